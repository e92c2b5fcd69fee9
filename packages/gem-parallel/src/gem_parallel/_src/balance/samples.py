"""One global assignment of a batch's samples to ranks, the same on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.agree import agree, group_device
from gem_parallel._src.balance.assign import METHODS, Method, assign
from gem_parallel._src.balance.move import Samples, move_samples
from gem_parallel._src.checks import check_group
from gem_parallel._src.collectives.base import DefaultCollectives

__all__ = ["Assignment", "BalanceReport", "SampleShare", "balance_samples"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Cost = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShare:
    """A sample and what it costs its rank."""

    source_rank: int
    position: int
    """In the batch of its source."""
    lengths: dict[str, int]
    """Tokens by sequence."""
    share: float
    """Of the rank's cost, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceReport:
    """What an assignment does to the ranks' costs."""

    method: Method
    costs_before: tuple[float, ...]
    """Of each rank, in the cost function's unit."""
    costs_after: tuple[float, ...]
    counts_after: tuple[int, ...]
    """Samples of each rank."""
    num_moved: int
    """Samples that leave their rank."""
    heaviest_rank: int
    """After, the first of equals."""
    heaviest: tuple[SampleShare, ...]
    """Its dearest samples, at most four."""

    @property
    def ratio_before(self) -> float:
        """Largest cost of a rank over the mean: the step waits for the largest."""
        return _ratio(self.costs_before)

    @property
    def ratio_after(self) -> float:
        """The same after."""
        return _ratio(self.costs_after)

    def __str__(self) -> str:
        """Two lines: the ratios, and the heaviest rank with its dearest samples."""
        samples = "; ".join(
            f"sample {each.position} of rank {each.source_rank}, "
            + ", ".join(f"{name} {length}" for name, length in each.lengths.items())
            + f": {each.share:.1%}"
            for each in self.heaviest
        )
        return (
            f"{self.method}: max / mean {self.ratio_before:.3f} -> {self.ratio_after:.3f}, "
            f"{self.num_moved} of {sum(self.counts_after)} samples move\n"
            f"heaviest rank {self.heaviest_rank}, {self.counts_after[self.heaviest_rank]} samples, "
            f"dearest: {samples or 'none'}"
        )


def _ratio(costs: tuple[float, ...]) -> float:
    mean = sum(costs) / len(costs)
    return max(costs) / mean if mean > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where every sample of the global batch goes; equal on all ranks. Made by ``balance_samples``."""

    ranks: tuple[int, ...]
    """Of each sample, those of rank 0 first."""
    counts: tuple[int, ...]
    """Samples that each rank has before."""
    report: BalanceReport
    _group: dist.ProcessGroup | None = field(repr=False)
    _lengths: dict[str, list[int]] = field(repr=False)

    def move(
        self,
        rows: Mapping[str, Tensor] | None = None,
        jagged: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> Samples:
        """Send each sample's part of every tensor to its rank, in one all-to-all. All ranks call it.

        Before it the ranks compare names, dtypes and shapes in one small all-gather.

        Best before the batch goes to the GPU, over a gloo group: on CUDA the offsets are read on the host.

        Args:
            rows: Name -> (B, ...): one row for each sample (dense features, labels, context ids).
            jagged: Name -> (values (T, ...), offsets (B + 1,)); the names are those of the lengths given to
                ``balance_samples``, whose lengths they must have. Of tensors that are jagged twice (ids of events),
                both levels go so: the counts of each event as values of the sequence, the ids with each sample's sum
                of counts.

        Returns:
            The samples of this rank, ordered by source rank, then by position there. Values as they were, bit for bit.

        Raises:
            TypeError: ``rows`` or ``jagged`` does not map names to tensors or pairs of them.
            ValueError: another number of samples or other lengths than were given, tensors on several devices, one
                that requires a gradient, none at all, or names, dtypes or shapes that differ between ranks.
            RuntimeError: another rank refuses its tensors.
        """
        rank = 0 if self._group is None else dist.get_rank(self._group)
        refusal: Exception | None = None
        try:
            self._check(rows, jagged, rank)
        except (TypeError, ValueError) as error:
            refusal = error
        described = 0 if refusal else _digest(_described(rows or {}, jagged or {}))
        table = agree("Assignment.move", "`rows` and `jagged`", self._group, refusal, [described])
        others = [source for source, each in enumerate(table) if each != [described]]
        if others:
            raise ValueError(
                "Assignment.move: `rows` and `jagged` must have the same names, dtypes and shapes after the first dim "
                f"on every rank of the group, got {_described(rows or {}, jagged or {})} here and others on ranks "
                f"{others}; pass the same tensors on all"
            )
        rows, jagged = dict(rows or {}), dict(jagged or {})
        starts = [sum(self.counts[:source]) for source in range(len(self.counts) + 1)]
        if self._group is None:
            return Samples(dict(sorted(rows.items())), {name: jagged[name] for name in sorted(jagged)})
        sources = [
            [
                sample - starts[source]
                for sample in range(starts[source], starts[source + 1])
                if self.ranks[sample] == rank
            ]
            for source in range(len(self.counts))
        ]
        lengths = {
            name: [
                [self._lengths[name][starts[source] + position] for position in here]
                for source, here in enumerate(sources)
            ]
            for name in jagged
        }
        destination = torch.tensor(self.ranks[starts[rank] : starts[rank + 1]], dtype=torch.int64)
        return move_samples(destination, sources, lengths, rows, jagged, self._group)

    def _check(
        self,
        rows: Mapping[str, Tensor] | None,
        jagged: Mapping[str, tuple[Tensor, Tensor]] | None,
        rank: int,
    ) -> None:
        rows, jagged = _mapping("rows", rows), _mapping("jagged", jagged)
        if not rows and not jagged:
            raise ValueError("Assignment.move: `rows` or `jagged` must hold a tensor, got none; pass the batch's")
        for name, tensor in rows.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"Assignment.move: `rows[{name!r}]` must be a tensor, got {type(tensor).__name__}; pass "
                    "torch.tensor"
                )
        for name, pair in jagged.items():
            if (
                not isinstance(pair, (tuple, list))
                or len(pair) != 2
                or not all(isinstance(each, Tensor) for each in pair)
            ):
                kinds = [type(each).__name__ for each in pair] if isinstance(pair, (tuple, list)) else []
                got = f"({', '.join(kinds)})" if kinds else type(pair).__name__
                raise TypeError(
                    f"Assignment.move: `jagged[{name!r}]` must be two tensors (values, offsets), got {got}; pass what "
                    "has one row for each sample in `rows`"
                )
        tensors = {f"rows[{name!r}]": tensor for name, tensor in rows.items()}
        tensors |= {f"jagged[{name!r}]": values for name, (values, _) in jagged.items()}
        devices = {str(tensor.device) for tensor in tensors.values()}
        if len(devices) > 1:
            raise ValueError(
                f"Assignment.move: tensors must lie on one device, got {sorted(devices)}; move them to one"
            )
        for where, tensor in tensors.items():
            if tensor.requires_grad:
                raise ValueError(
                    f"Assignment.move: `{where}` must not require a gradient, which would not come back, got one that "
                    "does; detach it, or move what it was computed from"
                )
        count, start = self.counts[rank], sum(self.counts[:rank])
        for name, tensor in rows.items():
            if tensor.ndim == 0 or tensor.shape[0] != count:
                raise ValueError(
                    f"Assignment.move: `rows[{name!r}]` must have one row for each of this rank's {count} samples, got "
                    f"shape {tuple(tensor.shape)}; pass the batch that the lengths are of"
                )
        for name, (values, offsets) in jagged.items():
            if name not in self._lengths:
                raise ValueError(
                    "Assignment.move: `jagged` must hold only names whose lengths were given to balance_samples, got "
                    f"{name!r} beside {sorted(self._lengths)}; give its lengths to balance_samples, or leave it out"
                )
            expected = self._lengths[name][start : start + count]
            if (
                offsets.shape != (count + 1,)
                or values.ndim == 0
                or torch.diff(offsets).tolist() != expected
                or len(values) != sum(expected)
            ):
                raise ValueError(
                    f"Assignment.move: `jagged[{name!r}]` must have the lengths given to balance_samples, "
                    f"{count} of sum {sum(expected)}, got offsets {tuple(offsets.shape)} and values "
                    f"{tuple(values.shape)}; pass the batch that the lengths are of"
                )


def balance_samples(
    lengths: Mapping[str, Tensor],
    cost: Cost,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    method: Method = "karmarkar_karp",
    equal_counts: bool = False,
) -> Assignment:
    """Assign the samples of all ranks' batches so that the ranks' costs are near each other.

    Every rank gathers all costs and lengths (an all-gather of integers and one of float64) and computes the same
    assignment from them. Samples that need not move stay as far as the method allows: a rank takes the part that holds
    most cost of its own.

    Args:
        lengths: Sequence -> (B,) integers, tokens of this rank's samples; the same names on every rank. B may differ
            between ranks, zero included. Those that ``cost`` does not read may be given for ``Assignment.move``.
        cost: lengths -> (B,) costs, at least 0: a ``LengthCost`` or another function.
        group: The ranks, or a mesh of one axis; None is one process.
        method: karmarkar_karp (largest differencing), greedy (dearest first to the cheapest rank), or none (every
            sample stays; the report says what that costs).
        equal_counts: Numbers of samples differ by at most one between ranks. largest differencing then ends with swaps
            of single samples.

    Returns:
        The assignment, equal on all ranks, with its report.

    Raises:
        TypeError: an argument of another kind.
        ValueError: no lengths, shapes that differ, a length below 0, an unknown method, equal counts with none, a cost
            that is negative or not finite, or names, ``method`` or ``equal_counts`` that differ between ranks (the last
            four on all ranks).
        RuntimeError: another rank refuses its lengths or cost, whatever error it met there.
    """
    check_group("balance_samples", group, remedy="torch.distributed.group.WORLD or another process group")
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    refusal: Exception | None = None
    table = torch.empty(0)
    try:
        table = _costs_and_lengths(lengths, cost, method, equal_counts)
    except Exception as error:  # whatever a cost function raises, the other ranks wait
        refusal = error
    names = [] if refusal else sorted(lengths)
    compared = {"names of `lengths`": names, "`method`": method, "`equal_counts`": equal_counts}
    mine = [] if refusal else [len(table), *map(_digest, compared.values())]
    words = agree("balance_samples", "`lengths` and `cost`", group, refusal, mine)
    for position, (what, have) in enumerate(compared.items(), start=1):
        others = [rank for rank, each in enumerate(words) if each[position] != mine[position]]
        if others:
            raise ValueError(
                f"balance_samples: {what} must be equal on all ranks of the group, got {have} here and other on ranks "
                f"{others}; pass the same on all"
            )
    counts = [each[0] for each in words]
    columns = _gather(table, counts, group)
    costs = columns[0]
    by_name = {name: [int(each) for each in column] for name, column in zip(names, columns[1:], strict=True)}
    for sample, value in enumerate(costs):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(
                f"balance_samples: `cost` must return finite numbers of at least 0, got {value} for lengths "
                f"{ {name: by_name[name][sample] for name in names} }; correct the function"
            )
    ranks = assign(costs, counts, method, equal_counts=equal_counts)
    report = _report(method, costs, by_name, counts, ranks)
    return Assignment(ranks=tuple(ranks), counts=tuple(counts), report=report, _group=group, _lengths=by_name)


def _costs_and_lengths(lengths: Mapping[str, Tensor], cost: Cost, method: Method, equal_counts: bool) -> Tensor:
    """(B, 1 + sequences) float64 of this rank, costs first, lengths by name; lengths are exact in float64."""
    if not isinstance(lengths, Mapping):
        raise TypeError(
            f"balance_samples: `lengths` must map sequences to tensors, got {type(lengths).__name__}; "
            'pass {"history": lengths}, for example'
        )
    if not lengths:
        raise ValueError("balance_samples: `lengths` must hold at least one sequence, got none; pass the batch's")
    if not callable(cost):
        raise TypeError(f"balance_samples: `cost` must be a function, got {type(cost).__name__}; pass a LengthCost")
    if method not in METHODS:
        raise ValueError(
            f"balance_samples: `method` must be one of {', '.join(METHODS)}, got {method!r}; name one of them"
        )
    if not isinstance(equal_counts, bool):
        raise TypeError(f"balance_samples: `equal_counts` must be a bool, got {equal_counts!r}; pass True or False")
    if equal_counts and method == "none":
        raise ValueError(
            "balance_samples: `equal_counts` must be False with method 'none', which moves no sample, got True; leave "
            "it out, or use method='greedy'"
        )
    for name, each in lengths.items():
        if not isinstance(name, str):
            raise TypeError(f"balance_samples: `lengths` must have str as its keys, got {name!r}; pass names")
        if not isinstance(each, Tensor):
            raise TypeError(
                f"balance_samples: `lengths[{name!r}]` must be a tensor, got {type(each).__name__}; pass torch.tensor"
            )
    names = sorted(lengths)
    shape = lengths[names[0]].shape
    for name in names:
        each = lengths[name]
        if each.ndim != 1 or each.shape != shape or each.dtype not in _INTEGERS:
            raise ValueError(
                f"balance_samples: `lengths[{name!r}]` must be integers of shape (B,) like the others, got "
                f"{each.dtype} {tuple(each.shape)} beside {tuple(shape)}; take offsets.diff()"
            )
        if len(each) and (lowest := int(each.min())) < 0:
            raise ValueError(
                f"balance_samples: `lengths[{name!r}]` must be at least 0, got {lowest}; take offsets.diff()"
            )
    found = cost(lengths)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"balance_samples: `cost` must return a tensor, got {type(found).__name__}; one cost for each sample"
        )
    if found.shape != shape:
        raise ValueError(
            f"balance_samples: `cost` must return one cost for each sample, shape (B,) = {tuple(shape)}, got "
            f"{tuple(found.shape)}; return one number per sample"
        )
    return torch.stack([found.detach().double(), *[lengths[name].double() for name in names]], dim=1)


def _gather(table: Tensor, counts: list[int], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Columns over the samples of all ranks."""
    if group is None:
        return table.t().tolist()  # type: ignore[no-any-return]
    longest = max(counts)
    if longest == 0:
        return [[] for _ in range(table.shape[1])]
    padded = torch.zeros((longest, table.shape[1]), dtype=table.dtype, device=group_device(group))
    padded[: len(table)] = table
    gathered = padded.new_empty((len(counts) * longest, table.shape[1]))
    DefaultCollectives().all_gather(gathered, padded, group)
    kept = torch.cat([part[:count] for part, count in zip(gathered.split(longest), counts, strict=True)])
    return kept.t().tolist()  # type: ignore[no-any-return]


def _mapping(argument: str, given: object) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TypeError(
            f"Assignment.move: `{argument}` must map names to tensors, got {type(given).__name__}; pass a dict with "
            "str as its keys"
        )
    return given


def _described(rows: Mapping[str, Tensor], jagged: Mapping[str, tuple[Tensor, Tensor]]) -> str:
    """What must be equal on all ranks."""
    named = [*sorted(rows.items()), *((f"{name} (jagged)", jagged[name][0]) for name in sorted(jagged))]
    return ", ".join(f"{name} {str(each.dtype).removeprefix('torch.')} {list(each.shape[1:])}" for name, each in named)


def _digest(value: object) -> int:
    return crc32(str(value).encode())


def _report(
    method: Method, costs: list[float], lengths: dict[str, list[int]], counts: list[int], ranks: list[int]
) -> BalanceReport:
    before, after, sizes = ([0.0] * len(counts) for _ in range(3))
    origin = [(rank, position) for rank, count in enumerate(counts) for position in range(count)]
    for sample, rank in enumerate(ranks):
        before[origin[sample][0]] += costs[sample]
        after[rank] += costs[sample]
        sizes[rank] += 1
    heaviest = max(range(len(counts)), key=lambda rank: (after[rank], -rank))
    here = [sample for sample, rank in enumerate(ranks) if rank == heaviest]
    dearest = sorted(here, key=lambda sample: (-costs[sample], sample))
    shares = tuple(
        SampleShare(
            source_rank=origin[sample][0],
            position=origin[sample][1],
            lengths={name: each[sample] for name, each in lengths.items()},
            share=costs[sample] / after[heaviest] if after[heaviest] > 0 else 0.0,
        )
        for sample in dearest[:4]
    )
    return BalanceReport(
        method=method,
        costs_before=tuple(before),
        costs_after=tuple(after),
        counts_after=tuple(int(size) for size in sizes),
        num_moved=sum(origin[sample][0] != rank for sample, rank in enumerate(ranks)),
        heaviest_rank=heaviest,
        heaviest=shares,
    )
