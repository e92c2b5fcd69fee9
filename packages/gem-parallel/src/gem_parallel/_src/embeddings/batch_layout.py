"""Where a batch's ids, offsets and outputs lie when one process lays all features one after the other.

Everything here follows from how many ids and bags each feature has, so batches of equal sizes share a layout.

One int64 tensor holds the batch: the values of all features, then all offsets. Each element has bounds: a value's are
its table's rows; a feature's first offset is 0, its last the number of its values, the others lie between. So clamping
finds every bad id and every offset that is out of place, and leaves what is safe to look up; what is left to check is
that offsets do not fall. The bounds of each element are written out, so that one operator acts on all of them; those of
large batches are numbers of the host, with an operator per segment and no memory (``MAX_EXPANDED``, ``CPU_EXPANDED``).

Adding a shift to each element makes a value the row of its engine and an offset a position among the engine's values.
The offsets of all pooled features in a row then are bags, once the first of the two is left out where one feature's end
meets the next one's start. Unpooled features come first, as bags of one id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from gem_parallel._src.embeddings.unit_layout import Unit, UnitLayout, UnitPart

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BatchLayout", "Bounds", "Check", "Segment", "Structure", "keep_latest", "make_check"]

MAX_EXPANDED = 2**25
"""Elements whose bounds are written out: 24 bytes each, and nearly as many again while they are made, for which a batch
of billions has no room."""

CPU_EXPANDED = 128
"""Likewise on the CPU, per segment: one more operator takes as long as to write the bounds of so many elements."""

MAX_KEPT = 2**20
"""Elements of what is kept for later batches."""

BLOCK = 2048
"""Elements of one program of the kernel."""

FIELDS = 8
"""Numbers that the kernel takes of a segment."""

Kept = TypeVar("Kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What is valid, element by element."""

    low: Tensor
    """(L,) int64, inclusive."""
    high: Tensor
    shift: Tensor
    """(L,) int64"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements with equal bounds and shift."""

    start: int
    end: int
    low: int
    high: int
    shift: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What is wrong with a batch of L elements, of which A are values and K offsets."""

    faults: Tensor
    """(L + K - 1,) bool: elements out of their bounds, then falls from one offset to the next."""
    bad: Tensor
    """(L,) the first part of it."""
    bad_values: Tensor
    """(A,) the first part of that."""
    falls: Tensor
    """(K - 1,) the last part."""
    scratch: Tensor | None
    """(A,) int64 row that takes the place of a bad value, where those are dropped: the one after its table's last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPlan:
    """A batch as ``layout_kernel`` takes it."""

    numbers: NDArray[np.int64]
    """Of each segment FIELDS numbers: first program, source, elements, largest, shift, place of what it becomes, place
    of what it was, kind; then each program's segment. Sources are each batch's own."""
    num_segments: int
    num_programs: int
    block: int
    """Elements of a program."""
    num_elements: int
    """Of what it lays out."""


@dataclass(kw_only=True, slots=True)
class BatchLayout:
    """Positions in the batch's tensor (L,), of which A are values."""

    units: list[UnitLayout]
    parts: list[int]
    """Lengths, from the first element on: each unit's values, then each unit's offsets of bags, then the rest; with a
    ``plan``, bags as fbgemm wants them, and no rest."""
    bounds: Bounds | None
    """None of a large batch."""
    segments: list[Segment]
    """Of a large batch, in order; the first ones are values, one for each feature."""
    table: Tensor | None
    """(A,) int64 number of each value's table in the unit's group; None if all units sum."""
    num_elements: int
    """L"""
    num_values: int
    """A"""
    num_falls: int
    """Places among the shifted offsets that fall in every good batch, between engines."""
    impossible: bool
    """A feature has values but no bags."""
    pairs: Callable[[], list[tuple[str, int, int, int, int]]]
    """Gives each feature with where its values and where its offsets begin and end."""
    outputs: list[str]
    """Features, as outputs are in order."""
    outputs_at: list[int]
    """Of each, its place in order of unit and slot."""
    sizes: list[list[int]]
    """Of each unit with features: rows of each of its sums, then if it has means, of each of its means."""
    whole: bool
    """Every element comes with the batch: no unit is ``counting``."""
    check: Check | None = None
    """Memory for the check of one batch after the other, on one stream."""
    plan: KernelPlan | None = None
    """Of a batch that the kernel lays out; there are no bounds, segments and falls then."""


def make_check(layout: BatchLayout, device: torch.device, *, drop: bool) -> Check:
    """Memory for a check."""
    length, split = layout.num_elements, layout.num_values
    faults = torch.empty(2 * length - split - 1, dtype=torch.bool, device=device)
    bad = faults[:length]
    scratch = layout.bounds.high[:split] + 1 if drop and layout.bounds is not None else None
    return Check(faults=faults, bad=bad, bad_values=bad[:split], falls=faults[length:], scratch=scratch)


def keep_latest(kept: dict[Any, Kept], key: object, value: Kept, most: int) -> None:
    """Add a value; the first of ``kept`` is the one longest unused."""
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


class Structure:
    """What layouts of batches with the same features have in common.

    P features in order of unit and slot. Segments of equal bounds and shift: one for each feature's values; then the
    runs of offsets: of each unit its bags of one id, if it has others, and its pooled features; last the unpooled
    features. A feature's run has three segments: the first offset, those between, the last.

    Args:
        units: All engines' features.
        present: Per unit and slot, whether the batch has the feature.
        outputs: All features, as outputs are in order.
        device: Of the batch.
    """

    def __init__(
        self, units: Sequence[Unit], present: Sequence[Sequence[bool]], outputs: Sequence[str], device: torch.device
    ) -> None:
        # Comes with fbgemm, without which the package imports, too.
        import numpy as np

        self._device = device
        self._parts: list[UnitPart] = []
        for unit, here in zip(units, present, strict=True):
            self._parts.append(UnitPart(unit, here, self._parts[-1].end if self._parts else 0))
        self._names = [name for part in self._parts for name in part.names]
        self._outputs = [name for name in outputs if name in self._names]
        self._outputs_at = [self._names.index(name) for name in self._outputs]
        count = len(self._names)
        self._first = np.array([part.first for part in self._parts for _ in part.names], dtype=np.int64)
        runs: list[int] = []
        """Feature; or ~unit for the bags of one id."""
        for at, part in enumerate(self._parts):
            runs += [~at] if part.mixed else []
            runs += part.pooled
        self._run_order = runs + [
            feature for part in self._parts for feature in range(part.first, part.first + part.num_single)
        ]
        self._runs = [run for run in self._run_order if run >= 0]
        self._sums = all(unit.sums for unit in units)
        self._falls = len([part for part in self._parts if part.names]) > 1 or len(self._runs) < len(self._run_order)
        slots = [
            (rows - 1, base, table)
            for unit, here in zip(units, present, strict=True)
            for rows, base, table, taken in zip(unit.num_rows, unit.bases, unit.tables, here, strict=True)
            if taken
        ]
        self._constants = np.array([0, 1, *(number for slot in slots for number in slot)], dtype=np.int64)
        self._kept_bags: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._plan_table = self._make_plan_table()
        self._sources = np.array(self._make_sources(count), dtype=np.int64).T.copy()

    def _make_sources(self, count: int) -> list[tuple[int, int, int, int, int]]:
        """Where (low, high, shift, table, length) of each segment stand in the constants and ``lay_out``'s numbers."""
        zero, one, first = 0, 1, 2 + 3 * count
        value, shift, end, between, last = (range(first + at * count, first + (at + 1) * count) for at in range(5))
        found = [(zero, 2 + 3 * at, 3 + 3 * at, 4 + 3 * at, value[at]) for at in range(count)]
        for run in self._run_order:
            if run >= 0:
                found.append((zero, zero, shift[run], zero, one))
                found.append((zero, value[run], shift[run], zero, between[run]))
                found.append((end[run], end[run], shift[run], zero, last[run]))
            else:
                # As many as the unit has values before its first pooled feature; three segments, too.
                single = shift[self._parts[~run].pooled[0]]
                found += [(zero,) * 5, (zero, single, zero, zero, single), (zero,) * 5]
        return found

    @property
    def names(self) -> list[str]:
        """Features in order of their values; a feature of several units more than once."""
        return self._names

    @property
    def num_pooled(self) -> list[int]:
        """Features of each unit whose offsets are bags."""
        return [len(part.pooled) for part in self._parts]

    @property
    def runs(self) -> list[int]:
        """Index in ``names`` of each feature, in order of their offsets."""
        return self._runs

    def lay_out(self, num_values: Sequence[int], num_offsets: Sequence[int], stream: int = 0) -> BatchLayout:
        """The layout of a batch whose features have so many values and offsets; P of each.

        Args:
            num_values: In order of unit and slot.
            num_offsets: Likewise.
            stream: Which stream is current; the layout is used on no other.

        Raises:
            ValueError: more ids or bags than one lookup can take.
        """
        import numpy as np

        sizes = [part.sizes(num_values, num_offsets) for part in self._parts]
        values = np.array(num_values, dtype=np.int64)
        offsets = np.array(num_offsets, dtype=np.int64)
        starts = values.cumsum() - values
        # Among the unit's values.
        shifts = starts - starts.take(self._first)
        last = np.minimum(offsets - 1, 1)
        ends = values * last
        numbers = (self._constants, values, shifts, ends, np.maximum(offsets - 2, 0), last)
        table = np.concatenate(numbers).take(self._sources)
        table[4].cumsum(out=table[4])
        length, total = int(table[4, -1]), int(table[4, len(values) - 1])
        bounds, number = self._expand(table, len(values), stream)
        units, parts, start = [], [], 0
        for part, each in zip(self._parts, sizes, strict=True):
            single = part.num_mixed(each)
            unit = part.place(
                each,
                sum(num_values[part.first : part.end]),
                start,
                kept=self._kept(part.seams(each), stream),
                counting=self._counting(single, stream) if single else None,
            )
            units.append(unit)
            parts += part.split(each)
            start += unit.num_values
        bags = [unit.num_offsets for unit in units]
        return BatchLayout(
            units=units,
            parts=[*(unit.num_values for unit in units), *bags, length - total - sum(bags)],
            bounds=bounds,
            segments=self._segments(table) if bounds is None else [],
            table=number,
            num_elements=length,
            num_values=total,
            num_falls=self._count_falls(shifts.tolist(), (shifts + ends).tolist()) if self._falls else 0,
            impossible=min(num_offsets) == 1 and bool((ends < values).any()),
            pairs=partial(self._pairs, table[4]),
            outputs=self._outputs,
            outputs_at=self._outputs_at,
            sizes=parts,
            whole=all(unit.counting is None for unit in units),
        )

    def plan(self, num_values: Sequence[int], num_offsets: Sequence[int]) -> BatchLayout:
        """As ``lay_out``, for the kernel: nothing is made on the device.

        Segments are each feature's values, then each feature's offsets, then each unit's bags of one id. Bags are
        written as fbgemm wants them, without the second of two equal offsets between features.
        """
        import numpy as np

        sizes = [part.sizes(num_values, num_offsets) for part in self._parts]
        count = len(self._names)
        lengths = np.array((*num_values, *num_offsets), dtype=np.int64)
        ends = lengths.cumsum()
        starts, total, num_given = ends - lengths, int(ends[count - 1]), int(ends[-1])
        values, offsets = lengths[:count], lengths[count:]
        last = values * np.minimum(offsets - 1, 1)
        units, outputs, bags, places, singles = [], [], [], [], []
        place, start = total, 0
        for part, each in zip(self._parts, sizes, strict=True):
            unit = part.place(each, sum(num_values[part.first : part.end]), start, kept=None, counting=None)
            units.append(unit)
            outputs += part.split(each)
            start += unit.num_values
            places += [-1] * part.num_single
            bags.append(0)
            if part.pooled:
                single = part.num_mixed(each)
                singles += [(single, place)] if part.mixed else []
                # One feature's end is the next one's start.
                places += accumulate(each[part.num_single : -1], initial=place + single)
                bags[-1] = unit.num_outputs + 1
                place += bags[-1]
        table = self._plan_table.copy()
        table[: 2 * count, 2], table[count : 2 * count, 3] = lengths, last
        table[count : 2 * count, 4] = starts[:count] - starts.take(self._first)
        table[:count, 5], table[count : 2 * count, 5] = starts[:count], places
        table[: 2 * count, 6] = starts
        if singles:
            table[2 * count :, 2], table[2 * count :, 5] = zip(*singles, strict=True)
        programs = (table[:, 2] + (BLOCK - 1)) // BLOCK
        table[:, 0] = programs.cumsum() - programs
        segments = np.arange(len(table)).repeat(programs)
        return BatchLayout(
            units=units,
            parts=[*(unit.num_values for unit in units), *bags],
            bounds=None,
            segments=[],
            table=None,
            num_elements=num_given,
            num_values=total,
            num_falls=0,
            impossible=min(num_offsets) == 1 and bool((last < values).any()),
            pairs=partial(self._planned_pairs, lengths),
            outputs=self._outputs,
            outputs_at=self._outputs_at,
            sizes=outputs,
            whole=True,
            plan=KernelPlan(
                numbers=np.concatenate((table.reshape(-1), segments)),
                num_segments=len(table),
                num_programs=len(segments),
                block=BLOCK,
                num_elements=place,
            ),
        )

    def _make_plan_table(self) -> NDArray[np.int64]:
        """The segments of ``KernelPlan.numbers`` with what all batches of the same features have in common."""
        import numpy as np

        count = len(self._names)
        table = np.zeros((2 * count + sum(part.mixed for part in self._parts), FIELDS), dtype=np.int64)
        table[:count, 3], table[:count, 4] = self._constants[2::3], self._constants[3::3]
        table[count : 2 * count, 7], table[2 * count :, 7] = 1, 2
        return table

    def _planned_pairs(self, lengths: NDArray[np.int64]) -> list[tuple[str, int, int, int, int]]:
        """``BatchLayout.pairs`` of what the kernel lays out."""
        ends = [0, *lengths.cumsum().tolist()]
        count = len(self._names)
        return [
            (name, ends[at], ends[at + 1], ends[at + count], ends[at + count + 1])
            for at, name in enumerate(self._names)
        ]

    def _expand(self, table: NDArray[np.int64], count: int, stream: int) -> tuple[Bounds | None, Tensor | None]:
        """The bounds of each element, and the number of each value's table, of what is known per segment.

        Args:
            table: Of segments; its last row says where each ends.
            count: Segments that are values.
            stream: Current stream.
        """
        length, total = int(table[4, -1]), int(table[4, count - 1])
        most = MAX_EXPANDED if self._device.type == "cuda" else min(MAX_EXPANDED, CPU_EXPANDED * table.shape[1])
        if length <= most:
            segments = _to_device(table, self._device)
            which = torch.searchsorted(segments[4], self._counting(length, stream), right=True)
            low, high, shift, *number = segments[: 3 if self._sums else 4].index_select(1, which).unbind()
            return Bounds(low=low, high=high, shift=shift), number[0][:total] if number else None
        if self._sums:
            return None, None
        tables = torch.empty(total, dtype=torch.int64, device=self._device)
        start = 0
        for end, each in zip(table[4, :count].tolist(), table[3].tolist(), strict=False):
            tables[start:end].fill_(each)
            start = end
        return None, tables

    def _kept(self, seams: tuple[int, ...], stream: int) -> Tensor | None:
        """``UnitLayout.kept``; mostly that of the batch before, whose bags were as many."""
        import numpy as np

        if not seams:
            return None
        key = stream, seams
        kept = self._kept_bags.pop(key, None)
        if kept is None:
            # One is left out at each seam; the last bag's end comes after them all.
            starts = _to_device(np.array(seams[:-1], dtype=np.int64), self._device)
            places = self._counting(seams[-1] + 1, stream)
            kept = torch.searchsorted(starts, places, right=True).add_(places)
        if kept.numel() <= MAX_KEPT:
            keep_latest(self._kept_bags, key, kept, 2 * len(self._parts))
        return kept

    def _counting(self, num: int, stream: int) -> Tensor:
        """0, 1, ... (num,), made on the current stream."""
        found = self._counts.get(stream)
        if found is None or found.numel() < num:
            found = torch.arange(num if num > MAX_KEPT else 2 * num, device=self._device)
            if num <= MAX_KEPT:
                self._counts[stream] = found
        return found[:num]

    @staticmethod
    def _segments(table: NDArray[np.int64]) -> list[Segment]:
        ends = table[4].tolist()
        low, high, shift = table[:3].tolist()
        return [Segment(*each) for each in zip([0, *ends[:-1]], ends, low, high, shift, strict=True)]

    def _count_falls(self, firsts: Sequence[int], lasts: Sequence[int]) -> int:
        """How often the last offset of a run lies above the first of the next."""
        falls, before = 0, 0
        for run in self._run_order:
            if run < 0:
                single = firsts[self._parts[~run].pooled[0]]
                first, last = (0, single - 1) if single else (before, before)
            else:
                first, last = firsts[run], lasts[run]
            falls += first < before
            before = last
        return falls

    def _pairs(self, table: NDArray[np.int64]) -> list[tuple[str, int, int, int, int]]:
        """``BatchLayout.pairs``, from where segments end."""
        ends = table.tolist()
        count = len(self._names)
        offsets = {run: count + 3 * at for at, run in enumerate(self._run_order)}
        return [
            (name, ends[at - 1] if at else 0, ends[at], ends[offsets[at] - 1], ends[offsets[at] + 2])
            for at, name in enumerate(self._names)
        ]


def _to_device(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """A copy on ``device``, or on the CPU the same memory; the host does not wait."""
    if device.type != "cuda":
        return torch.from_numpy(numbers).to(device)
    pinned = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
    pinned.numpy()[:] = numbers
    return pinned.to(device, non_blocking=True)
