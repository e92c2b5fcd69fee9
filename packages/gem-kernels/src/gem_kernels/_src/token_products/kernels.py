"""Triton kernels of x (xᵀ y): columns of x are independent but for their sum, so one reading serves each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.tiles.matrix import load_matrix, store_matrix

MAX_TOKENS = 128
MAX_RANK = 64
_MAX_BLOCK_D = 64


@triton.jit
def token_products_fwd_kernel(
    x_ptr,  # (B, TOKENS, DIM) contiguous
    y_ptr,  # (B, TOKENS, RANK) contiguous
    out_ptr,  # (B, TOKENS, RANK) contiguous
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # int64 before the sizes: a batch may have more than 2**31 elements.
    b = tl.program_id(0).to(tl.int64)
    x_ptr += b * (TOKENS * DIM)
    y = load_matrix(y_ptr + b * (TOKENS * RANK), 0, TOKENS, RANK, BLOCK_T, BLOCK_R)
    out = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for column in range(0, DIM, BLOCK_D):
        x = load_matrix(x_ptr, column, TOKENS, DIM, BLOCK_T, BLOCK_D)
        inner = tl.dot(tl.trans(x), y).to(x.dtype)
        out = tl.dot(x, inner, out)
    store_matrix(out_ptr + b * (TOKENS * RANK), out, 0, TOKENS, RANK, BLOCK_T, BLOCK_R)


@triton.jit
def token_products_bwd_kernel(
    x_ptr,  # (B, TOKENS, DIM) contiguous
    y_ptr,  # (B, TOKENS, RANK) contiguous
    dout_ptr,  # (B, TOKENS, RANK) contiguous
    dx_ptr,  # (B, TOKENS, DIM) contiguous
    dy_ptr,  # (B, TOKENS, RANK) contiguous
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """With c = xᵀ y and dc = xᵀ dout: dx = dout cᵀ + y dcᵀ and dy = x dc."""
    b = tl.program_id(0).to(tl.int64)
    x_ptr += b * (TOKENS * DIM)
    dx_ptr += b * (TOKENS * DIM)
    y = load_matrix(y_ptr + b * (TOKENS * RANK), 0, TOKENS, RANK, BLOCK_T, BLOCK_R)
    dout = load_matrix(dout_ptr + b * (TOKENS * RANK), 0, TOKENS, RANK, BLOCK_T, BLOCK_R)
    dy = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    for column in range(0, DIM, BLOCK_D):
        x = load_matrix(x_ptr, column, TOKENS, DIM, BLOCK_T, BLOCK_D)
        inner = tl.dot(tl.trans(x), y).to(x.dtype)
        dinner = tl.dot(tl.trans(x), dout).to(x.dtype)
        dx = tl.dot(dout, tl.trans(inner))
        dx = tl.dot(y, tl.trans(dinner), dx)
        store_matrix(dx_ptr, dx, column, TOKENS, DIM, BLOCK_T, BLOCK_D)
        dy = tl.dot(x, dinner, dy)
    store_matrix(dy_ptr + b * (TOKENS * RANK), dy, 0, TOKENS, RANK, BLOCK_T, BLOCK_R)


def constants(tokens: int, dim: int, rank: int) -> dict[str, int]:
    """Compile-time arguments."""
    return {
        "TOKENS": tokens,
        "DIM": dim,
        "RANK": rank,
        "BLOCK_T": power_of_two(tokens),
        "BLOCK_D": min(power_of_two(dim), _MAX_BLOCK_D),
        "BLOCK_R": power_of_two(rank),
    }


def launch_forward(x: Tensor, y: Tensor) -> Tensor:
    """(B, n, d) and (B, n, k) -> (B, n, k), contiguous."""
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if out.numel():
        with device_guard(x):
            flags = constants(x.shape[1], x.shape[2], y.shape[2])
            token_products_fwd_kernel[(x.shape[0],)](x, y, out, **flags, num_warps=4)
    return out


def launch_backward(x: Tensor, y: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y, contiguous."""
    x, y, dout = x.contiguous(), y.contiguous(), dout.contiguous()
    dx, dy = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, y))
    if x.numel() and y.numel():
        with device_guard(x):
            flags = constants(x.shape[1], x.shape[2], y.shape[2])
            token_products_bwd_kernel[(x.shape[0],)](x, y, dout, dx, dy, **flags, num_warps=4)
    return dx, dy
