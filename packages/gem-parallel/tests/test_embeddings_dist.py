"""N ranks equal one rank: every placement, pooling and optimizer, with awkward batches; 2 and 4 gloo processes."""

import pytest
import torch
from sparse_cases import CASES, SPLITS, joined, make, rank_batch, train_step
from torch.distributed.tensor import DTensor

from gem_parallel import ParallelDims

pytestmark = pytest.mark.dist
NUM_STEPS = len(SPLITS)


def full_state(module):
    """Whole tables on every rank that has a part of them."""
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for key, value in module.state_dict().items()
    }


def rank_train(rank, world_size, folder):
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu").sparse
    results = {}
    for case in CASES:
        module = make(case, mesh)
        first = full_state(module)
        outputs = [train_step(module, case, rank_batch(case, step, rank, world_size)) for step in range(NUM_STEPS)]
        results[case.id] = (first, outputs, full_state(module))
    return results


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def trained(request, ranks):
    return request.param, ranks("rank_train", request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ranks_equal_one_process(trained, case):
    world_size, results = trained
    module = make(case)
    first = full_state(module)
    parts = [[rank_batch(case, step, rank, world_size) for rank in range(world_size)] for step in range(NUM_STEPS)]
    outputs = [train_step(module, case, joined(part)) for part in parts]
    last = full_state(module)
    seen = set()
    for rank, by_case in enumerate(results):
        start, rank_outputs, end = by_case[case.id]
        for key, value in start.items():
            assert torch.equal(value, first[key]), key
        for key, value in end.items():
            seen.add(key)
            compare(value, last[key], case, f"rank {rank}, {key}")
        for step in range(NUM_STEPS):
            for name, value in rank_outputs[step].items():
                before = [part[name] for part in parts[step][:rank] if name in part]
                offset = sum(len(each[2]) for each in before)
                compare(value, outputs[step][name][offset : offset + len(value)], case, f"rank {rank}, {step}, {name}")
    # every table is somewhere
    assert seen == set(last)
    assert all(not torch.equal(last[key], first[key]) for key in last if key.endswith("weight"))


def compare(value, expected, case, what):
    if case.exact:
        assert torch.equal(value, expected), f"{what}: {(value - expected).abs().max()}"
    else:
        # Sums in another order: relative 1e-6 in a gradient, and steps of 0.125 that scale it to at most 1e-5.
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")
