"""Ids to their owners: deduplicate, tell everyone the counts and the faults, then send.

Per group: an id becomes its position in the concatenation of all shards, ordered by rank, table and row. Sorting these
positions puts the distinct ids in sending order. The counts of all groups and the state of the check travel in one
all-to-all of integers, which is also the only point where the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from gem_parallel._src.embeddings.ids import NUM_SUMMARY, BatchIds, BatchReport, GroupIds, summarise
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.pending import GroupRequest, Route
from gem_parallel._src.embeddings.transfer import DeviceVector, to_device

__all__ = ["Exchanger", "RankReport", "exchange_rows"]

NUM_FLAGS = 6
"""Leading columns of the counts: refused, malformed places and their first feature, first feature and id out of range,
number of out-of-range ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank says about its batch."""

    rank: int
    refused: bool
    """It raised before it could look at the values."""
    malformed: int
    malformed_feature: int
    first_feature: int
    first_id: int
    num_out_of_range: int


class _GroupPlan:
    """Where one group's shards lie in the concatenation over (rank, table, row)."""

    def __init__(self, group: Group, world_size: int, device: torch.device) -> None:
        sizes = [shard.num_local_rows(rank) for rank in range(world_size) for shard in group.tables]
        starts = list(accumulate(sizes, initial=0))
        self.world_size = world_size
        self.num_tables = len(group.tables)
        self.total = starts[-1]
        """Also the position that stands for dropped ids: past every shard."""
        bases = torch.tensor(starts[:-1], dtype=torch.int64).view(world_size, self.num_tables).t().contiguous()
        for index, shard in enumerate(group.tables):
            if not shard.row_wise:
                # Ids of such a table divide to 0 by its chunk, whoever owns it.
                bases[index, 0] = bases[index, shard.owner].clone()
        self.bases = bases.flatten().to(device)
        self.boundaries = torch.tensor(starts, dtype=torch.int64, device=device)
        self.chunks = torch.tensor([shard.chunk for shard in group.tables], dtype=torch.int64, device=device)
        self.num_rows = torch.tensor([shard.config.num_rows for shard in group.tables], device=device)


@dataclass(slots=True, kw_only=True)
class _Dedup:
    """One group's ids by distinct position, before the host knows how many there are."""

    order: Tensor
    sorted_positions: Tensor
    distinct_of_sorted: Tensor
    send_counts: Tensor
    """(R * T,) distinct ids per owner and table."""


def deduplicate(ids: GroupIds, plan: _GroupPlan) -> _Dedup:
    """Distinct positions of a group's ids."""
    device = plan.boundaries.device
    values = ids.values
    num_values = values.numel()
    counts = to_device(ids.counts, device)
    table = torch.repeat_interleave(torch.arange(plan.num_tables, device=device), counts, output_size=num_values)
    valid = (values >= 0) & (values < plan.num_rows[table])
    safe = torch.where(valid, values, 0)
    chunk = plan.chunks[table]
    shard = table * plan.world_size + torch.div(safe, chunk, rounding_mode="floor")
    positions = torch.where(valid, plan.bases[shard] + safe % chunk, plan.total)
    sorted_positions, order = torch.sort(positions, stable=True)
    is_new = torch.ones(num_values, dtype=torch.int64, device=device)
    if num_values:
        is_new[1:] = (sorted_positions[1:] != sorted_positions[:-1]).to(torch.int64)
    running = torch.cat([is_new.new_zeros(1), is_new.cumsum(0)])
    send_counts = running[torch.searchsorted(sorted_positions, plan.boundaries)].diff()
    return _Dedup(
        order=order,
        sorted_positions=sorted_positions,
        distinct_of_sorted=running[1:] - 1,
        send_counts=send_counts,
    )


class Exchanger:
    """The exchanges of one module over one process group."""

    def __init__(self, groups: Sequence[Group], process_group: dist.ProcessGroup, device: torch.device) -> None:
        self.process_group = process_group
        self.world_size = process_group.size()
        self.rank = process_group.rank()
        self._groups = groups
        self._device = device
        self._plans = [_GroupPlan(group, self.world_size, device) for group in groups]
        self._num_columns = NUM_FLAGS + sum(plan.num_tables for plan in self._plans)

    def refuse(self) -> None:
        """Tell the other ranks that this one has raised, in place of its counts."""
        send = torch.zeros(self.world_size, self._num_columns, dtype=torch.int64, device=self._device)
        send[:, 0] = 1
        send[:, 2:5] = -1
        dist.all_to_all_single(torch.empty_like(send), send, group=self.process_group)

    def exchange(
        self, batch: BatchIds, *, report_ids: bool
    ) -> tuple[list[GroupRequest], list[dist.Work], BatchReport, list[RankReport]]:
        """Send a batch's ids.

        Args:
            batch: This rank's ids.
            report_ids: Whether out-of-range ids are faults.

        Returns:
            Requests, the transfers they wait for, this rank's own report, and the ranks with faults; with faults there
            are no requests, on any rank.
        """
        dedups = [deduplicate(ids, plan) for ids, plan in zip(batch.groups, self._plans, strict=True)]
        summary = batch.summary
        flags = torch.cat([summary.new_zeros(1), summary[:NUM_SUMMARY], summary[NUM_SUMMARY:].sum().view(1)])
        rows = [flags.expand(self.world_size, NUM_FLAGS)]
        rows += [dedup.send_counts.view(self.world_size, -1) for dedup in dedups]
        send = torch.cat(rows, dim=1)
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self.process_group)
        # One transfer: own counts and report, and everyone's counts and flags.
        host = DeviceVector(torch.cat([summary, send.flatten(), received.flatten()])).read()
        own = summarise(host[: summary.numel()])
        size = self.world_size * self._num_columns
        sent = torch.tensor(host[summary.numel() : summary.numel() + size]).view(self.world_size, -1)
        got = torch.tensor(host[summary.numel() + size :]).view(self.world_size, -1)
        faults = [
            fault
            for fault in (self._rank_report(rank, got[rank].tolist()) for rank in range(self.world_size))
            if fault.refused or fault.malformed or (report_ids and fault.num_out_of_range)
        ]
        if faults:
            return [], [], own, faults
        requests, works = [], []
        column = NUM_FLAGS
        for ids, plan, dedup in zip(batch.groups, self._plans, dedups, strict=True):
            columns = slice(column, column + plan.num_tables)
            request, work = self._send(ids, plan, dedup, sent[:, columns], got[:, columns])
            requests.append(request)
            works.append(work)
            column += plan.num_tables
        return requests, works, own, faults

    @staticmethod
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

    def _send(
        self, ids: GroupIds, plan: _GroupPlan, dedup: _Dedup, sent: Tensor, got: Tensor
    ) -> tuple[GroupRequest, dist.Work]:
        """Send one group's ids; ``sent`` and ``got`` are (R, T) counts on the host."""
        num_unique = int(sent.sum())
        # One slot more: all dropped ids share distinct number U.
        distinct = dedup.sorted_positions.new_full((num_unique + 1,), plan.total)
        distinct.scatter_(0, dedup.distinct_of_sorted, dedup.sorted_positions)
        distinct = distinct[:num_unique]
        local = distinct - plan.boundaries[torch.searchsorted(plan.boundaries, distinct, right=True) - 1]
        inverse = torch.empty_like(dedup.order).scatter_(0, dedup.order, dedup.distinct_of_sorted)
        starts = torch.searchsorted(
            dedup.distinct_of_sorted, torch.arange(num_unique + 1, device=self._device, dtype=torch.int64)
        )
        send_splits, receive_splits = sent.sum(1).tolist(), got.sum(1).tolist()
        rows = local.new_empty(sum(receive_splits))
        work = dist.all_to_all_single(rows, local, receive_splits, send_splits, group=self.process_group, async_op=True)
        assert work is not None
        route = Route(
            inverse=inverse,
            order=dedup.order,
            starts=starts,
            num_unique=num_unique,
            send_splits=send_splits,
            receive_splits=receive_splits,
            by_table=self._order_by_table(got),
        )
        return GroupRequest(ids=ids, rows=rows, counts=got.sum(0).tolist(), route=route), work

    def _order_by_table(self, got: Tensor) -> Tensor | None:
        """Positions that bring ids received by (source, table) into (table, source) order."""
        if got.shape[1] == 1:
            return None
        lengths = got.t().flatten()
        source = (got.flatten().cumsum(0) - got.flatten()).view_as(got).t().flatten()
        shift = source - (lengths.cumsum(0) - lengths)
        total = int(lengths.sum())
        moved = to_device(torch.stack([shift, lengths]), self._device)
        return torch.arange(total, device=self._device) + torch.repeat_interleave(moved[0], moved[1], output_size=total)


def exchange_rows(
    rows: Tensor, *, send_splits: list[int], receive_splits: list[int], process_group: dist.ProcessGroup, extra: int
) -> Tensor:
    """All-to-all of rows (sum(send_splits), dim); the result has ``extra`` more rows at its end, of zeros."""
    total = sum(receive_splits)
    out = rows.new_empty(total + extra, rows.shape[1])
    if extra:
        out[total:].zero_()
    dist.all_to_all_single(out[:total], rows.contiguous(), receive_splits, send_splits, group=process_group)
    return out
