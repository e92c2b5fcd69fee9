"""Where a batch's ids, offsets and outputs lie when one process lays all features one after the other.

Everything here follows from how many ids and bags each feature has, so batches of equal sizes share a layout.

One int64 tensor holds the batch: the values of all features, then all offsets. Each element has bounds: a value's are
its table's rows; a feature's first offset is 0, its last the number of its values, the others lie between. So clamping
finds every bad id and every offset that is out of place, and leaves what is safe to look up; what is left to check is
that offsets do not fall.

Adding a shift to each element makes a value the row of its engine and an offset a position among the engine's values.
The offsets of all pooled features in a row then are bags, once where one feature's end meets the next one's start the
first of the two is left out. Unpooled features come first, as bags of one id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem_parallel._src.embeddings.layout import FeatureSlot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BatchLayout", "Check", "Structure", "Unit", "UnitLayout", "make_check"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What one engine looks up."""

    slots: tuple[FeatureSlot, ...]
    """Unpooled ones, then sums, then means."""
    num_rows: tuple[int, ...]
    """Rows of each slot's table."""
    bases: tuple[int, ...]
    """Row of the engine at which each slot's table begins."""
    tables: tuple[int, ...]
    """Number of each slot's table."""
    dim: int
    sums: bool
    """Whether it sums over bags; if not, the order of the slots is free, and offsets are checked only."""


@dataclass(kw_only=True, slots=True)
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
class UnitLayout:
    """One engine's part of a batch."""

    names: list[str]
    """Features that the batch has, in order of slot."""
    values: slice
    """Of the batch's tensor."""
    num_values: int
    num_offsets: int
    """Offsets of its bags, which follow those of the units before; 0 if every bag is one id."""
    kept: Tensor | None
    """(num_outputs + 1,) int64: which of these offsets are bags'; None if all are."""
    counting: Tensor | None
    """0, 1, ...: the offsets of unpooled features, if there are pooled ones, too."""
    sizes: list[int]
    """Output rows of each feature."""
    num_outputs: int
    num_before_means: int
    """Output rows that are no means; they come first."""
    has_means: bool
    means_only: bool


@dataclass(kw_only=True, slots=True)
class BatchLayout:
    """Positions in the batch's tensor (L,), of which A are values."""

    units: list[UnitLayout]
    parts: list[int]
    """Lengths, from the first element on: each unit's values, then each unit's offsets of bags, then the rest."""
    low: Tensor
    """(L,) int64 bounds, inclusive."""
    high: Tensor
    shift: Tensor
    """(L,) int64"""
    table: Tensor
    """(L,) int64 of a value: number of its table in the unit's group."""
    num_values: int
    """A"""
    num_falls: int
    """Places among the shifted offsets that fall in every good batch, between engines."""
    impossible: bool
    """A feature has values but no bags."""
    pairs: list[tuple[str, slice, slice]]
    """Each feature's values and offsets."""
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


def make_check(layout: BatchLayout, *, drop: bool) -> Check:
    """Memory for a check."""
    length, split = layout.low.numel(), layout.num_values
    faults = torch.empty(2 * length - split - 1, dtype=torch.bool, device=layout.low.device)
    bad = faults[:length]
    scratch = layout.high[:split] + 1 if drop else None
    return Check(faults=faults, bad=bad, bad_values=bad[:split], falls=faults[length:], scratch=scratch)


class _Part:
    """One unit's features that a batch has."""

    def __init__(self, unit: Unit, present: Sequence[bool], first: int) -> None:
        slots = [slot for slot, here in zip(unit.slots, present, strict=True) if here]
        self.names = [slot.config.name for slot in slots]
        self.first, self.end = first, first + len(slots)
        poolings = [slot.config.pooling if unit.sums else "none" for slot in slots]
        self.num_single = poolings.count("none")
        self.num_sums = poolings.count("sum")
        self.has_means = self.num_single + self.num_sums < len(slots)
        self.mixed = 0 < self.num_single < len(slots)
        self.pooled = range(self.first + self.num_single, self.end)


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
        self._parts: list[_Part] = []
        for unit, here in zip(units, present, strict=True):
            self._parts.append(_Part(unit, here, self._parts[-1].end if self._parts else 0))
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
        starts, start = [], count
        for run in self._run_order:
            starts.append(start)
            start += 3 if run >= 0 else 1
        self._runs = np.array([run for run in self._run_order if run >= 0], dtype=np.int64)
        self._runs_at = np.array([at for run, at in zip(self._run_order, starts, strict=True) if run >= 0])
        self._single_at = [at for run, at in zip(self._run_order, starts, strict=True) if run < 0]
        # Rows: low, high, shift, table, length.
        self._template = np.zeros((5, start), dtype=np.int64)
        slots = [
            (rows - 1, base, table)
            for unit, here in zip(units, present, strict=True)
            for rows, base, table, taken in zip(unit.num_rows, unit.bases, unit.tables, here, strict=True)
            if taken
        ]
        self._template[1:4, :count] = np.array(slots).reshape(count, 3).T
        self._template[4, self._runs_at] = 1

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
        runs: list[int] = self._runs.tolist()
        return runs

    def lay_out(self, num_values: Sequence[int], num_offsets: Sequence[int]) -> BatchLayout:
        """The layout of a batch whose features have so many values and offsets; P of each."""
        import numpy as np

        values = np.array(num_values, dtype=np.int64)
        offsets = np.array(num_offsets, dtype=np.int64)
        starts = values.cumsum() - values
        # Among the unit's values.
        shifts = starts - starts[self._first]
        runs, at = self._runs, self._runs_at
        ends = values * (offsets > 1)
        table = self._template.copy()
        table[4, : len(values)] = values
        table[1, at + 1] = values[runs]
        table[0, at + 2] = table[1, at + 2] = ends[runs]
        table[2, at] = table[2, at + 1] = table[2, at + 2] = shifts[runs]
        table[4, at + 1] = np.maximum(offsets[runs] - 2, 0)
        table[4, at + 2] = np.minimum(offsets[runs] - 1, 1)
        mixed = [part for part in self._parts if part.mixed]
        singles = [int(shifts[part.first + part.num_single]) for part in mixed]
        for single, place in zip(singles, self._single_at, strict=True):
            table[1, place] = table[4, place] = single
        np.cumsum(table[4], out=table[4])
        seams = [self._seams(part, num_values, num_offsets) for part in self._parts]
        (low, high, shift, number), kept = self._expand(table, seams)
        total = int(table[4, len(values) - 1])
        units, pairs = self._place(num_values, num_offsets, starts, total, kept)
        bags = [unit.num_offsets for unit in units]
        return BatchLayout(
            units=units,
            parts=[*(unit.num_values for unit in units), *bags, int(table[4, -1]) - total - sum(bags)],
            low=low,
            high=high,
            shift=shift,
            table=number,
            num_values=total,
            num_falls=self._count_falls(shifts, shifts + ends, singles),
            impossible=bool((ends < values).any()),
            pairs=pairs,
            outputs=self._outputs,
            outputs_at=self._outputs_at,
            sizes=[
                sizes
                for part, unit in zip(self._parts, units, strict=True)
                for first in [part.num_single + part.num_sums]
                for sizes in (unit.sizes[:first], unit.sizes[first:])
                if sizes
            ],
            whole=all(unit.counting is None for unit in units),
        )

    def _seams(self, part: _Part, num_values: Sequence[int], num_offsets: Sequence[int]) -> list[int]:
        """Output row at which each pooled feature but the first begins, then the number of all; [] if there is none."""
        if len(part.pooled) < 2:
            return []
        sizes = [sum(num_values[part.first : part.first + part.num_single])]
        sizes += [num_offsets[feature] - 1 for feature in part.pooled]
        return list(accumulate(sizes))[1:]

    def _expand(
        self, table: NDArray[np.int64], seams: Sequence[Sequence[int]]
    ) -> tuple[Sequence[Tensor], list[Tensor | None]]:
        """Per element of the batch and per bag of each unit, of what is known per segment and per feature.

        Returns:
            (low, high, shift, table) of elements, ``table``'s last row saying where each segment ends; and
            ``UnitLayout.kept`` of each unit.
        """
        import numpy as np

        numbers = np.concatenate([table.ravel(), *(np.array(each, dtype=np.int64) for each in seams)])
        if self._device.type == "cpu":
            small = torch.from_numpy(numbers)
        else:
            pinned = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
            pinned.numpy()[:] = numbers
            small = pinned.to(self._device, non_blocking=True)
        segments, *ends = small.split([table.size, *(len(each) for each in seams)])
        segments = segments.view(table.shape)
        longest = max([int(table[-1, -1]), *(each[-1] + 1 for each in seams if each)])
        elements = torch.arange(longest, device=self._device)
        which = torch.searchsorted(segments[-1], elements[: int(table[-1, -1])], right=True)
        kept: list[Tensor | None] = []
        for each, end in zip(seams, ends, strict=True):
            if not each:
                kept.append(None)
                continue
            # One is left out at each seam; the last bag's end comes after them all.
            rows = elements[: each[-1] + 1]
            kept.append(torch.searchsorted(end[:-1], rows, right=True).add_(rows))
        return segments[:-1].index_select(1, which).unbind(), kept

    def _count_falls(self, firsts: NDArray[np.int64], lasts: NDArray[np.int64], singles: Sequence[int]) -> int:
        """How often the last offset of a run lies above the first of the next."""
        if not singles:
            return int((firsts[self._runs[1:]] < lasts[self._runs[:-1]]).sum())
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

    def _place(
        self,
        num_values: Sequence[int],
        num_offsets: Sequence[int],
        starts: NDArray[np.int64],
        total: int,
        kept: Sequence[Tensor | None],
    ) -> tuple[list[UnitLayout], list[tuple[str, slice, slice]]]:
        """Each unit's part; and each feature's."""
        units: list[UnitLayout] = []
        offsets_at: dict[int, int] = {}
        at = total
        for part, each in zip(self._parts, kept, strict=True):
            first_bag = at
            sizes = list(num_values[part.first : part.first + part.num_single])
            single = sum(sizes)
            at += single if part.mixed else 0
            for feature in part.pooled:
                offsets_at[feature] = at
                sizes.append(num_offsets[feature] - 1)
                at += num_offsets[feature]
            start = int(starts[part.first]) if part.names else total
            count = sum(num_values[part.first : part.end])
            units.append(
                UnitLayout(
                    names=part.names,
                    values=slice(start, start + count),
                    num_values=count,
                    num_offsets=at - first_bag,
                    kept=each,
                    counting=torch.arange(single, device=self._device) if part.mixed and single else None,
                    sizes=sizes,
                    num_outputs=sum(sizes),
                    num_before_means=sum(sizes[: part.num_single + part.num_sums]),
                    has_means=part.has_means,
                    means_only=part.has_means and part.num_single + part.num_sums == 0,
                )
            )
        for part in self._parts:
            for feature in range(part.first, part.first + part.num_single):
                offsets_at[feature] = at
                at += num_offsets[feature]
        pairs = []
        for feature, name in enumerate(self._names):
            first, place = int(starts[feature]), offsets_at[feature]
            pairs.append((name, slice(first, first + num_values[feature]), slice(place, place + num_offsets[feature])))
        return units, pairs
