"""Triton dQ of jagged attention: over the keys of a tile of query rows, and of seeds over the whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import fit_lengths
from gem_kernels._src.attention.launch import capability_of, cut_batch, make_grid, row_strides
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.jagged_attention.backward_dkdv import load_log2_lse
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.jagged_attention.bias_tiles import add_bias, load_times
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.forward import RUNTIME_SIZES
from gem_kernels._src.jagged_attention.short import fit_pairs
from gem_kernels._src.tiles.index import key_sequence, locate_tile
from gem_kernels._src.tiles.mask import key_range, pair_mask
from gem_kernels._src.tiles.memory import load_row_scalars, load_rows, sequence_bounds, store_rows

_SEED_PROGRAMS = 1024
"""Programs that share the seeds' gradient: enough to fill a GPU, few enough that their partial sums stay small."""
_LOG2E = tl.constexpr(math.log2(math.e))


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


@triton.jit
def _accumulate_keys(
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
    first,  # of the tile's queries
    len_k,
    left,
    right,
    scale_log2,
    radius,
    num_buckets,
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
    """Add what one key sequence gives to the dQ of rows first, first + 1, ..., without the scale."""
    offs_m = first + tl.arange(0, BLOCK_M)
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
    return dq


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _jagged_attention_bwd_dq_kernel(
    q_ptr,  # (T_q, H, D)
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    lse_ptr,  # (T_q, H) float32
    delta_ptr,  # (T_q, H) float32
    dq_ptr,  # (T_q, H, D), heads contiguous
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (R + 1,), R = B without request_index
    tile_offsets_ptr,  # (B + 1,), read only if SEARCH
    request_index_ptr,  # (B,) or None
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
    stride_dqt,
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
    start_k, len_k = sequence_bounds(offsets_k_ptr, key_sequence(request_index_ptr, b))
    head = head.to(tl.int64)
    q_ptr += start_q * stride_qt + head * stride_qh
    do_ptr += start_q * stride_dot + head * stride_doh
    k_ptr += start_k * stride_kt + head // GROUP * stride_kh
    v_ptr += start_k * stride_vt + head // GROUP * stride_vh
    dq_ptr += start_q * stride_dqt + head * D
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
    times_m = load_times(times_q_ptr, first, len_q, BLOCK_M, HAS_TIME)
    dq = _accumulate_keys(
        dq, q, do, lse, delta, k_ptr, v_ptr, position_ptr, time_ptr, times_k_ptr, times_m, stride_kt, stride_vt,
        first, len_k, left, right, scale * _LOG2E, radius, num_buckets,
        HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
        D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
    )  # fmt: skip
    store_rows(dq_ptr, dq * scale, first, len_q, stride_dqt, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=[*RUNTIME_SIZES, "num_seeds", "sequences_per_part"])
def _jagged_attention_bwd_dq_seeds_kernel(
    q_ptr,  # (S, H, D)
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (B S, H, D_v)
    lse_ptr,  # (B S, H) float32
    delta_ptr,  # (B S, H) float32
    partial_ptr,  # (P, S, H, D) float32
    offsets_k_ptr,  # (R + 1,), R = B without request_index
    request_index_ptr,  # (B,) or None
    position_ptr,  # (H, 2 * radius + 1) float32 contiguous, read only if HAS_POSITION
    time_ptr,  # (H, num_buckets) float32 contiguous, read only if HAS_TIME
    times_q_ptr,  # (B S,), read only if HAS_TIME
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
    num_seeds,
    sequences_per_part,
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
    PRECISION: tl.constexpr,
):
    """The dQ of one tile of seeds, summed over the sequences of one part of the batch in their order."""
    pid = tl.program_id(0)
    first = pid % num_tiles * BLOCK_M
    head = (pid // num_tiles % num_heads).to(tl.int64)
    part = pid // (num_tiles * num_heads)
    if HAS_POSITION:
        position_ptr += head * (2 * radius + 1)
    if HAS_TIME:
        time_ptr += head * num_buckets
    k_ptr += head // GROUP * stride_kh
    v_ptr += head // GROUP * stride_vh
    q = load_rows(q_ptr + head * stride_qh, first, num_seeds, stride_qt, BLOCK_M, D, BLOCK_D)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin = part * sequences_per_part
    for b in range(begin, tl.minimum(begin + sequences_per_part, num_sequences)):
        start_q = tl.cast(b, tl.int64) * num_seeds
        start_k, len_k = sequence_bounds(offsets_k_ptr, key_sequence(request_index_ptr, b))
        row = start_q * num_heads + head
        do = load_rows(
            do_ptr + start_q * stride_dot + head * stride_doh, first, num_seeds, stride_dot, BLOCK_M, D_V, BLOCK_DV
        )
        lse = load_log2_lse(lse_ptr + row, first, num_seeds, num_heads, BLOCK_M)
        delta = load_row_scalars(delta_ptr + row, first, num_seeds, num_heads, BLOCK_M, 0.0)
        times_m = lse
        times_b = times_k_ptr
        if HAS_TIME:
            times_m = load_times(times_q_ptr + start_q, first, num_seeds, BLOCK_M, HAS_TIME)
            times_b = times_k_ptr + start_k
        dq = _accumulate_keys(
            dq, q, do, lse, delta, k_ptr + start_k * stride_kt, v_ptr + start_k * stride_vt, position_ptr, time_ptr,
            times_b, times_m, stride_kt, stride_vt, first, len_k, left, right, scale * _LOG2E, radius, num_buckets,
            HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    partial_ptr += (part.to(tl.int64) * num_seeds * num_heads + head) * D
    store_rows(partial_ptr, dq * scale, first, num_seeds, num_heads * D, BLOCK_M, D, BLOCK_D)


def launch_dq_of_rows(
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
    dq: Tensor | None = None,
) -> Tensor:
    """The dq (T_q, H, D), contiguous or where it was given; ``shared`` are the flags of all backward kernels."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if dq is None else dq
    config = select("dq", max(q.shape[2], v.shape[2]), q.dtype, capability_of(q), has_bias=bias.is_set)
    config = fit_pairs("dq", config, max(q.shape[2], v.shape[2]), pairing, left, right, bias)
    config = fit_lengths(config, pairing.max_seqlen_q, max_seqlen_k)
    grid = make_grid(
        "jagged_attention", pairing.offsets_q, q.shape[0], pairing.max_seqlen_q, config.block_m, q.shape[1]
    )
    _jagged_attention_bwd_dq_kernel[(grid.size,)](
        q,
        k,
        v,
        do,
        lse,
        delta,
        dq,
        pairing.offsets_q,
        pairing.offsets_k,
        grid.tile_offsets,
        pairing.request_index,
        *bias[:4],
        *row_strides(q, k, v, do),
        dq.stride(0),
        pairing.num_queries,
        q.shape[1],
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
    return dq


def launch_dq_of_seeds(
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
) -> Tensor:
    """The dq (S, H, D), contiguous: partial sums over parts of the batch, then their sum, all in float32."""
    widest = max(q.shape[2], v.shape[2])
    config = select("dq", widest, q.dtype, capability_of(q), has_bias=bias.is_set, shared_rows=True)
    config = fit_lengths(config, pairing.max_seqlen_q, max_seqlen_k)
    num_seeds, num_heads, dim = q.shape
    num_tiles = -(-num_seeds // config.block_m)
    num_parts, sequences_per_part = cut_batch(pairing.num_queries, _SEED_PROGRAMS, num_tiles * num_heads)
    partial = torch.empty(num_parts, num_seeds, num_heads, dim, dtype=torch.float32, device=q.device)
    _jagged_attention_bwd_dq_seeds_kernel[(num_tiles * num_heads * num_parts,)](
        q,
        k,
        v,
        do,
        lse,
        delta,
        partial,
        pairing.offsets_k,
        pairing.request_index,
        *bias[:4],
        *row_strides(q, k, v, do),
        pairing.num_queries,
        num_heads,
        num_tiles,
        num_seeds,
        sequences_per_part,
        left,
        right,
        scale,
        bias.radius,
        bias.num_buckets,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **shared,
    )
    return partial.sum(0).to(q.dtype)
