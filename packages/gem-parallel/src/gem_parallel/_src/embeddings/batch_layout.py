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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_parallel._src.embeddings.layout import FeatureSlot
from gem_parallel._src.embeddings.transfer import to_device

__all__ = ["ABSENT", "BatchLayout", "Sizes", "Unit", "UnitLayout", "lay_out"]

Sizes = tuple[int, int]
"""Values and offsets of a feature."""

ABSENT: Sizes = (-1, -1)
"""Of one that the batch leaves out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What one engine looks up."""

    slots: tuple[FeatureSlot, ...]
    """Unpooled ones, then sums, then means."""
    num_rows: tuple[int, ...]
    """Rows of each slot's table."""
    bases: tuple[int, ...]
    """Row of the engine at which each slot's table begins."""
    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLayout:
    """One engine's part of a batch."""

    names: tuple[str, ...]
    """Features that the batch has, in order of slot."""
    values: slice
    """Of the batch's tensor."""
    num_values: int
    bags: slice | None
    """Of the batch's tensor; None if every bag is one id."""
    sizes: list[int]
    """Output rows of each slot, and of the empty bags between pooled ones."""
    slots_at: list[int]
    """Index in ``sizes`` of each slot."""
    num_outputs: int
    mean_start: int | None
    """First output row that is a mean, up to the last row; None if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLayout:
    """Positions in the batch's tensor (L,), of which A are values."""

    units: tuple[UnitLayout, ...]
    features: dict[str, tuple[slice, slice]]
    """Name -> where its values and its offsets are."""
    low: Tensor
    """(L,) int64 bounds, inclusive."""
    high: Tensor
    shift: Tensor
    """(L,) int64"""
    num_values: int
    """A"""
    counting: dict[int, Tensor]
    """Unit -> 0, 1, ...: the offsets of its unpooled features, if it has pooled ones, too."""
    num_falls: int
    """Places among the shifted offsets that fall in every good batch, between engines."""
    impossible: bool
    """A feature has values but no bags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Offsets that follow each other: of a feature, or of all bags of one id."""

    name: str | None
    segments: list[tuple[int, int, int, int]]
    """(low, high, shift, length)"""
    first: int
    """Shifted."""
    last: int

    @property
    def length(self) -> int:
        return sum(segment[3] for segment in self.segments)


def _offsets_of(name: str, num_values: int, num_offsets: int, shift: int) -> _Run:
    if num_offsets == 1:
        return _Run(name=name, segments=[(0, 0, shift, 1)], first=shift, last=shift)
    between = (0, num_values, shift, num_offsets - 2)
    segments = [(0, 0, shift, 1), between, (num_values, num_values, shift, 1)]
    return _Run(name=name, segments=segments, first=shift, last=shift + num_values)


def lay_out(units: Sequence[Unit], sizes: Sequence[Sequence[Sizes]], device: torch.device) -> BatchLayout:
    """The layout of a batch; ``sizes`` has one entry per unit and slot."""
    values: list[tuple[int, int, int, int]] = []
    bags: list[_Run] = []
    checked: list[_Run] = []
    counting: dict[int, Tensor] = {}
    parts: list[UnitLayout] = []
    values_of: dict[str, slice] = {}
    num_values = sum(max(each[0], 0) for unit_sizes in sizes for each in unit_sizes)
    first_value, first_bag = 0, num_values
    for at, (unit, unit_sizes) in enumerate(zip(units, sizes, strict=True)):
        present = [index for index, each in enumerate(unit_sizes) if each != ABSENT]
        pooled = [index for index in present if unit.slots[index].config.pooling != "none"]
        num_single = sum(unit_sizes[index][0] for index in present if index not in pooled)
        if pooled and num_single:
            counting[at] = torch.arange(num_single, device=device)
            bags.append(_Run(name=None, segments=[(0, num_single, 0, num_single)], first=0, last=num_single - 1))
        start = 0
        for index in present:
            each, num_offsets = unit_sizes[index]
            values.append((0, unit.num_rows[index] - 1, unit.bases[index], each))
            name = unit.slots[index].config.name
            (bags if index in pooled else checked).append(_offsets_of(name, each, num_offsets, start))
            values_of[name] = slice(first_value + start, first_value + start + each)
            start += each
        parts.append(_lay_out_unit(unit, present, unit_sizes, first_value, first_bag))
        first_value += start
        first_bag = num_values + sum(run.length for run in bags)
    runs = bags + checked
    features: dict[str, tuple[slice, slice]] = {}
    start = num_values
    for run in runs:
        if run.name is not None:
            features[run.name] = values_of[run.name], slice(start, start + run.length)
        start += run.length
    segments = values + [segment for run in runs for segment in run.segments]
    table = to_device([number for segment in segments for number in segment], device).view(-1, 4)
    length = sum(segment[3] for segment in segments)
    which = torch.repeat_interleave(table[:, 3], output_size=length)
    low, high, shift = table[:, :3].t().contiguous().index_select(1, which)
    return BatchLayout(
        units=tuple(parts),
        features=features,
        low=low,
        high=high,
        shift=shift,
        num_values=num_values,
        counting=counting,
        num_falls=sum(after.first < before.last for before, after in itertools.pairwise(runs)),
        impossible=any(each > 0 and num_offsets == 1 for unit_sizes in sizes for each, num_offsets in unit_sizes),
    )


def _lay_out_unit(
    unit: Unit, present: Sequence[int], sizes: Sequence[Sizes], first_value: int, first_bag: int
) -> UnitLayout:
    rows: list[int] = []
    slots_at: list[int] = []
    mean_start = None
    after_pooled = False
    for index in present:
        num_values, num_offsets = sizes[index]
        pooling = unit.slots[index].config.pooling
        if after_pooled:
            rows.append(1)
        after_pooled = pooling != "none"
        if pooling == "mean" and mean_start is None:
            mean_start = sum(rows)
        slots_at.append(len(rows))
        rows.append(num_offsets - 1 if after_pooled else num_values)
    num_values = sum(sizes[index][0] for index in present)
    return UnitLayout(
        names=tuple(unit.slots[index].config.name for index in present),
        values=slice(first_value, first_value + num_values),
        num_values=num_values,
        bags=slice(first_bag, first_bag + sum(rows) + 1) if after_pooled else None,
        sizes=rows,
        slots_at=slots_at,
        num_outputs=sum(rows),
        mean_start=mean_start,
    )
