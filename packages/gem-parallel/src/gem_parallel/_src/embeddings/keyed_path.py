"""One process on CUDA: a joined batch goes to fbgemm as it came, behind one kernel that checks it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_parallel._src.embeddings.batch_layout import keep_latest
from gem_parallel._src.embeddings.combined_engine import CombinedEngine
from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy
from gem_parallel._src.embeddings.ids import NUM_SUMMARY, BatchIds, flatten_ids
from gem_parallel._src.embeddings.keyed import KeyedJaggedIds
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.limits import check_num_bags, check_num_ids
from gem_parallel._src.embeddings.transfer import Flag, to_device
from gem_parallel._src.embeddings.unit_layout import Unit

__all__ = ["KeyedBatch", "KeyedPath", "row_dtype"]

MAX_ORDERS = 16
"""Orders of keys, of which callers mostly have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """Keys that one call of one engine looks up."""

    engine: CombinedEngine
    pooling: str
    tables: Tensor
    """(F, 2) int64 of each key: last row of its table, where the table begins in the engine."""


@dataclass(slots=True, kw_only=True)
class KeyedBatch:
    """A joined batch, checked and as rows of its engine."""

    ids: KeyedJaggedIds
    order: _Order
    values: Tensor
    """(N,) int32 or int64 rows of the engine."""
    bags: Tensor | None
    """(F * B + 1,) likewise; None without pooling."""
    flag: Flag | None
    """Whether there is a fault; until it is read."""
    starts: list[int]
    """(F,) where each key's ids begin; once the flag was read, without pooling."""

    impossible = False
    """Bags as they cannot be; refused before."""

    def tensors(self) -> list[Tensor]:
        """All of the device."""
        found = [self.ids.values, self.ids.offsets, self.values]
        return found if self.bags is None else [*found, self.bags]


class KeyedPath:
    """Exchange and lookup of joined batches; the arguments are as of ``LocalPath``, whose engines these are."""

    def __init__(
        self,
        units: Sequence[Unit],
        engines: Sequence[CombinedEngine],
        groups: Sequence[Group],
        features: Sequence[FeatureConfig],
        *,
        policy: IdPolicy,
        device: torch.device,
    ) -> None:
        self._units, self._engines = units, engines
        self._groups, self._features = groups, features
        self._policy, self._device = policy, device
        self._dtype = row_dtype(device)
        self._hashed = {
            slot.config.name for group in groups for slot in group.features if group.tables[slot.table].config.hashed
        }
        self._orders: dict[tuple[str, ...], _Order | None] = {}
        self._flags: list[Flag] = []
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def exchange(self, ids: KeyedJaggedIds, stream: torch.cuda.Stream | None) -> KeyedBatch | None:
        """Start a batch's check on the current CUDA stream, which is ``stream``; None if one call does not take it.

        Raises:
            ValueError: what the host can see of a bad batch.
        """
        keys, values, offsets = ids.keys, ids.values, ids.offsets
        order = self._orders[keys] if keys in self._orders else self._order(keys)
        if order is None or values.device != self._device:
            return None
        num_values, engine = values.numel(), order.engine
        if not num_values or not ids.num_bags:
            # No kernel sees an empty batch, or one without bags.
            return None
        check_num_ids(engine.dim, keys, num_values)
        pooled = order.pooling != "none"
        if pooled:
            check_num_bags(engine.dim, keys, offsets.numel() - 1, engine.max_bags)
        # Here and not at the top: only Linux has Triton.
        from gem_parallel._src.embeddings.keyed_kernel import launch_keyed

        flag = self._flags.pop() if self._flags else Flag(self._device)
        values = values if values.is_contiguous() else values.contiguous()
        offsets = offsets if offsets.is_contiguous() else offsets.contiguous()
        here = stream is None or torch.cuda.current_device() == self._device.index
        with nullcontext() if here else torch.cuda.device(self._device):
            cut = launch_keyed(
                values,
                offsets,
                order.tables,
                flag,
                num_bags=ids.num_bags,
                pooled=pooled,
                drop=self._policy == "drop",
                dtype=self._dtype,
            )
        flag.record(stream)
        return KeyedBatch(ids=ids, order=order, values=cut[0], bags=cut[1] if pooled else None, flag=flag, starts=[])

    def _order(self, keys: tuple[str, ...]) -> _Order | None:
        found = None
        for unit, engine in zip(self._units, self._engines, strict=True):
            slots = {slot.config.name: at for at, slot in enumerate(unit.slots)}
            poolings = {unit.slots[slots[key]].config.pooling for key in keys if key in slots}
            if slots.keys() >= set(keys) and len(poolings) == 1 and not self._hashed.intersection(keys):
                numbers = [
                    number for at in map(slots.__getitem__, keys) for number in (unit.num_rows[at] - 1, unit.bases[at])
                ]
                tables = to_device(numbers, self._device).view(-1, 2)
                if self._device.type == "cuda":
                    # Other streams read it, too.
                    torch.cuda.current_stream(self._device).synchronize()
                found = _Order(engine=engine, pooling=poolings.pop(), tables=tables)
        keep_latest(self._orders, keys, found, MAX_ORDERS)
        return found

    def faults(self, batch: KeyedBatch) -> BatchIds | None:
        """The batch's ids one by one if the check has found something, else None; waits for the check.

        Raises:
            ValueError: features whose offsets do not follow one another.
        """
        flag = batch.flag
        if flag is None:
            return None
        batch.flag = None
        found = flag.read()
        if batch.bags is None:
            num_keys = len(batch.ids.keys)
            batch.starts = flag.stage(num_keys)[1].tolist()
        self._flags.append(flag)
        if not found:
            return None
        pairs = batch.ids.split()
        checked = flatten_ids(pairs, self._groups, self._features, policy=self._policy, device=self._device)
        if not checked.summary[0] and not checked.summary[NUM_SUMMARY:].any():
            raise ValueError(
                "exchange: the tensors of joined ids must not change before lookup returns, got a batch with bad ids "
                "or offsets that has none any more; copy what is overwritten"
            )
        return checked

    def read(self, batch: KeyedBatch, step: int | None) -> list[Tensor]:
        """Rows of all features (rows, dim), in the graph of the update; arguments as of ``LocalPath.read``."""
        engine, bags = batch.order.engine, batch.bags
        if self._policy == "drop":
            engine.clear_scratch()
        rows = engine.pooled(batch.values, bags, step)
        if batch.order.pooling == "mean":
            assert bags is not None
            rows = rows / bags.diff().clamp_(min=1).unsqueeze(1)
        return [rows]

    def outputs(self, batch: KeyedBatch, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Each key's part of what ``read`` gave."""
        keys = batch.ids.keys
        if batch.bags is not None:
            sizes = [batch.ids.num_bags] * len(keys)
        else:
            ends = [*batch.starts[1:], batch.values.numel()]
            sizes = [end - start for start, end in zip(batch.starts, ends, strict=True)]
        return dict(zip(keys, rows[0].split(sizes), strict=True))


def row_dtype(device: torch.device) -> torch.dtype:
    """Of an engine's rows and bags: fbgemm's CUDA kernels take 32 bits, too, and sort them faster; all fit (limits)."""
    return torch.int32 if device.type == "cuda" else torch.int64
