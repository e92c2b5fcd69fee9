"""Triton matmuls with a norm inside: of their input (lazily, on the product) or of their output (on whole rows)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import precision_of
from gem_kernels._src.attention.launch import capability_of, device_guard
from gem_kernels._src.norm_linear import hopper_launch
from gem_kernels._src.norm_linear.configs import MAX_FUSED_NORM, select
from gem_kernels._src.norm_linear.rows import launch_norm_rows, row_major


@triton.jit
def _product(
    x_ptr,  # (num_rows, K) from the tile's first row on
    w_ptr,  # (N, K)
    stride_xm,
    stride_wn,
    num_rows,
    first_n,
    one,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SQUARES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(BLOCK_M, BLOCK_N) float32 of x wᵀ and, if SQUARES, (BLOCK_M,) sums of the squares of x's rows, else zeros.

    Rows of the tile that lie outside the tensors repeat the last one: their results are never stored, and the loop
    needs no masks.
    """
    # int64 before the stride: a row index times a stride passes 2**31 in real batches.
    offs_m = tl.minimum(tl.arange(0, BLOCK_M), num_rows - 1).to(tl.int64)
    offs_n = tl.minimum(first_n + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[:, None] * stride_wn + offs_k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # One sum per column of the tile: the loop adds without exchange between threads.
    squares = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            mask_k = (offs_k < K - k)[None, :]
            x = tl.load(x_ptrs, mask=mask_k, other=0.0)
            w = tl.load(w_ptrs, mask=mask_k, other=0.0)
        if SQUARES:
            # Times 1, which the compiler does not know: product and squares both read registers. A tile that a product
            # of Hopper reads in shared memory and another operation in registers gets one buffer too few (Triton 3.6
            # to 3.9), and the copy of a later tile overwrites it while the product is still at work.
            wide = x.to(tl.float32) * one
            squares += wide * wide
            x = wide.to(x.dtype)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    return acc, tl.sum(squares, 1)


@triton.jit
def _load_columns(ptr, num_rows, first_n, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_M, BLOCK_N) float32 of columns first_n, first_n + 1, ... of a contiguous tensor; 0 outside it."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask = (offs_m < num_rows)[:, None]
    if N % BLOCK_N != 0:
        mask = mask & (offs_n < N)[None, :]
    return tl.load(ptr + (offs_m[:, None] * N + offs_n[None, :]), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_columns(ptr, x, num_rows, first_n, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Inverse of ``_load_columns``, in the dtype of ``ptr``."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask = (offs_m < num_rows)[:, None]
    if N % BLOCK_N != 0:
        mask = mask & (offs_n < N)[None, :]
    tl.store(ptr + (offs_m[:, None] * N + offs_n[None, :]), x.to(ptr.dtype.element_ty), mask=mask)


# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
@triton.jit(do_not_specialize=["num_rows"])
def _rmsnorm_linear_fwd_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (N, K), the norm's weight folded in
    bias_ptr,  # (N,), read only if HAS_BIAS
    out_ptr,  # (M, N)
    rrms_ptr,  # (M,)
    stride_xm,
    stride_wn,
    num_rows,
    eps,
    one,  # 1.0
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    # Tiles of the same rows are neighbours, so that x comes from memory once.
    first = (pid // TILES_N).to(tl.int64) * BLOCK_M
    first_n = (pid % TILES_N) * BLOCK_N
    num_rows -= first
    acc, squares = _product(
        x_ptr + first * stride_xm, w_ptr, stride_xm, stride_wn, num_rows, first_n, one,
        N, K, BLOCK_M, BLOCK_N, BLOCK_K, True, PRECISION,
    )  # fmt: skip
    rrms = tl.rsqrt(squares / K + eps)
    out = acc * rrms[:, None]
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if HAS_BIAS:
        out += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    _store_columns(out_ptr + first * N, out, num_rows, first_n, N, BLOCK_M, BLOCK_N)
    if first_n == 0:
        tl.store(rrms_ptr + first + offs_m, rrms, mask=offs_m < num_rows)


@triton.jit
def _with_bias(acc, bias_ptr, first_n, N: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr):
    if HAS_BIAS:
        offs_n = first_n + tl.arange(0, BLOCK_N)
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _moments(x, FIRST: tl.constexpr, N: tl.constexpr, IS_LAYER: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mean (0 unless IS_LAYER) of a tile's columns below N, and sum of squared distances from it, row by row."""
    COUNT: tl.constexpr = N - FIRST if N - FIRST < BLOCK_N else BLOCK_N
    inside = (tl.arange(0, BLOCK_N) < COUNT)[None, :]
    if COUNT < BLOCK_N:
        x = tl.where(inside, x, 0.0)
    if IS_LAYER:
        mean = tl.sum(x, 1) / COUNT
        x -= mean[:, None]
        if COUNT < BLOCK_N:
            x = tl.where(inside, x, 0.0)
    else:
        mean = tl.zeros([x.shape[0]], dtype=tl.float32)
    return mean, tl.sum(x * x, 1)


@triton.jit
def _store_normalized(
    unit,
    out_ptr,
    unit_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    num_rows,
    first_n,
    N: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Apply the affine part to a tile of normalised rows and store it; with an affine part, the tile before it too."""
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if HAS_NORM_WEIGHT or HAS_NORM_BIAS:
        _store_columns(unit_ptr, unit, num_rows, first_n, N, BLOCK_M, BLOCK_N)
    if HAS_NORM_WEIGHT:
        unit *= tl.load(norm_weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if HAS_NORM_BIAS:
        unit += tl.load(norm_bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    _store_columns(out_ptr, unit, num_rows, first_n, N, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_norm_fwd_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (N, K)
    bias_ptr,  # (N,), read only if HAS_BIAS
    norm_weight_ptr,  # (N,), read only if HAS_NORM_WEIGHT
    norm_bias_ptr,  # (N,), read only if HAS_NORM_BIAS
    out_ptr,  # (M, N)
    unit_ptr,  # (M, N), written only with a norm weight or bias
    rstd_ptr,  # (M,)
    stride_xm,
    stride_wn,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Whole rows of the product in one program: N <= 2 BLOCK_N."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    num_rows -= first
    x_ptr += first * stride_xm
    out_ptr += first * N
    unit_ptr += first * N
    left, _ = _product(
        x_ptr, w_ptr, stride_xm, stride_wn, num_rows, 0, 1.0, N, K, BLOCK_M, BLOCK_N, BLOCK_K, False, PRECISION
    )
    left = _with_bias(left, bias_ptr, 0, N, HAS_BIAS, BLOCK_N)
    mean, squares = _moments(left, 0, N, IS_LAYER, BLOCK_N)
    if BLOCK_N < N:
        # Registers hold one product: the first waits in the output, where it stays in L2, and its moments are combined
        # with those of the second.
        _store_columns(out_ptr, left, num_rows, 0, N, BLOCK_M, BLOCK_N)
        right, _ = _product(
            x_ptr,
            w_ptr,
            stride_xm,
            stride_wn,
            num_rows,
            BLOCK_N,
            1.0,
            N,
            K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            False,
            PRECISION,
        )
        right = _with_bias(right, bias_ptr, BLOCK_N, N, HAS_BIAS, BLOCK_N)
        mean_right, squares_right = _moments(right, BLOCK_N, N, IS_LAYER, BLOCK_N)
        squares += squares_right
        if IS_LAYER:
            distance = mean_right - mean
            mean += distance * ((N - BLOCK_N) / N)
            squares += distance * distance * (BLOCK_N * (N - BLOCK_N) / N)
        rstd = tl.rsqrt(squares / N + eps)
        _store_normalized(
            (right - mean[:, None]) * rstd[:, None], out_ptr, unit_ptr, norm_weight_ptr, norm_bias_ptr, num_rows,
            BLOCK_N, N, HAS_NORM_WEIGHT, HAS_NORM_BIAS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        # Other threads of the program may have written what this one reads.
        tl.debug_barrier()
        left = _load_columns(out_ptr, num_rows, 0, N, BLOCK_M, BLOCK_N)
    else:
        rstd = tl.rsqrt(squares / N + eps)
    _store_normalized(
        (left - mean[:, None]) * rstd[:, None], out_ptr, unit_ptr, norm_weight_ptr, norm_bias_ptr,
        num_rows, 0, N, HAS_NORM_WEIGHT, HAS_NORM_BIAS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    tl.store(rstd_ptr + first + offs_m, rstd, mask=offs_m < num_rows)


def fold(weight: Tensor, norm_weight: Tensor | None) -> Tensor:
    """Weight (N, K) with the norm's weight (K,) multiplied into its columns; rounded once, to the dtype of both."""
    return weight if norm_weight is None else (weight.float() * norm_weight.float()).to(weight.dtype)


def launch_rmsnorm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Output (M, N) in the dtype of x, and the reciprocal root mean squares (M,) float32 of its rows."""
    folded = fold(weight, norm_weight)
    if x.dtype == torch.float32:
        # Full float32 products keep their operands in registers; the library's are faster than Triton's.
        normalized = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _, rrms = launch_norm_rows(x, normalized, None, None, None, is_layer=False, eps=eps)
        return torch.nn.functional.linear(normalized, folded, bias), rrms
    if hopper_launch.applies(x, folded, norm_of_output=False):
        return hopper_launch.launch_hopper_rmsnorm_linear(x, folded, bias, eps)
    return launch_fused_rmsnorm_linear(x, folded, bias, eps)


def launch_fused_rmsnorm_linear(x: Tensor, folded: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """``launch_rmsnorm_linear`` by the kernel of this module."""
    x, folded = row_major(x), row_major(folded)
    (num_rows, in_features), out_features = x.shape, folded.shape[0]
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    rrms = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out, rrms
    config = select("rmsnorm_linear", in_features, out_features, capability_of(x))
    grid = triton.cdiv(num_rows, config.block_m) * triton.cdiv(out_features, config.block_n)
    with device_guard(x):
        _rmsnorm_linear_fwd_kernel[(grid,)](
            x,
            folded,
            folded if bias is None else bias,
            out,
            rrms,
            x.stride(0),
            folded.stride(0),
            num_rows,
            eps,
            1.0,
            N=out_features,
            K=in_features,
            HAS_BIAS=bias is not None,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            PRECISION=precision_of(x.dtype),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out, rrms


def launch_linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    is_layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (M, N), its value before the affine part (empty if there is none), and the factors (M,) of the norm."""
    if x.dtype == torch.float32 or weight.shape[0] > MAX_FUSED_NORM:
        hidden = torch.nn.functional.linear(x, weight, bias)
        normalized, rstd = launch_norm_rows(hidden, hidden, norm_weight, norm_bias, None, is_layer=is_layer, eps=eps)
        if normalized is None:
            return hidden, x.new_empty(0, weight.shape[0]), rstd
        return hidden, normalized, rstd
    if hopper_launch.applies(x, weight, norm_of_output=True):
        return hopper_launch.launch_hopper_linear_norm(x, weight, bias, norm_weight, norm_bias, is_layer, eps)
    return launch_fused_linear_norm(x, weight, bias, norm_weight, norm_bias, is_layer, eps)


def launch_fused_linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    is_layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``launch_linear_norm`` by the kernel of this module, for N <= ``MAX_FUSED_NORM``."""
    x, weight = row_major(x), row_major(weight)
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    is_affine = norm_weight is not None or norm_bias is not None
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    normalized = torch.empty(num_rows if is_affine else 0, out_features, dtype=x.dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out, normalized, rstd
    config = select("linear_norm", in_features, out_features, capability_of(x))
    with device_guard(x):
        _linear_norm_fwd_kernel[(triton.cdiv(num_rows, config.block_m),)](
            x,
            weight,
            weight if bias is None else bias,
            weight if norm_weight is None else norm_weight,
            weight if norm_bias is None else norm_bias,
            out,
            normalized if is_affine else out,
            rstd,
            x.stride(0),
            weight.stride(0),
            num_rows,
            eps,
            N=out_features,
            K=in_features,
            IS_LAYER=is_layer,
            HAS_BIAS=bias is not None,
            HAS_NORM_WEIGHT=norm_weight is not None,
            HAS_NORM_BIAS=norm_bias is not None,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            PRECISION=precision_of(x.dtype),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out, normalized, rstd
