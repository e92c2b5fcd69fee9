"""A rank that dies or hangs: the others raise within a bound and name it."""

import os
import time

import pytest
import torch
from sparse_cases import SparseCase, make, rank_batch, train_step

from gem_parallel import ParallelDims
from gem_parallel._src.embeddings import link

pytestmark = pytest.mark.dist
CASE = SparseCase("mixed", "mixed", "rowwise_adagrad", True)
REPORT_S = 3.0
LOST = 3


def leave(folder, function, rank, result):
    """End the process as a crash does, with its result where the test looks for it."""
    run = max(folder.glob(f"{function}-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    torch.save(result, run / f"{rank}.pt")
    os._exit(0)


def rank_lost(rank, world_size, folder, replicas, phase, stuck):
    """Rank 3 takes part in one step and in the next up to `phase`, then dies, or stops and holds its connections."""
    link.REPORT_S = REPORT_S
    mesh = ParallelDims.for_world(world_size, sparse_replicate=replicas).build_mesh("cpu").sparse
    module = make(CASE, mesh, timeout_s=2.0)
    train_step(module, CASE, rank_batch(CASE, 0, rank, world_size))
    batch = rank_batch(CASE, 1, rank, world_size)
    phases = []
    started = time.monotonic()

    def reached(name):
        phases.append(name)
        if rank == LOST and name == phase:
            if stuck:
                time.sleep(12)
            leave(folder, "rank_lost", rank, None)

    try:
        reached("exchange")
        pending = module.exchange({name: pair[:2] for name, pair in batch.items()})
        reached("lookup")
        outputs = module.lookup(pending)
        reached("backward")
        sum((each * batch[name][2]).sum() for name, each in outputs.items()).backward()
        reached("end")
        error = None
    except RuntimeError as raised:
        error = str(raised)
    leave(folder, "rank_lost", rank, (phases[-1], error, time.monotonic() - started))


@pytest.mark.parametrize(
    ("replicas", "phase", "stuck"),
    [(1, "exchange", False), (2, "lookup", False), (1, "backward", False), (2, "exchange", True)],
    ids=["dies before exchange", "dies before lookup", "dies before backward", "hangs"],
)
def test_lost_rank_is_named(ranks, replicas, phase, stuck):
    results = ranks("rank_lost", 4, replicas=replicas, phase=phase, stuck=stuck)
    named = 0
    for rank, (last, error, seconds) in enumerate(results[:LOST]):
        assert error is not None, f"rank {rank} went through"
        # one transfer's time, the others' word, and room for a busy machine
        assert seconds < 2 * (2 + REPORT_S) + 10, f"rank {rank} took {seconds} s"
        assert last != "end"
        assert f"failed on rank {rank} after" in error
        assert "between ranks [" in error
        # With copies, a rank may meet only neighbours of the lost one: then these are silent, or failed as well.
        named += f"rank {LOST} said nothing" in error or f", {LOST} said nothing" in error
    assert named >= (3 if replicas == 1 else 1), [error for _, error, _ in results[:LOST]]


def test_timeout_is_checked():
    with pytest.raises(ValueError, match="`timeout_s` must be finite and above 0, got 0"):
        make(CASE, timeout_s=0)
