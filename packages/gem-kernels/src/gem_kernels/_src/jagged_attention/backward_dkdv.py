"""Triton dK and dV of jagged attention over the queries of a key tile: those of all query sequences that read the keys.

Where every key sequence fits one tile and no window cuts pairs, the kernel meets all keys of its queries and writes dQ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import fit_lengths
from gem_kernels._src.attention.launch import capability_of, make_grid, one_key_tile, row_strides
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.jagged_attention.bias_tiles import add_bias, load_times
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.forward import RUNTIME_SIZES
from gem_kernels._src.jagged_attention.short import fit_pairs
from gem_kernels._src.tiles.index import locate_tile
from gem_kernels._src.tiles.mask import pair_mask, query_range
from gem_kernels._src.tiles.memory import load_row_scalars, load_rows, sequence_bounds, store_rows

_LOG2E = tl.constexpr(math.log2(math.e))


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


@triton.jit
def _accumulate_sequence(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    offsets_q_ptr,
    position_ptr,
    time_ptr,
    times_q_ptr,
    times_n,
    stride_qt,
    stride_qh,
    stride_dot,
    stride_doh,
    b,  # the query sequence
    head_kv,
    num_heads,
    first,  # of the tile's keys
    len_k,
    left,
    right,
    scale,
    radius,
    num_buckets,
    BROADCAST_Q: tl.constexpr,
    WRITE_DQ: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    TIME_SHIFT: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the queries of one sequence and of all heads of the group give to the key tile's dK and dV."""
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    offs_n = first + tl.arange(0, BLOCK_N)
    if HAS_TIME:
        times_q_ptr += start_q
    # Rows past the queries have p = 0 by their LSE, and padded keys spoil only their own rows of dK and dV, which are
    # not stored: without a window only a dQ written here needs a mask.
    low, split, high = query_range(first, len_q, left, right, BLOCK_N, BLOCK_M, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        split = high
    for group in range(GROUP):
        head = head_kv * GROUP + group
        q_h = q_ptr + head * stride_qh
        if not BROADCAST_Q:
            q_h += start_q * stride_qt
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
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _jagged_attention_bwd_dkdv_kernel(
    q_ptr,  # (T_q, H, D), or (S, H, D) if BROADCAST_Q; T_q is B S below
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    lse_ptr,  # (T_q, H) float32
    delta_ptr,  # (T_q, H) float32
    dq_ptr,  # (T_q, H, D), written only if WRITE_DQ
    dk_ptr,  # (T_k, H_kv, D), heads contiguous
    dv_ptr,  # (T_k, H_kv, D_v), heads contiguous
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (R + 1,), R = B without request_starts
    tile_offsets_ptr,  # (R + 1,), read only if SEARCH
    request_starts_ptr,  # (R + 1,) or None
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
    stride_dkt,
    stride_dvt,
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
    BROADCAST_Q: tl.constexpr,
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
    head_kv = head_kv.to(tl.int64)
    num_heads = num_heads_kv * GROUP
    k_ptr += start_k * stride_kt + head_kv * stride_kh
    v_ptr += start_k * stride_vt + head_kv * stride_vh
    dk_ptr += start_k * stride_dkt + head_kv * D
    dv_ptr += start_k * stride_dvt + head_kv * D_V

    k = load_rows(k_ptr, first, len_k, stride_kt, BLOCK_N, D, BLOCK_D)
    v = load_rows(v_ptr, first, len_k, stride_vt, BLOCK_N, D_V, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    if HAS_TIME:
        times_k_ptr += start_k
    times_n = load_times(times_k_ptr, first, len_k, BLOCK_N, HAS_TIME)
    if request_starts_ptr is not None:
        for i in range(tl.load(request_starts_ptr + b), tl.load(request_starts_ptr + b + 1)):
            dk, dv = _accumulate_sequence(
                dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, offsets_q_ptr, position_ptr, time_ptr,
                times_q_ptr, times_n, stride_qt, stride_qh, stride_dot, stride_doh,
                i, head_kv, num_heads, first, len_k, left, right, scale, radius, num_buckets,
                BROADCAST_Q, WRITE_DQ, GROUP, HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
                D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
    else:
        dk, dv = _accumulate_sequence(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, offsets_q_ptr, position_ptr, time_ptr,
            times_q_ptr, times_n, stride_qt, stride_qh, stride_dot, stride_doh,
            b, head_kv, num_heads, first, len_k, left, right, scale, radius, num_buckets,
            BROADCAST_Q, WRITE_DQ, GROUP, HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip

    store_rows(dk_ptr, dk * scale, first, len_k, stride_dkt, BLOCK_N, D, BLOCK_D)
    store_rows(dv_ptr, dv, first, len_k, stride_dvt, BLOCK_N, D_V, BLOCK_DV)


def launch_dkdv(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    pairing: Pairing,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    bias: Bias,
    shared: Mapping[str, Any],
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Dq where this kernel can write it, else None; dk and dv, contiguous or where they were given.

    ``shared`` are the flags of all kernels.
    """
    num_heads_kv = k.shape[1]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if dk is None else dk
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if dv is None else dv
    write_dq = not pairing.broadcast_q and one_key_tile(select, q, v, max_seqlen_k, left, right, pairing.num_keys)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if write_dq else None
    widest = max(q.shape[2], v.shape[2])
    config = select(
        "dqdkdv" if write_dq else "dkdv",
        widest,
        q.dtype,
        capability_of(q),
        has_bias=bias.is_set,
        shared_rows=pairing.indexed,
        requests=pairing.request_index is not None,
    )
    if not write_dq:
        config = fit_pairs("dkdv", config, widest, pairing, left, right, bias)
    columns = shared["BLOCK_D"] + shared["BLOCK_DV"]
    config = fit_lengths(config, pairing.max_seqlen_q, max_seqlen_k, columns_per_key=columns)
    grid = make_grid(
        "jagged_attention", pairing.offsets_k, k.shape[0], max_seqlen_k, config.block_n, num_heads_kv, padded=write_dq
    )
    _jagged_attention_bwd_dkdv_kernel[(grid.size,)](
        q,
        k,
        v,
        do,
        lse,
        delta,
        q if dq is None else dq,
        dk,
        dv,
        pairing.offsets_q,
        pairing.offsets_k,
        grid.tile_offsets,
        pairing.request_starts(),
        *bias[:4],
        *row_strides(q, k, v, do),
        dk.stride(0),
        dv.stride(0),
        pairing.num_keys,
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
        BROADCAST_Q=pairing.broadcast_q,
        WRITE_DQ=write_dq,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **shared,
    )
    return dq, dk, dv
