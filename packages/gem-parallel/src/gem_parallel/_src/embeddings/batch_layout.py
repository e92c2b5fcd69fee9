"""Where a batch's ids, offsets and outputs lie when one process lays all features one after the other.

Everything here follows from how many ids and bags each feature has, so batches of equal sizes share a layout.

One int64 tensor holds the batch: the values of all features, then all offsets. Each element has bounds: a value's are
its table's rows; a feature's first offset is 0, its last the number of its values, the others lie between. So clamping
finds every bad id and every offset that is out of place, and leaves what is safe to look up; what is left to check is
that offsets do not fall.

Adding a shift to each element makes a value the row of its engine and an offset a position among the engine's values.
The offsets of all pooled features in a row then are bags: where one feature's end meets the next one's start there is
an empty bag between them, whose output belongs to nobody. Unpooled features come first, as bags of one id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem_parallel._src.embeddings.layout import FeatureSlot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BatchLayout", "Structure", "Unit", "UnitLayout"]


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
class UnitLayout:
    """One engine's part of a batch."""

    names: list[str]
    """Features that the batch has, in order of slot."""
    values: slice
    """Of the batch's tensor."""
    num_values: int
    bags: slice | None
    """Of the batch's tensor; None if every bag is one id."""
    counting: Tensor | None
    """0, 1, ...: the offsets of unpooled features, if there are pooled ones, too."""
    sizes: list[int]
    """Output rows of each feature, and of the empty bags between pooled ones."""
    names_at: list[int]
    """Index in ``sizes`` of each feature."""
    num_outputs: int
    mean_start: int | None
    """First output row that is a mean, up to the last row; None if there is none."""


@dataclass(kw_only=True, slots=True)
class BatchLayout:
    """Positions in the batch's tensor (L,), of which A are values."""

    units: list[UnitLayout]
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


class Structure:
    """What layouts of batches with the same features have in common.

    P features in order of unit and slot. Segments of equal bounds and shift: one for each feature's values; then the
    runs of offsets: of each unit its bags of one id, if it has others, and its pooled features; last the unpooled
    features. A feature's run has three segments: the first offset, those between, the last.

    Args:
        units: All engines' features.
        present: Per unit and slot, whether the batch has the feature.
        device: Of the batch.
    """

    def __init__(self, units: Sequence[Unit], present: Sequence[Sequence[bool]], device: torch.device) -> None:
        # Comes with fbgemm, without which the package imports, too.
        import numpy as np

        self._device = device
        self._parts: list[_Part] = []
        for unit, here in zip(units, present, strict=True):
            self._parts.append(_Part(unit, here, self._parts[-1].end if self._parts else 0))
        self._names = [name for part in self._parts for name in part.names]
        count = len(self._names)
        self._first = np.array([part.first for part in self._parts for _ in part.names], dtype=np.int64)
        runs: list[int] = []
        """Feature; or ~unit for the bags of one id."""
        for at, part in enumerate(self._parts):
            runs += [~at] if part.mixed else []
            runs += range(part.first + part.num_single, part.end)
        self._run_order = runs + [
            feature for part in self._parts for feature in range(part.first, part.first + part.num_single)
        ]
        self._num_bag_runs = len(runs)
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
        low, high, shift, number = self._expand(table)
        total = int(table[4, len(values) - 1])
        units, pairs = self._place(num_values, num_offsets, starts, total)
        return BatchLayout(
            units=units,
            low=low,
            high=high,
            shift=shift,
            table=number,
            num_values=total,
            num_falls=self._count_falls(shifts, shifts + ends, singles),
            impossible=bool((ends < values).any()),
            pairs=pairs,
        )

    def _expand(self, table: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """(low, high, shift, table) per element, of segments; the last row of ``table`` says where each ends."""
        if self._device.type == "cpu":
            small = torch.from_numpy(table)
        else:
            pinned = torch.empty(table.shape, dtype=torch.int64, pin_memory=True)
            pinned.numpy()[:] = table
            small = pinned.to(self._device, non_blocking=True)
        elements = torch.arange(int(table[-1, -1]), device=self._device)
        which = torch.searchsorted(small[-1], elements, right=True)
        return small[:-1].index_select(1, which).unbind()

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
        self, num_values: Sequence[int], num_offsets: Sequence[int], starts: NDArray[np.int64], total: int
    ) -> tuple[list[UnitLayout], list[tuple[str, slice, slice]]]:
        """Each unit's part; and each feature's."""
        units: list[UnitLayout] = []
        offsets_at: dict[int, int] = {}
        at = total
        for part in self._parts:
            first_bag = at
            single = sum(num_values[part.first : part.first + part.num_single])
            sizes = list(num_values[part.first : part.first + part.num_single])
            names_at = list(range(part.num_single))
            mean_start = None
            at += single if part.mixed else 0
            for feature in range(part.first + part.num_single, part.end):
                if feature > part.first + part.num_single:
                    sizes.append(1)
                if part.has_means and feature == part.first + part.num_single + part.num_sums:
                    mean_start = at - first_bag
                offsets_at[feature] = at
                names_at.append(len(sizes))
                sizes.append(num_offsets[feature] - 1)
                at += num_offsets[feature]
            start = int(starts[part.first]) if part.names else total
            count = sum(num_values[part.first : part.end])
            pooled = part.num_single < len(part.names)
            units.append(
                UnitLayout(
                    names=part.names,
                    values=slice(start, start + count),
                    num_values=count,
                    bags=slice(first_bag, at) if pooled else None,
                    counting=torch.arange(single, device=self._device) if part.mixed and single else None,
                    sizes=sizes,
                    names_at=names_at,
                    num_outputs=sum(sizes),
                    mean_start=mean_start,
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
