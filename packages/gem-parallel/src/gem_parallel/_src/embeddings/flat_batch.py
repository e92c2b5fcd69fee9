"""A batch in one tensor, checked by a handful of operators for any number of features.

All values and offsets are copied into one tensor (``batch_layout``), clamped to what is valid there, and compared with
what came. That counts faults; it does not say whose they are. A batch with faults is checked again, feature by feature,
by ``flatten_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from gem_parallel._src.embeddings.batch_layout import BatchLayout, Structure, Unit
from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy
from gem_parallel._src.embeddings.hashing import hash_ids
from gem_parallel._src.embeddings.ids import BatchIds, flatten_ids
from gem_parallel._src.embeddings.layout import Group

__all__ = ["FlatBatch", "Flattener"]

MAX_LAYOUTS = 4
MAX_LAYOUT_ELEMENTS = 2**20
"""Layouts of larger batches are not kept: 32 bytes per element."""

MAX_STRUCTURES = 16

INT64 = {torch.int64}
ONE_DIM = {1}

Kept = TypeVar("Kept")


class FlatBatch:
    """One batch with at least one feature.

    Attributes:
        layout: Where everything is.
        given: (L,) int64 as it came, hashed ids as rows.
        safe: (L,) clamped, or with dropped ids as the row after their table's last; shifted.
        faults: (L + K - 1,) bool, K offsets: elements out of their bounds, then falls from one offset to the next.
            In a good batch ``layout.num_falls`` of them are True.
        bad: (L,) the first part of ``faults``.
    """

    __slots__ = ("bad", "faults", "given", "layout", "safe")

    def __init__(self, layout: BatchLayout, given: Tensor, drop: bool) -> None:
        self.layout, self.given = layout, given
        safe = torch.clamp(given, layout.low, layout.high)
        split, length = layout.num_values, given.numel()
        self.faults = torch.empty(2 * length - split - 1, dtype=torch.bool, device=given.device)
        self.bad = torch.ne(safe, given, out=self.faults[:length])
        if drop:
            torch.where(self.bad[:split], layout.high[:split] + 1, safe[:split], out=safe[:split])
        self.safe = safe.add_(layout.shift)
        torch.lt(safe[split + 1 :], safe[split:-1], out=self.faults[length:])


class Flattener:
    """Lays batches of one module out.

    Args:
        units: What is laid out together; all features of ``groups``.
        groups: The tables by dim.
        features: As configured.
        policy: What becomes of bad ids.
        device: Of tables and ids.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Sequence[Group],
        features: Sequence[FeatureConfig],
        *,
        policy: IdPolicy,
        device: torch.device,
    ) -> None:
        self._units, self._groups, self._features = units, groups, features
        self._policy, self._device = policy, device
        self._names = [
            [(slot.config.name, unit.sums and slot.config.pooling != "none") for slot in unit.slots] for unit in units
        ]
        self._repeats = len({slot.config.name for unit in units for slot in unit.slots}) < sum(
            len(unit.slots) for unit in units
        )
        self._hashed = {
            slot.config.name: group.tables[slot.table].config.num_rows
            for group in groups
            for slot in group.features
            if group.tables[slot.table].config.hashed
        }
        self._layouts: dict[object, BatchLayout] = {}
        self._structures: dict[object, Structure] = {}

    def flatten(self, ids: Mapping[str, tuple[Tensor, Tensor]], stream: int) -> FlatBatch | None:
        """Lay a batch out and compare it with its bounds; None if it has no features.

        Args:
            ids: The batch.
            stream: Which stream this runs on; layouts are used on the stream that made them.

        Raises:
            TypeError, ValueError: what the host can see of a bad batch.
        """
        bags: list[list[Tensor]] = []
        checked: list[Tensor] = []
        values: list[Tensor] = []
        present: list[bool] = []
        if not isinstance(ids, Mapping):
            self._refuse(ids)
        for names in self._names:
            unit_bags: list[Tensor] = []
            for name, pooled in names:
                pair = ids.get(name)
                present.append(pair is not None)
                if pair is not None:
                    try:
                        value, offset = pair
                    except (TypeError, ValueError):
                        self._refuse(ids)
                    values.append(value)
                    (unit_bags if pooled else checked).append(offset)
            bags.append(unit_bags)
        num_found = len(values)
        if self._repeats:
            # Column shards of one table.
            num_found = len({name for names in self._names for name, _ in names if name in ids})
        if num_found != len(ids):
            self._refuse(ids)
        if not values:
            return None
        # In the order of values.
        offsets = checked
        if len(checked) < len(values):
            offsets = [ids[name][1] for names in self._names for name, _ in names if name in ids]
        everything = values + offsets
        try:
            good = {each.dtype for each in everything} == INT64 and {each.ndim for each in everything} == ONE_DIM
            num_values, num_offsets = [each.numel() for each in values], [each.numel() for each in offsets]
        except AttributeError:
            good = False
        if not good or min(num_offsets) == 0:
            self._refuse(ids)
        try:
            if self._hashed:
                here = [name for names in self._names for name, _ in names if name in ids]
                values = [
                    hash_ids(each, self._hashed[name]) if name in self._hashed else each
                    for name, each in zip(here, values, strict=True)
                ]
        except RuntimeError:
            # A sparse tensor; that error does not say so.
            flatten_ids(ids, self._groups, self._features, policy=self._policy, device=self._device)
            raise
        layout = self._layout(present, num_values, num_offsets, stream)
        parts = values
        for unit, unit_bags in zip(layout.units, bags, strict=True):
            if unit.counting is not None:
                parts.append(unit.counting)
            parts += unit_bags
        parts += checked
        try:
            given = torch.cat(parts)
        except RuntimeError:
            # Tensors of two devices or layouts, most likely; that error names one.
            flatten_ids(ids, self._groups, self._features, policy=self._policy, device=self._device)
            raise
        if given.device != self._device or given.layout is not torch.strided:
            self._refuse(ids)
        return FlatBatch(layout, given, self._policy == "drop")

    def _layout(self, present: list[bool], num_values: list[int], num_offsets: list[int], stream: int) -> BatchLayout:
        names = tuple(present)
        key = (stream, names, *num_values, *num_offsets)
        layout = self._layouts.pop(key, None)
        if layout is None:
            structure = self._structures.pop(names, None) or self._structure(present)
            _keep(self._structures, names, structure, MAX_STRUCTURES)
            layout = structure.lay_out(num_values, num_offsets)
        if layout.low.numel() <= MAX_LAYOUT_ELEMENTS:
            _keep(self._layouts, key, layout, MAX_LAYOUTS)
        return layout

    def _structure(self, present: list[bool]) -> Structure:
        remaining = iter(present)
        return Structure(self._units, [[next(remaining) for _ in unit.slots] for unit in self._units], self._device)

    def _refuse(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> NoReturn:
        flatten_ids(ids, self._groups, self._features, policy=self._policy, device=self._device)
        raise AssertionError("a batch was refused without a reason")

    def again(self, layout: BatchLayout, given: Tensor) -> BatchIds:
        """The batch feature by feature, with what is wrong with it."""
        pairs = {name: (given[values], given[offsets]) for name, values, offsets in layout.pairs}
        return flatten_ids(pairs, self._groups, self._features, policy=self._policy, device=self._device)


def _keep(kept: dict[object, Kept], key: object, value: Kept, most: int) -> None:
    """Add a value; the first of ``kept`` is the one longest unused."""
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]
