"""One group's ids as positions: which distinct ones there are, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gem_parallel._src.embeddings.ids import GroupIds
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.pending import LocalOrder
from gem_parallel._src.embeddings.transfer import to_device

__all__ = ["Distinct", "GroupPlan", "block_order", "find_distinct", "order_locally", "slice_bases"]


def slice_bases(group: Group, rank: int) -> list[int]:
    """(T + 1,) row at which each table begins in a slice at rest of ``rank``'s tables, and their total.

    Every replica's slice has room for ``slice_rows`` rows of a table, also the last one, which may have fewer.
    """
    sizes = []
    for shard in group.tables:
        start, end = shard.rows_of(rank)
        sizes.append(shard.slice_rows if end > start else 0)
    return list(accumulate(sizes, initial=0))


def engine_bases(group: Group, rank: int) -> list[int]:
    """(T + 1,) row at which each table begins in the one engine of ``rank``, and their total."""
    kept = [shard.rows_of(rank) for shard in group.tables]
    return list(accumulate((end - start + 1 for start, end in kept), initial=0))


class GroupPlan:
    """Where one group's shards lie in the concatenation over (rank, table, slice)."""

    def __init__(
        self, group: Group, world_size: int, num_replicas: int, device: torch.device, *, combined: bool = False
    ) -> None:
        self.combined = combined
        """Ids travel as rows of the owner's one engine, where each table has a scratch row after its rows."""
        self.world_size = world_size
        self.num_replicas = num_replicas
        self.num_tables = len(group.tables)
        sizes, shifts = [], []
        for rank in range(world_size):
            begins = engine_bases(group, rank) if combined else slice_bases(group, rank)
            for table, shard in enumerate(group.tables):
                for replica in range(num_replicas):
                    low, high = shard.slice_of(rank, replica)
                    sizes.append(high - low)
                    shifts.append(replica * begins[-1] + begins[table] if num_replicas > 1 or combined else 0)
        starts = list(accumulate(sizes, initial=0))
        self.total = starts[-1]
        """Also the position that stands for dropped ids: past every shard."""
        bases = torch.tensor(starts[:-1], dtype=torch.int64).view(world_size, self.num_tables, num_replicas)[:, :, 0]
        by_table = bases.t().contiguous()
        for index, shard in enumerate(group.tables):
            if shard.kind == "whole":
                # Ids of such a table divide to 0 by its chunk, whoever owns it.
                by_table[index, 0] = by_table[index, shard.owner].clone()
        self.bases = by_table.flatten().to(device)
        self.boundaries = torch.tensor(starts, dtype=torch.int64, device=device)
        # From a position to the owner's row: of its table, of its engine, or with replicas in the gathered slices.
        self.shifts = torch.tensor(shifts, dtype=torch.int64, device=device) - self.boundaries[:-1]
        self.chunks = torch.tensor([shard.chunk for shard in group.tables], dtype=torch.int64, device=device)
        self.num_rows = torch.tensor([shard.config.num_rows for shard in group.tables], device=device)


@dataclass(slots=True, kw_only=True)
class Distinct:
    """One group's ids by distinct position, before the host knows how many there are."""

    order: Tensor
    sorted_positions: Tensor
    distinct_of_sorted: Tensor
    send_counts: Tensor
    """(L * T * M,) distinct ids per owner, table and slice."""


def _tables_of(ids: GroupIds, plan: GroupPlan) -> tuple[Tensor, Tensor | None]:
    """(N,) the table of each id, and whether the id is one of its rows; None if all are."""
    if ids.tables is not None:
        return ids.tables, None if ids.dropped is None else ~ids.dropped
    device, values = plan.boundaries.device, ids.values
    counts = to_device(ids.counts, device)
    tables = torch.arange(counts.numel(), device=device)
    table = torch.repeat_interleave(tables, counts, output_size=values.numel())
    return table, (values >= 0) & (values < plan.num_rows[table])


def find_distinct(ids: GroupIds, plan: GroupPlan) -> Distinct:
    """Distinct positions of a group's ids, in sending order."""
    values, device = ids.values, plan.boundaries.device
    num_values = values.numel()
    table, valid = _tables_of(ids, plan)
    safe = values if valid is None else torch.where(valid, values, 0)
    chunk = plan.chunks[table]
    shard = table * plan.world_size + torch.div(safe, chunk, rounding_mode="floor")
    positions = plan.bases[shard] + safe % chunk
    if valid is not None:
        positions = torch.where(valid, positions, plan.total)
    sorted_positions, order = torch.sort(positions, stable=True)
    is_new = torch.ones(num_values, dtype=torch.int64, device=device)
    if num_values:
        is_new[1:] = (sorted_positions[1:] != sorted_positions[:-1]).to(torch.int64)
    running = torch.cat([is_new.new_zeros(1), is_new.cumsum(0)])
    send_counts = running[torch.searchsorted(sorted_positions, plan.boundaries)].diff()
    return Distinct(
        order=order,
        sorted_positions=sorted_positions,
        distinct_of_sorted=running[1:] - 1,
        send_counts=send_counts,
    )


def order_locally(ids: GroupIds, plan: GroupPlan) -> LocalOrder:
    """Sort a replicated group's values by row; the plan is that of one rank. No size depends on the batch's content."""
    device = plan.boundaries.device
    table, valid = _tables_of(ids, plan)
    rows = ids.values + plan.boundaries[table]
    if valid is not None:
        rows = torch.where(valid, rows, plan.total)
    in_order, order = torch.sort(rows, stable=True)
    starts = torch.searchsorted(in_order, torch.arange(plan.total + 1, device=device))
    return LocalOrder(rows=rows, order=order, starts=starts)


def block_order(counts: Tensor, axes: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Index that brings rows laid out in blocks into another order of the blocks.

    Args:
        counts: Rows per block, int64 on the host; blocks lie in the order of its axes.
        axes: The order wanted, as for ``permute``.
        device: Of the result.

    Returns:
        (counts.sum(),) int64 for ``index_select``; None if nothing moves.
    """
    lengths = counts.permute(axes).flatten()
    ends = counts.flatten().cumsum(0)
    starts = (ends - counts.flatten()).view_as(counts).permute(axes).flatten()
    shift = starts - (lengths.cumsum(0) - lengths)
    if not bool(shift[lengths > 0].any()):
        return None
    total = int(lengths.sum())
    moved = to_device(torch.stack([shift, lengths]), device)
    return torch.arange(total, device=device) + torch.repeat_interleave(moved[0], moved[1], output_size=total)
