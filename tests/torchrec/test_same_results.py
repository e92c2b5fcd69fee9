"""gem-parallel and torchrec on the same tables: outputs, weights and moments after five steps (`nox -s torchrec`)."""

import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "gem-parallel" / "benchmarks"))

from torchrec_tables import KINDS, PROVIDERS, Case, start_rank

NUM_STEPS, NUM_BAGS = 5, 12
# Two tables of one dim, two of others. All have more rows than ranks: where a collection has a mean and a rank holds no
# row of a row-wise table, torchrec 1.9.2 corrupts the heap.
SUMS = {"rows": (50, 3, 11, 30), "dims": (8, 8, 4, 16), "poolings": ("sum",) * 4}
MEANS = {**SUMS, "poolings": ("sum", "mean", "mean", "sum")}
UNPOOLED = {"rows": (50, 3, 11), "dims": (8, 8, 8), "poolings": ("none",) * 3}
CASES = {
    f"{name}-{placement}-{kind}": Case(**tables, placement=placement, kind=kind)
    for name, tables in {"sums": SUMS, "means": MEANS, "unpooled": UNPOOLED}.items()
    for placement in ("table_wise", "row_wise")
    for kind in KINDS
}


def has_exact_means(case):
    """torchrec divides row-wise bags of a collection that has a mean, its sums too, by their length plus 1e-6.

    Where gradients cancel to zero, AdaGrad makes a step of what that leaves.
    """
    return case.placement == "table_wise" or "mean" not in case.poolings


RUNS = [
    (case_id, exact) for case_id in CASES for exact in (True, False) if not exact or has_exact_means(CASES[case_id])
]


def batch_of(case, step, rank, exact):
    """Ids with many repeats, empty bags, and the outputs' gradients."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch, gradients = {}, {}
    for name, rows, dim, pooling in zip(case.names, case.rows, case.dims, case.poolings, strict=True):
        # Powers of two keep a mean exact.
        lengths = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (NUM_BAGS,), generator=generator)]
        lengths[0] = 1
        ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = rows // 2
        batch[name] = (ids, lengths)
        gradient = torch.randn(len(ids) if pooling == "none" else NUM_BAGS, dim, generator=generator)
        gradients[name] = (gradient * 4).round() / 8 if exact else gradient
    return batch, gradients


def train(rank, world_size, folder):
    start_rank(rank, world_size, folder)
    results = {}
    for case_id, exact in RUNS:
        case = CASES[case_id]
        for provider, make in PROVIDERS.items():
            tables = make(case, world_size)
            generator = torch.Generator().manual_seed(7)
            shapes = zip(case.names, case.rows, case.dims, strict=True)
            tables.load({name: torch.randn(rows, dim, generator=generator) for name, rows, dim in shapes})
            outputs = []
            for step in range(NUM_STEPS):
                batch, gradients = batch_of(case, step, rank, exact)
                found = tables.forward(tables.prepare(batch))
                torch.autograd.backward([found[name] for name in case.names], [gradients[n] for n in case.names])
                outputs.append({name: each.detach().clone() for name, each in found.items()})
            results[case_id, exact, provider] = outputs, tables.state()
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[1, 2], ids=["1_process", "2_processes"])
def results(request, tmp_path_factory):
    """One dict of (case, exact, provider) -> (outputs of each step, state) per rank."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(train, (request.param, folder), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


@pytest.mark.parametrize(
    ("case_id", "exact"), RUNS, ids=[f"{case_id}-{'exact' if exact else 'random'}" for case_id, exact in RUNS]
)
def test_same_results(results, case_id, exact):
    """Weights and moments bit for bit where sums of gradients are exact in any order, else to float32 rounding.

    Outputs likewise, but for row-wise bags on two ranks: torchrec adds up sums per rank.
    """
    case = CASES[case_id]
    rounded = {"rtol": 1e-5, "atol": 2e-5}
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else rounded
    in_parts = len(results) > 1 and case.placement == "row_wise" and not case.unpooled
    for rank in results:
        ours, theirs = (rank[case_id, exact, provider][0] for provider in ("gem", "torchrec"))
        for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert left.keys() == right.keys()
            for name, value in left.items():
                torch.testing.assert_close(
                    value,
                    right[name],
                    **(rounded if in_parts else tolerance),
                    msg=lambda text, at=(step, name): f"{at}: {text}",
                )
    # torchrec's parts add up to the whole; ours are whole on every rank that has any.
    theirs = {}
    for rank in results:
        for name, value in rank[case_id, exact, "torchrec"][1].items():
            theirs[name] = theirs.get(name, 0) + value
    ours = {name: value for rank in results for name, value in rank[case_id, exact, "gem"][1].items()}
    moments = [] if case.kind == "sgd" else ["sum"]
    assert set(ours) == set(theirs) == {f"{name}.{part}" for name in case.names for part in ["weight", *moments]}
    for name, value in ours.items():
        assert bool(value.abs().sum() > 0), name
        torch.testing.assert_close(value, theirs[name], **tolerance, msg=lambda text, at=name: f"{at}: {text}")
