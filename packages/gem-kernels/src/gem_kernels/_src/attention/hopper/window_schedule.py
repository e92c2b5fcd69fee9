"""Units of work of Hopper's kernels where a window cuts pairs: tiles of one side, and the rows that they may meet.

Made on the device by one launch, as in ``schedule``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call
from gem_kernels._src.attention.hopper.schedule import BLOCK, MAX_SORTED, OTHERS


class WindowSchedule(NamedTuple):
    """Tiles of a batch."""

    chunks: Tensor
    """(N, 4) int32: first own row, own rows, first other row, other rows. N is a bound, not all of it is written."""
    num_chunks: Tensor
    """(1,) int32, on the device: how many rows of ``chunks`` are written."""
    shifts: Tensor
    """(N,) int32: position of the first own row less that of the first other row, within the sequence."""


@triton.jit
def _load(offsets_ptr, other_offsets_ptr, b, num_sequences, left, right, tile_rows, SORTED: tl.constexpr):
    """(first own row, own rows, first other row, other rows, tiles, rank key) of sequences ``b``."""
    mask = b < num_sequences
    first = tl.load(offsets_ptr + b, mask=mask, other=0).to(tl.int32)
    length = tl.load(offsets_ptr + b + 1, mask=mask, other=0).to(tl.int32) - first
    other_first = tl.load(other_offsets_ptr + b, mask=mask, other=0).to(tl.int32)
    other_length = tl.load(other_offsets_ptr + b + 1, mask=mask, other=0).to(tl.int32) - other_first
    tiles = tl.where(mask, (length + tile_rows - 1) // tile_rows, 0)
    rank = num_sequences - b.to(tl.int64)
    if SORTED:
        # What a tile in the middle meets.
        met = tl.minimum(other_length.to(tl.int64), left.to(tl.int64) + right + tile_rows)
        rank += met * tl.minimum(length, tile_rows) * (num_sequences + 1)
    return first, length, other_first, other_length, tiles, rank


@triton.jit(do_not_specialize=["num_sequences", "left", "right", "tile_rows"])
def _window_schedule_kernel(
    offsets_ptr,  # (B + 1,)
    other_offsets_ptr,  # (B + 1,)
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,  # (1,) int32
    shifts_ptr,  # (N,) int32
    num_sequences,
    left,
    right,
    tile_rows,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, length, other_first, other_length, tiles, rank = _load(
        offsets_ptr, other_offsets_ptr, b, num_sequences, left, right, tile_rows, SORTED
    )
    before = tl.zeros([BLOCK], tl.int32)
    total = 0
    for start in range(0, num_sequences, OTHERS):
        others = start + tl.arange(0, OTHERS)
        _first, _length, _other_first, _other_length, other_tiles, other_rank = _load(
            offsets_ptr, other_offsets_ptr, others, num_sequences, left, right, tile_rows, SORTED
        )
        before += tl.sum(tl.where(other_rank[None, :] > rank[:, None], other_tiles[None, :], 0), 1)
        total += tl.sum(other_tiles, 0)
    if tl.program_id(0) == 0:
        tl.store(num_chunks_ptr, total)
    for i in range(tl.max(tiles, 0)):
        mask = i < tiles
        row = i * tile_rows
        rows = tl.minimum(length - row, tile_rows)
        low = tl.minimum(tl.maximum(row - left, 0), other_length)
        high = tl.minimum(row + rows + right, other_length)
        ptr = chunks_ptr + (before + i).to(tl.int64) * 4
        tl.store(ptr, first + row, mask=mask)
        tl.store(ptr + 1, rows, mask=mask)
        tl.store(ptr + 2, other_first + low, mask=mask)
        tl.store(ptr + 3, tl.maximum(high - low, 0), mask=mask)
        tl.store(shifts_ptr + before + i, row - low, mask=mask)


def make_window_schedule(
    offsets: Tensor, other_offsets: Tensor, total: int, *, tile_rows: int, left: int, right: int
) -> WindowSchedule:
    """Tiles of ``tile_rows`` rows, and the rows of the other side from ``left`` before their first to ``right`` behind.

    Args:
        offsets: (B + 1,) of the side that is cut, on a CUDA device, contiguous.
        other_offsets: (B + 1,) on the same device, contiguous.
        total: Rows of the side that is cut, below 2**31, as are those of the other.
        tile_rows: Rows of a tile.
        left: From 0 to 2**30.
        right: From 0 to 2**30.
    """
    num_sequences = offsets.shape[0] - 1
    # Every tile but the last of its sequence is whole.
    bound = min(total // tile_rows + num_sequences, total)
    chunks = torch.empty(bound, 4, dtype=torch.int32, device=offsets.device)
    shifts = torch.empty(bound, dtype=torch.int32, device=offsets.device)
    num_chunks = torch.empty(1, dtype=torch.int32, device=offsets.device)
    arguments = (offsets, other_offsets, chunks, num_chunks, shifts, num_sequences, left, right, tile_rows)
    constants = {"SORTED": num_sequences <= MAX_SORTED, "BLOCK": BLOCK, "OTHERS": OTHERS}
    call(_window_schedule_kernel, triton.cdiv(num_sequences, BLOCK), arguments, constants, offsets.device)
    return WindowSchedule(chunks, num_chunks, shifts)
