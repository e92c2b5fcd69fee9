"""Triton kernels on whole rows: a norm, and its backward with the sums over rows that its parameters need."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.norm_linear.configs import MAX_NORM, select_backward_rows, select_rows

MAX_PROGRAMS = 1024
"""Of a backward that sums over rows, each with its own share of the sums: some eight per multiprocessor of a large GPU.
A constant, so that every GPU sums in the same order."""


def row_major(x: Tensor) -> Tensor:
    """``x`` (M, N) with contiguous rows, copied only if they are not."""
    return x if x.stride(1) == 1 else x.contiguous()


def backward_programs(num_rows: int, rows: int, sums: bool) -> int:
    """Programs of a backward over tiles of ``rows`` rows: one a tile, which is faster, unless they sum over rows."""
    tiles = triton.cdiv(num_rows, rows)
    return min(tiles, MAX_PROGRAMS) if sums else tiles


@triton.jit
def load_row_tile(ptr, first, num_rows, stride_m, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """(ROWS, BLOCK_N) float32 of rows first, first + 1, ...; 0 outside the tensor."""
    rows = first + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (offs_n < N)[None, :]
    return tl.load(ptr + rows[:, None] * stride_m + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_row_tile(ptr, tile, first, num_rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write a tile of rows to a contiguous tensor, in its dtype; nothing outside it."""
    rows = first + tl.arange(0, ROWS)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (offs_n < N)[None, :]
    tl.store(ptr + rows[:, None] * N + offs_n[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_features(ptr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """(1, BLOCK_N) float32 of one number per feature."""
    offs_n = tl.arange(0, BLOCK_N)
    return tl.load(ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]


# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
@triton.jit(do_not_specialize=["num_rows"])
def _norm_rows_kernel(
    x_ptr,  # (M, N)
    out_ptr,  # (M, N); may be x
    unit_ptr,  # (M, N), written only with a weight or bias
    weight_ptr,  # (N,), read only if HAS_WEIGHT
    bias_ptr,  # (N,), read only if HAS_BIAS
    rstd_ptr,  # (M,)
    stride_xm,
    num_rows,
    eps,
    N: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    x = load_row_tile(x_ptr, first, num_rows, stride_xm, N, ROWS, BLOCK_N)
    if IS_LAYER:
        x = tl.where((tl.arange(0, BLOCK_N) < N)[None, :], x - (tl.sum(x, 1) / N)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    x *= rstd[:, None]
    if HAS_WEIGHT or HAS_BIAS:
        store_row_tile(unit_ptr, x, first, num_rows, N, ROWS, BLOCK_N)
    if HAS_WEIGHT:
        x *= load_features(weight_ptr, N, BLOCK_N)
    if HAS_BIAS:
        x += load_features(bias_ptr, N, BLOCK_N)
    store_row_tile(out_ptr, x, first, num_rows, N, ROWS, BLOCK_N)
    rows = first + tl.arange(0, ROWS)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rows_bwd_kernel(
    dy_ptr,  # (M, N)
    unit_ptr,  # (M, N): normalised rows, or rows before the norm if RAW
    weight_ptr,  # (N,), read only if HAS_WEIGHT
    rstd_ptr,  # (M,)
    dx_ptr,  # (M, N); may be dy
    unit_out_ptr,  # (M, N): normalised rows, written only if RAW
    sums_ptr,  # (3, programs, N): of dy * unit, of dy, of dx; written only if SUMS
    stride_dym,
    stride_um,
    num_rows,
    N: tl.constexpr,
    IS_LAYER: tl.constexpr,
    RAW: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    sum_dweight = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    sum_dy = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    sum_dx = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for tile in range(pid, tl.cdiv(num_rows, ROWS), num_programs):
        first = tl.cast(tile, tl.int64) * ROWS
        rows = first + tl.arange(0, ROWS)
        dy = load_row_tile(dy_ptr, first, num_rows, stride_dym, N, ROWS, BLOCK_N)
        unit = load_row_tile(unit_ptr, first, num_rows, stride_um, N, ROWS, BLOCK_N)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        if RAW:
            unit *= rstd
            store_row_tile(unit_out_ptr, unit, first, num_rows, N, ROWS, BLOCK_N)
        if SUMS:
            sum_dweight += dy * unit
            sum_dy += dy
        if HAS_WEIGHT:
            dy *= load_features(weight_ptr, N, BLOCK_N)
        dx = dy - unit * (tl.sum(dy * unit, 1) / N)[:, None]
        if IS_LAYER:
            dx -= (tl.sum(dy, 1) / N)[:, None]
        dx *= rstd
        if SUMS:
            sum_dx += dx
        store_row_tile(dx_ptr, dx, first, num_rows, N, ROWS, BLOCK_N)
    if SUMS:
        offs_n = tl.arange(0, BLOCK_N)
        sums_ptr += pid.to(tl.int64) * N
        stride = num_programs.to(tl.int64) * N
        tl.store(sums_ptr + offs_n, tl.sum(sum_dweight, 0), mask=offs_n < N)
        tl.store(sums_ptr + stride + offs_n, tl.sum(sum_dy, 0), mask=offs_n < N)
        tl.store(sums_ptr + 2 * stride + offs_n, tl.sum(sum_dx, 0), mask=offs_n < N)


def check_features(op: str, features: int) -> None:
    """Raise for a norm over more features than one program holds."""
    if features > MAX_NORM:
        raise ValueError(f"{op}: a norm on CUDA must be over at most {MAX_NORM} features, got {features}; split them.")


def launch_norm_rows(
    x: Tensor,
    out: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized: Tensor | None,
    *,
    is_layer: bool,
    eps: float,
) -> tuple[Tensor | None, Tensor]:
    """Write the norm of the rows of ``x`` (M, N) to ``out``, contiguous, which may be ``x``.

    Returns the rows before the affine part (``normalized`` or new; None without an affine part) and the factors (M,).
    """
    x = row_major(x)
    num_rows, features = x.shape
    is_affine = weight is not None or bias is not None
    if is_affine and normalized is None:
        normalized = torch.empty(num_rows, features, dtype=out.dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows > 0:
        config = select_rows(features)
        with device_guard(x):
            _norm_rows_kernel[(triton.cdiv(num_rows, config.rows),)](
                x,
                out,
                out if normalized is None else normalized,
                x if weight is None else weight,
                x if bias is None else bias,
                rstd,
                x.stride(0),
                num_rows,
                eps,
                N=features,
                IS_LAYER=is_layer,
                HAS_WEIGHT=weight is not None,
                HAS_BIAS=bias is not None,
                ROWS=config.rows,
                BLOCK_N=config.block_n,
                num_warps=config.num_warps,
            )
    return normalized, rstd


class RowSums(NamedTuple):
    """Sums over rows, (N,) float32."""

    dweight: Tensor
    """Of dy * unit."""
    dy: Tensor
    dx: Tensor


def launch_norm_rows_backward(
    dy: Tensor,
    unit: Tensor,
    rstd: Tensor,
    *,
    weight: Tensor | None = None,
    is_layer: bool,
    dx: Tensor | None = None,
    unit_out: Tensor | None = None,
    sums: bool = False,
) -> tuple[Tensor, RowSums | None]:
    """Gradient (M, N) of the rows before the norm, and if ``sums`` the sums over rows.

    ``unit`` holds the normalised rows or, when ``unit_out`` is given, the rows before an RMS norm, whose normalised
    rows are then written there. ``dx`` may be ``dy``.
    """
    dy, unit = row_major(dy), row_major(unit)
    num_rows, features = unit.shape
    dx = torch.empty(num_rows, features, dtype=dy.dtype, device=dy.device) if dx is None else dx
    config = select_backward_rows(features)
    programs = backward_programs(num_rows, config.rows, sums)
    partial = torch.empty(3, programs, features, dtype=torch.float32, device=dy.device) if sums else rstd
    if num_rows > 0:
        with device_guard(dy):
            _norm_rows_bwd_kernel[(programs,)](
                dy,
                unit,
                unit if weight is None else weight,
                rstd,
                dx,
                dx if unit_out is None else unit_out,
                partial,
                dy.stride(0),
                unit.stride(0),
                num_rows,
                N=features,
                IS_LAYER=is_layer,
                RAW=unit_out is not None,
                HAS_WEIGHT=weight is not None,
                SUMS=sums,
                ROWS=config.rows,
                BLOCK_N=config.block_n,
                num_warps=config.num_warps,
            )
    return dx, RowSums(*partial.sum(1)) if sums else None
