"""A batch in one tensor, checked by a handful of operators for any number of features.

All values and offsets are copied into one tensor (``batch_layout``), clamped to what is valid there, and compared with
what came. That counts faults; it does not say whose they are. A batch with faults is checked again, feature by feature,
by ``flatten_ids``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NoReturn

import torch
from torch import Tensor

from gem_parallel._src.embeddings.batch_layout import BatchLayout, Check, Structure, keep_latest, make_check
from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy
from gem_parallel._src.embeddings.hashing import hash_ids
from gem_parallel._src.embeddings.ids import BatchIds, flatten_ids
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.unit_layout import Unit

__all__ = ["FlatBatch", "Flattener"]

MAX_LAYOUTS = 4
MAX_LAYOUT_ELEMENTS = 2**20
"""Layouts of larger batches are not kept: 24 to 40 bytes per element."""

MAX_ORDERS = 16
"""Orders of names, of which callers mostly have one."""

INT64 = {torch.int64}
PAIR = {2}
UNIT_STRIDE = {(1,)}
DTYPE = attrgetter("dtype")


class FlatBatch:
    """One batch with at least one feature.

    Attributes:
        layout: Where everything is.
        given: (L,) int64 as it came, hashed ids as rows.
        safe: (L,) clamped, or with dropped ids as the row after their table's last; shifted.
        parts: ``safe`` cut into ``layout.parts``.
        check: What had to be clamped. In a good batch ``layout.num_falls`` of its ``faults`` are True.
    """

    __slots__ = ("check", "given", "layout", "parts", "safe")

    def __init__(self, layout: BatchLayout, given: Tensor, check: Check, *, drop: bool) -> None:
        self.layout, self.given, self.check = layout, given, check
        bounds = layout.bounds
        if bounds is None:
            safe = _clamped(layout, given, check, drop=drop)
        else:
            safe = torch.clamp(given, bounds.low, bounds.high)
            torch.ne(safe, given, out=check.bad)
            if check.scratch is not None:
                values = safe[: layout.num_values]
                torch.where(check.bad_values, check.scratch, values, out=values)
            safe.add_(bounds.shift)
        self.safe = safe
        offsets = safe[layout.num_values :]
        torch.lt(offsets[1:], offsets[:-1], out=check.falls)
        self.parts = safe.split(layout.parts)


def _clamped(layout: BatchLayout, given: Tensor, check: Check, *, drop: bool) -> Tensor:
    """``FlatBatch.safe`` of a batch whose bounds are not written out, and ``check.bad``."""
    safe = torch.empty_like(given)
    for each in layout.segments:
        torch.clamp(given[each.start : each.end], each.low, each.high, out=safe[each.start : each.end])
    torch.ne(safe, given, out=check.bad)
    for each in layout.segments:
        part = safe[each.start : each.end]
        if drop and each.end <= layout.num_values:
            part.masked_fill_(check.bad[each.start : each.end], each.high + 1)
        if each.shift:
            part.add_(each.shift)
    return safe


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """How the tensors of a mapping of names come into the batch's order: all values, then all offsets."""

    structure: Structure
    arrange: Callable[[list[Tensor]], tuple[Tensor, ...]]
    """Of a list of values, offsets, values, ... in order of name."""
    num: int
    """Features of all units."""
    offsets_at: list[int]
    """Place of each feature's offsets among all offsets."""
    hashed: list[tuple[int, int]]
    """(place, rows) of values to hash."""


class Flattener:
    """Lays batches of one module out.

    Args:
        units: What is laid out together; all features of ``groups``.
        groups: The tables by dim.
        features: As configured.
        policy: What becomes of bad ids.
        device: Of tables and ids.
        shared: Whether one batch's ``check`` may lie where another's did, which was laid out on the same stream.
        planned: Whether a kernel lays batches out: ``collect`` is called, and not ``flatten``.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Sequence[Group],
        features: Sequence[FeatureConfig],
        *,
        policy: IdPolicy,
        device: torch.device,
        shared: bool,
        planned: bool = False,
    ) -> None:
        self._units, self._groups, self._features = units, groups, features
        self._policy, self._device, self._shared = policy, device, shared
        self._planned = planned
        self._number = -1 if device.type == "cpu" else device.index
        self._hashed = {
            slot.config.name: group.tables[slot.table].config.num_rows
            for group in groups
            for slot in group.features
            if group.tables[slot.table].config.hashed
        }
        self._known = {slot.config.name for unit in units for slot in unit.slots}
        self._layouts: dict[object, BatchLayout] = {}
        self._orders: dict[tuple[str, ...], _Order] = {}

    def collect(
        self, ids: Mapping[str, tuple[Tensor, Tensor]], stream: int
    ) -> tuple[BatchLayout, tuple[Tensor, ...]] | None:
        """A batch's tensors in order and their layout, for the kernel; None if it has no features.

        Raises:
            TypeError, ValueError: what the host can see of a bad batch.
        """
        found = self._ordered(ids)
        if found is None:
            return None
        order, parts, names, sizes = found
        apart = False
        try:
            fit = set(map(Tensor.get_device, parts)) == {self._number}
            if set(map(Tensor.stride, parts)) != UNIT_STRIDE:
                fit, apart = fit and set(map(Tensor.dim, parts)) == {1}, True
        except RuntimeError:
            # Sparse tensors have no such property.
            fit = False
        if not fit:
            self._refuse(ids)
        # Refuses too many ids, before any is hashed or copied.
        layout = self._layout(ids, order, (stream, names, sizes))
        parts = self._hash(ids, order, parts)
        return layout, tuple(map(Tensor.contiguous, parts)) if apart else parts

    def flatten(self, ids: Mapping[str, tuple[Tensor, Tensor]], stream: int) -> FlatBatch | None:
        """Lay a batch out and compare it with its bounds; None if it has no features.

        Args:
            ids: The batch.
            stream: Which stream this runs on; layouts are used on the stream that made them.

        Raises:
            TypeError, ValueError: what the host can see of a bad batch.
        """
        found = self._ordered(ids)
        if found is None:
            return None
        order, parts, names, sizes = found
        layout = self._layout(ids, order, (stream, names, sizes))
        parts = self._hash(ids, order, parts)
        try:
            given = torch.cat(parts if layout.whole else self._with_counting(order, layout, parts))
        except RuntimeError:
            # Tensors of two devices, shapes or layouts, most likely; that error names one.
            flatten_ids(ids, self._groups, self._features, policy=self._policy, device=self._device)
            raise
        if given.device != self._device or given.layout is not torch.strided or given.ndim != 1:
            self._refuse(ids)
        check, drop = layout.check, self._policy == "drop"
        if check is None:
            check = make_check(layout, self._device, drop=drop)
            if self._shared:
                layout.check = check
        return FlatBatch(layout, given, check, drop=drop)

    def _ordered(
        self, ids: Mapping[str, tuple[Tensor, Tensor]]
    ) -> tuple[_Order, tuple[Tensor, ...], tuple[str, ...], tuple[int, ...]] | None:
        """The batch's tensors in order, with their names and sizes."""
        if not isinstance(ids, Mapping):
            self._refuse(ids)
        names = tuple(ids)
        if not names:
            return None
        order = self._orders.get(names) or self._order(ids, names)
        pairs = ids.values()
        # Loops over all features cost as much as the operators on the batch: these run in C.
        parts: tuple[Tensor, ...] = ()
        sizes: tuple[int, ...] = ()
        try:
            if set(map(len, pairs)) == PAIR:
                parts = order.arrange(list(chain.from_iterable(pairs)))
                if set(map(DTYPE, parts)) == INT64:
                    sizes = tuple(map(Tensor.numel, parts))
        except (AttributeError, TypeError):
            pass
        if not sizes:
            self._refuse(ids)
        return order, parts, names, sizes

    def _hash(
        self, ids: Mapping[str, tuple[Tensor, Tensor]], order: _Order, parts: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """``parts`` with hashes in place of the ids that have no bound."""
        if not order.hashed:
            return parts
        found = list(parts)
        try:
            for place, num_rows in order.hashed:
                found[place] = hash_ids(found[place], num_rows)
        except RuntimeError:
            # A sparse tensor; that error does not say so.
            flatten_ids(ids, self._groups, self._features, policy=self._policy, device=self._device)
            raise
        return tuple(found)

    def _with_counting(self, order: _Order, layout: BatchLayout, parts: Sequence[Tensor]) -> list[Tensor]:
        """All parts with the offsets of bags of one id, which come before a unit's own offsets."""
        found, at = list(parts[: order.num]), order.num
        for unit, num_pooled in zip(layout.units, order.structure.num_pooled, strict=True):
            if unit.counting is not None:
                found.append(unit.counting)
            found += parts[at : at + num_pooled]
            at += num_pooled
        return [*found, *parts[at:]]

    def _layout(
        self,
        ids: Mapping[str, tuple[Tensor, Tensor]],
        order: _Order,
        key: tuple[int, tuple[str, ...], tuple[int, ...]],
    ) -> BatchLayout:
        layout = self._layouts.pop(key, None)
        if layout is None:
            num_values, given = key[2][: order.num], key[2][order.num :]
            if min(given) == 0:
                self._refuse(ids)
            num_offsets = [given[at] for at in order.offsets_at]
            if self._planned:
                layout = order.structure.plan(num_values, num_offsets)
            else:
                layout = order.structure.lay_out(num_values, num_offsets, key[0])
        if self._planned or layout.num_elements <= MAX_LAYOUT_ELEMENTS:
            keep_latest(self._layouts, key, layout, MAX_LAYOUTS)
        return layout

    def _order(self, ids: Mapping[str, tuple[Tensor, Tensor]], names: tuple[str, ...]) -> _Order:
        if not self._known.issuperset(names):
            self._refuse(ids)
        place = {name: 2 * at for at, name in enumerate(names)}
        structure = Structure(
            self._units,
            [[slot.config.name in place for slot in unit.slots] for unit in self._units],
            [feature.name for feature in self._features],
            self._device,
        )
        runs = list(range(len(structure.names))) if self._planned else structure.runs
        found = [place[name] for name in structure.names] + [place[structure.names[run]] + 1 for run in runs]
        order = _Order(
            structure=structure,
            arrange=itemgetter(*found),
            num=len(runs),
            offsets_at=[runs.index(feature) for feature in range(len(runs))],
            hashed=[(at, self._hashed[name]) for at, name in enumerate(structure.names) if name in self._hashed],
        )
        keep_latest(self._orders, names, order, MAX_ORDERS)
        return order

    def _refuse(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> NoReturn:
        flatten_ids(ids, self._groups, self._features, policy=self._policy, device=self._device)
        raise AssertionError("a batch was refused without a reason")

    def again(self, layout: BatchLayout, given: Tensor) -> BatchIds:
        """The batch feature by feature, with what is wrong with it."""
        pairs = {name: (given[start:end], given[first:last]) for name, start, end, first, last in layout.pairs()}
        return flatten_ids(pairs, self._groups, self._features, policy=self._policy, device=self._device)
