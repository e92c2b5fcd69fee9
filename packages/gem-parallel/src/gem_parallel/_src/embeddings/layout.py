"""Which rank owns which rows and columns, and the order in which everything is laid out.

A table is cut twice. Over the ranks of a sharding group, which hold one copy of the tables together: whole on one rank,
by rows, by columns, or on every rank. And what one rank of the group owns is cut by rows over its replicas, the ranks
that own the same in the other groups: at rest each keeps one slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gem_parallel._src.embeddings.config import MAX_LOCAL_ROWS, FeatureConfig, TableConfig

__all__ = ["FeatureSlot", "Group", "TableShard", "check_local_rows", "make_groups", "make_shards"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShard:
    """One table, or some columns of it, over the ranks of a sharding group and their replicas."""

    config: TableConfig
    kind: Literal["whole", "rows", "replicated"]
    """whole: on one rank (a column shard, too); rows: consecutive rows per rank; replicated: on every rank."""
    owner: int
    """Rank of a whole one; else 0."""
    chunk: int
    """Rows per rank of the sharding group."""
    slice_rows: int
    """Rows per replica at rest; chunk if there is one replica or the table is replicated."""
    first_column: int
    dim: int
    """Columns."""
    piece: int
    """Number of this column shard among its table's."""
    num_pieces: int

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Half-open range of global rows that ``rank`` of a sharding group owns; empty for ranks past the end."""
        num_rows = self.config.num_rows
        if self.kind == "replicated":
            return 0, num_rows
        if self.kind == "whole":
            return (0, num_rows) if rank == self.owner else (0, 0)
        return min(rank * self.chunk, num_rows), min((rank + 1) * self.chunk, num_rows)

    def slice_of(self, rank: int, replica: int) -> tuple[int, int]:
        """Half-open range of global rows that a rank keeps at rest."""
        start, end = self.rows_of(rank)
        if self.kind == "replicated":
            return start, end
        return min(start + replica * self.slice_rows, end), min(start + (replica + 1) * self.slice_rows, end)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSlot:
    """A feature in the order of its group: by table, then as configured. One per column shard of its table."""

    config: FeatureConfig
    table: int
    """Index in the group's tables."""
    index: int
    """Index in the module's features."""
    piece: int
    """Column shard of the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tables of one dim: their rows travel in one exchange."""

    dim: int
    replicated: bool
    """Every rank holds the tables: no ids and no rows travel, gradients are added over all ranks."""
    joint: bool
    """Column shards whose optimizer needs the norm of whole rows."""
    tables: tuple[TableShard, ...]
    features: tuple[FeatureSlot, ...]


def num_column_shards(table: TableConfig, world_size: int) -> int:
    """Column shards of a column-wise table: as many as divide both the ranks and the vectors of 4 in a row."""
    return next(parts for parts in range(world_size, 0, -1) if world_size % parts == 0 and table.dim % (4 * parts) == 0)


def make_shards(tables: Sequence[TableConfig], world_size: int, num_replicas: int = 1) -> tuple[TableShard, ...]:
    """Place tables: auto resolved, whole ones packed largest first onto the least loaded rank.

    Args:
        tables: As configured.
        world_size: Ranks of a sharding group.
        num_replicas: Sharding groups.

    Returns:
        The shards in order of table and column; a pure function of the arguments, so all ranks agree.
    """
    sizes = [table.num_rows * table.dim for table in tables]
    fair_share = sum(sizes) / world_size
    load = [0.0] * world_size
    shards: dict[int, list[TableShard]] = {}
    packed = []
    for index, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        by_rows = table.placement == "row_wise" or (table.placement == "auto" and size > fair_share)
        if table.placement == "replicated" and world_size * num_replicas > 1:
            shards[index] = [_shard(table, "replicated", 0, table.num_rows, table.num_rows)]
            load = [each + size for each in load]
        elif by_rows and world_size > 1:
            slice_rows = -(-table.num_rows // (world_size * num_replicas))
            shard = _shard(table, "rows", 0, slice_rows * num_replicas, slice_rows)
            shards[index] = [shard]
            for rank in range(world_size):
                start, end = shard.rows_of(rank)
                load[rank] += (end - start) * table.dim
        else:
            packed.append(index)
    for index in sorted(packed, key=lambda index: (-sizes[index], index)):
        table = tables[index]
        parts = num_column_shards(table, world_size) if table.placement == "column_wise" else 1
        # Column shards lie on neighbouring ranks, in blocks that divide the group.
        blocks = [sum(load[first : first + parts]) for first in range(0, world_size, parts)]
        first = blocks.index(min(blocks)) * parts
        slice_rows = -(-table.num_rows // num_replicas)
        shards[index] = [
            _shard(table, "whole", first + piece, table.num_rows, slice_rows, piece, parts) for piece in range(parts)
        ]
        for piece in range(parts):
            load[first + piece] += sizes[index] / parts
    return tuple(shard for index in range(len(tables)) for shard in shards[index])


def _shard(
    table: TableConfig,
    kind: Literal["whole", "rows", "replicated"],
    owner: int,
    chunk: int,
    slice_rows: int,
    piece: int = 0,
    num_pieces: int = 1,
) -> TableShard:
    dim = table.dim // num_pieces
    return TableShard(
        config=table,
        kind=kind,
        owner=owner,
        chunk=chunk,
        slice_rows=slice_rows,
        first_column=piece * dim,
        dim=dim,
        piece=piece,
        num_pieces=num_pieces,
    )


def check_local_rows(shards: Sequence[TableShard]) -> None:
    """Raise if a rank would hold more rows of a table than the engines can index."""
    for shard in shards:
        if shard.slice_rows > MAX_LOCAL_ROWS:
            ranks = -(-shard.config.num_rows // MAX_LOCAL_ROWS)
            raise ValueError(
                f"ShardedEmbeddings: table {shard.config.name!r} must have at most {MAX_LOCAL_ROWS} rows on one rank "
                f"(limit of fbgemm's row indices), got {shard.slice_rows}; place it row_wise over {ranks} ranks or more"
            )


def make_groups(
    shards: Sequence[TableShard], features: Sequence[FeatureConfig], *, joint_columns: bool = False
) -> tuple[Group, ...]:
    """Group tables by dim and by how they are updated, in order of first appearance; in a group, by memory.

    Args:
        shards: As ``make_shards`` gives them.
        features: As configured.
        joint_columns: Whether column shards need each other's part of a row's norm.
    """

    def key(shard: TableShard) -> tuple[int, bool, bool]:
        return shard.dim, shard.kind == "replicated", joint_columns and shard.num_pieces > 1

    memories = list(dict.fromkeys(shard.config.memory for shard in shards))
    groups = []
    for dim, replicated, joint in dict.fromkeys(key(shard) for shard in shards):
        found = [shard for shard in shards if key(shard) == (dim, replicated, joint)]
        # Tables that share an engine follow each other.
        members = tuple(sorted(found, key=lambda shard: memories.index(shard.config.memory)))
        slots = [
            FeatureSlot(config=feature, table=position, index=index, piece=shard.piece)
            for position, shard in enumerate(members)
            for index, feature in enumerate(features)
            if feature.table == shard.config.name
        ]
        groups.append(Group(dim=dim, replicated=replicated, joint=joint, tables=members, features=tuple(slots)))
    return tuple(groups)
