"""Triton kernel that transposes each matrix of a batch, tile by tile, so that reads and writes are both in rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.launch import device_guard

MAX_TILE = 64
"""Rows and columns of a tile."""


@triton.jit
def transpose_kernel(
    x_ptr,  # (B, M, N)
    out_ptr,  # (B, N, M)
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles_m: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    tile = pid % (tiles_m * tiles_n)
    # int64 before the sizes: a batch may have more than 2**31 elements.
    start = (pid // (tiles_m * tiles_n)).to(tl.int64) * (M * N)
    offs_m = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    x = tl.load(
        x_ptr + start + (offs_m[:, None] * N + offs_n[None, :]), mask=mask_m[:, None] & mask_n[None, :], other=0.0
    )
    tl.store(
        out_ptr + start + (offs_n[:, None] * M + offs_m[None, :]), tl.trans(x), mask=mask_n[:, None] & mask_m[None, :]
    )


def blocks(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of matrices (rows, columns)."""
    return min(power_of_two(rows), MAX_TILE), min(power_of_two(columns), MAX_TILE)


def launch(x: Tensor) -> Tensor:
    """(B, M, N) -> (B, N, M), contiguous."""
    x = x.contiguous()
    batch, rows, columns = x.shape
    out = torch.empty(batch, columns, rows, dtype=x.dtype, device=x.device)
    if x.numel() > 0:
        block_m, block_n = blocks(rows, columns)
        tiles = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n)
        with device_guard(x):
            transpose_kernel[(batch * tiles,)](x, out, M=rows, N=columns, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4)
    return out
