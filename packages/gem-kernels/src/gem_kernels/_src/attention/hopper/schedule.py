"""Units of work of the Hopper kernels: chunks of query rows, those with most to do first, so that the last are short.

Made on the device by one launch, because lengths are there and reading them would stall the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call

MAX_TILES = 8
"""Query tiles of a chunk whose keys stay in shared memory."""
MAX_SORTED = 8192
"""Sequences up to which chunks are ordered by work. Ordering compares each with each; many balance by themselves."""
BLOCK = 16
OTHERS = 512


class Schedule(NamedTuple):
    """Chunks of a batch."""

    chunks: Tensor
    """(N, 4) int32: first query row, query rows, first key row, keys. N is a bound, not all of it is written."""
    num_chunks: Tensor
    """(1,) int32, on the device: how many rows of ``chunks`` are written."""


@triton.jit
def _plan(offsets_q_ptr, offsets_k_ptr, b, num_sequences, tile_rows, resident_keys, max_tiles, SORTED: tl.constexpr):
    """(first query row, query rows, first key row, keys, rows of a chunk, chunks, rank key) of sequences ``b``."""
    mask = b < num_sequences
    first_q = tl.load(offsets_q_ptr + b, mask=mask, other=0).to(tl.int32)
    len_q = tl.load(offsets_q_ptr + b + 1, mask=mask, other=0).to(tl.int32) - first_q
    first_k = tl.load(offsets_k_ptr + b, mask=mask, other=0).to(tl.int32)
    len_k = tl.load(offsets_k_ptr + b + 1, mask=mask, other=0).to(tl.int32) - first_k
    rows = tl.where(len_k <= resident_keys, tile_rows * max_tiles, tile_rows)
    chunks = tl.where(mask, (len_q + rows - 1) // rows, 0)
    rank = num_sequences - b.to(tl.int64)
    if SORTED:
        rank += len_k.to(tl.int64) * tl.minimum(len_q, rows) * (num_sequences + 1)
    return first_q, len_q, first_k, len_k, rows, chunks, rank


@triton.jit(do_not_specialize=["num_sequences", "tile_rows", "resident_keys", "max_tiles"])
def _schedule_kernel(
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,  # (1,) int32
    num_sequences,
    tile_rows,
    resident_keys,
    max_tiles,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_q, len_q, first_k, len_k, rows, chunks, rank = _plan(
        offsets_q_ptr, offsets_k_ptr, b, num_sequences, tile_rows, resident_keys, max_tiles, SORTED
    )
    before = tl.zeros([BLOCK], tl.int32)
    total = 0
    for start in range(0, num_sequences, OTHERS):
        others = start + tl.arange(0, OTHERS)
        _fq, _lq, _fk, _lk, _rows, other_chunks, other_rank = _plan(
            offsets_q_ptr, offsets_k_ptr, others, num_sequences, tile_rows, resident_keys, max_tiles, SORTED
        )
        ahead = other_rank[None, :] > rank[:, None]
        before += tl.sum(tl.where(ahead, other_chunks[None, :], 0), 1)
        total += tl.sum(other_chunks, 0)
    if tl.program_id(0) == 0:
        tl.store(num_chunks_ptr, total)
    for i in range(tl.max(chunks, 0)):
        ptr = chunks_ptr + (before + i).to(tl.int64) * 4
        mask = i < chunks
        tl.store(ptr, first_q + i * rows, mask=mask)
        tl.store(ptr + 1, tl.minimum(len_q - i * rows, rows), mask=mask)
        tl.store(ptr + 2, first_k, mask=mask)
        tl.store(ptr + 3, len_k, mask=mask)


def make_schedule(
    offsets_q: Tensor,
    offsets_k: Tensor,
    total_q: int,
    *,
    tile_rows: int,
    resident_keys: int,
    max_tiles: int = MAX_TILES,
) -> Schedule:
    """Cut every sequence into chunks: of one query tile, or of ``max_tiles`` where ``resident_keys`` hold its keys.

    Args:
        offsets_q: (B + 1,) on a CUDA device, contiguous.
        offsets_k: (B + 1,) on the same device, contiguous.
        total_q: Query rows of the batch, below 2**31, as are key rows.
        tile_rows: Query rows of a tile.
        resident_keys: Keys that a program holds at a time.
        max_tiles: Tiles of a chunk.
    """
    num_sequences = offsets_q.shape[0] - 1
    # Every chunk but the last of its sequence holds a whole tile at least.
    bound = min(total_q // tile_rows + num_sequences, total_q)
    chunks = torch.empty(bound, 4, dtype=torch.int32, device=offsets_q.device)
    num_chunks = torch.empty(1, dtype=torch.int32, device=offsets_q.device)
    arguments = (offsets_q, offsets_k, chunks, num_chunks, num_sequences, tile_rows, resident_keys, max_tiles)
    constants = {"SORTED": num_sequences <= MAX_SORTED, "BLOCK": BLOCK, "OTHERS": OTHERS}
    call(_schedule_kernel, triton.cdiv(num_sequences, BLOCK), arguments, constants, offsets_q.device)
    return Schedule(chunks, num_chunks)
