"""Placements and replicas: every grid of 4 ranks equals one process, and every grid the others, bit for bit."""

import pytest
import torch
from sparse_cases import GRID_CASES, NUM_STEPS, SparseCase, check, compare, full_state, make, rank_batch, train_step

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
        for number, case in enumerate(GRID_CASES):
            module = make(case, mesh, gather=("tables", "rows")[number // 2 % 2])
            first = full_state(module)
            outputs = [train_step(module, case, rank_batch(case, step, rank, world_size)) for step in range(NUM_STEPS)]
            results[replicas, case.id] = (first, outputs, full_state(module))
    mesh = mesh_of(world_size, 2)
    for case, dtype in NARROW:
        module = make(case, mesh, weight_dtype=dtype)
        first = full_state(module)
        outputs = [train_step(module, case, rank_batch(case, step, rank, world_size)) for step in range(NUM_STEPS)]
        results[case.id, dtype] = (first, outputs, full_state(module))
    again = make(REPEATED, mesh)
    for step in range(NUM_STEPS):
        train_step(again, REPEATED, rank_batch(REPEATED, step, rank, world_size))
    results["again"] = full_state(again)
    return results


@pytest.fixture(scope="module")
def trained(ranks):
    return ranks("rank_train", 4)


# float16 is rounded to the nearest on the CPU; the random bits of bfloat16 depend on the row, not on who holds it.
NARROW = [
    (SparseCase("mixed", "mixed", kind, True), dtype)
    for kind in ("sgd", "adagrad", "adam")
    for dtype in (torch.float16, torch.bfloat16)
]
REPEATED = SparseCase("mixed", "mixed", "rowwise_adagrad", False)


@pytest.mark.parametrize(("case", "dtype"), NARROW, ids=lambda value: getattr(value, "id", str(value)))
def test_narrow_weights_equal_one_process_bitwise(trained, case, dtype):
    check(4, [result[case.id, dtype] for result in trained], case, bitwise=True, weight_dtype=dtype)
    weights = [value for key, value in trained[0][case.id, dtype][2].items() if key.endswith("weight")]
    assert {weight.dtype for weight in weights} == {dtype}


def test_two_runs_are_equal_bitwise(trained):
    """Also where sums are not exact: what arrives is added in an order that does not depend on when it arrives."""
    for result in trained:
        once, twice = result[2, REPEATED.id][2], result["again"]
        assert once.keys() == twice.keys()
        assert all(torch.equal(value, twice[key]) for key, value in once.items())


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


CUDA_CASES = [case for case in GRID_CASES if not case.exact]


def rank_train_cuda(rank, world_size, folder):
    """As `rank_train`, through NCCL, with ids a batch ahead on a stream of their own and rows started early."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    side = torch.cuda.Stream()
    results = {}
    for replicas in (each for each in REPLICAS if each <= world_size):
        mesh = ParallelDims.for_world(world_size, sparse_replicate=replicas).build_mesh("cuda").sparse
        for case in CUDA_CASES:
            module = make(case, mesh, device)
            first = full_state(module)
            outputs, ahead = [], []
            for step in range(NUM_STEPS + 1):
                if ahead:
                    torch.cuda.current_stream().wait_stream(side)
                    module.start_lookup(ahead[0][1])
                if step < NUM_STEPS:
                    with torch.cuda.stream(side):
                        batch = {
                            name: tuple(each.to(device) for each in parts)
                            for name, parts in rank_batch(case, step, rank, world_size).items()
                        }
                        pending = module.exchange({name: parts[:2] for name, parts in batch.items()})
                    ahead.append((batch, pending))
                if step > 0:
                    batch, pending = ahead.pop(0)
                    rows = module.lookup(pending)
                    sum((torch.tanh(each) * batch[name][2]).sum() for name, each in rows.items()).backward()
                    outputs.append({name: each.detach().cpu() for name, each in rows.items()})
            results[replicas, case.id] = (first, outputs, full_state(module))
    return results


@pytest.mark.gpu
def test_nccl_grids_equal_one_cpu_process(ranks):
    world_size = next((size for size in (4, 2) if size <= torch.cuda.device_count()), None)
    if world_size is None:
        pytest.skip("needs two GPUs or more")
    results = ranks("rank_train_cuda", world_size, backend="nccl")
    for replicas, name in results[0]:
        case = next(case for case in CUDA_CASES if case.id == name)
        check(world_size, [result[replicas, name] for result in results], case, bitwise=False)
