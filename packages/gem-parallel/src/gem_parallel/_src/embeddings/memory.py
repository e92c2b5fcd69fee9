"""Tables in host memory: how large their cache is, and what cannot lie there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from gem_parallel._src.embeddings.config import (
    Gather,
    SparseOptimizerConfig,
    TableConfig,
    TableMemory,
)
from gem_parallel._src.embeddings.layout import Group

__all__ = ["cache_bytes", "cache_sets", "check_cache_fits", "check_host_fits", "check_locations"]

CACHE_WAYS = 32
"""Rows of one set of fbgemm's cache: a row may lie in any place of one set only."""


def cache_sets(num_rows: int, cache_load_factor: float) -> int:
    """Sets of the cache of tables with ``num_rows`` rows together."""
    return max(1, -(-int(num_rows * cache_load_factor) // CACHE_WAYS))


def cache_bytes(num_rows: int, dim: int, weight_bytes: int, memory: TableMemory) -> int:
    """Device memory of a cache and its bookkeeping.

    Rows in it; per place the row that it holds and, for lru, when that was last used; per row of the tables the table
    it belongs to and, for lfu, how often it was used.

    Args:
        num_rows: Rows of the tables that share the cache.
        dim: Columns.
        weight_bytes: Per element.
        memory: Of the tables.
    """
    if memory.location != "uvm_caching":
        return 0
    places = cache_sets(num_rows, memory.cache_load_factor) * CACHE_WAYS
    uses = places if memory.cache_algorithm == "lru" else num_rows + 1
    return places * (dim * weight_bytes + 8) + 8 * uses + 4 * num_rows


def check_locations(
    groups: Iterable[Group],
    *,
    optimizer: SparseOptimizerConfig,
    weight_dtype: torch.dtype,
    device: torch.device,
    gather: Gather,
    num_replicas: int,
) -> None:
    """Raise unless every table can lie where it is wanted.

    Raises:
        ValueError: a table in host memory on a CPU device, with bfloat16 weights, replicated, column-wise under
            rowwise_adagrad, in copies whose lookup gathers whole tables, or behind a cache in float16 under adam.
    """
    for group in groups:
        for shard in group.tables:
            table = shard.config
            if table.location == "device":
                continue
            rule = None
            if device.type == "cpu":
                rule = "on a CPU device, where tables lie in host memory anyway", "leave `location` out"
            elif weight_dtype == torch.bfloat16:
                rule = "with bfloat16 weights, which PyTorch updates", "use weight_dtype=torch.float16 or torch.float32"
            elif weight_dtype == torch.float16 and optimizer.kind == "adam" and table.location == "uvm_caching":
                rule = (
                    "or 'uvm' with float16 weights under adam, of which fbgemm's backward refuses a cache",
                    "use weight_dtype=torch.float32",
                )
            elif group.replicated:
                rule = "for a replicated table, whose gradient is as large as the table", "use placement='row_wise'"
            elif group.joint:
                rule = (
                    f"for a column_wise table under {optimizer.kind}, which PyTorch updates",
                    "use placement='row_wise' or another optimizer",
                )
            elif num_replicas > 1 and gather == "tables":
                rule = (
                    f"with {num_replicas} copies whose lookup gathers whole tables on the device",
                    "use gather='rows'",
                )
            if rule is not None:
                raise ValueError(
                    f"ShardedEmbeddings: table {table.name!r}: `location` must be 'device' {rule[0]}, "
                    f"got {table.location!r}; {rule[1]}"
                )


def check_cache_fits(
    tables: Sequence[TableConfig],
    num_rows: Sequence[int],
    dim: int,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise if the cache of tables that share one is larger than the free memory of a CUDA device.

    fbgemm would make a smaller cache and say nothing.
    """
    memory = tables[0].memory
    wanted = cache_bytes(sum(num_rows), dim, weight_dtype.itemsize, memory)
    if not wanted:
        return
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if wanted > free:
        names = ", ".join(table.name for table in tables)
        raise ValueError(
            f"ShardedEmbeddings: the cache of tables {names} (`cache_load_factor` {memory.cache_load_factor:g}) must "
            f"fit in the {free / 1e9:.1f} GB that are free on {device}, got {wanted / 1e9:.1f} GB; "
            "lower `cache_load_factor` or spread the tables over more ranks"
        )


def check_host_fits(
    tables: Sequence[TableConfig], num_rows: Sequence[int], dim: int, weight_dtype: torch.dtype, optimizer: str
) -> None:
    """Raise if tables that share an engine are larger than what is free of the host's memory.

    Linux would promise the memory and kill the process when it is used. Other ranks of the host take theirs at the same
    time and are not counted.
    """
    if tables[0].location == "device":
        return
    moments = {"adagrad": 1, "adam": 2}.get(optimizer, 0)
    wanted = sum(num_rows) * dim * (weight_dtype.itemsize + 4 * moments)
    free = _free_host_bytes()
    if free is not None and wanted > free:
        names = ", ".join(table.name for table in tables)
        raise ValueError(
            f"ShardedEmbeddings: tables {names} in host memory must fit in the {free / 1e9:.1f} GB that are free "
            f"there, got {wanted / 1e9:.1f} GB of weights and moments on this rank; spread them over more hosts, use "
            "weight_dtype=torch.float16 or kind='rowwise_adagrad'"
        )


def _free_host_bytes() -> int | None:
    """What Linux can give without swapping; None elsewhere."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
