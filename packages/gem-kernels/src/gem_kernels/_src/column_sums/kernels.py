"""Triton kernel of sums over rows: parts of the rows first, which torch then adds; the same bits on every run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.launch import device_guard

ROWS = 32
MAX_BLOCK_N = 128
_PROGRAMS = 1056
"""In all, some for each multiprocessor of a large GPU."""


@triton.jit(do_not_specialize=["num_rows"])
def column_sums_kernel(
    x_ptr,  # (M, N), columns contiguous
    partial_ptr,  # (P, N) float32
    stride_x,
    num_rows,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    part, parts = tl.program_id(0) // tiles, tl.num_programs(0) // tiles
    columns = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    in_width = columns < N
    total = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for first in range(part * ROWS, num_rows, parts * ROWS):
        # int64 before the stride: a row index times a stride passes 2**31 in real batches.
        rows = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & in_width[None, :]
        total += tl.load(x_ptr + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(partial_ptr + part.to(tl.int64) * N + columns, tl.sum(total, 0), mask=in_width)


def launch(x: Tensor) -> Tensor:
    """(M, N) -> (N,) float32."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, width = x.shape
    block_n = min(power_of_two(width), MAX_BLOCK_N)
    tiles = max(1, triton.cdiv(width, block_n))
    # Few enough that adding the parts costs little.
    parts = max(1, min(triton.cdiv(num_rows, 8 * ROWS), _PROGRAMS // tiles))
    partial = torch.empty(parts, width, dtype=torch.float32, device=x.device)
    if width:
        with device_guard(x):
            column_sums_kernel[(parts * tiles,)](
                x, partial, x.stride(0), num_rows, N=width, ROWS=ROWS, BLOCK_N=block_n, num_warps=4
            )
    return partial.sum(0)
