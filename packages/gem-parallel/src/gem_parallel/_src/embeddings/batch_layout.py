"""Where a batch's ids, offsets and outputs lie when one process lays all features one after the other.

Everything here follows from how many ids and bags each feature has, so batches of equal sizes share a layout.

One int64 tensor holds the batch: the values of all features, then all offsets. Each element has bounds: a value's are
its table's rows; a feature's first offset is 0, its last the number of its values, the others lie between. So clamping
finds every bad id and every offset that is out of place, and leaves what is safe to look up; what is left to check is
that offsets do not fall. Up to ``MAX_EXPANDED`` elements the bounds of each are written out, so that one operator acts
on all of them; of larger batches they are numbers of the host, with an operator per segment and no memory.

Adding a shift to each element makes a value the row of its engine and an offset a position among the engine's values.
The offsets of all pooled features in a row then are bags, once the first of the two is left out where one feature's end
meets the next one's start. Unpooled features come first, as bags of one id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem_parallel._src.embeddings.unit_layout import Unit, UnitLayout, UnitPart

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BatchLayout", "Bounds", "Check", "Segment", "Structure", "make_check"]

MAX_EXPANDED = 2**25
"""Elements whose bounds are written out: 24 bytes each, and nearly as many again while they are made, for which a batch
of billions has no room."""


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


@dataclass(kw_only=True, slots=True)
class BatchLayout:
    """Positions in the batch's tensor (L,), of which A are values."""

    units: list[UnitLayout]
    parts: list[int]
    """Lengths, from the first element on: each unit's values, then each unit's offsets of bags, then the rest."""
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


def make_check(layout: BatchLayout, device: torch.device, *, drop: bool) -> Check:
    """Memory for a check."""
    length, split = layout.num_elements, layout.num_values
    faults = torch.empty(2 * length - split - 1, dtype=torch.bool, device=device)
    bad = faults[:length]
    scratch = layout.bounds.high[:split] + 1 if drop and layout.bounds is not None else None
    return Check(faults=faults, bad=bad, bad_values=bad[:split], falls=faults[length:], scratch=scratch)


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
        # The bags of one id have three segments, too, of which one is not empty.
        self._run_feature = np.array([max(run, 0) for run in self._run_order], dtype=np.int64)
        self._single_runs = [at for at, run in enumerate(self._run_order) if run < 0]
        self._sums = all(unit.sums for unit in units)
        self._falls = len([part for part in self._parts if part.names]) > 1 or bool(self._single_runs)
        # Rows: low, high, shift, table, length.
        self._template = np.zeros((5, count + 3 * len(self._run_order)), dtype=np.int64)
        slots = [
            (rows - 1, base, table)
            for unit, here in zip(units, present, strict=True)
            for rows, base, table, taken in zip(unit.num_rows, unit.bases, unit.tables, here, strict=True)
            if taken
        ]
        self._template[1:4, :count] = np.array(slots).reshape(count, 3).T
        self._template[4, count::3] = 1

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

    def lay_out(self, num_values: Sequence[int], num_offsets: Sequence[int]) -> BatchLayout:
        """The layout of a batch whose features have so many values and offsets; P of each.

        Raises:
            ValueError: more ids or bags than one lookup can take.
        """
        import numpy as np

        for part in self._parts:
            part.check(num_values, num_offsets)
        values = np.array(num_values, dtype=np.int64)
        offsets = np.array(num_offsets, dtype=np.int64)
        starts = values.cumsum() - values
        # Among the unit's values.
        shifts = starts - starts[self._first]
        ends = values * (offsets > 1)
        count, of = len(values), self._run_feature
        table = self._template.copy()
        runs = table[:, count:].reshape(5, len(of), 3)
        table[4, :count] = values
        runs[1, :, 1] = values[of]
        runs[0, :, 2] = runs[1, :, 2] = ends[of]
        runs[2] = shifts[of, None]
        run_offsets = offsets[of]
        runs[4, :, 1] = np.maximum(run_offsets - 2, 0)
        runs[4, :, 2] = np.minimum(run_offsets - 1, 1)
        singles = [int(shifts[part.pooled[0]]) for part in self._parts if part.mixed]
        for single, at in zip(singles, self._single_runs, strict=True):
            runs[:, at] = 0
            runs[1, at, 1] = runs[4, at, 1] = single
        np.cumsum(table[4], out=table[4])
        length, total = int(table[4, -1]), int(table[4, count - 1])
        seams = [part.seams(num_values, num_offsets) for part in self._parts]
        bounds, number, kept = self._expand(table, count, seams)
        segments = self._segments(table) if bounds is None else []
        units = [
            part.place(num_values, num_offsets, start, each, self._device)
            for part, start, each in zip(self._parts, self._unit_starts(starts, total), kept, strict=True)
        ]
        bags = [unit.num_offsets for unit in units]
        return BatchLayout(
            units=units,
            parts=[*(unit.num_values for unit in units), *bags, length - total - sum(bags)],
            bounds=bounds,
            segments=segments,
            table=number,
            num_elements=length,
            num_values=total,
            num_falls=self._count_falls(shifts, shifts + ends, singles) if self._falls else 0,
            impossible=bool((ends < values).any()),
            pairs=partial(self._pairs, table[4]),
            outputs=self._outputs,
            outputs_at=self._outputs_at,
            sizes=[sizes for part, unit in zip(self._parts, units, strict=True) for sizes in part.sizes(unit)],
            whole=all(unit.counting is None for unit in units),
        )

    def _unit_starts(self, starts: NDArray[np.int64], total: int) -> list[int]:
        """First value of each unit."""
        return [int(starts[part.first]) if part.names else total for part in self._parts]

    def _expand(
        self, table: NDArray[np.int64], count: int, seams: Sequence[Sequence[int]]
    ) -> tuple[Bounds | None, Tensor | None, list[Tensor | None]]:
        """Per element of the batch and per bag of each unit, of what is known per segment and per feature.

        Args:
            table: Of segments; its last row says where each ends.
            count: Segments that are values.
            seams: ``UnitPart.seams`` of each unit.

        Returns:
            The bounds; the numbers of the values' tables; and ``UnitLayout.kept`` of each unit.
        """
        import numpy as np

        length, total = int(table[4, -1]), int(table[4, count - 1])
        # Of a large batch the tables' numbers only.
        large = length > MAX_EXPANDED
        columns = slice(count if large else None)
        rows = slice(3 if self._sums else 4)
        used = table[:, columns]
        numbers = np.concatenate([used.ravel(), *(np.array(each, dtype=np.int64) for each in seams)])
        small = _to_device(numbers, self._device)
        segments, *ends = small.split([used.size, *(len(each) for each in seams)])
        segments = segments.view(used.shape)
        expanded = 0 if large and self._sums else total if large else length
        longest = max([expanded, *(each[-1] + 1 for each in seams if each)])
        elements = torch.arange(longest, device=self._device)
        kept: list[Tensor | None] = []
        for each, end in zip(seams, ends, strict=True):
            if not each:
                kept.append(None)
                continue
            # One is left out at each seam; the last bag's end comes after them all.
            places = elements[: each[-1] + 1]
            kept.append(torch.searchsorted(end[:-1], places, right=True).add_(places))
        if not expanded:
            return None, None, kept
        which = torch.searchsorted(segments[4], elements[:expanded], right=True)
        if large:
            return None, segments[3].index_select(0, which), kept
        low, high, shift, *number = segments[rows].index_select(1, which).unbind()
        return Bounds(low=low, high=high, shift=shift), number[0][:total] if number else None, kept

    @staticmethod
    def _segments(table: NDArray[np.int64]) -> list[Segment]:
        ends = table[4].tolist()
        low, high, shift = table[:3].tolist()
        return [Segment(*each) for each in zip([0, *ends[:-1]], ends, low, high, shift, strict=True)]

    def _count_falls(self, firsts: NDArray[np.int64], lasts: NDArray[np.int64], singles: Sequence[int]) -> int:
        """How often the last offset of a run lies above the first of the next."""
        remaining = iter(singles)
        falls, before = 0, 0
        for run in self._run_order:
            if run < 0:
                single = next(remaining)
                first, last = (0, single - 1) if single else (before, before)
            else:
                first, last = int(firsts[run]), int(lasts[run])
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
    """The host does not wait."""
    if device.type != "cuda":
        return torch.from_numpy(numbers).to(device)
    pinned = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
    pinned.numpy()[:] = numbers
    return pinned.to(device, non_blocking=True)
