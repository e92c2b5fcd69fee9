"""Ids to their owners: deduplicate, tell everyone the counts and the faults, then send.

Per group: an id becomes its position in the concatenation of all shards, ordered by rank, table and row. Sorting these
positions puts the distinct ids in sending order. The counts of all groups and the state of the check travel in one
all-to-all of integers, with replicas in a second one between them; then is the only time that the host waits for the
device. The counts fix the size of every later transfer of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gem_parallel._src.embeddings.grid import Grid
from gem_parallel._src.embeddings.ids import NUM_SUMMARY, BatchIds, BatchReport, GroupIds, join_bags, summarise
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.link import Transfer
from gem_parallel._src.embeddings.pending import GroupRequest, ReplicaRoute, Route
from gem_parallel._src.embeddings.plan import Distinct, GroupPlan, block_order, find_distinct, order_locally
from gem_parallel._src.embeddings.transfer import DeviceVector

__all__ = ["Exchanger", "RankReport"]

NUM_FLAGS = 6
"""Leading columns of the counts: refused, malformed places and their first feature, first feature and id out of range,
number of out-of-range ids."""

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


def _is_bad(flags: Tensor, report_ids: bool) -> Tensor:
    """(rows,) bool of (rows, NUM_FLAGS or more)."""
    bad = (flags[:, 0] > 0) | (flags[:, 1] > 0)
    return bad | (flags[:, 5] > 0) if report_ids else bad


class Exchanger:
    """The id exchanges of one module over one grid of ranks.

    Args:
        groups: The tables by dim.
        grid: The ranks.
        device: Of the ids.
        combined: Per group, whether every rank has one engine for it (``shares_rows``).
    """

    def __init__(self, groups: Sequence[Group], grid: Grid, device: torch.device, combined: Sequence[bool]) -> None:
        self._grid = grid
        self._device = device
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
        self._num_counts = sum(
            plan.num_tables * plan.num_replicas
            for plan, sharded in zip(self._plans, self._sharded, strict=True)
            if sharded
        )

    def refuse(self) -> None:
        """Tell the other ranks that this one has raised, in place of its counts."""
        send = torch.zeros(self._grid.num_shards, NUM_FLAGS + self._num_counts, dtype=torch.int64, device=self._device)
        send[:, 0] = 1
        send[:, 2:5] = -1
        self._tell(send, report_ids=False)

    def exchange(
        self, batch: BatchIds, *, report_ids: bool
    ) -> tuple[list[GroupRequest], list[Transfer], BatchReport, list[RankReport]]:
        """Send a batch's ids.

        Args:
            batch: This rank's ids.
            report_ids: Whether out-of-range ids are faults.

        Returns:
            Requests, the transfers they wait for, this rank's own report, and the ranks with faults; with faults there
            are no requests, on any rank.
        """
        grid, summary = self._grid, batch.summary
        found = [
            find_distinct(ids, plan) if sharded else None
            for ids, plan, sharded in zip(batch.groups, self._plans, self._sharded, strict=True)
        ]
        flags = torch.cat([summary.new_zeros(1), summary[:NUM_SUMMARY], summary[NUM_SUMMARY:].sum().view(1)])
        rows = [flags.expand(grid.num_shards, NUM_FLAGS)]
        rows += [each.send_counts.view(grid.num_shards, -1) for each in found if each is not None]
        send = torch.cat(rows, dim=1)
        received, from_replicas = self._tell(send, report_ids=report_ids)
        # One transfer: own counts and report, and everyone's counts and flags.
        parts = [summary, send.flatten(), received.flatten(), from_replicas.flatten()]
        try:
            host = DeviceVector(torch.cat(parts)).read(grid.shards.timeout_s)
        except TimeoutError as error:
            grid.shards.fail(COUNTS, grid.shards.timeout_s or 0.0, error)
        own, sent, got, others = host.split([part.numel() for part in parts])
        report = summarise(own.tolist())
        sent, got = sent.view_as(send), got.view_as(received)
        others = others.view(from_replicas.shape)
        faults = self._faults(got, others, report_ids)
        if faults:
            return [], [], report, faults
        requests, works = [], []
        column = 0
        for ids, plan, each in zip(batch.groups, self._plans, found, strict=True):
            if each is None:
                local = order_locally(ids, plan)
                nothing = [0] * plan.num_tables
                bags = join_bags(ids.features)
                requests.append(GroupRequest(ids=ids, rows=ids.values[:0], counts=nothing, local=local, bags=bags))
                continue
            shape = (grid.num_shards, plan.num_tables, plan.num_replicas)
            width = plan.num_tables * plan.num_replicas
            columns = slice(NUM_FLAGS + column, NUM_FLAGS + column + width)
            request, work = self._send(ids, plan, each, sent[:, columns], got[:, columns].reshape(shape))
            if plan.num_replicas > 1:
                block = slice(1 + NUM_FLAGS + column * grid.num_shards // plan.num_replicas, None)
                size = grid.num_shards * plan.num_tables
                theirs = others[:, block][:, :size].reshape(grid.num_replicas, grid.num_shards, plan.num_tables)
                request = self._with_replicas(request, got[:, columns].reshape(shape), theirs)
            requests.append(request)
            works.append(work)
            column += width
        return requests, works, report, faults

    def _tell(self, send: Tensor, *, report_ids: bool) -> tuple[Tensor, Tensor]:
        """Swap flags and counts in the sharding group, then, between replicas, what each group found.

        Returns:
            The rows of the group's ranks, (L, flags + counts); and per replica (M, 1 + flags + counts of this rank's
            slice): rank of its group's first fault, its flags, and rows per (group of tables, source, table).
        """
        grid = self._grid
        received = torch.empty_like(send)
        grid.shards.all_to_all(received, send, what=COUNTS).wait()
        if grid.copies is None:
            return received, received.new_zeros(0, 1 + NUM_FLAGS)
        bad = _is_bad(received, report_ids)
        first = bad.to(torch.int8).argmax().view(1)
        head = torch.cat([first, (received[first, :NUM_FLAGS] * bad[first].unsqueeze(1)).flatten()])
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

    def _faults(self, got: Tensor, others: Tensor, report_ids: bool) -> list[RankReport]:
        """Ranks of this sharding group with faults, and the first one of each other group that has any."""
        grid = self._grid
        flags = got[:, :NUM_FLAGS]
        found = [
            _rank_report(grid.rank_of(rank, grid.replica_rank), flags[rank].tolist())
            for rank in _is_bad(flags, report_ids).nonzero().flatten().tolist()
        ]
        flags = others[:, 1 : 1 + NUM_FLAGS]
        for replica in _is_bad(flags, report_ids).nonzero().flatten().tolist():
            if replica != grid.replica_rank:
                first = int(others[replica, 0])
                found.append(_rank_report(grid.rank_of(first, replica), flags[replica].tolist()))
        return sorted(found, key=lambda each: each.rank)

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
