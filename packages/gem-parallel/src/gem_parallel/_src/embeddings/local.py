"""One process: few kernels per batch, and no wait between the ids and the rows.

One fbgemm call per dim sums over the bags of all features (``combined_engine``), of a batch that was laid out and
clamped to what is valid (``flat_batch``). Whether it had to be is on its way to the host while the lookup runs; a bad
batch raises before ``lookup`` returns. Until then nothing but valid rows was read, and nothing was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_parallel._src.embeddings.batch_layout import Unit, UnitLayout
from gem_parallel._src.embeddings.combined_engine import CombinedEngine
from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy
from gem_parallel._src.embeddings.flat_batch import Flattener
from gem_parallel._src.embeddings.ids import BatchIds
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.pending import LocalBatch
from gem_parallel._src.embeddings.transfer import Flag

__all__ = ["LocalPath"]

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
        self._features, self._policy, self._device = features, policy, device
        self._units: list[Unit] = []
        self._engines: list[CombinedEngine] = []
        for group, members in zip(groups, engines, strict=True):
            first = 0
            for engine in members:
                self._units.append(_unit(group, engine, first))
                self._engines.append(engine)
                first += engine.num_tables
        self._flattener = Flattener(self._units, groups, features, policy=policy, device=device)
        self._flags: list[Flag] = []
        self._padding = {unit.dim: torch.zeros(1, unit.dim, device=device) for unit in self._units}
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> LocalBatch:
        """Lay a batch out and start its check on the current CUDA stream, which is ``stream``.

        Raises:
            TypeError, ValueError: what the host can see of a bad batch.
        """
        batch = self._flattener.flatten(ids, 0 if stream is None else stream.cuda_stream)
        if batch is None:
            return LocalBatch(layout=None, given=None, safe=None, flag=None)
        flag = self._flags.pop() if self._flags else Flag(self._device)
        flag.send(batch.faults.sum(), stream)
        return LocalBatch(layout=batch.layout, given=batch.given, safe=batch.safe, flag=flag)

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
        return self._flattener.again(layout, given)

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


def _unit(group: Group, engine: CombinedEngine, first_table: int) -> Unit:
    mine = range(first_table, first_table + engine.num_tables)
    slots = [slot for slot in group.features if slot.table in mine]
    # Gradients of equal ids are added in this order.
    slots.sort(key=lambda slot: ORDER[slot.config.pooling])
    return Unit(
        slots=tuple(slots),
        num_rows=tuple(group.tables[slot.table].config.num_rows for slot in slots),
        bases=tuple(engine.bases[slot.table - first_table] for slot in slots),
        tables=tuple(slot.table for slot in slots),
        dim=engine.dim,
        sums=True,
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
