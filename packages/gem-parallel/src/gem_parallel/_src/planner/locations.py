"""Tables in host memory: which go there when the device is too small, and what cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gem_parallel._src.embeddings.memory import cache_bytes
from gem_parallel._src.mesh import ParallelDims
from gem_parallel._src.planner.description import SparseTable, Workload
from gem_parallel._src.planner.memory import MemoryPlan
from gem_parallel._src.planner.tables import PlacedTable, TablePlan, rows_of

__all__ = ["check_host_memory", "check_locations", "locate_tables"]


def _refusal(each: PlacedTable, location: str, dims: ParallelDims, workload: Workload) -> tuple[str, str] | None:
    """(why a placed table cannot lie in host memory, the remedy), as ``ShardedEmbeddings`` refuses it."""
    if location == "uvm_caching" and each.table.weight_bytes == 2 and workload.sparse_optimizer == "adam":
        return "or 'uvm' for weights of 2 bytes under adam", "use weights of 4 bytes or another optimizer"
    if each.kind == "replicated" and dims.world_size > 1:
        return "for a replicated table", "place it row_wise"
    if each.kind == "column_wise" and each.num_owners > 1 and workload.sparse_optimizer == "rowwise_adagrad":
        return "for a column_wise table under rowwise_adagrad", "place it row_wise"
    if dims.sparse_replicate > 1 and workload.table_gather == "tables":
        return f"with {dims.sparse_replicate} copies whose lookup gathers whole tables", "use table_gather='rows'"
    return None


def check_locations(plan: TablePlan, dims: ParallelDims, workload: Workload) -> None:
    """Refuse tables in host memory that ``ShardedEmbeddings`` refuses.

    Raises:
        ValueError: replicated, column-wise under rowwise_adagrad, in copies that are gathered whole, or with a cache
            of 2-byte weights under adam.
    """
    for each in plan.placed:
        location = each.table.memory.location
        found = None if location == "device" else _refusal(each, location, dims, workload)
        if found is not None:
            raise ValueError(
                f"explain: table {each.table.name!r}: `location` must be 'device' {found[0]}, got "
                f"{each.table.location!r}; {found[1]}"
            )


def check_host_memory(memory: MemoryPlan, dims: ParallelDims) -> None:
    """Refuse tables that are larger than the host.

    Raises:
        ValueError: the heaviest rank needs more than 0.9 of the host memory per device.
    """
    if not memory.host_fits:
        ranks = dims.sparse_shard * dims.sparse_replicate
        least = -(-int(ranks * memory.host_bytes) // int(0.9 * memory.host_capacity))
        raise ValueError(
            f"explain: tables in host memory must take at most 0.9 of the {memory.host_capacity / 1e9:.1f} GB of host "
            f"memory per device, got {memory.host_bytes / 1e9:.1f} GB on the heaviest rank; spread them over {least} "
            "ranks or more, or keep weights in 2 bytes"
        )


def locate_tables(
    tables: Sequence[SparseTable],
    plan: TablePlan,
    dims: ParallelDims,
    workload: Workload,
    *,
    place: Callable[[Sequence[SparseTable]], TablePlan],
    peak: Callable[[TablePlan], float],
    limit: float,
) -> TablePlan:
    """Move tables left to auto into host memory until the device's peak is below ``limit``.

    Those go first of which a rank's batch names the smallest part of the rows, as their caches miss least often per
    byte that is freed. If all of them are not enough, all are moved; those that cannot lie there, or whose cache would
    not be smaller, stay.

    Args:
        tables: As described.
        plan: With all of them on the device.
        dims: The layout.
        workload: The batch.
        place: Places tables.
        peak: Peak memory on the device under a placement, bytes.
        limit: Bytes of it that may be used.
    """
    if peak(plan) <= limit:
        return plan
    movable = []
    for index, (table, each) in enumerate(zip(tables, plan.placed, strict=True)):
        cached = replace(table, location="uvm_caching") if table.location == "auto" else table
        if cached is table or _refusal(each, "uvm_caching", dims, workload) is not None:
            continue
        if cache_bytes(table.num_rows, table.dim, table.weight_bytes, cached.memory) < table.rest_bytes:
            movable.append(index)
    movable.sort(key=lambda i: (rows_of(tables[i], workload.samples_per_rank) / tables[i].num_rows, i))

    def moved(count: int) -> TablePlan:
        chosen = set(movable[:count])
        return place(
            [replace(table, location="uvm_caching") if i in chosen else table for i, table in enumerate(tables)]
        )

    low, high = 0, len(movable)
    if not high:
        return plan
    best = moved(high)
    if peak(best) > limit:
        return best
    while high - low > 1:
        middle = (low + high) // 2
        candidate = moved(middle)
        if peak(candidate) <= limit:
            high, best = middle, candidate
        else:
            low = middle
    return best
