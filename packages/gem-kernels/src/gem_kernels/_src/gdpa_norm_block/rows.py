"""Triton kernels on whole rows before and after the attention, forward and backward.

A row is one token with all its heads. What the attention reads, the rows after the layer norm, is made again wherever
it is needed from q and two numbers per row.
"""

import triton
import triton.language as tl

from gem_kernels._src.norm_linear.rows import load_features, load_row_tile, store_row_tile


@triton.jit
def _normalized(
    q_ptr,
    mean_ptr,
    rstd_ptr,
    first,
    num_rows,
    stride_qt,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(ROWS, BLOCK_N) of q, the same rows normalised, and their factors (ROWS, 1); 0 outside the tensor."""
    rows = first + tl.arange(0, ROWS)
    q = load_row_tile(q_ptr, first, num_rows, stride_qt, N, ROWS, BLOCK_N)
    mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    unit = (q - mean) * rstd
    if N != BLOCK_N:
        unit = tl.where((tl.arange(0, BLOCK_N) < N)[None, :], unit, 0.0)
    return q, unit, rstd


@triton.jit
def _affine(
    x, weight_ptr, bias_ptr, N: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    if HAS_WEIGHT:
        x *= load_features(weight_ptr, N, BLOCK_N)
    if HAS_BIAS:
        x += load_features(bias_ptr, N, BLOCK_N)
    return x


# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    q_ptr,  # (T_q, N)
    weight_ptr,  # (N,), read only if HAS_WEIGHT
    bias_ptr,  # (N,), read only if HAS_BIAS
    out_ptr,  # (T_q, N)
    mean_ptr,  # (T_q,)
    rstd_ptr,  # (T_q,)
    stride_qt,
    num_rows,
    eps,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    x = load_row_tile(q_ptr, first, num_rows, stride_qt, N, ROWS, BLOCK_N)
    mean = tl.sum(x, 1) / N
    x -= mean[:, None]
    if N != BLOCK_N:
        x = tl.where((tl.arange(0, BLOCK_N) < N)[None, :], x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    x = _affine(x * rstd[:, None], weight_ptr, bias_ptr, N, BLOCK_N, HAS_WEIGHT, HAS_BIAS)
    store_row_tile(out_ptr, x, first, num_rows, N, ROWS, BLOCK_N)
    tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    attended_ptr,  # (T_q, N): output of the attention; the sum before the RMS norm from then on if KEEP
    q_ptr,  # (T_q, N)
    mean_ptr,  # (T_q,)
    rstd_ptr,  # (T_q,)
    weight_ptr,  # (N,), read only if HAS_WEIGHT
    bias_ptr,  # (N,), read only if HAS_BIAS
    rms_weight_ptr,  # (N,), read only if HAS_RMS_WEIGHT
    out_ptr,  # (T_q, N); may be attended
    rrms_ptr,  # (T_q,)
    stride_qt,
    num_rows,
    eps,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RMS_WEIGHT: tl.constexpr,
    QUERY_RESIDUAL: tl.constexpr,
    RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    x = load_row_tile(attended_ptr, first, num_rows, N, N, ROWS, BLOCK_N)
    q, unit, _ = _normalized(q_ptr, mean_ptr, rstd_ptr, first, num_rows, stride_qt, N, ROWS, BLOCK_N)
    if QUERY_RESIDUAL:
        x += _affine(unit, weight_ptr, bias_ptr, N, BLOCK_N, HAS_WEIGHT, HAS_BIAS)
    if KEEP:
        store_row_tile(attended_ptr, x, first, num_rows, N, ROWS, BLOCK_N)
    rrms = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    x = _affine(x * rrms[:, None], rms_weight_ptr, bias_ptr, N, BLOCK_N, HAS_RMS_WEIGHT, False)
    if RESIDUAL:
        x += q
    store_row_tile(out_ptr, x, first, num_rows, N, ROWS, BLOCK_N)
    tl.store(rrms_ptr + rows, rrms, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_bwd_kernel(
    dout_ptr,  # (T_q, N)
    attended_ptr,  # (T_q, N)
    q_ptr,  # (T_q, N)
    mean_ptr,  # (T_q,)
    rstd_ptr,  # (T_q,)
    rrms_ptr,  # (T_q,)
    weight_ptr,  # (N,), read only if HAS_WEIGHT
    bias_ptr,  # (N,), read only if HAS_BIAS
    rms_weight_ptr,  # (N,), read only if HAS_RMS_WEIGHT
    dtotal_ptr,  # (T_q, N), gradient of the sum before the RMS norm; may be attended
    sums_ptr,  # (programs, N): of dout times the normalised sum; written only if HAS_RMS_WEIGHT
    stride_dot,
    stride_qt,
    num_rows,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RMS_WEIGHT: tl.constexpr,
    QUERY_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    sums = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for tile in range(pid, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * ROWS
        rows = first + tl.arange(0, ROWS)
        x = load_row_tile(attended_ptr, first, num_rows, N, N, ROWS, BLOCK_N)
        if QUERY_RESIDUAL:
            _, unit, _ = _normalized(q_ptr, mean_ptr, rstd_ptr, first, num_rows, stride_qt, N, ROWS, BLOCK_N)
            x += _affine(unit, weight_ptr, bias_ptr, N, BLOCK_N, HAS_WEIGHT, HAS_BIAS)
        rrms = tl.load(rrms_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        x *= rrms
        dx = load_row_tile(dout_ptr, first, num_rows, stride_dot, N, ROWS, BLOCK_N)
        if HAS_RMS_WEIGHT:
            # A bias of the layer norm stands in rows outside the tensor too: there dx is 0.
            sums += dx * x
            dx *= load_features(rms_weight_ptr, N, BLOCK_N)
        dx = rrms * (dx - x * (tl.sum(dx * x, 1) / N)[:, None])
        store_row_tile(dtotal_ptr, dx, first, num_rows, N, ROWS, BLOCK_N)
    if HAS_RMS_WEIGHT:
        offs_n = tl.arange(0, BLOCK_N)
        tl.store(sums_ptr + pid.to(tl.int64) * N + offs_n, tl.sum(sums, 0), mask=offs_n < N)


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_bwd_kernel(
    dattended_ptr,  # (T_q, N): gradient of the attention's queries
    dtotal_ptr,  # (T_q, N), read only if QUERY_RESIDUAL
    dout_ptr,  # (T_q, N), read only if RESIDUAL
    q_ptr,  # (T_q, N)
    mean_ptr,  # (T_q,)
    rstd_ptr,  # (T_q,)
    weight_ptr,  # (N,), read only if HAS_WEIGHT
    dq_ptr,  # (T_q, N); may be dattended
    sums_ptr,  # (2, programs, N): of the gradient times the normalised rows, of the gradient; written only if SUMS
    stride_dot,
    stride_qt,
    num_rows,
    N: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    QUERY_RESIDUAL: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    sum_dweight = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    sum_dbias = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for tile in range(pid, tl.cdiv(num_rows, ROWS), num_programs):
        first = tl.cast(tile, tl.int64) * ROWS
        dx = load_row_tile(dattended_ptr, first, num_rows, N, N, ROWS, BLOCK_N)
        if QUERY_RESIDUAL:
            dx += load_row_tile(dtotal_ptr, first, num_rows, N, N, ROWS, BLOCK_N)
        _, unit, rstd = _normalized(q_ptr, mean_ptr, rstd_ptr, first, num_rows, stride_qt, N, ROWS, BLOCK_N)
        if SUMS:
            sum_dweight += dx * unit
            sum_dbias += dx
        if HAS_WEIGHT:
            dx *= load_features(weight_ptr, N, BLOCK_N)
        dx = rstd * (dx - (tl.sum(dx, 1) / N)[:, None] - unit * (tl.sum(dx * unit, 1) / N)[:, None])
        if RESIDUAL:
            dx += load_row_tile(dout_ptr, first, num_rows, stride_dot, N, ROWS, BLOCK_N)
        store_row_tile(dq_ptr, dx, first, num_rows, N, ROWS, BLOCK_N)
    if SUMS:
        offs_n = tl.arange(0, BLOCK_N)
        sums_ptr += pid.to(tl.int64) * N
        tl.store(sums_ptr + offs_n, tl.sum(sum_dweight, 0), mask=offs_n < N)
        tl.store(sums_ptr + num_programs.to(tl.int64) * N + offs_n, tl.sum(sum_dbias, 0), mask=offs_n < N)
