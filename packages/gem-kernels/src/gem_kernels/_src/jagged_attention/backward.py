"""Triton backward of jagged attention, deterministic: no gradient row is written by two programs.

``delta`` first (row sums of dO * O), then one kernel per side: dK and dV over the queries of a key tile, dQ over the
keys of a query tile. Where every key sequence fits one tile and no window cuts pairs, the first kernel sees all keys of
its queries, writes dQ too, and the second is not launched.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import fit_lengths, power_of_two, precision_of
from gem_kernels._src.attention.launch import (
    capability_of,
    clamp_window,
    device_guard,
    make_grid,
    one_key_tile,
    unit_stride,
)
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.jagged_attention.bias_tiles import add_bias, load_times
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.forward import RUNTIME_SIZES
from gem_kernels._src.tiles.index import locate_tile
from gem_kernels._src.tiles.mask import key_range, pair_mask, query_range
from gem_kernels._src.tiles.memory import load_row_scalars, load_rows, sequence_bounds, store_rows

_LOG2E = tl.constexpr(math.log2(math.e))
DELTA_ROWS = 16
"""Rows of one program of the delta kernel: memory-bound, so many small programs."""


@triton.jit(do_not_specialize=["num_rows"])
def _jagged_attention_bwd_delta_kernel(
    out_ptr,  # (T_q, H, D_v) contiguous
    do_ptr,  # (T_q, H, D_v)
    dlse_ptr,  # (T_q, H) float32 contiguous, read only if HAS_DLSE
    delta_ptr,  # (T_q, H) float32 contiguous
    stride_dot,
    stride_doh,
    num_rows,  # T_q * H
    num_heads,
    HAS_DLSE: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Write delta = rowsum(dO * O) - dLSE: dS = P * (dP - delta) then holds with and without a gradient of the LSE."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_DV)
    mask = rows < num_rows
    mask_rd = mask[:, None] & (offs_d < D_V)[None, :]
    out = tl.load(out_ptr + rows[:, None] * D_V + offs_d[None, :], mask=mask_rd, other=0.0).to(tl.float32)
    offs_do = rows // num_heads * stride_dot + rows % num_heads * stride_doh
    do = tl.load(do_ptr + offs_do[:, None] + offs_d[None, :], mask=mask_rd, other=0.0).to(tl.float32)
    delta = tl.sum(out * do, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=mask, other=0.0)
    tl.store(delta_ptr + rows, delta, mask=mask)


@triton.jit
def load_log2_lse(lse_ptr, first, len_q, num_heads, BLOCK_M: tl.constexpr):
    """LSE in base 2; +inf for rows past the sequence and rows without a key, so that exp2(score - lse) is 0 there."""
    lse = load_row_scalars(lse_ptr, first, len_q, num_heads, BLOCK_M, float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E)


@triton.jit
def _accumulate_dkdv(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    position_ptr,
    time_ptr,
    times_q_ptr,
    times_n,
    stride_qt,
    stride_dot,
    stride_dqt,
    num_heads,
    start,
    stop,
    offs_n,
    len_q,
    len_k,
    left,
    right,
    scale,
    radius,
    num_buckets,
    MASKED: tl.constexpr,
    WRITE_DQ: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    TIME_SHIFT: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what queries [start, stop) of one head give to the key tile's dK (without the scale) and dV.

    Tiles are transposed, (keys, queries), so that both products take P and dS as they are.
    """
    for m in range(start, stop, BLOCK_M):
        q = load_rows(q_ptr, m, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        lse = load_log2_lse(lse_ptr, m, len_q, num_heads, BLOCK_M)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        offs_m = m + tl.arange(0, BLOCK_M)
        if HAS_POSITION or HAS_TIME:
            times_m = load_times(times_q_ptr, m, len_q, BLOCK_M, HAS_TIME)
            scores = add_bias(
                scores, scale * _LOG2E, position_ptr, time_ptr, offs_m[None, :], offs_n[:, None], times_m[None, :],
                times_n[:, None], radius, num_buckets, HAS_POSITION, HAS_TIME, TIME_SHIFT,
            )  # fmt: skip
            p = tl.exp2(scores - lse[None, :])
        else:
            p = tl.exp2(scores * (scale * _LOG2E) - lse[None, :])
        if MASKED:
            mask = pair_mask(offs_m[None, :], offs_n[:, None], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(mask, p, 0.0)
        do = load_rows(do_ptr, m, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = load_row_scalars(delta_ptr, m, len_q, num_heads, BLOCK_M, 0.0)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if WRITE_DQ:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * scale
            store_rows(dq_ptr, dq, tl.cast(m, tl.int32), len_q, stride_dqt, BLOCK_M, D, BLOCK_D)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _jagged_attention_bwd_dkdv_kernel(
    q_ptr,  # (T_q, H, D)
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    lse_ptr,  # (T_q, H) float32
    delta_ptr,  # (T_q, H) float32
    dq_ptr,  # (T_q, H, D), written only if WRITE_DQ
    dk_ptr,  # (T_k, H_kv, D)
    dv_ptr,  # (T_k, H_kv, D_v)
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    tile_offsets_ptr,  # (B + 1,), read only if SEARCH
    position_ptr,  # (H, 2 * radius + 1) float32 contiguous, read only if HAS_POSITION
    time_ptr,  # (H, num_buckets) float32 contiguous, read only if HAS_TIME
    times_q_ptr,  # (T_q,), read only if HAS_TIME
    times_k_ptr,  # (T_k,), read only if HAS_TIME
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dot,
    stride_doh,
    num_sequences,
    num_heads_kv,
    num_tiles,
    num_steps,
    left,
    right,
    scale,
    radius,
    num_buckets,
    GROUP: tl.constexpr,  # query heads per key head
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    TIME_SHIFT: tl.constexpr,
    SEARCH: tl.constexpr,
    WRITE_DQ: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b, head_kv, tile = locate_tile(
        tl.program_id(0), tile_offsets_ptr, num_sequences, num_heads_kv, num_tiles, num_steps, SEARCH
    )
    start_k, len_k = sequence_bounds(offsets_k_ptr, b)
    first = tile * BLOCK_N
    # With WRITE_DQ the only tile also stands for empty key sequences, whose queries need their zero dQ.
    if first >= len_k and not WRITE_DQ:
        return
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    head_kv = head_kv.to(tl.int64)
    num_heads = num_heads_kv * GROUP
    k_ptr += start_k * stride_kt + head_kv * stride_kh
    v_ptr += start_k * stride_vt + head_kv * stride_vh
    dk_ptr += (start_k * num_heads_kv + head_kv) * D
    dv_ptr += (start_k * num_heads_kv + head_kv) * D_V

    k = load_rows(k_ptr, first, len_k, stride_kt, BLOCK_N, D, BLOCK_D)
    v = load_rows(v_ptr, first, len_k, stride_vt, BLOCK_N, D_V, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    offs_n = first + tl.arange(0, BLOCK_N)
    if HAS_TIME:
        times_q_ptr += start_q
        times_k_ptr += start_k
    times_n = load_times(times_k_ptr, first, len_k, BLOCK_N, HAS_TIME)
    # Rows past the queries have p = 0 by their LSE, and padded keys spoil only their own rows of dK and dV, which are
    # not stored: without a window only a dQ written here needs a mask.
    low, split, high = query_range(first, len_q, left, right, BLOCK_N, BLOCK_M, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        split = high
    for group in range(GROUP):
        head = head_kv * GROUP + group
        q_h = q_ptr + start_q * stride_qt + head * stride_qh
        do_h = do_ptr + start_q * stride_dot + head * stride_doh
        dq_h = dq_ptr + (start_q * num_heads + head) * D
        lse_h = lse_ptr + start_q * num_heads + head
        delta_h = delta_ptr + start_q * num_heads + head
        position_h = position_ptr
        if HAS_POSITION:
            position_h += head * (2 * radius + 1)
        time_h = time_ptr
        if HAS_TIME:
            time_h += head * num_buckets
        if HAS_LEFT or HAS_RIGHT:
            dk, dv = _accumulate_dkdv(
                dk, dv, k, v, q_h, do_h, dq_h, lse_h, delta_h, position_h, time_h, times_q_ptr, times_n,
                stride_qt, stride_dot, num_heads * D, num_heads,
                low, tl.minimum(split, high), offs_n, len_q, len_k, left, right, scale, radius, num_buckets,
                True, WRITE_DQ, HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
        if not HAS_LEFT:
            dk, dv = _accumulate_dkdv(
                dk, dv, k, v, q_h, do_h, dq_h, lse_h, delta_h, position_h, time_h, times_q_ptr, times_n,
                stride_qt, stride_dot, num_heads * D, num_heads,
                split, high, offs_n, len_q, len_k, left, right, scale, radius, num_buckets,
                WRITE_DQ, WRITE_DQ, HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip

    store_rows(dk_ptr, dk * scale, first, len_k, num_heads_kv * D, BLOCK_N, D, BLOCK_D)
    store_rows(dv_ptr, dv, first, len_k, num_heads_kv * D_V, BLOCK_N, D_V, BLOCK_DV)


@triton.jit
def _accumulate_dq(
    dq,
    q,
    do,
    lse,
    delta,
    k_ptr,
    v_ptr,
    position_ptr,
    time_ptr,
    times_k_ptr,
    times_m,
    stride_kt,
    stride_vt,
    start,
    stop,
    offs_m,
    len_k,
    left,
    right,
    scale_log2,
    radius,
    num_buckets,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    TIME_SHIFT: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what keys [start, stop) give to dQ, without the scale."""
    for n in range(start, stop, BLOCK_N):
        k = load_rows(k_ptr, n, len_k, stride_kt, BLOCK_N, D, BLOCK_D)
        v = load_rows(v_ptr, n, len_k, stride_vt, BLOCK_N, D_V, BLOCK_DV)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        offs_n = n + tl.arange(0, BLOCK_N)
        if HAS_POSITION or HAS_TIME:
            times_n = load_times(times_k_ptr, n, len_k, BLOCK_N, HAS_TIME)
            scores = add_bias(
                scores, scale_log2, position_ptr, time_ptr, offs_m[:, None], offs_n[None, :], times_m[:, None],
                times_n[None, :], radius, num_buckets, HAS_POSITION, HAS_TIME, TIME_SHIFT,
            )  # fmt: skip
            p = tl.exp2(scores - lse[:, None])
        else:
            p = tl.exp2(scores * scale_log2 - lse[:, None])
        if MASKED:
            # Padded keys too: their p may overflow, and inf * 0 would reach dQ.
            mask = pair_mask(offs_m[:, None], offs_n[None, :], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(mask, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _jagged_attention_bwd_dq_kernel(
    q_ptr,  # (T_q, H, D)
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    lse_ptr,  # (T_q, H) float32
    delta_ptr,  # (T_q, H) float32
    dq_ptr,  # (T_q, H, D)
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    tile_offsets_ptr,  # (B + 1,), read only if SEARCH
    position_ptr,  # (H, 2 * radius + 1) float32 contiguous, read only if HAS_POSITION
    time_ptr,  # (H, num_buckets) float32 contiguous, read only if HAS_TIME
    times_q_ptr,  # (T_q,), read only if HAS_TIME
    times_k_ptr,  # (T_k,), read only if HAS_TIME
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dot,
    stride_doh,
    num_sequences,
    num_heads,
    num_tiles,
    num_steps,
    left,
    right,
    scale,
    radius,
    num_buckets,
    GROUP: tl.constexpr,  # query heads per key head
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    TIME_SHIFT: tl.constexpr,
    SEARCH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b, head, tile = locate_tile(
        tl.program_id(0), tile_offsets_ptr, num_sequences, num_heads, num_tiles, num_steps, SEARCH
    )
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    first = tile * BLOCK_M
    if first >= len_q:
        return
    start_k, len_k = sequence_bounds(offsets_k_ptr, b)
    head = head.to(tl.int64)
    q_ptr += start_q * stride_qt + head * stride_qh
    do_ptr += start_q * stride_dot + head * stride_doh
    k_ptr += start_k * stride_kt + head // GROUP * stride_kh
    v_ptr += start_k * stride_vt + head // GROUP * stride_vh
    dq_ptr += (start_q * num_heads + head) * D
    row = start_q * num_heads + head
    if HAS_POSITION:
        position_ptr += head * (2 * radius + 1)
    if HAS_TIME:
        time_ptr += head * num_buckets
        times_q_ptr += start_q
        times_k_ptr += start_k

    q = load_rows(q_ptr, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
    do = load_rows(do_ptr, first, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
    lse = load_log2_lse(lse_ptr + row, first, len_q, num_heads, BLOCK_M)
    delta = load_row_scalars(delta_ptr + row, first, len_q, num_heads, BLOCK_M, 0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    offs_m = first + tl.arange(0, BLOCK_M)
    times_m = load_times(times_q_ptr, first, len_q, BLOCK_M, HAS_TIME)
    scale_log2 = scale * _LOG2E
    low, split, high = key_range(first, len_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        split = low
    else:
        dq = _accumulate_dq(
            dq, q, do, lse, delta, k_ptr, v_ptr, position_ptr, time_ptr, times_k_ptr, times_m, stride_kt, stride_vt,
            low, split, offs_m, len_k, left, right, scale_log2, radius, num_buckets,
            False, HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    dq = _accumulate_dq(
        dq, q, do, lse, delta, k_ptr, v_ptr, position_ptr, time_ptr, times_k_ptr, times_m, stride_kt, stride_vt,
        split, high, offs_m, len_k, left, right, scale_log2, radius, num_buckets,
        True, HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
        D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
    )  # fmt: skip
    store_rows(dq_ptr, dq * scale, first, len_q, num_heads * D, BLOCK_M, D, BLOCK_D)


def launch_delta(out: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """(T_q, H) float32 row sums of dO * O, less dLSE."""
    total, num_heads, dim_v = out.shape
    delta = torch.empty(total, num_heads, dtype=torch.float32, device=out.device)
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    _jagged_attention_bwd_delta_kernel[(triton.cdiv(total * num_heads, DELTA_ROWS),)](
        out,
        do,
        dlse,
        delta,
        do.stride(0),
        do.stride(1),
        total * num_heads,
        num_heads,
        HAS_DLSE=dlse is not None,
        D_V=dim_v,
        BLOCK_R=DELTA_ROWS,
        BLOCK_DV=power_of_two(dim_v),
        num_warps=4,
    )
    return delta


def launch_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    bias: Bias | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq (T_q, H, D), dk (T_k, H_kv, D), dv (T_k, H_kv, D_v), contiguous."""
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    out, lse = out.contiguous(), lse.contiguous()
    offsets_q, offsets_k = offsets_q.contiguous(), offsets_k.contiguous()
    (total_q, num_heads, dim), (total_k, num_heads_kv, dim_v) = q.shape, v.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if total_q == 0 or total_k == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    left, right = clamp_window(left, right)
    bias = (bias or Bias()).tables(torch.float32)
    biases = (bias.position, bias.time, bias.times_q, bias.times_k)
    widest, capability = max(dim, dim_v), capability_of(q)
    shared = {
        "GROUP": num_heads // num_heads_kv,
        "D": dim,
        "D_V": dim_v,
        "BLOCK_D": power_of_two(dim),
        "BLOCK_DV": power_of_two(dim_v),
        "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0,
        "PRECISION": precision_of(q.dtype),
        **bias.flags(),
    }
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2])
    with device_guard(q):
        delta = launch_delta(out, do, dlse)
        write_dq = one_key_tile(select, q, v, max_seqlen_k, left, right, offsets_k.shape[0] - 1)
        config = select("dqdkdv" if write_dq else "dkdv", widest, q.dtype, capability, has_bias=bias.is_set)
        config = fit_lengths(config, max_seqlen_q, max_seqlen_k)
        grid = make_grid(
            "jagged_attention", offsets_k, total_k, max_seqlen_k, config.block_n, num_heads_kv, padded=write_dq
        )
        _jagged_attention_bwd_dkdv_kernel[(grid.size,)](
            q,
            k,
            v,
            do,
            lse,
            delta,
            dq,
            dk,
            dv,
            offsets_q,
            offsets_k,
            grid.tile_offsets,
            *biases,
            *strides,
            offsets_k.shape[0] - 1,
            num_heads_kv,
            grid.num_tiles,
            grid.num_steps,
            left,
            right,
            scale,
            bias.radius,
            bias.num_buckets,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SEARCH=grid.search,
            WRITE_DQ=write_dq,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **shared,
        )
        if write_dq:
            return dq, dk, dv
        config = select("dq", widest, q.dtype, capability, has_bias=bias.is_set)
        config = fit_lengths(config, max_seqlen_q, max_seqlen_k)
        grid = make_grid("jagged_attention", offsets_q, total_q, max_seqlen_q, config.block_m, num_heads)
        _jagged_attention_bwd_dq_kernel[(grid.size,)](
            q,
            k,
            v,
            do,
            lse,
            delta,
            dq,
            offsets_q,
            offsets_k,
            grid.tile_offsets,
            *biases,
            *strides,
            offsets_q.shape[0] - 1,
            num_heads,
            grid.num_tiles,
            grid.num_steps,
            left,
            right,
            scale,
            bias.radius,
            bias.num_buckets,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SEARCH=grid.search,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **shared,
        )
    return dq, dk, dv
