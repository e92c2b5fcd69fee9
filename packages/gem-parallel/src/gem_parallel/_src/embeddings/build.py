"""Engines and stores of the tables that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from gem_parallel._src.embeddings.cached_engine import CachedEngine
from gem_parallel._src.embeddings.combined_engine import CombinedEngine, split_tables
from gem_parallel._src.embeddings.config import Gather, SparseOptimizerConfig, TableMemory
from gem_parallel._src.embeddings.engine import Engine, FbgemmEngine
from gem_parallel._src.embeddings.gathered import GatheredTables
from gem_parallel._src.embeddings.grid import Grid
from gem_parallel._src.embeddings.layout import Group
from gem_parallel._src.embeddings.memory import check_cache_fits, check_host_fits
from gem_parallel._src.embeddings.plan import slice_bases
from gem_parallel._src.embeddings.stores import FusedStore, ReplicatedStore, ShardedStore, Store
from gem_parallel._src.embeddings.torch_engine import TorchEngine, needs_torch_engine

__all__ = ["Storage", "combines", "make_engines", "make_store", "shares_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How tables are kept and updated."""

    optimizer: SparseOptimizerConfig
    weight_dtype: torch.dtype
    wire_dtype: torch.dtype
    gather: Gather
    keep_gathered: bool
    device: torch.device
    seed: int


def combines(memory: TableMemory) -> bool:
    """Whether tables of a dim are one table of fbgemm's, which sums over bags.

    A cache needs a lookup that names its tables; then there is one unpooled engine per cache.
    """
    return memory.location != "uvm_caching"


def shares_rows(group: Group, num_shards: int, num_replicas: int, storage: Storage) -> bool:
    """Whether one engine has all tables of a group on every rank, and each row has one holder.

    Then ids may travel as rows of that engine, in any order. All ranks come to the same answer.
    """
    if group.joint or group.replicated or num_replicas > 1:
        return False
    if needs_torch_engine(storage.optimizer, storage.weight_dtype, storage.device):
        return False
    memories = {shard.config.memory for shard in group.tables}
    if len(memories) > 1 or not combines(*memories):
        return False
    return all(
        len(split_tables([end - start for start, end in (shard.rows_of(rank) for shard in group.tables)])) == 1
        for rank in range(num_shards)
    )


def make_engines(group: Group, shard_rank: int, replica_rank: int, storage: Storage) -> list[Engine]:
    """The engines of one group, in order of table, for the rows that this rank keeps.

    Raises:
        RuntimeError: the device has no room for them (``torch.OutOfMemoryError`` where torch raises it).
    """
    try:
        return _make_engines(group, shard_rank, replica_rank, storage)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "alloc" not in str(error):
            raise
        sizes = [
            (end - start, shard.dim, shard.config.name)
            for shard in group.tables
            for start, end in [shard.slice_of(shard_rank, replica_rank)]
        ]
        largest = ", ".join(f"{name!r} {rows} x {dim}" for rows, dim, name in sorted(sizes, reverse=True)[:3])
        size = sum(rows * dim for rows, dim, _ in sizes) * storage.weight_dtype.itemsize
        kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else RuntimeError
        raise kind(
            f"ShardedEmbeddings: the tables of dim {group.dim} must fit on {storage.device}, got {size} bytes of "
            f"weights besides the optimizer's moments (largest: {largest}); use fewer rows, more ranks, or on CUDA "
            f"location='uvm' ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'})"
        ) from error


def _make_engines(group: Group, shard_rank: int, replica_rank: int, storage: Storage) -> list[Engine]:
    kept = [shard.slice_of(shard_rank, replica_rank) for shard in group.tables]
    optimizer, weight_dtype, device = storage.optimizer, storage.weight_dtype, storage.device
    if group.joint or needs_torch_engine(optimizer, weight_dtype, device):
        return [
            TorchEngine(
                num_rows=[end - start],
                dim=group.dim,
                optimizer=optimizer,
                weight_dtype=weight_dtype,
                device=device,
                name=shard.config.name,
                seed=storage.seed,
                first_row=start,
                first_column=shard.first_column,
                width=shard.config.dim,
            )
            for shard, (start, end) in zip(group.tables, kept, strict=True)
        ]
    engines: list[Engine] = []
    for memory, members in groupby(zip(group.tables, kept, strict=True), key=lambda member: member[0].config.memory):
        found = list(members)
        rows = [end - start for _, (start, end) in found]
        check_host_fits([shard.config for shard, _ in found], rows, group.dim, weight_dtype, optimizer.kind)
        if combines(memory):
            first = 0
            for count in split_tables(rows):
                engines.append(
                    CombinedEngine(
                        num_rows=rows[first : first + count],
                        dim=group.dim,
                        optimizer=optimizer,
                        weight_dtype=weight_dtype,
                        device=device,
                        memory=memory,
                    )
                )
                first += count
            continue
        check_cache_fits([shard.config for shard, _ in found], rows, group.dim, weight_dtype, device)
        engine = FbgemmEngine(
            num_rows=rows,
            dim=group.dim,
            optimizer=optimizer,
            weight_dtype=weight_dtype,
            device=device,
            pools=False,
            memory=memory,
        )
        if memory.location == "uvm_caching":
            learning_rate = optimizer.learning_rate
            engines.append(CachedEngine(engine, num_rows=rows, learning_rate=learning_rate, device=device))
        else:
            engines.append(engine)
    return engines


def make_store(group: Group, engines: Sequence[Engine], grid: Grid | None, storage: Storage) -> Store:
    """The store of one group; ``grid`` is None in one process."""
    if group.replicated:
        return ReplicatedStore(group, engines, storage.device)
    if grid is None or (grid.copies is None and not group.joint):
        return FusedStore(group, engines, storage.device)
    gathered = None
    if grid.copies is not None and storage.gather == "tables":
        gathered = GatheredTables(
            slices=[weight for engine in engines for weight in engine.weights()],
            bases=slice_bases(group, grid.shard_rank),
            dim=group.dim,
            dtype=storage.weight_dtype,
            device=storage.device,
            copies=grid.copies,
            keep=storage.keep_gathered,
        )
    return ShardedStore(group, engines, grid, storage.device, gathered=gathered, wire_dtype=storage.wire_dtype)
