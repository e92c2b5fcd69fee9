"""Ids to their owners: deduplicate, tell everyone the counts and the faults, then send.

Per group: an id becomes its position in the concatenation of all shards, ordered by rank, table and row. Sorting these
positions puts the distinct ids in sending order. The counts of all groups and the state of the check travel in one
all-to-all of integers, with replicas in a second one between them; then is the only time that the host waits for the
device. The counts fix the size of every later transfer of the batch.

The state of the check is how many faults there are. If there are any, on any rank, the same exchange runs once more,
for whose they are.

The learning rates of the ranks travel with the counts, so that comparing them costs no transfer of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy
from gem_parallel._src.embeddings.flat_batch import FlatBatch, Flattener
from gem_parallel._src.embeddings.grid import Grid
from gem_parallel._src.embeddings.ids import BatchReport, FeatureIds, GroupIds, join_bags, summarise
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.limits import check_num_received
from gem_parallel._src.embeddings.link import Transfer
from gem_parallel._src.embeddings.pending import GroupRequest, ReplicaRoute, Route
from gem_parallel._src.embeddings.plan import Distinct, GroupPlan, block_order, find_distinct, order_locally
from gem_parallel._src.embeddings.transfer import DeviceVector, to_device
from gem_parallel._src.embeddings.unit_layout import Unit

__all__ = ["Exchanged", "Exchanger", "RankReport"]

NUM_FLAGS = 7
"""Leading columns of the counts: refused, malformed places and their first feature, first feature and id out of range,
number of out-of-range ids, bits of the learning rate."""

RATE = NUM_FLAGS - 1

HEAD = 1 + NUM_FLAGS + 1
"""Leading columns between copies: the group's first rank with a fault, its flags, where the learning rate is the
sender's own, and whether the rates of its group differ."""

COUNTS = "exchange: the exchange of counts"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank says about its batch."""

    rank: int
    """On the grid's flat axis."""
    refused: bool
    """It raised before it could look at the values."""
    malformed: int
    malformed_feature: int
    first_feature: int
    first_id: int
    num_out_of_range: int


def _rank_report(rank: int, columns: Sequence[int]) -> RankReport:
    return RankReport(
        rank=rank,
        refused=bool(columns[0]),
        malformed=columns[1],
        malformed_feature=columns[2],
        first_feature=columns[3],
        first_id=columns[4],
        num_out_of_range=columns[5],
    )


def _is_bad(flags: Tensor, policy: IdPolicy) -> Tensor:
    """(rows,) bool of (rows, NUM_FLAGS or more)."""
    bad = (flags[:, 0] > 0) | (flags[:, 1] > 0)
    return bad | (flags[:, 5] > 0) if policy == "error" else bad


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """What an exchange has come to."""

    requests: list[GroupRequest]
    works: list[Transfer]
    """Transfers that the requests wait for."""
    report: BatchReport | None
    """Of this rank; None if nothing is wrong."""
    faults: list[RankReport]
    """Ranks with faults; if there are any, there are no requests, on any rank."""
    rates: dict[int, float] = field(default_factory=dict)
    """Rank -> learning rate, of those this rank heard of, where not all are equal: then there are no requests, on any
    rank."""
    groups: list[GroupIds]
    """This rank's ids."""


def _unit(group: Group) -> Unit:
    """A group whose values are laid out in order of table."""
    slots = group.features
    return Unit(
        slots=slots,
        num_rows=tuple(group.tables[slot.table].config.num_rows for slot in slots),
        bases=(0,) * len(slots),
        tables=tuple(slot.table for slot in slots),
        dim=group.dim,
        sums=False,
    )


class Exchanger:
    """The id exchanges of one module over one grid of ranks.

    Args:
        groups: The tables by dim.
        features: As configured.
        grid: The ranks.
        device: Of the ids.
        policy: What becomes of bad ids.
        combined: Per group, whether every rank has one engine for it (``shares_rows``).
    """

    def __init__(
        self,
        groups: Sequence[Group],
        features: Sequence[FeatureConfig],
        grid: Grid,
        device: torch.device,
        *,
        policy: IdPolicy,
        combined: Sequence[bool],
    ) -> None:
        self._grid = grid
        self._device = device
        self._groups, self._features = groups, features
        self._policy = policy
        units = [_unit(group) for group in groups]
        # Dropped ids are known by their part of the check until the batch has been looked up.
        self._flattener = Flattener(units, groups, features, policy=policy, device=device, shared=policy != "drop")
        self._sharded = [not group.replicated for group in groups]
        self._plans = [
            GroupPlan(
                group,
                1 if group.replicated else grid.num_shards,
                1 if group.replicated else grid.num_replicas,
                device,
                combined=one,
            )
            for group, one in zip(groups, combined, strict=True)
        ]
        self._before = torch.zeros(1, dtype=torch.int64, device=device)
        self._rate_bits, self._rate = 0, torch.zeros(1, dtype=torch.int64, device=device)
        self._between = torch.full((3,), -1, dtype=torch.int64, device=device)
        self._num_counts = sum(
            plan.num_tables * plan.num_replicas
            for plan, sharded in zip(self._plans, self._sharded, strict=True)
            if sharded
        )

    def refuse(self) -> None:
        """Tell the other ranks that this one has raised, in place of its counts, and in place of details."""
        send = self._flags_only([1, 0, -1, -1, -1, 0])
        for _ in range(2):
            self._tell(send)

    def _flags_only(self, flags: Sequence[int]) -> Tensor:
        send = torch.zeros(self._grid.num_shards, NUM_FLAGS + self._num_counts, dtype=torch.int64, device=self._device)
        send[:, :RATE] = to_device(flags, self._device)
        send[:, RATE] = self._rate
        return send

    def _set_rate(self, learning_rate: float) -> None:
        (bits,) = struct.unpack("<q", struct.pack("<d", learning_rate))
        if bits != self._rate_bits:
            # Made on the stream that the host waits for before the next exchange, so that no other can be too early.
            self._rate_bits, self._rate = bits, torch.full((1,), bits, dtype=torch.int64, device=self._device)

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]], learning_rate: float) -> Exchanged:
        """Send a batch's ids; if a rank's batch is bad, its details. ``learning_rate`` is compared.

        Raises:
            TypeError, ValueError: what the host can see of a bad batch; the other ranks are told.
        """
        self._set_rate(learning_rate)
        try:
            stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
            batch = self._flattener.flatten(ids, stream)
        except Exception:
            # Also what no check foresaw: the other ranks wait for this one's counts.
            self.refuse()
            raise
        groups = self._group_ids(ids, batch)
        grid = self._grid
        found = [
            find_distinct(each, plan) if sharded else None
            for each, plan, sharded in zip(groups, self._plans, self._sharded, strict=True)
        ]
        flags = self._flags(batch)
        rows = [flags.expand(grid.num_shards, NUM_FLAGS)]
        rows += [each.send_counts.view(grid.num_shards, -1) for each in found if each is not None]
        send = torch.cat(rows, dim=1)
        sent, got, others = self._read(send)
        num_malformed, num_bad = int(sent[0, 1]), int(sent[0, 5])
        report = None
        if batch is not None and (num_malformed or num_bad):
            report = summarise(self._flattener.again(batch.layout, batch.given).summary.tolist())
        faults = self._faults(got, others)
        if faults:
            # Whose ids and offsets they are, and which, nobody has looked at yet.
            told = [0, 0, -1, -1, -1, 0]
            if report is not None:
                first = (report.malformed, report.malformed_feature, report.first_feature, report.first_id)
                told = [0, *first, sum(report.out_of_range)]
            _, got, others = self._read(self._flags_only(told))
            return Exchanged(requests=[], works=[], report=report, faults=self._faults(got, others), groups=groups)
        rates = self._rates(got, others)
        if rates:
            return Exchanged(requests=[], works=[], report=report, faults=[], groups=groups, rates=rates)
        requests, works = [], []
        column = 0
        for mine, plan, each in zip(groups, self._plans, found, strict=True):
            if each is None:
                local = order_locally(mine, plan)
                nothing = [0] * plan.num_tables
                bags = join_bags(mine.features)
                requests.append(GroupRequest(ids=mine, rows=mine.values[:0], counts=nothing, local=local, bags=bags))
                continue
            shape = (grid.num_shards, plan.num_tables, plan.num_replicas)
            width = plan.num_tables * plan.num_replicas
            columns = slice(NUM_FLAGS + column, NUM_FLAGS + column + width)
            request, work = self._send(mine, plan, each, sent[:, columns], got[:, columns].reshape(shape))
            if plan.num_replicas > 1:
                block = slice(HEAD + column * grid.num_shards // plan.num_replicas, None)
                size = grid.num_shards * plan.num_tables
                theirs = others[:, block][:, :size].reshape(grid.num_replicas, grid.num_shards, plan.num_tables)
                request = self._with_replicas(request, got[:, columns].reshape(shape), theirs)
            requests.append(request)
            works.append(work)
            column += width
        return Exchanged(requests=requests, works=works, report=report, faults=[], groups=groups)

    def _group_ids(self, ids: Mapping[str, tuple[Tensor, Tensor]], batch: FlatBatch | None) -> list[GroupIds]:
        if batch is None:
            none = torch.empty(0, dtype=torch.int64, device=self._device)
            return [
                GroupIds(group=group, values=none, features=(), counts=(0,) * len(group.tables), tables=none)
                for group in self._groups
            ]
        found = []
        assert batch.layout.table is not None
        for group, unit in zip(self._groups, batch.layout.units, strict=True):
            features = []
            counts = [0] * len(group.tables)
            start = 0
            slots = [slot for slot in group.features if slot.config.name in ids]
            for slot, size in zip(slots, unit.sizes, strict=True):
                offsets = ids[slot.config.name][1]
                features.append(FeatureIds(slot=slot, start=start, end=start + size, offsets=offsets))
                counts[slot.table] += size
                start += size
            found.append(
                GroupIds(
                    group=group,
                    values=batch.safe[unit.values],
                    features=tuple(features),
                    counts=tuple(counts),
                    tables=batch.layout.table[unit.values],
                    dropped=batch.check.bad[unit.values] if self._policy == "drop" else None,
                )
            )
        return found

    def _flags(self, batch: FlatBatch | None) -> Tensor:
        """(NUM_FLAGS,): how many faults there are, and not yet which."""
        if batch is None:
            return to_device([0, 0, -1, -1, -1, 0, self._rate_bits], self._device)
        split = batch.layout.num_values
        num_bad = batch.check.faults[:split].sum().view(1)
        num_malformed = batch.check.faults[split:].sum().view(1) - (batch.layout.num_falls - batch.layout.impossible)
        return torch.cat([self._before, num_malformed, self._between, num_bad, self._rate])

    def _read(self, send: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tell the others, and wait for it: what was sent, what came, and what came from other copies, on the host."""
        received, from_replicas = self._tell(send)
        parts = [send, received, from_replicas]
        grid = self._grid
        try:
            host = DeviceVector(torch.cat([part.flatten() for part in parts])).read(grid.shards.timeout_s)
        except TimeoutError as error:
            grid.shards.fail(COUNTS, grid.shards.timeout_s or 0.0, error)
        sent, got, others = host.split([part.numel() for part in parts])
        return sent.view_as(send), got.view_as(received), others.view(from_replicas.shape)

    def _tell(self, send: Tensor) -> tuple[Tensor, Tensor]:
        """Swap flags and counts in the sharding group, then, between replicas, what each group found.

        Returns:
            The rows of the group's ranks, (L, flags + counts); and per replica (M, HEAD + counts of this rank's slice):
            ``HEAD``, and rows per (group of tables, source, table).
        """
        grid = self._grid
        received = torch.empty_like(send)
        grid.shards.all_to_all(received, send, what=COUNTS).wait()
        if grid.copies is None:
            return received, received.new_zeros(0, HEAD)
        bad = _is_bad(received, self._policy)
        first = bad.to(torch.int8).argmax().view(1)
        fault = (received[first, :RATE] * bad[first].unsqueeze(1)).flatten()
        differs = (received[:, RATE] != self._rate).any().to(torch.int64).view(1)
        head = torch.cat([first, fault, self._rate, differs])
        blocks = [head.expand(grid.num_replicas, -1)]
        column = NUM_FLAGS
        for plan, sharded in zip(self._plans, self._sharded, strict=True):
            if sharded:
                width = plan.num_tables * plan.num_replicas
                counts = received[:, column : column + width].view(grid.num_shards, plan.num_tables, plan.num_replicas)
                blocks.append(counts.permute(2, 0, 1).reshape(plan.num_replicas, -1))
                column += width
        told = torch.cat(blocks, dim=1)
        from_replicas = torch.empty_like(told)
        grid.copies.all_to_all(from_replicas, told, what="exchange: the exchange of counts between copies").wait()
        return received, from_replicas

    def _faults(self, got: Tensor, others: Tensor) -> list[RankReport]:
        """Ranks of this sharding group with faults, and the first one of each other group that has any."""
        grid = self._grid
        flags = got[:, :NUM_FLAGS]
        found = [
            _rank_report(grid.rank_of(rank, grid.replica_rank), flags[rank].tolist())
            for rank in _is_bad(flags, self._policy).nonzero().flatten().tolist()
        ]
        flags = others[:, 1 : 1 + NUM_FLAGS]
        for replica in _is_bad(flags, self._policy).nonzero().flatten().tolist():
            if replica != grid.replica_rank:
                first = int(others[replica, 0])
                found.append(_rank_report(grid.rank_of(first, replica), flags[replica].tolist()))
        return sorted(found, key=lambda each: each.rank)

    def _rates(self, got: Tensor, others: Tensor) -> dict[int, float]:
        """``Exchanged.rates``; if any two ranks differ, every rank finds it in its own group or is told by another."""
        grid = self._grid
        rates = {grid.rank_of(rank, grid.replica_rank): bits for rank, bits in enumerate(got[:, RATE].tolist())}
        for replica, columns in enumerate(others[:, :HEAD].tolist()):
            rates[grid.rank_of(grid.shard_rank, replica)] = columns[1 + RATE]
        if set(rates.values()) == {self._rate_bits} and not others[:, HEAD - 1].any():
            return {}
        return {rank: struct.unpack("<d", struct.pack("<q", rates[rank]))[0] for rank in sorted(rates)}

    def _send(
        self, ids: GroupIds, plan: GroupPlan, found: Distinct, sent: Tensor, got: Tensor
    ) -> tuple[GroupRequest, Transfer]:
        """Send one group's ids; ``sent`` (L, T * M) and ``got`` (L, T, M) are counts on the host."""
        num_unique = int(sent.sum())
        # One slot more: all dropped ids share distinct number U.
        distinct = found.sorted_positions.new_full((num_unique + 1,), plan.total)
        distinct.scatter_(0, found.distinct_of_sorted, found.sorted_positions)
        distinct = distinct[:num_unique]
        local = distinct + plan.shifts[torch.searchsorted(plan.boundaries, distinct, right=True) - 1]
        inverse = torch.empty_like(found.order).scatter_(0, found.order, found.distinct_of_sorted)
        starts = torch.searchsorted(
            found.distinct_of_sorted, torch.arange(num_unique + 1, device=self._device, dtype=torch.int64)
        )
        send_splits, receive_splits = sent.sum(1).tolist(), got.sum((1, 2)).tolist()
        check_num_received(ids.group.dim, self._grid.rank, sum(receive_splits))
        rows = local.new_empty(sum(receive_splits))
        work = self._grid.shards.all_to_all(
            rows, local, receive_splits, send_splits, what="exchange: the exchange of ids"
        )
        counts = got.sum(2)
        any_order = plan.combined or plan.num_replicas > 1
        by_table = None if any_order else block_order(counts, (1, 0), self._device)
        route = Route(
            inverse=inverse,
            order=found.order,
            starts=starts,
            num_unique=num_unique,
            send_splits=send_splits,
            receive_splits=receive_splits,
            by_table=by_table,
        )
        request = GroupRequest(
            ids=ids,
            rows=rows,
            counts=counts.sum(0).tolist(),
            route=route,
            bags=join_bags(ids.features),
            combined=plan.combined,
        )
        return request, work

    def _with_replicas(self, request: GroupRequest, got: Tensor, theirs: Tensor) -> GroupRequest:
        """Add the way from owner to slice: ``got`` (L, T, M) rows came here, ``theirs`` (M, L, T) stay here."""
        route = ReplicaRoute(
            to_slices=block_order(got, (2, 0, 1), self._device),
            send_splits=got.sum((0, 1)).tolist(),
            receive_splits=theirs.sum((1, 2)).tolist(),
            from_slices=block_order(theirs, (2, 1, 0), self._device),
            counts=theirs.sum((0, 1)).tolist(),
        )
        return replace(request, replicas=route)
