"""Initial weights that do not depend on how a table is cut."""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch import Tensor

from gem_parallel._src.embeddings.layout import TableShard

__all__ = ["CHUNK_ROWS", "fill_initial"]

CHUNK_ROWS = 65536
"""Rows drawn from one generator."""


def chunk_seed(seed: int, name: str, chunk: int) -> int:
    """63-bit seed of one chunk of one table."""
    words = f"{seed}/{zlib.crc32(name.encode())}/{chunk}".encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "little") >> 1


def fill_initial(weight: Tensor, shard: TableShard, first: int, last: int, seed: int) -> None:
    """Write the initial values of rows [first, last) into ``weight`` (last - first, shard.dim).

    Chunk c of 65,536 rows is drawn whole on the CPU from a generator seeded by (seed, crc32(name), c); a rank copies
    the rows and columns it holds. The values are therefore the same for every world size, placement and device.
    """
    table = shard.config
    std = table.dim**-0.5 if table.init_std is None else table.init_std
    columns = slice(shard.first_column, shard.first_column + shard.dim)
    for chunk in range(first // CHUNK_ROWS, -(-last // CHUNK_ROWS) if last > first else 0):
        start = chunk * CHUNK_ROWS
        end = min(start + CHUNK_ROWS, table.num_rows)
        generator = torch.Generator().manual_seed(chunk_seed(seed, table.name, chunk))
        values = torch.randn(end - start, table.dim, generator=generator) * std
        low, high = max(start, first), min(end, last)
        weight[low - first : high - first].copy_(values[low - start : high - start, columns])
