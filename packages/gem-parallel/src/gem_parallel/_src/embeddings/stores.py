"""What a rank keeps of one group of tables: how rows are read, and how gradients change them.

Three kinds. Where a table has one holder per row, fbgemm's lookup stands in the autograd graph and updates in its own
backward. Where the holder of a row is not the reader, or an update needs more than one rank, rows are read without a
graph and ``update`` is called with the gradients: with replicas, for column shards that share a moment, and for
replicated tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_parallel._src.embeddings.combined_engine import CombinedEngine
from gem_parallel._src.embeddings.engine import Engine
from gem_parallel._src.embeddings.gathered import GatheredTables
from gem_parallel._src.embeddings.grid import Grid
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.link import Transfer
from gem_parallel._src.embeddings.pending import GroupRequest, ReplicaRoute
from gem_parallel._src.embeddings.plan import slice_bases
from gem_parallel._src.embeddings.torch_engine import TorchEngine
from gem_parallel._src.embeddings.transfer import to_device
from gem_parallel._src.embeddings.wire import RowTransfer

__all__ = ["FusedStore", "ReplicatedStore", "RowBlock", "ShardedStore", "SliceIds", "Store", "Update"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Rows that one engine looked up, for tables ``first_table`` up to ``first_table + num_tables``."""

    group: int
    first_table: int
    num_tables: int
    start: int
    """Position of the block's first row among its group's rows in order of table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Which optimizer step gradients belong to."""

    step: int
    learning_rate: float


class FusedStore:
    """One holder per row: the engines' own backward updates."""

    def __init__(self, group: Group, engines: Sequence[Engine], device: torch.device) -> None:
        self.engines = engines
        self._dim = group.dim
        self._device = device

    def read(self, index: int, request: GroupRequest, step: int | None) -> list[tuple[RowBlock, Tensor]]:
        """Blocks of rows in order of table, each in the graph of its engine; ``index`` is the group's."""
        ids = request.rows
        if request.combined and ids.numel():
            (engine,) = self.engines
            assert isinstance(engine, CombinedEngine)
            block = RowBlock(group=index, first_table=0, num_tables=engine.num_tables, start=0)
            return [(block, engine.pooled(ids, None, step))]
        if request.route is not None and request.route.by_table is not None:
            ids = ids.index_select(0, request.route.by_table)
        found = []
        table = start = 0
        for engine in self.engines:
            counts = list(request.counts[table : table + engine.num_tables])
            total = sum(counts)
            block = RowBlock(group=index, first_table=table, num_tables=engine.num_tables, start=start)
            if total:
                rows = engine.lookup(ids[start : start + total], counts, None, step)
            else:
                # No kernel sees an empty batch.
                rows = torch.zeros(0, self._dim, device=self._device)
            found.append((block, rows))
            table += engine.num_tables
            start += total
        return found


@dataclass(kw_only=True, slots=True)
class SliceIds:
    """Positions of the rows that the replicas ask for or send gradients of, on their way."""

    arriving: Tensor
    sent: Tensor | None
    work: Transfer

    def wait(self) -> Tensor:
        """(K,) int64 positions in the gathered tables, as the replicas sent them."""
        if self.sent is not None:
            self.work.wait()
            self.sent = None
        return self.arriving


class ShardedStore:
    """Rows that several ranks must agree on: slices of replicas, or column shards with one moment per row.

    With replicas each rank keeps a slice of what its owner's part of the tables is. Reading gathers the slices, or the
    rows asked for if there is no ``gathered``. Gradients go, row by row, to the rank that keeps the row, which adds
    those of all replicas in order of rank and updates once with its own moments: the same sums, squares and steps as
    with one copy of the tables, so no moment has to be scaled by the number of replicas and neither weights nor moments
    are averaged.
    """

    def __init__(
        self,
        group: Group,
        engines: Sequence[Engine],
        grid: Grid,
        device: torch.device,
        *,
        gathered: GatheredTables | None,
        wire_dtype: torch.dtype,
    ) -> None:
        assert gathered is None or grid.copies is not None
        self.engines = engines
        self.gathered = gathered
        self._group, self._grid, self._device = group, grid, device
        self._wire_dtype = wire_dtype
        self._bases = slice_bases(group, grid.shard_rank)
        mine = [shard for shard in group.tables if shard.rows_of(grid.shard_rank)[1] > 0]
        # Names of my tables that each rank of the sharding group holds another column shard of, itself included.
        held = {shard.config.name for shard in mine}
        self._partners = [
            [shard.config.name for shard in group.tables if shard.owner == rank and shard.config.name in held]
            for rank in range(grid.num_shards)
        ]

    def begin(self, request: GroupRequest, *, training: bool) -> SliceIds | None:
        """Start what ``read`` and ``update`` wait for."""
        if self.gathered is not None:
            self.gathered.begin()
        return self.send_ids(request) if training or self.gathered is None else None

    def read(self, request: GroupRequest, slice_ids: SliceIds | None) -> Tensor:
        """(N, dim) float32 rows as they were asked for, by (source, table).

        Args:
            request: The batch.
            slice_ids: What ``send_ids`` gave; needed where rows, not tables, are gathered.
        """
        if self.gathered is not None:
            rows = self.gathered.read(request.rows)
            self.gathered.done()
            return rows
        route, way = request.route, request.replicas
        assert route is not None
        if way is None:
            return self._held_rows(request.rows, request.counts, route.by_table, None)
        assert slice_ids is not None
        assert self._grid.copies is not None
        asked = RowTransfer(
            self._held_rows(slice_ids.wait(), way.counts, way.from_slices, way),
            send_splits=way.receive_splits,
            receive_splits=way.send_splits,
            link=self._grid.copies,
            wire_dtype=self._wire_dtype,
            what="lookup: the exchange of rows between copies",
        ).wait()
        return asked if way.to_slices is None else torch.empty_like(asked).index_copy_(0, way.to_slices, asked)

    def _held_rows(self, ids: Tensor, counts: Sequence[int], order: Tensor | None, way: ReplicaRoute | None) -> Tensor:
        """Rows that this rank holds, in the order of ``ids``, which ``order`` brings into order of table."""
        ids = ids if order is None else ids.index_select(0, order)
        if way is not None:
            ids = self._rows_of_slice(ids, way)
        parts = [torch.zeros(0, self._group.dim, device=self._device)]
        for engine, _, part, each in self._by_engine(ids, counts):
            parts.append(engine.lookup(part, each, None, None))
        rows = torch.cat(parts)
        return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)

    def send_ids(self, request: GroupRequest) -> SliceIds | None:
        """Tell the replicas which rows of their slices are asked for, and gradients will come for."""
        way = request.replicas
        if way is None:
            return None
        sent = request.rows if way.to_slices is None else request.rows.index_select(0, way.to_slices)
        arriving = sent.new_empty(sum(way.receive_splits))
        assert self._grid.copies is not None
        what = "lookup: the exchange of ids between copies"
        work = self._grid.copies.all_to_all(arriving, sent, way.receive_splits, way.send_splits, what=what)
        return SliceIds(arriving=arriving, sent=sent, work=work)

    def send_gradients(self, request: GroupRequest, grad: Tensor) -> RowTransfer | None:
        """Start the way of gradients (N, dim), as received from the sources, to the slices."""
        way = request.replicas
        if way is None:
            return None
        assert self._grid.copies is not None
        return RowTransfer(
            grad if way.to_slices is None else grad.index_select(0, way.to_slices),
            send_splits=way.send_splits,
            receive_splits=way.receive_splits,
            link=self._grid.copies,
            wire_dtype=self._wire_dtype,
            what="backward: the exchange of gradients between copies",
        )

    def update(self, request: GroupRequest, ids: Tensor, grad: Tensor, update: Update) -> None:
        """One optimizer step of this rank's rows.

        Args:
            request: The batch.
            ids: What arrived of ids: from the replicas, or in one copy from the sources.
            grad: (len(ids), dim) what arrived of gradients.
            update: The step.
        """
        way, route = request.replicas, request.route
        assert route is not None
        if way is None:
            order, counts = route.by_table, request.counts
        else:
            order, counts = way.from_slices, way.counts
        if order is not None:
            ids, grad = ids.index_select(0, order), grad.index_select(0, order)
        if way is not None:
            ids = self._rows_of_slice(ids, way)
        if self._group.joint:
            self._update_jointly(ids, counts, grad, update)
        else:
            for engine, start, part, each in self._by_engine(ids, counts):
                part_grad = grad[start : start + part.numel()]
                engine.update(part, each, part_grad, update.step, update.learning_rate)
        if self.gathered is not None:
            self.gathered.stale()

    def _rows_of_slice(self, positions: Tensor, way: ReplicaRoute) -> Tensor:
        """Rows of the slice's tables, of gathered positions in order of table."""
        moved = to_device([*self._bases[:-1], *way.counts], self._device).view(2, -1)
        bases = torch.repeat_interleave(moved[0], moved[1], output_size=positions.numel())
        return positions % max(self._bases[-1], 1) - bases

    def _by_engine(self, ids: Tensor, counts: Sequence[int]) -> list[tuple[Engine, int, Tensor, list[int]]]:
        """(engine, start, its ids, their counts) of the engines that have any; ``ids`` lie in order of table."""
        found = []
        table = start = 0
        for engine in self.engines:
            each = list(counts[table : table + engine.num_tables])
            if sum(each):
                found.append((engine, start, ids[start : start + sum(each)], each))
            table += engine.num_tables
            start += sum(each)
        return found

    def _update_jointly(self, ids: Tensor, counts: Sequence[int], grad: Tensor, update: Update) -> None:
        """Add the squares of a row's column shards over the ranks that hold them, then move the row.

        They hold gradients of the same ids in the same order, so the parts need no ids; each rank adds all parts in
        order of column and gets the same moment.
        """
        names = [shard.config.name for shard in self._group.tables]
        pieces = [shard.piece for shard in self._group.tables]
        totals: dict[str, tuple[TorchEngine, int, Tensor, Tensor]] = {}
        table = {id(engine): index for index, engine in enumerate(self.engines)}
        for engine, start, part, _ in self._by_engine(ids, counts):
            assert isinstance(engine, TorchEngine)
            index = table[id(engine)]
            rows, total = engine.total(part, grad[start : start + part.numel()])
            totals[names[index]] = engine, pieces[index], rows, total
        squares = {name: engine.square(total) for name, (engine, _, _, total) in totals.items()}
        none = torch.zeros(0, device=self._device)
        per_rank = [[squares[name] for name in partners if name in squares] for partners in self._partners]
        sent = torch.cat([none, *(each for parts in per_rank for each in parts)])
        splits = [sum(each.numel() for each in parts) for parts in per_rank]
        received = torch.empty_like(sent)
        what = "backward: the exchange of squares between column shards"
        self._grid.shards.all_to_all(received, sent, splits, splits, what=what).wait()
        sums = {name: torch.zeros_like(square) for name, square in squares.items()}
        start = 0
        # Ranks rise with the columns they hold.
        for partners in self._partners:
            for name in partners:
                if name in sums:
                    end = start + sums[name].numel()
                    sums[name] += received[start:end]
                    start = end
        for name, (engine, _, rows, total) in totals.items():
            engine.step(rows, total, sums[name], update.step, update.learning_rate)


class ReplicatedStore:
    """Whole tables on every rank; gradients are added densely, (rows, dim + 1) with the number of naming ranks last.

    Every rank then makes the same step, so the copies stay equal and nothing else is exchanged.
    """

    def __init__(self, group: Group, engines: Sequence[Engine], device: torch.device) -> None:
        self.engines = engines
        self._dim = group.dim
        sizes = [shard.config.num_rows for shard in group.tables]
        self._sizes = sizes
        self.num_rows = sum(sizes)
        parts = [torch.arange(size, device=device) for size in sizes]
        self._rows = torch.cat(parts)
        # Each table's scratch row, which takes the place of the rows that the batch does not name.
        self._scratch = torch.cat([torch.full_like(part, size) for part, size in zip(parts, sizes, strict=True)])

    def read(self, request: GroupRequest) -> Tensor:
        """(N, dim) float32 rows of this rank's values; zeros for dropped ids."""
        local = request.local
        assert local is not None
        weights = [weight for engine in self.engines for weight in engine.weights()]
        found = torch.zeros(local.rows.numel(), self._dim, device=local.rows.device)
        start = base = 0
        for weight, count in zip(weights, request.ids.counts, strict=True):
            if count:
                rows = local.rows[start : start + count] - base
                last = weight.shape[0] - 1
                part = weight.index_select(0, rows.clamp(max=last)).float()
                found[start : start + count] = torch.where((rows <= last).unsqueeze(1), part, 0.0)
            start += count
            base += weight.shape[0]
        return found

    def update(self, total: Tensor, update: Update) -> None:
        """One optimizer step; ``total`` (num_rows, dim + 1) is added over all ranks."""
        named = total[:, -1] > 0
        ids = torch.where(named, self._rows, self._scratch)
        grad = total[:, :-1].contiguous()
        table = start = 0
        for engine in self.engines:
            counts = self._sizes[table : table + engine.num_tables]
            end = start + sum(counts)
            engine.update(ids[start:end], counts, grad[start:end], update.step, update.learning_rate)
            table += engine.num_tables
            start = end


Store = FusedStore | ShardedStore | ReplicatedStore
