"""Which rank owns which rows, and the order in which everything is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gem_parallel._src.embeddings.config import MAX_LOCAL_ROWS, FeatureConfig, TableConfig

__all__ = ["FeatureSlot", "Group", "TableShard", "check_local_rows", "make_groups", "make_shards"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShard:
    """One table over all ranks."""

    config: TableConfig
    row_wise: bool
    owner: int
    """Rank of all rows of a table-wise table; 0 for a row-wise one."""
    chunk: int
    """Rows per rank of a row-wise table (as ``torch.chunk`` and DTensor's Shard(0) cut); num_rows if table-wise."""

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Half-open range of global rows that ``rank`` owns; empty for ranks past the end."""
        num_rows = self.config.num_rows
        if not self.row_wise:
            return (0, num_rows) if rank == self.owner else (0, 0)
        return min(rank * self.chunk, num_rows), min((rank + 1) * self.chunk, num_rows)

    def num_local_rows(self, rank: int) -> int:
        start, end = self.rows_of(rank)
        return end - start


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSlot:
    """A feature in the order of its group: by table, then as configured."""

    config: FeatureConfig
    table: int
    """Index in the group's tables."""
    index: int
    """Index in the module's features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tables of one dim: their rows travel in one exchange."""

    dim: int
    tables: tuple[TableShard, ...]
    features: tuple[FeatureSlot, ...]


def make_shards(tables: Sequence[TableConfig], world_size: int) -> tuple[TableShard, ...]:
    """Place tables: auto resolved, table-wise ones packed largest first onto the least loaded rank.

    A pure function of its arguments, so all ranks agree.
    """
    sizes = [table.num_rows * table.dim for table in tables]
    fair_share = sum(sizes) / world_size
    load = [0.0] * world_size
    shards: dict[int, TableShard] = {}
    packed = []
    for index, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        row_wise = table.placement == "row_wise" or (table.placement == "auto" and size > fair_share)
        if not row_wise or world_size == 1:
            packed.append(index)
            continue
        shard = TableShard(config=table, row_wise=True, owner=0, chunk=-(-table.num_rows // world_size))
        shards[index] = shard
        for rank in range(world_size):
            load[rank] += shard.num_local_rows(rank) * table.dim
    for index in sorted(packed, key=lambda index: (-sizes[index], index)):
        rank = load.index(min(load))
        load[rank] += sizes[index]
        shards[index] = TableShard(config=tables[index], row_wise=False, owner=rank, chunk=tables[index].num_rows)
    return tuple(shards[index] for index in range(len(tables)))


def check_local_rows(shards: Sequence[TableShard]) -> None:
    """Raise if a rank would own more rows of a table than the engines can index."""
    for shard in shards:
        if shard.chunk > MAX_LOCAL_ROWS:
            ranks = -(-shard.config.num_rows // MAX_LOCAL_ROWS)
            raise ValueError(
                f"ShardedEmbeddings: table {shard.config.name!r} must have at most {MAX_LOCAL_ROWS} rows on one rank "
                f"(limit of fbgemm's row indices), got {shard.chunk}; place it row_wise over {ranks} ranks or more"
            )


def make_groups(shards: Sequence[TableShard], features: Sequence[FeatureConfig]) -> tuple[Group, ...]:
    """Group tables by dim, in order of first appearance."""
    groups = []
    for dim in dict.fromkeys(shard.config.dim for shard in shards):
        members = tuple(shard for shard in shards if shard.config.dim == dim)
        position = {shard.config.name: index for index, shard in enumerate(members)}
        slots = [
            FeatureSlot(config=feature, table=position[feature.table], index=index)
            for index, feature in enumerate(features)
            if feature.table in position
        ]
        groups.append(
            Group(dim=dim, tables=members, features=tuple(sorted(slots, key=lambda slot: (slot.table, slot.index))))
        )
    return tuple(groups)
