"""Tiles of rows between global memory and registers; masked lanes read 0 and are never written."""

import triton
import triton.language as tl


@triton.jit
def sequence_bounds(offsets_ptr, b):
    """(first packed row as int64, number of rows as int32) of sequence b."""
    start = tl.load(offsets_ptr + b).to(tl.int64)
    stop = tl.load(offsets_ptr + b + 1).to(tl.int64)
    return start, (stop - start).to(tl.int32)


@triton.jit
def load_rows(ptr, first, num_rows, stride_t, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """(ROWS, BLOCK_DIM) tile of rows first, first + 1, ... of the sequence at ``ptr``; zero from ``num_rows`` on."""
    local = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_DIM)
    # int64 before the stride: a row index times a stride passes 2**31 in real batches.
    ptrs = ptr + tl.cast(first, tl.int64) * stride_t + (local.to(tl.int64)[:, None] * stride_t + offs_d[None, :])
    mask = (local < num_rows - first)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (offs_d < DIM)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, tile, first, num_rows, stride_t, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Inverse of ``load_rows``: writes only rows below ``num_rows`` and channels below ``DIM``."""
    local = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_DIM)
    ptrs = ptr + tl.cast(first, tl.int64) * stride_t + (local.to(tl.int64)[:, None] * stride_t + offs_d[None, :])
    mask = (local < num_rows - first)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (offs_d < DIM)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row_scalars(ptr, first, num_rows, stride_t, ROWS: tl.constexpr, other):
    """(ROWS,) float32 vector of one number per row; ``other`` from ``num_rows`` on."""
    local = tl.arange(0, ROWS)
    ptrs = ptr + tl.cast(first, tl.int64) * stride_t + local.to(tl.int64) * stride_t
    return tl.load(ptrs, mask=local < num_rows - first, other=other)
