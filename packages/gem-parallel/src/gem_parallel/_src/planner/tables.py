"""Placement of embedding tables: which ranks own what, and what each rank holds, serves and receives."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gem_parallel._src.embeddings.config import MAX_LOCAL_ROWS
from gem_parallel._src.embeddings.memory import cache_bytes
from gem_parallel._src.planner.description import SparseTable, TableKind, Workload
from gem_parallel._src.planner.hardware import Hardware

__all__ = ["PlacedTable", "TablePlan", "check_rows", "place_tables"]

Strategy = Literal["size", "cost"]
BALANCE = 1.05
"""Load of the heaviest rank / mean that cost-based placement stops at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTable:
    """One table over the ranks of axis sparse_shard."""

    table: SparseTable
    kind: TableKind
    owners: tuple[int, ...]
    """Ranks of the parts of a table- or column-wise table; of a row-wise or replicated one, (0,)."""
    num_owners: int
    """Ranks that own a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """All tables, and per rank of the axis: bytes at rest, rows served, and load."""

    placed: tuple[PlacedTable, ...]
    rest_bytes: tuple[float, ...]
    """Weights of a rank's part, over all its replicas."""
    gathered_bytes: tuple[float, ...]
    """The same, each replica's slice of a table padded to the longest."""
    state_bytes: tuple[float, ...]
    """Optimizer state of a rank's part, over all its replicas."""
    host_rest_bytes: tuple[float, ...]
    """The part of ``rest_bytes`` that lies in host memory."""
    host_state_bytes: tuple[float, ...]
    """The part of ``state_bytes`` that lies in host memory."""
    cache_bytes: tuple[float, ...]
    """Caches on the device of tables in host memory, with their bookkeeping, over all replicas of a rank's part."""
    host_read_bytes: tuple[float, ...]
    """What a rank's lookups move between host and device memory in one step: rows without a cache are read; each row
    that a cache lacks is read, and the changed one that it replaces written back."""
    host_update_bytes: tuple[float, ...]
    """What updates read, change and write in host memory in one step: rows without a cache, and moments."""
    served_bytes: tuple[float, ...]
    """Rows looked up for all ranks in one step, float32."""
    requested_bytes: float
    """Rows that each rank asks for (float32), its own included."""
    requested_ids: float
    """Distinct ids that each rank sends, its own included."""
    served_ids: tuple[float, ...]
    local_bytes: float
    """Rows of replicated tables that each rank reads for itself."""
    replicated_bytes: float
    """Gradients of replicated tables and a flag per row, all-reduced whole."""
    num_columns: int
    """Tables whose counts are exchanged."""
    num_dims: int
    """Different row lengths among them: each has exchanges of its own."""

    @property
    def balance(self) -> float:
        """Served bytes of the heaviest rank / mean."""
        mean = sum(self.served_bytes) / len(self.served_bytes)
        return max(self.served_bytes) / mean if mean else 1.0


def check_rows(plan: TablePlan, ranks: int, replicas: int) -> None:
    """Refuse a placement that ``ShardedEmbeddings`` refuses.

    Raises:
        ValueError: more rows of a table on one rank than fbgemm can index.
    """
    for each in plan.placed:
        parts = {"row_wise": ranks * replicas, "replicated": 1}.get(each.kind, replicas)
        rows = -(-each.table.num_rows // parts)
        if rows > MAX_LOCAL_ROWS:
            least = -(-each.table.num_rows // MAX_LOCAL_ROWS)
            raise ValueError(
                f"explain: table {each.table.name!r} must have at most {MAX_LOCAL_ROWS} rows on one rank (limit of "
                f"fbgemm's row indices), got {rows} as it is placed {each.kind}; "
                f"cut it by rows over {least} ranks or more"
            )


def rows_of(table: SparseTable, samples: int) -> float:
    """Distinct ids of one rank's batch: expected, and no more than there are rows."""
    return min(samples * table.ids_per_sample * table.unique_fraction, float(table.num_rows))


def _host_traffic(table: SparseTable, served: float, workload: Workload) -> tuple[float, float]:
    """Bytes that lookups and updates of ``served`` rows move from and to host memory, see ``TablePlan``."""
    if table.memory.location == "device":
        return 0.0, 0.0
    rows = served * table.dim * table.weight_bytes
    moments = served * workload.host_state_bytes(table)
    if table.memory.location == "uvm":
        return rows, rows + moments
    return 2 * table.missed * rows, moments


def _cost(table: SparseTable, workload: Workload, hardware: Hardware, ranks: int) -> float:
    """Seconds of serving a table: lookup and update of what all ranks ask for."""
    served = rows_of(table, workload.samples_per_rank) * ranks
    amount = served * table.dim * 4
    read, updated = _host_traffic(table, served, workload)
    return (
        amount / hardware.embedding_read.value
        + amount / hardware.embedding_update.value
        + read / hardware.host_read.value
        + updated / hardware.host_update.value
    )


def _device_bytes(table: SparseTable) -> float:
    """Device memory of a whole table's weights, or of its cache."""
    if table.memory.location == "device":
        return float(table.rest_bytes)
    return float(cache_bytes(table.num_rows, table.dim, table.weight_bytes, table.memory))


def _fractions(num_rows: int, ranks: int, replicas: int) -> list[tuple[int, int, float]]:
    """[first rank, last rank) -> share of the rows on each: equal chunks of whole slices of the replicas."""
    chunk = -(-num_rows // (ranks * replicas)) * replicas
    whole, rest = divmod(num_rows, chunk)
    parts = [(0, whole, chunk / num_rows)]
    return [*parts, (whole, whole + 1, rest / num_rows)] if rest else parts


def num_parts(dim: int, ranks: int) -> int:
    """Column shards of a column-wise table: as many as divide both the ranks and the vectors of 4 in a row."""
    return next(parts for parts in range(ranks, 0, -1) if ranks % parts == 0 and dim % (4 * parts) == 0)


def place_tables(
    tables: Sequence[SparseTable],
    ranks: int,
    workload: Workload,
    hardware: Hardware,
    *,
    strategy: Strategy = "size",
    kinds: Sequence[TableKind] = ("table_wise", "row_wise"),
    memory_bytes: float | None = None,
    replicas: int = 1,
) -> TablePlan:
    """Choose a kind for each table left to ``auto``, and owners for what is not cut by rows.

    size: as ``ShardedEmbeddings`` does with ``auto``: row-wise above a rank's fair share of all elements. cost:
    row-wise what costs more than a rank's fair share of the time of lookups and updates or does not fit, and then more
    and more tables until the heaviest rank is within 5 % of the mean; with ``column_wise`` among the kinds, tables that
    columns make light enough are cut so first, with ``replicated``, tables whose all-reduce is smaller than their
    exchange are copied. Either way what is not cut by rows is packed as ``ShardedEmbeddings`` packs it, largest first
    onto the emptiest ranks (LPT over elements), so that a plan can be carried out by naming the kinds.

    Args:
        tables: The tables.
        ranks: Degree of sparse_shard.
        workload: Batch and optimizer.
        hardware: Rates.
        strategy: How.
        kinds: What may be chosen under cost.
        memory_bytes: Most bytes of tables on one rank, for cost; None does not look.
        replicas: Degree of sparse_replicate: every rank's part is cut by rows over them at rest.
    """
    chosen: list[TableKind] = []
    sizes = [float(table.num_rows * table.dim) for table in tables]
    weights = sizes if strategy == "size" else [_cost(table, workload, hardware, ranks) for table in tables]
    fair = sum(weights) / ranks
    for table, weight in zip(tables, weights, strict=True):
        chosen.append(_first_kind(table, weight, fair, ranks, workload, strategy, kinds, memory_bytes))
    plan = _lay_out(tables, chosen, sizes, ranks, replicas, workload)
    if strategy == "size" or "row_wise" not in kinds:
        return plan
    threshold = fair
    for _ in range(20):
        free = [i for i, table in enumerate(tables) if table.kind == "auto" and chosen[i] == "table_wise"]
        if plan.balance <= BALANCE or not free:
            break
        threshold = min(threshold / 2, max(weights[i] for i in free))
        candidate = list(chosen)
        for i in free:
            # A table with fewer rows than ranks cut by rows loads its first ranks only.
            if weights[i] >= threshold and tables[i].num_rows >= ranks:
                candidate[i] = "row_wise"
        other = _lay_out(tables, candidate, sizes, ranks, replicas, workload)
        if other.balance < plan.balance:
            chosen, plan = candidate, other
    return plan


def _first_kind(
    table: SparseTable,
    weight: float,
    fair: float,
    ranks: int,
    workload: Workload,
    strategy: Strategy,
    kinds: Sequence[TableKind],
    memory_bytes: float | None,
) -> TableKind:
    if table.kind != "auto":
        return "table_wise" if ranks == 1 and table.kind != "replicated" else table.kind
    if ranks == 1:
        return "table_wise"
    if strategy == "size":
        return "row_wise" if weight > fair else "table_wise"
    exchanged = 2 * rows_of(table, workload.samples_per_rank) * table.dim * workload.row_bytes
    if "replicated" in kinds and 2 * table.num_rows * (table.dim + 1) * 4 < exchanged:
        return "replicated"
    heavy = weight > fair or (memory_bytes is not None and _device_bytes(table) > memory_bytes)
    if heavy and "column_wise" in kinds and 1 < weight / fair <= num_parts(table.dim, ranks):
        return "column_wise"
    return "row_wise" if heavy and "row_wise" in kinds else "table_wise"


def _lay_out(
    tables: Sequence[SparseTable],
    kinds: Sequence[TableKind],
    weights: Sequence[float],
    ranks: int,
    replicas: int,
    workload: Workload,
) -> TablePlan:
    spread = _Spread(ranks)
    placed: list[PlacedTable | None] = [None] * len(tables)
    packed = []
    for i, (table, kind) in enumerate(zip(tables, kinds, strict=True)):
        if kind == "row_wise":
            cuts = _fractions(table.num_rows, ranks, replicas)
            chunk = -(-table.num_rows // (ranks * replicas)) * replicas
            for first, last, share in cuts:
                spread.add(table, share, workload, ranks, first, last, weights[i], gathered=chunk / table.num_rows)
            placed[i] = PlacedTable(table=table, kind=kind, owners=(0,), num_owners=cuts[-1][1])
        elif kind == "replicated":
            spread.add_copy(table, workload)
            placed[i] = PlacedTable(table=table, kind=kind, owners=(0,), num_owners=ranks)
        else:
            packed.append(i)
    owners = _pack(tables, kinds, weights, packed, spread.loads())
    for i, found in owners.items():
        share = 1 / len(found)
        padded = -(-tables[i].num_rows // replicas) * replicas / tables[i].num_rows
        spread.add(
            tables[i],
            share,
            workload,
            ranks,
            found[0],
            found[-1] + 1,
            0.0,
            ids=1.0,
            gathered=share * padded,
            parts=len(found),
        )
        placed[i] = PlacedTable(table=tables[i], kind=kinds[i], owners=tuple(found), num_owners=len(found))
    exchanged = [i for i, kind in enumerate(kinds) if kind != "replicated"]
    samples = workload.samples_per_rank
    return TablePlan(
        placed=tuple(each for each in placed if each is not None),
        rest_bytes=tuple(spread.total("rest")),
        gathered_bytes=tuple(spread.total("gathered")),
        state_bytes=tuple(spread.total("state")),
        host_rest_bytes=tuple(spread.total("host rest")),
        host_state_bytes=tuple(spread.total("host state")),
        cache_bytes=tuple(spread.total("cache")),
        host_read_bytes=tuple(spread.total("host read")),
        host_update_bytes=tuple(spread.total("host update")),
        served_bytes=tuple(spread.total("rows")),
        served_ids=tuple(spread.total("ids")),
        requested_bytes=sum(rows_of(tables[i], samples) * tables[i].dim * 4 for i in exchanged),
        requested_ids=sum(rows_of(tables[i], samples) * max(1, len(owners.get(i, ()))) for i in exchanged),
        local_bytes=spread.local_bytes,
        replicated_bytes=spread.replicated_bytes,
        num_columns=sum(max(1, len(owners.get(i, ()))) for i in exchanged),
        num_dims=len({tables[i].dim // max(1, len(owners.get(i, ()))) for i in exchanged}),
    )


def _pack(
    tables: Sequence[SparseTable],
    kinds: Sequence[TableKind],
    weights: Sequence[float],
    packed: Sequence[int],
    loads: list[float],
) -> dict[int, list[int]]:
    """LPT: heaviest first, whole tables onto the least loaded rank, columns onto the least loaded block of ranks."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners: dict[int, list[int]] = {}
    for i in sorted(packed, key=lambda i: (-weights[i], i)):
        parts = num_parts(tables[i].dim, len(loads)) if kinds[i] == "column_wise" else 1
        if parts > 1:
            blocks = [sum(loads[first : first + parts]) for first in range(0, len(loads), parts)]
            first = blocks.index(min(blocks)) * parts
        else:
            # Entries of ranks whose load has changed since are stale.
            while heap[0][0] != loads[heap[0][1]]:
                heapq.heappop(heap)
            first = heap[0][1]
        owners[i] = list(range(first, first + parts))
        for rank in owners[i]:
            loads[rank] += weights[i] / parts
            heapq.heappush(heap, (loads[rank], rank))
    return owners


class _Spread:
    """Sums over ranks, where most of what is added goes to a run of ranks."""

    _HOST = ("host rest", "host state", "cache", "host read", "host update")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        names = ("rest", "gathered", "state", "rows", "ids", "weight")
        self._steps = {name: [0.0] * (ranks + 1) for name in (*names, *self._HOST)}
        self.local_bytes = 0.0
        self.replicated_bytes = 0.0

    def add(
        self,
        table: SparseTable,
        share: float,
        workload: Workload,
        ranks: int,
        first: int,
        last: int,
        weight: float,
        *,
        gathered: float,
        ids: float | None = None,
        parts: int = 1,
    ) -> None:
        """Put ``share`` of a table on each of the ranks [first, last), ``gathered`` of it counting padding.

        With ``parts`` above 1 the share is one of so many column shards.
        """
        served = rows_of(table, workload.samples_per_rank) * ranks
        amounts = {
            "rest": table.rest_bytes * share,
            "gathered": table.rest_bytes * gathered,
            "state": table.num_rows * workload.state_bytes(table) * share,
            "rows": served * table.dim * 4 * share,
            "ids": served * (share if ids is None else ids),
            "weight": weight * share,
        }
        if table.memory.location != "device":
            read, updated = _host_traffic(table, served, workload)
            # A column shard's cache has every row's bookkeeping.
            cache = cache_bytes(table.num_rows, table.dim // parts, table.weight_bytes, table.memory)
            amounts["host rest"] = table.rest_bytes * share
            amounts["host state"] = table.num_rows * workload.host_state_bytes(table) * share
            amounts["cache"] = cache * (share * parts)
            amounts["host read"], amounts["host update"] = read * share, updated * share
        for name, amount in amounts.items():
            self._steps[name][first] += amount
            self._steps[name][last] -= amount

    def add_copy(self, table: SparseTable, workload: Workload) -> None:
        for name, amount in (("rest", table.rest_bytes), ("state", table.num_rows * workload.state_bytes(table))):
            self._steps[name][0] += amount
            self._steps[name][self._ranks] -= amount
        self.local_bytes += rows_of(table, workload.samples_per_rank) * table.dim * 4
        self.replicated_bytes += float(table.num_rows * (table.dim + 1) * 4)

    def total(self, name: str) -> list[float]:
        found, running = [], 0.0
        for step in self._steps[name][: self._ranks]:
            running += step
            found.append(max(0.0, running))
        return found

    def loads(self) -> list[float]:
        return self.total("weight")
