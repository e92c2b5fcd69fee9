"""One process: few kernels per batch, and no wait between the ids and the rows.

One fbgemm call per dim sums over the bags of all features (``combined_engine``), of a batch that was laid out and
clamped to what is valid, on CUDA by one kernel (``layout_kernel``), else by operators (``flat_batch``). Whether it had
to be is on its way to the host while the lookup runs; a bad batch raises before ``lookup`` returns. Until then nothing
but valid rows was read, and nothing was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from gem_parallel._src.embeddings.combined_engine import CombinedEngine
from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy
from gem_parallel._src.embeddings.engine import Engine
from gem_parallel._src.embeddings.flat_batch import Flattener
from gem_parallel._src.embeddings.ids import BatchIds
from gem_parallel._src.embeddings.keyed_path import KeyedPath, row_dtype
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.pending import LocalBatch
from gem_parallel._src.embeddings.transfer import Flag
from gem_parallel._src.embeddings.unit_layout import Unit
from gem_parallel._src.optional import has_triton

__all__ = ["LocalPath", "make_local"]

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
        self._policy, self._device = policy, device
        self._units: list[Unit] = []
        self._engines: list[CombinedEngine] = []
        for group, members in zip(groups, engines, strict=True):
            first = 0
            for engine in members:
                self._units.append(_unit(group, engine, first))
                self._engines.append(engine)
                first += engine.num_tables
        self._kernel = lays_out_by_kernel(device)
        self._flattener = Flattener(
            self._units, groups, features, policy=policy, device=device, shared=True, planned=self._kernel
        )
        self.keyed: KeyedPath | None = None
        """For joined batches."""
        if self._kernel:
            self.keyed = KeyedPath(self._units, self._engines, groups, features, policy=policy, device=device)
        self._flags: list[Flag] = []
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> LocalBatch:
        """Lay a batch out and start its check on the current CUDA stream, which is ``stream``.

        Raises:
            TypeError, ValueError: what the host can see of a bad batch.
        """
        if self._kernel:
            return self._exchange_by_kernel(ids, stream)
        batch = self._flattener.flatten(ids, 0 if stream is None else stream.cuda_stream)
        if batch is None:
            return LocalBatch(layout=None, given=None, safe=None, values=(), bags=(), flag=None)
        flag = self._flags.pop() if self._flags else Flag(self._device)
        flag.send(batch.check.faults.sum(), stream)
        layout, parts = batch.layout, batch.parts
        bags: list[Tensor | None] = []
        for unit, offsets in zip(layout.units, parts[len(layout.units) :], strict=False):
            kept = unit.kept
            bags.append(None if not unit.num_offsets else offsets if kept is None else offsets.index_select(0, kept))
        return LocalBatch(layout=layout, given=batch.given, safe=batch.safe, values=parts, bags=bags, flag=flag)

    def _exchange_by_kernel(
        self, ids: Mapping[str, tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None
    ) -> LocalBatch:
        found = self._flattener.collect(ids, 0 if stream is None else stream.cuda_stream)
        if found is None:
            return LocalBatch(layout=None, given=None, safe=None, values=(), bags=(), flag=None)
        layout, parts = found
        # Here and not at the top: only Linux has Triton.
        from gem_parallel._src.embeddings.layout_kernel import launch

        flag = self._flags.pop() if self._flags else Flag(self._device)
        here = stream is None or torch.cuda.current_device() == self._device.index
        with nullcontext() if here else torch.cuda.device(self._device):
            cut, given = launch(layout, parts, flag, drop=self._policy == "drop", dtype=row_dtype(self._device))
        flag.record(stream)
        bags = [
            each if unit.num_offsets else None
            for unit, each in zip(layout.units, cut[len(layout.units) :], strict=True)
        ]
        return LocalBatch(layout=layout, given=given, safe=cut[0], values=cut, bags=bags, flag=flag)

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
        """Sums, then means, of each engine (rows, dim), in the graph of the update.

        Args:
            batch: The batch, whose offsets are known to be possible.
            step: Number of the update; None where there is none. Gradients are enabled if there is one, else disabled.
        """
        found: list[Tensor] = []
        if batch.layout is None:
            return found
        for engine, unit, values, bags in zip(
            self._engines, batch.layout.units, batch.values, batch.bags, strict=False
        ):
            if not unit.names:
                continue
            if self._policy == "drop":
                engine.clear_scratch()
            if unit.num_values:
                rows = engine.pooled(values, bags, step)
            else:
                # No kernel sees an empty batch; the anchor keeps the result in the graph.
                rows = self._anchor.new_zeros(unit.num_outputs, engine.dim)
                rows = rows if step is None else rows + self._anchor.sum()
            if not unit.has_means:
                found.append(rows)
                continue
            first = unit.num_before_means
            assert bags is not None
            lengths = bags[first:].diff().clamp_(min=1).unsqueeze(1)
            if unit.means_only:
                found.append(rows / lengths)
            else:
                sums, totals = rows.split([first, unit.num_outputs - first])
                found += [sums, totals / lengths]
        return found

    def outputs(self, batch: LocalBatch, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each feature's part of what ``read`` gave."""
        layout = batch.layout
        if layout is None:
            return {}
        parts: list[Tensor] = []
        for each, sizes in zip(rows, layout.sizes, strict=True):
            parts += each.split(sizes) if len(sizes) > 1 else (each,)
        return dict(zip(layout.outputs, [parts[at] for at in layout.outputs_at], strict=True))


def lays_out_by_kernel(device: torch.device) -> bool:
    """Whether one kernel lays a batch out, or torch's operators do."""
    return device.type == "cuda" and has_triton()


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
        max_bags=engine.max_bags,
    )


def make_local(
    groups: Sequence[Group],
    engines: Sequence[Sequence[Engine]],
    features: Sequence[FeatureConfig],
    *,
    policy: IdPolicy,
    device: torch.device,
) -> LocalPath | None:
    """The way of one process, unless an engine does not combine its tables; ``engines`` are each group's."""
    combined = [[engine for engine in own if isinstance(engine, CombinedEngine)] for own in engines]
    if any(len(some) < len(own) for some, own in zip(combined, engines, strict=True)):
        return None
    return LocalPath(groups, combined, features, policy=policy, device=device)
