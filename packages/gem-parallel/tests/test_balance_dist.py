"""The assignment is the same on all ranks and the samples arrive whole, in one all-to-all; 2 and 4 gloo processes."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from gem_parallel.balance import LengthCost, balance_samples

pytestmark = pytest.mark.dist
COST = LengthCost(constant=2.0, linear={"history": 3.0}, quadratic={"history": 0.25})


@dataclass(frozen=True)
class Case:
    id: str
    lengths: tuple
    """Per rank of 4; 2 ranks take the first two."""
    method: str = "karmarkar_karp"
    equal_counts: bool = False


SKEWED = ((100, 90, 0, 80), (1, 2, 3, 0, 5), (), (40, 7))
CASES = [
    Case("any counts", SKEWED),
    Case("equal counts", SKEWED, equal_counts=True),
    Case("greedy", SKEWED, method="greedy"),
    Case("none", SKEWED, method="none"),
    Case("all on the last", ((), (9, 8, 7, 6, 5, 4), (), ())),
    Case("no samples", ((), (), (), ())),
    Case("no tokens", ((0, 0), (0,), (), (0,))),
]


def batch(lengths, rank):
    """Tensors in which every item names its sample: 1000 * rank + position."""
    size = torch.tensor(lengths, dtype=torch.int64)
    names = 1000 * rank + torch.arange(len(lengths))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
    owner = torch.repeat_interleave(names, size)
    token = torch.arange(len(owner)) - torch.repeat_interleave(offsets[:-1], size)
    clicks = size % 3
    click_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), clicks.cumsum(0)])
    rows = {
        "name": names,
        "dense": names[:, None] + torch.tensor([0.25, 0.5, 0.75]),
        "label": names % 2 == 1,
        "empty": torch.empty(len(lengths), 0),
    }
    jagged = {
        "history": (torch.stack([owner, token], 1).to(torch.float64), offsets),
        "clicks": (torch.repeat_interleave(names, clicks).to(torch.int16), click_offsets),
    }
    return rows, jagged


def rank_balance(rank, world_size, folder):
    calls = []
    all_to_all = dist.all_to_all_single

    def counted(output, tensor, *arguments, **options):
        calls.append(tensor.numel())
        return all_to_all(output, tensor, *arguments, **options)

    dist.all_to_all_single = counted
    found = {}
    for case in CASES:
        rows, jagged = batch(case.lengths[rank], rank)
        lengths = {name: torch.diff(offsets) for name, (_, offsets) in jagged.items()}
        assignment = balance_samples(
            lengths, COST, dist.group.WORLD, method=case.method, equal_counts=case.equal_counts
        )
        moved = assignment.move(rows, jagged)
        found[case.id] = (assignment.ranks, dataclasses.asdict(assignment.report), moved, len(calls))
        calls.clear()
    dist.all_to_all_single = all_to_all
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def outcome(request, ranks):
    return request.param, ranks("rank_balance", request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_same_on_all_ranks_and_samples_arrive_whole(outcome, case):
    world_size, results = outcome
    expected = [batch(case.lengths[rank], rank) for rank in range(world_size)]
    names = torch.cat([rows["name"] for rows, _ in expected]).tolist()
    destinations = dict(zip(names, results[0][case.id][0], strict=True))
    for rank, result in enumerate(results):
        ranks, report, moved, calls = result[case.id]
        assert (ranks, report) == results[0][case.id][:2]
        assert calls == 1
        mine = [name for name in names if destinations[name] == rank]
        assert moved.rows["name"].tolist() == mine
        here = torch.tensor(mine, dtype=torch.int64)
        assert torch.equal(moved.rows["dense"], here[:, None] + torch.tensor([0.25, 0.5, 0.75]))
        assert torch.equal(moved.rows["label"], here % 2 == 1)
        assert moved.rows["empty"].shape == (len(mine), 0)
        for field, width in (("history", 2), ("clicks", None)):
            values, offsets = moved.jagged[field]
            original = [expected[name // 1000][1][field] for name in mine]
            parts = [
                all_values[all_offsets[name % 1000] : all_offsets[name % 1000 + 1]]
                for name, (all_values, all_offsets) in zip(mine, original, strict=True)
            ]
            assert torch.equal(torch.diff(offsets), torch.tensor([len(part) for part in parts], dtype=torch.int64))
            assert values.dtype == expected[0][1][field][0].dtype
            assert torch.equal(values, torch.cat([values[:0], *parts])), (field, width)
    counts = [list(results[0][case.id][0]).count(rank) for rank in range(world_size)]
    assert list(results[0][case.id][1]["counts_after"]) == counts
    if case.equal_counts:
        assert max(counts) - min(counts) <= 1


def test_ratios_and_the_heaviest_rank(outcome):
    world_size, results = outcome
    reports = {case.id: results[0][case.id][1] for case in CASES}
    costs = [COST({"history": torch.tensor(each)}).sum().item() if each else 0.0 for each in SKEWED[:world_size]]
    for case in ("any counts", "equal counts", "greedy", "none"):
        assert list(reports[case]["costs_before"]) == costs
        assert sum(reports[case]["costs_after"]) == pytest.approx(sum(costs), rel=1e-12)
    assert list(reports["none"]["costs_after"]) == costs
    assert reports["none"]["num_moved"] == 0
    assert reports["none"]["heaviest_rank"] == 0
    dearest = reports["none"]["heaviest"][0]
    assert (dearest["source_rank"], dearest["position"]) == (0, 0)
    assert dearest["lengths"] == {"history": 100, "clicks": 1}
    assert dearest["share"] == pytest.approx((2 + 300 + 2500) / costs[0], rel=1e-12)
    best = max(reports["any counts"]["costs_after"])
    assert best <= max(reports["greedy"]["costs_after"]) < 0.75 * max(costs)


def rank_bad_cost(rank, world_size, folder):
    try:
        balance_samples(
            {"a": torch.tensor([1, 2])},
            lambda lengths: torch.tensor([1.0, float("nan") if rank else 1.0]),
            dist.group.WORLD,
        )
    except ValueError as error:
        return str(error)
    return ""


def test_a_bad_cost_is_an_error_on_all_ranks(ranks):
    for text in ranks("rank_bad_cost", 2):
        assert "finite numbers of at least 0, got nan for lengths {'a': 2}" in text


def rank_one_refuses(rank, world_size, folder):
    """id -> error of this rank, where only rank 1 was given something else; nobody waits."""
    group, lengths, cost = dist.group.WORLD, {"a": torch.tensor([1, 2])}, LengthCost(linear={"a": 1.0})
    assignment = balance_samples(lengths, cost, group, method="none")
    ones, offsets = torch.ones(3), torch.tensor([0, 1, 3])

    def fails(lengths):
        raise KeyError("no such table")

    calls = {
        "float lengths": lambda: balance_samples({"a": torch.ones(2)} if rank else lengths, cost, group),
        "no lengths": lambda: balance_samples({} if rank else lengths, cost, group),
        "a cost that fails": lambda: balance_samples(lengths, fails if rank else cost, group),
        "a cost of another kind": lambda: balance_samples(lengths, 3 if rank else cost, group),
        "names": lambda: balance_samples(
            {"b" if rank else "a": torch.ones(2).long()}, lambda given: torch.ones(2), group
        ),
        "more names": lambda: balance_samples(lengths | ({"b": torch.ones(2).long()} if rank else {}), cost, group),
        "method": lambda: balance_samples(lengths, cost, group, method="greedy" if rank else "none"),
        "equal_counts": lambda: balance_samples(lengths, cost, group, equal_counts=rank == 1),
        "rows": lambda: assignment.move({"x": torch.ones(3 if rank else 2)}),
        "no tensors": lambda: assignment.move({} if rank else {"x": torch.ones(2)}),
        "other names": lambda: assignment.move({"y" if rank else "x": torch.ones(2)}),
        "other dtypes": lambda: assignment.move({"x": torch.ones(2).to(torch.float64 if rank else torch.float32)}),
        "other shapes": lambda: assignment.move({"x": torch.ones(2, 1 + rank)}),
        "jagged of another": lambda: assignment.move(
            {}, {"a": (ones, offsets)} if rank else {"a": (ones.long(), offsets)}
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            found[name] = (type(error).__name__, str(error))
    # After all of it the ranks are still in step.
    assert len(balance_samples(lengths, cost, group).move({"x": torch.ones(2)}).rows["x"]) == 2
    return found


STOPS = "must be right on every rank of the group, and ranks [1] refused theirs"
ONE_REFUSES = {
    "float lengths": (STOPS, "must be integers of shape"),
    "no lengths": (STOPS, "`lengths` must hold at least one sequence"),
    "a cost that fails": (STOPS, "no such table"),
    "a cost of another kind": (STOPS, "`cost` must be a function, got int"),
    "names": ("names of `lengths` must be equal on all ranks of the group, got ['a'] here", "got ['b'] here"),
    "more names": ("got ['a'] here and other on ranks [1]", "got ['a', 'b'] here and other on ranks [0]"),
    "method": ("`method` must be equal on all ranks of the group, got none here", "got greedy here"),
    "equal_counts": ("`equal_counts` must be equal on all ranks of the group, got False", "got True"),
    "rows": (STOPS, "`rows['x']` must have one row for each of this rank's 2 samples"),
    "no tensors": (STOPS, "must hold a tensor, got none"),
    "other names": ("got x float32 [] here and others on ranks [1]", "got y float32 [] here and others on ranks [0]"),
    "other dtypes": ("got x float32 [] here", "got x float64 [] here"),
    "other shapes": ("got x float32 [1] here", "got x float32 [2] here"),
    "jagged of another": ("got a (jagged) int64 [] here", "got a (jagged) float32 [] here"),
}


def test_what_one_rank_refuses_all_refuse(ranks):
    results = ranks("rank_one_refuses", 2)
    for name, texts in ONE_REFUSES.items():
        for result, text in zip(results, texts, strict=True):
            kind, said = result[name]
            assert text in said, name
            assert (kind == "RuntimeError") == (text == STOPS), name
