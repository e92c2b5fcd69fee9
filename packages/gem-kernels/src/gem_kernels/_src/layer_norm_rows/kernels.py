"""Triton kernels of a layer norm without weights, over whole rows; the backward adds what several readers send back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.gdpa_norm_block.rows import layer_norm_kernel
from gem_kernels._src.norm_linear.configs import select_backward_rows, select_rows
from gem_kernels._src.norm_linear.rows import load_row_tile, row_major, store_row_tile

MAX_READERS = 4
"""Gradients of the normalised rows that one backward adds."""


# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_rows_bwd_kernel(
    dy0_ptr,  # (M, N)
    dy1_ptr,  # (M, N) or None, as the two that follow
    dy2_ptr,
    dy3_ptr,
    x_ptr,  # (M, N)
    mean_ptr,  # (M,)
    rstd_ptr,  # (M,)
    direct_ptr,  # (M, N) or None: gradient of x from those that read it without the norm
    dx_ptr,  # (M, N)
    stride_dy0m,
    stride_dy1m,
    stride_dy2m,
    stride_dy3m,
    stride_xm,
    stride_directm,
    num_rows,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    dy = load_row_tile(dy0_ptr, first, num_rows, stride_dy0m, N, ROWS, BLOCK_N)
    if dy1_ptr is not None:
        dy += load_row_tile(dy1_ptr, first, num_rows, stride_dy1m, N, ROWS, BLOCK_N)
    if dy2_ptr is not None:
        dy += load_row_tile(dy2_ptr, first, num_rows, stride_dy2m, N, ROWS, BLOCK_N)
    if dy3_ptr is not None:
        dy += load_row_tile(dy3_ptr, first, num_rows, stride_dy3m, N, ROWS, BLOCK_N)
    x = load_row_tile(x_ptr, first, num_rows, stride_xm, N, ROWS, BLOCK_N)
    mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    unit = (x - mean) * rstd
    if N != BLOCK_N:
        unit = tl.where((tl.arange(0, BLOCK_N) < N)[None, :], unit, 0.0)
    dx = rstd * (dy - (tl.sum(dy, 1) / N)[:, None] - unit * (tl.sum(dy * unit, 1) / N)[:, None])
    if direct_ptr is not None:
        dx += load_row_tile(direct_ptr, first, num_rows, stride_directm, N, ROWS, BLOCK_N)
    store_row_tile(dx_ptr, dx, first, num_rows, N, ROWS, BLOCK_N)


def launch_forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised rows (M, N), contiguous, and their means and factors (M,) float32."""
    x = row_major(x)
    num_rows, features = x.shape
    out = torch.empty(num_rows, features, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(num_rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if num_rows > 0:
        config = select_rows(features)
        with device_guard(x):
            layer_norm_kernel[(triton.cdiv(num_rows, config.rows),)](
                x,
                x,
                x,
                out,
                mean,
                rstd,
                x.stride(0),
                num_rows,
                eps,
                N=features,
                HAS_WEIGHT=False,
                HAS_BIAS=False,
                ROWS=config.rows,
                BLOCK_N=config.block_n,
                num_warps=config.num_warps,
            )
    return out, mean, rstd


def launch_backward(grads: Sequence[Tensor], x: Tensor, mean: Tensor, rstd: Tensor, direct: Tensor | None) -> Tensor:
    """Gradient of x (M, N), contiguous, in its dtype, from one to four gradients of the normalised rows."""
    x = row_major(x)
    num_rows, features = x.shape
    dys = [row_major(dy) for dy in grads]
    direct = None if direct is None else row_major(direct)
    dx = torch.empty(num_rows, features, dtype=x.dtype, device=x.device)
    absent = MAX_READERS - len(dys)
    if num_rows > 0:
        config = select_backward_rows(features)
        with device_guard(x):
            layer_norm_rows_bwd_kernel[(triton.cdiv(num_rows, config.rows),)](
                *dys,
                *(None for _ in range(absent)),
                x,
                mean,
                rstd,
                direct,
                dx,
                *(dy.stride(0) for dy in dys),
                *(0 for _ in range(absent)),
                x.stride(0),
                0 if direct is None else direct.stride(0),
                num_rows,
                N=features,
                ROWS=config.rows,
                BLOCK_N=config.block_n,
                num_warps=config.num_warps,
            )
    return dx
