"""Placements and replicas: every grid of 4 ranks equals one process, and every grid the others, bit for bit."""

import pytest
import torch
from sparse_cases import GRID_CASES, NUM_STEPS, check, compare, full_state, make, rank_batch, train_step

from gem_parallel import ParallelDims

pytestmark = pytest.mark.dist
# Replicas of each table; 4 / replicas ranks hold a copy.
REPLICAS = (1, 2, 4)


def mesh_of(world_size, replicas):
    return ParallelDims.for_world(world_size, sparse_replicate=replicas).build_mesh("cpu").sparse


def rank_train(rank, world_size, folder):
    results = {}
    for replicas in REPLICAS:
        mesh = mesh_of(world_size, replicas)
        for case in GRID_CASES:
            module = make(case, mesh)
            first = full_state(module)
            outputs = [train_step(module, case, rank_batch(case, step, rank, world_size)) for step in range(NUM_STEPS)]
            results[replicas, case.id] = (first, outputs, full_state(module))
    return results


@pytest.fixture(scope="module")
def trained(ranks):
    return ranks("rank_train", 4)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("case", GRID_CASES, ids=lambda case: case.id)
def test_grid_equals_one_process(trained, case, replicas):
    # Column shards under row-wise AdaGrad are updated by PyTorch, one process by fbgemm: the same formula, rounded
    # elsewhere.
    joint = case.kind == "rowwise_adagrad" and case.placement in ("column_wise", "mixed") and replicas < 4
    check(4, [result[replicas, case.id] for result in trained], case, bitwise=case.exact and not joint)


@pytest.mark.parametrize("case", [case for case in GRID_CASES if not case.exact], ids=lambda case: case.id)
def test_grids_equal_each_other_bitwise(trained, case):
    """Gradients of a row are added in order of rank whatever the grid, so also inexact sums agree.

    Not the squares of a row's columns: their parts differ with the number of column shards.
    """
    joint = case.kind == "rowwise_adagrad" and case.placement in ("column_wise", "mixed")
    states = [{}, {}, {}]
    for state, replicas in zip(states, REPLICAS, strict=True):
        for result in trained:
            _, outputs, last = result[replicas, case.id]
            plain_outputs = result[1, case.id][1]
            for step, plain in zip(outputs, plain_outputs, strict=True):
                assert joint or all(torch.equal(step[name], plain[name]) for name in plain)
            for key, value in last.items():
                assert torch.equal(state.setdefault(key, value), value), f"ranks differ in {key}"
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        for key, value in state.items():
            compare(value, states[0][key], not joint, key)
