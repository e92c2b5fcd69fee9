"""Learning rates that differ between ranks are found where the ranks tell each other counts anyway."""

import pytest
from sparse_cases import SparseCase, make, rank_batch, train_step

from gem_parallel import ParallelDims

pytestmark = pytest.mark.dist
CASE = SparseCase("mixed", "mixed", "rowwise_adagrad", True)


def rank_rates(rank, world_size, folder, replicas, rates, bad):
    """What exchange says under these rates, with a bad batch on rank `bad`; then a step under equal ones."""
    mesh = ParallelDims.for_world(world_size, sparse_replicate=replicas).build_mesh("cpu").sparse
    module = make(CASE, mesh, timeout_s=20.0)
    batch = rank_batch(CASE, 0, rank, world_size)
    module.set_learning_rate(rates[rank])
    ids = {name: pair[:2] for name, pair in batch.items()}
    if rank == bad:
        ids["nothing"] = next(iter(ids.values()))
    try:
        module.exchange(ids)
        said = None
    except (ValueError, RuntimeError) as error:
        said = str(error)
    module.set_learning_rate(0.25)
    train_step(module, CASE, batch)
    return said


ONE_HALF = "0.1 on rank 0, 0.5 on rank 1"


@pytest.mark.parametrize(
    ("replicas", "rates", "says"),
    [
        (1, (0.1, 0.5), [ONE_HALF] * 2),
        (2, (0.1, 0.5), [ONE_HALF] * 2),
        (1, (0.1, 0.1, 0.5, 0.1), ["0.1 on ranks [0, 1, 3], 0.5 on rank 2"] * 4),
        # Ranks 0 and 2 hold a copy together, and 1 and 3: rank 0 meets 2 and 1, and hears of 3 by 1.
        (
            2,
            (0.1, 0.1, 0.1, 0.5),
            ["0.1 on ranks [0, 1, 2], and others among", "0.5 on rank 3", "0.5 on rank 3", "0.5 on rank 3"],
        ),
        (4, (0.1, 0.1, 0.1, 0.5), ["0.1 on ranks [0, 1, 2], 0.5 on rank 3"] * 4),
    ],
    ids=["2 shards", "2 copies", "4 shards", "2 copies of 2 shards", "4 copies"],
)
def test_rates_that_differ_raise_on_all_ranks(ranks, replicas, rates, says):
    results = ranks("rank_rates", len(rates), replicas=replicas, rates=rates, bad=None)
    for said, words in zip(results, says, strict=True):
        assert said is not None
        assert said.startswith("exchange: learning rates must be equal on all ranks, got ")
        assert words in said
        assert said.endswith("call set_learning_rate with the same value on every rank")


def test_a_bad_batch_comes_first(ranks):
    results = ranks("rank_rates", 4, replicas=2, rates=(0.1, 0.2, 0.1, 0.1), bad=2)
    assert "`ids` must name configured features" in results[2]
    assert all("rank 2: refused its batch" in said for rank, said in enumerate(results) if rank != 2)


def test_equal_rates_pass(ranks):
    assert ranks("rank_rates", 4, replicas=2, rates=(0.1,) * 4, bad=None) == [None] * 4
