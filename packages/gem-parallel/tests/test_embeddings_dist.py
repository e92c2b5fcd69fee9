"""N ranks equal one rank: every placement, pooling and optimizer, with awkward batches; 2 and 4 gloo processes."""

import pytest
import torch
from sparse_cases import CASES, NUM_STEPS, bitwise, check, full_state, make, rank_batch, train_step

from gem_parallel import ParallelDims
from gem_parallel._src.embeddings import combined_engine as combined_source
from gem_parallel._src.embeddings import module as module_source


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


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ranks_equal_one_process(trained, case):
    world_size, results = trained
    check(world_size, [result[case.id] for result in results], case, bitwise=bitwise(case))


SPLIT_CASES = [
    case for case in CASES if case.exact and case.id.startswith(("row_wise-sum-rowwise", "table_wise-mean-adagrad"))
]


def rank_train_split(rank, world_size, folder):
    """As `rank_train`, where the tables of a dim have more rows together than one engine can index."""
    combined_source.MAX_LOCAL_ROWS = 28
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu").sparse
    results = {}
    for case in SPLIT_CASES:
        module = make(case, mesh)
        counts = [len(engines) for engines in module._engines]
        first = full_state(module)
        outputs = [train_step(module, case, rank_batch(case, step, rank, world_size)) for step in range(NUM_STEPS)]
        results[case.id] = counts, (first, outputs, full_state(module))
    return results


@pytest.mark.dist
def test_ranks_with_several_engines_equal_one_process(ranks):
    results = ranks("rank_train_split", 2)
    assert len(SPLIT_CASES) == 2
    for case in SPLIT_CASES:
        assert max(max(result[case.id][0]) for result in results) > 1
        check(2, [result[case.id][1] for result in results], case, bitwise=bitwise(case))


CUDA_CASES = [case for case in CASES if not case.exact and case.placement == "row_wise"]


def rank_train_cuda(rank, world_size, folder):
    """As `rank_train`, with ids sent a batch ahead on a stream of their own, and through NCCL also on one GPU."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    module_source.needs_exchange = lambda mesh: True
    mesh = ParallelDims.for_world(world_size).build_mesh("cuda").sparse
    side = torch.cuda.Stream()
    results = {}
    for case in CUDA_CASES:
        module = make(case, mesh, device)
        first = full_state(module)
        outputs, ahead = [], []
        for step in range(NUM_STEPS + 1):
            if step < NUM_STEPS:
                with torch.cuda.stream(side):
                    batch = {
                        name: tuple(each.to(device) for each in parts)
                        for name, parts in rank_batch(case, step, rank, world_size).items()
                    }
                    pending = module.exchange({name: parts[:2] for name, parts in batch.items()})
                ahead.append((batch, pending))
            if step > 0:
                torch.cuda.current_stream().wait_stream(side)
                batch, pending = ahead.pop(0)
                rows = module.lookup(pending)
                sum((torch.tanh(each) * batch[name][2]).sum() for name, each in rows.items()).backward()
                outputs.append({name: each.detach().cpu() for name, each in rows.items()})
        results[case.id] = (first, outputs, full_state(module))
    return results


@pytest.mark.gpu
@pytest.mark.dist
def test_nccl_ranks_equal_one_cpu_process(ranks):
    world_size = next(size for size in (4, 2, 1) if size <= torch.cuda.device_count())
    results = ranks("rank_train_cuda", world_size, backend="nccl")
    for case in CUDA_CASES:
        check(world_size, [result[case.id] for result in results], case, bitwise=False)
