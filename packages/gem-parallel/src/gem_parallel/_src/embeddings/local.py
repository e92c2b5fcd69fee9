"""One process: few kernels per batch, and no wait between the ids and the rows.

All values and offsets are copied into one tensor, clamped to what is valid there, compared with what came, and looked
up: one fbgemm call per dim sums over bags (``combined_engine``). What the comparison found is on its way to the host
while the lookup runs; a bad batch raises before ``lookup`` returns. Until then nothing but the clamped rows was read,
and nothing was written. Only then are the ids checked again one by one, for the message and the counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_parallel._src.embeddings.batch_layout import BatchLayout, Structure, Unit, UnitLayout
from gem_parallel._src.embeddings.combined_engine import CombinedEngine
from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy
from gem_parallel._src.embeddings.hashing import hash_ids
from gem_parallel._src.embeddings.ids import BatchIds, flatten_ids
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.pending import LocalBatch
from gem_parallel._src.embeddings.transfer import Flag

__all__ = ["LocalPath"]

MAX_LAYOUTS = 4
MAX_LAYOUT_ELEMENTS = 2**20
"""Layouts of larger batches are not kept: 24 bytes per element."""

MAX_STRUCTURES = 16

Kept = TypeVar("Kept")

ORDER = {"none": 0, "sum": 1, "mean": 2}


class LocalPath:
    """Exchange and lookup of one process whose engines are all ``CombinedEngine``.

    Args:
        groups: The tables by dim.
        engines: Of each group.
        features: As configured.
        policy: What becomes of bad ids.
        device: Of tables and ids.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        engines: Sequence[Sequence[CombinedEngine]],
        features: Sequence[FeatureConfig],
        *,
        policy: IdPolicy,
        device: torch.device,
    ) -> None:
        self._groups, self._features, self._policy, self._device = groups, features, policy, device
        self._units: list[Unit] = []
        self._engines: list[CombinedEngine] = []
        for group, members in zip(groups, engines, strict=True):
            first = 0
            for engine in members:
                self._units.append(_unit(group, engine, first))
                self._engines.append(engine)
                first += engine.num_tables
        self._names = [
            [(slot.config.name, slot.config.pooling != "none") for slot in unit.slots] for unit in self._units
        ]
        self._hashed = {
            slot.config.name: group.tables[slot.table].config.num_rows
            for group in groups
            for slot in group.features
            if group.tables[slot.table].config.hashed
        }
        self._layouts: dict[object, BatchLayout] = {}
        self._structures: dict[object, Structure] = {}
        self._flags: list[Flag] = []
        self._padding = {unit.dim: torch.zeros(1, unit.dim, device=device) for unit in self._units}
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> LocalBatch:
        """Lay a batch out and start its check.

        Raises:
            TypeError, ValueError: what the host can see of a bad batch.
        """
        parts: list[Tensor] = []
        checked: list[Tensor] = []
        bags: list[list[Tensor]] = []
        present: list[list[bool]] = []
        num_values: list[int] = []
        num_offsets: list[int] = []
        int64, device, hashed = torch.int64, self._device, self._hashed
        for names in self._names:
            unit_bags: list[Tensor] = []
            for name, pooled in names:
                pair = ids.get(name)
                if pair is None:
                    continue
                try:
                    values, offsets = pair
                    (count,), (offset_count,) = values.shape, offsets.shape
                    good = values.dtype is int64 and offsets.dtype is int64 and offset_count > 0
                    good = good and values.device == device and offsets.device == device
                except (AttributeError, TypeError, ValueError):
                    good = False
                if not good:
                    self._refuse(ids)
                parts.append(hash_ids(values, hashed[name]) if name in hashed else values)
                (unit_bags if pooled else checked).append(offsets)
                num_values.append(count)
                num_offsets.append(offset_count)
            bags.append(unit_bags)
            present.append([name in ids for name, _ in names])
        if len(num_values) != len(ids):
            self._refuse(ids)
        if not num_values:
            return LocalBatch(layout=None, given=None, safe=None, flag=None)
        layout = self._layout(present, num_values, num_offsets)
        for unit, unit_bags in zip(layout.units, bags, strict=True):
            parts += unit_bags if unit.counting is None else [unit.counting, *unit_bags]
        parts += checked
        given = torch.cat(parts)
        safe = torch.clamp(given, layout.low, layout.high)
        split, length = layout.num_values, given.numel()
        faults = torch.empty(2 * length - split - 1, dtype=torch.bool, device=device)
        bad = torch.ne(safe, given, out=faults[:length])
        if self._policy == "drop":
            # A table's scratch row is the one after its last.
            scratch = layout.high[:split] + 1
            torch.where(bad[:split], scratch, safe[:split], out=safe[:split])
        safe.add_(layout.shift)
        torch.lt(safe[split + 1 :], safe[split:-1], out=faults[length:])
        flag = self._flags.pop() if self._flags else Flag(device)
        flag.send(faults.sum())
        return LocalBatch(layout=layout, given=given, safe=safe, flag=flag)

    def _layout(self, present: list[list[bool]], num_values: list[int], num_offsets: list[int]) -> BatchLayout:
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        names = tuple(here for unit in present for here in unit)
        key = (stream, names, *num_values, *num_offsets)
        layout = self._layouts.pop(key, None)
        if layout is None:
            structure = self._structures.pop(names, None) or Structure(self._units, present, self._device)
            _keep(self._structures, names, structure, MAX_STRUCTURES)
            layout = structure.lay_out(num_values, num_offsets)
        if layout.low.numel() <= MAX_LAYOUT_ELEMENTS:
            _keep(self._layouts, key, layout, MAX_LAYOUTS)
        return layout

    def _refuse(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> NoReturn:
        flatten_ids(ids, self._groups, self._features, policy=self._policy, device=self._device)
        raise AssertionError("a batch was refused without a reason")

    def faults(self, batch: LocalBatch) -> BatchIds | None:
        """The batch's ids one by one if the check has found something, else None; waits for the check."""
        layout, flag, given = batch.layout, batch.flag, batch.given
        if flag is None:
            return None
        assert layout is not None
        assert given is not None
        num_faults = flag.read() - layout.num_falls
        self._flags.append(flag)
        batch.flag = batch.given = None
        if not num_faults and not layout.impossible:
            return None
        pairs = {name: (given[values], given[offsets]) for name, values, offsets in layout.pairs}
        return flatten_ids(pairs, self._groups, self._features, policy=self._policy, device=self._device)

    def read(self, batch: LocalBatch, step: int | None) -> list[Tensor]:
        """(num_outputs, dim) sums of each engine, in the graph of the update; ``step`` is None where there is none."""
        found: list[Tensor] = []
        if batch.layout is None:
            return found
        assert batch.safe is not None
        for engine, unit in zip(self._engines, batch.layout.units, strict=True):
            if self._policy == "drop":
                engine.clear_scratch()
            if unit.num_values:
                bags = None if unit.bags is None else batch.safe[unit.bags]
                found.append(engine.pooled(batch.safe[unit.values], bags, step))
            else:
                # No kernel sees an empty batch; the anchor keeps the result in the graph.
                rows = self._anchor.new_zeros(unit.num_outputs, engine.dim)
                found.append(rows if step is None else rows + self._anchor.sum())
        return found

    def outputs(self, batch: LocalBatch, rows: Sequence[Tensor], *, training: bool) -> dict[str, Tensor]:
        """Each feature's part of what ``read`` gave; means divided by their bags' lengths."""
        by_name: dict[str, Tensor] = {}
        if batch.layout is None:
            return by_name
        assert batch.safe is not None
        for engine, unit, each in zip(self._engines, batch.layout.units, rows, strict=True):
            lengths = None
            if unit.mean_start is not None:
                assert unit.bags is not None
                lengths = batch.safe[unit.bags][unit.mean_start :].diff().clamp_(min=1).unsqueeze(1)
            if unit.bags is None:
                parts: Sequence[Tensor] = each.split(unit.sizes) if len(unit.sizes) > 1 else [each][: len(unit.sizes)]
            elif training:
                parts = _Split.apply(each, unit, lengths, self._padding[engine.dim])
            else:
                parts = _split(each, unit, lengths)
            by_name.update(zip(unit.names, parts, strict=True))
        return {feature.name: by_name[feature.name] for feature in self._features if feature.name in by_name}


def _keep(kept: dict[object, Kept], key: object, value: Kept, most: int) -> None:
    """Add a value; the first of ``kept`` is the one longest unused."""
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


def _unit(group: Group, engine: CombinedEngine, first_table: int) -> Unit:
    mine = range(first_table, first_table + engine.num_tables)
    slots = [slot for slot in group.features if slot.table in mine]
    # Gradients of equal ids are added in this order.
    slots.sort(key=lambda slot: ORDER[slot.config.pooling])
    return Unit(
        slots=tuple(slots),
        num_rows=tuple(group.tables[slot.table].config.num_rows for slot in slots),
        bases=tuple(engine.bases[slot.table - first_table] for slot in slots),
        dim=engine.dim,
    )


def _split(rows: Tensor, unit: UnitLayout, lengths: Tensor | None) -> tuple[Tensor, ...]:
    if lengths is None:
        parts = rows.split(unit.sizes)
        return tuple(parts[at] for at in unit.names_at)
    start = unit.mean_start
    assert start is not None
    means = rows[start:] / lengths
    found: list[Tensor] = []
    at = 0
    for size in unit.sizes:
        found.append(rows[at : at + size] if at < start else means[at - start : at - start + size])
        at += size
    return tuple(found[index] for index in unit.names_at)


class _Split(torch.autograd.Function):
    """``_split`` whose backward is one copy: the rows between pooled features need no gradient, and get any."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, unit: UnitLayout, lengths: Tensor | None, padding: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.unit, ctx.lengths, ctx.padding = unit, lengths, padding
        return _split(rows, unit, lengths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        unit: UnitLayout = ctx.unit
        parts: list[Tensor] = [ctx.padding] * len(unit.sizes)
        for at, grad in zip(unit.names_at, grads, strict=True):
            parts[at] = ctx.padding.expand(unit.sizes[at], -1) if grad is None else grad
        total = torch.cat(parts) if len(parts) > 1 else parts[0]
        if ctx.lengths is not None:
            start = unit.mean_start
            assert start is not None
            if len(parts) > 1:
                total[start:].div_(ctx.lengths)
            else:
                total = total / ctx.lengths
        return total, None, None, None
