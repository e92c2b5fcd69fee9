"""Backward kernels of the block where every sequence has few keys: gradients of the rows, and of keys and values."""

import triton
import triton.language as tl

from gem_kernels._src.gdpa_norm_block.few_keys_tiles import attend, head_gradients, normalize
from gem_kernels._src.tiles.index import locate_tile
from gem_kernels._src.tiles.memory import load_row_scalars, load_rows, sequence_bounds, store_rows


# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
@triton.jit(do_not_specialize=["num_sequences", "num_tiles", "num_steps"])
def dq_kernel(
    do_ptr,  # (T_q, N), N = HEADS * D
    q_ptr,  # (T_q, N)
    k_ptr,  # (T_k, N)
    v_ptr,  # (T_k, N)
    dq_ptr,  # (T_q, N)
    mean_ptr,  # (T_q,)
    rstd_ptr,  # (T_q,)
    rrms_ptr,  # (T_q,)
    inner_ptr,  # (T_q,), written for the other kernel
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    tile_offsets_ptr,  # (B + 1,), read only if SEARCH
    stride_dot,
    stride_qt,
    stride_kt,
    stride_vt,
    num_sequences,
    num_tiles,
    num_steps,
    pre_scale,
    post_scale,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUERY_RESIDUAL: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Gradient of q. Each norm's backward needs a sum over all heads first, so the heads are gone through twice."""
    N: tl.constexpr = HEADS * D
    b, _, tile = locate_tile(tl.program_id(0), tile_offsets_ptr, num_sequences, 1, num_tiles, num_steps, SEARCH)
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    first = tile * BLOCK_M
    if first >= len_q:
        return
    start_k, len_k = sequence_bounds(offsets_k_ptr, b)
    do_ptr += start_q * stride_dot
    q_ptr += start_q * stride_qt
    dq_ptr += start_q * N
    k_ptr += start_k * stride_kt
    v_ptr += start_k * stride_vt
    mean = load_row_scalars(mean_ptr + start_q, first, len_q, 1, BLOCK_M, 0.0)
    rstd = load_row_scalars(rstd_ptr + start_q, first, len_q, 1, BLOCK_M, 0.0)
    rrms = load_row_scalars(rrms_ptr + start_q, first, len_q, 1, BLOCK_M, 0.0)

    inner = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Loops and no unrolling: unrolled, the loads of all heads are moved to the front and no register is left.
    for head in range(HEADS):
        q = load_rows(q_ptr + head * D, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        dout = load_rows(do_ptr + head * D, first, len_q, stride_dot, BLOCK_M, D, BLOCK_D)
        k = load_rows(k_ptr + head * D, 0, len_k, stride_kt, BLOCK_K, D, BLOCK_D)
        v = load_rows(v_ptr + head * D, 0, len_k, stride_vt, BLOCK_K, D, BLOCK_D)
        unit = normalize(q, mean, rstd, D, BLOCK_D)
        _scores, _activated, total = attend(unit, k, v, pre_scale, post_scale, ACTIVATION, QUERY_RESIDUAL)
        inner += tl.sum(total * dout.to(tl.float32), 1)
    inner *= rrms * rrms / N
    sum_dunit = tl.zeros([BLOCK_M], dtype=tl.float32)
    sum_product = tl.zeros([BLOCK_M], dtype=tl.float32)
    for head in range(HEADS):
        q = load_rows(q_ptr + head * D, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        dout = load_rows(do_ptr + head * D, first, len_q, stride_dot, BLOCK_M, D, BLOCK_D)
        k = load_rows(k_ptr + head * D, 0, len_k, stride_kt, BLOCK_K, D, BLOCK_D)
        v = load_rows(v_ptr + head * D, 0, len_k, stride_vt, BLOCK_K, D, BLOCK_D)
        unit, _activated, dscores, dtotal = head_gradients(
            q, dout, k, v, mean, rstd, rrms, inner, pre_scale, post_scale,
            ACTIVATION, DERIVATIVE, QUERY_RESIDUAL, D, BLOCK_D,
        )  # fmt: skip
        dunit = tl.dot(dscores, k)
        if QUERY_RESIDUAL:
            dunit += dtotal
        sum_dunit += tl.sum(dunit, 1)
        sum_product += tl.sum(dunit * unit, 1)
        store_rows(dq_ptr + head * D, dunit, first, len_q, N, BLOCK_M, D, BLOCK_D)
    # Other threads of this program wrote what is read back here, from the cache.
    tl.debug_barrier()
    dunit = load_rows(dq_ptr, first, len_q, N, BLOCK_M, N, BLOCK_N).to(tl.float32)
    unit = normalize(load_rows(q_ptr, first, len_q, stride_qt, BLOCK_M, N, BLOCK_N), mean, rstd, N, BLOCK_N)
    dq = (dunit - (sum_dunit / N)[:, None] - unit * (sum_product / N)[:, None]) * rstd[:, None]
    if RESIDUAL:
        dq += load_rows(do_ptr, first, len_q, stride_dot, BLOCK_M, N, BLOCK_N).to(tl.float32)
    store_rows(dq_ptr, dq, first, len_q, N, BLOCK_M, N, BLOCK_N)
    local = tl.arange(0, BLOCK_M)
    tl.store(inner_ptr + start_q + first + local, inner, mask=local < len_q - first)


@triton.jit
def dkdv_kernel(
    do_ptr,  # (T_q, N), N = HEADS * D
    q_ptr,  # (T_q, N)
    k_ptr,  # (T_k, N)
    v_ptr,  # (T_k, N)
    dk_ptr,  # (T_k, N)
    dv_ptr,  # (T_k, N)
    mean_ptr,  # (T_q,)
    rstd_ptr,  # (T_q,)
    rrms_ptr,  # (T_q,)
    inner_ptr,  # (T_q,)
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    stride_dot,
    stride_qt,
    stride_kt,
    stride_vt,
    pre_scale,
    post_scale,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_RESIDUAL: tl.constexpr,
):
    """Gradients of the keys and values of one sequence and head, summed over its rows in their order."""
    N: tl.constexpr = HEADS * D
    b = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    start_k, len_k = sequence_bounds(offsets_k_ptr, b)
    do_ptr += start_q * stride_dot + head * D
    q_ptr += start_q * stride_qt + head * D
    k = load_rows(k_ptr + start_k * stride_kt + head * D, 0, len_k, stride_kt, BLOCK_K, D, BLOCK_D)
    v = load_rows(v_ptr + start_k * stride_vt + head * D, 0, len_k, stride_vt, BLOCK_K, D, BLOCK_D)
    dk = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
    for first in range(0, len_q, BLOCK_M):
        mean = load_row_scalars(mean_ptr + start_q, first, len_q, 1, BLOCK_M, 0.0)
        rstd = load_row_scalars(rstd_ptr + start_q, first, len_q, 1, BLOCK_M, 0.0)
        rrms = load_row_scalars(rrms_ptr + start_q, first, len_q, 1, BLOCK_M, 0.0)
        inner = load_row_scalars(inner_ptr + start_q, first, len_q, 1, BLOCK_M, 0.0)
        q = load_rows(q_ptr, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        dout = load_rows(do_ptr, first, len_q, stride_dot, BLOCK_M, D, BLOCK_D)
        unit, activated, dscores, dtotal = head_gradients(
            q, dout, k, v, mean, rstd, rrms, inner, pre_scale, post_scale,
            ACTIVATION, DERIVATIVE, QUERY_RESIDUAL, D, BLOCK_D,
        )  # fmt: skip
        dk = tl.dot(tl.trans(dscores), unit.to(k.dtype), dk)
        dv = tl.dot(tl.trans(activated), dtotal.to(v.dtype), dv)
    at = start_k * N + head * D
    store_rows(dk_ptr + at, dk, 0, len_k, N, BLOCK_K, D, BLOCK_D)
    store_rows(dv_ptr + at, dv * post_scale, 0, len_k, N, BLOCK_K, D, BLOCK_D)
