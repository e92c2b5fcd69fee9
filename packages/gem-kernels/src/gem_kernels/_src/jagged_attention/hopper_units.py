"""Units of work of the backward in one kernel: tiles of keys, the order in which their parts of dq are added.

Programs take units by turns, the first P at once, and each tile of queries meets the key tiles of its sequence in
ascending order. Were those neighbours, they would all wait for one another. Key tiles of a few sequences, of about the
same work, take turns instead: by the time that a program begins with one, the one before it is that much ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call
from gem_kernels._src.attention.hopper.order import length_of, order_by_work
from gem_kernels._src.attention.hopper.schedule import OTHERS


class Units(NamedTuple):
    """Key tiles of a batch, those of a sequence in ascending order."""

    chunks: Tensor
    """(N, 4) int32: first key row, keys, first query row, queries. N is a bound, not all of it is written."""
    blocks: Tensor
    """(N,) int32: tiles of the same sequence before this one."""
    num_chunks: Tensor
    """(1,) int32, on the device: how many rows are written."""


@triton.jit(do_not_specialize=["num_sequences"])
def _jagged_attention_hopper_units_kernel(
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    order_ptr,  # (B,) int32
    chunks_ptr,  # (N, 4) int32
    blocks_ptr,  # (N,) int32
    num_chunks_ptr,  # (1,) int32
    num_sequences,
    TILE_ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    OTHERS: tl.constexpr,
):
    first = tl.program_id(0) * SIDE
    before = 0
    total = 0
    for start in range(0, num_sequences, OTHERS):
        places = start + tl.arange(0, OTHERS)
        inside = places < num_sequences
        others = tl.load(order_ptr + places, mask=inside, other=0)
        tiles = ((length_of(offsets_k_ptr, others, inside) + TILE_ROWS - 1) // TILE_ROWS).to(tl.int32)
        total += tl.sum(tiles, 0)
        before += tl.sum(tl.where(places < first, tiles, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(num_chunks_ptr, total)
    places = first + tl.arange(0, SIDE)
    inside = places < num_sequences
    b = tl.load(order_ptr + places, mask=inside, other=0)
    first_q = tl.load(offsets_q_ptr + b, mask=inside, other=0).to(tl.int32)
    first_k = tl.load(offsets_k_ptr + b, mask=inside, other=0).to(tl.int32)
    len_q = length_of(offsets_q_ptr, b, inside).to(tl.int32)
    len_k = length_of(offsets_k_ptr, b, inside).to(tl.int32)
    tiles = (len_k + TILE_ROWS - 1) // TILE_ROWS
    for i in range(tl.max(tiles, 0)):
        mask = i < tiles
        count = tl.cumsum(mask.to(tl.int32), 0)
        place = (before + count - 1).to(tl.int64)
        ptr = chunks_ptr + place * 4
        tl.store(ptr, first_k + i * TILE_ROWS, mask=mask)
        tl.store(ptr + 1, tl.minimum(len_k - i * TILE_ROWS, TILE_ROWS), mask=mask)
        tl.store(ptr + 2, first_q, mask=mask)
        tl.store(ptr + 3, len_q, mask=mask)
        tl.store(blocks_ptr + place, i, mask=mask)
        before += tl.max(count, 0)


def make_units(offsets_q: Tensor, offsets_k: Tensor, total_k: int, *, tile_rows: int, side: int) -> Units:
    """Cut the keys of every sequence into tiles; those of ``side`` sequences take turns.

    Args:
        offsets_q: (B + 1,) on a CUDA device, contiguous, as is ``offsets_k``.
        offsets_k: (B + 1,) on the same device.
        total_k: Key rows of the batch, below 2**31, as are query rows.
        tile_rows: Keys of a tile.
        side: Sequences whose tiles take turns, a power of two.
    """
    num_sequences = offsets_k.shape[0] - 1
    # Every tile but the last of its sequence is whole.
    bound = min(total_k // tile_rows + num_sequences, total_k)
    device = offsets_k.device
    order = order_by_work(offsets_q, offsets_k)
    chunks = torch.empty(bound, 4, dtype=torch.int32, device=device)
    blocks = torch.empty(bound, dtype=torch.int32, device=device)
    num_chunks = torch.empty(1, dtype=torch.int32, device=device)
    call(
        _jagged_attention_hopper_units_kernel,
        triton.cdiv(num_sequences, side),
        (offsets_q, offsets_k, order, chunks, blocks, num_chunks, num_sequences),
        {"TILE_ROWS": tile_rows, "SIDE": side, "OTHERS": OTHERS},
        device,
    )
    return Units(chunks, blocks, num_chunks)
