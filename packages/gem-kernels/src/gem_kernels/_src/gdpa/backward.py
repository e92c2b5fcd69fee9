"""Triton backward of GDPA, deterministic: no gradient row is written by two programs. Nothing was saved but q, k, v.

One kernel per side: dK and dV over the queries of a key tile, dQ over the keys of a query tile. Where every key
sequence fits one tile and no window cuts pairs, the first kernel sees all keys of its queries, writes dQ too, and the
second is not launched. Padded rows are zero and act(0) = 0, so only a window needs masks.
"""

from __future__ import annotations

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
from gem_kernels._src.gdpa.configs import select
from gem_kernels._src.gdpa.forward import RUNTIME_SIZES
from gem_kernels._src.tiles.activation import activation_pair
from gem_kernels._src.tiles.index import locate_tile
from gem_kernels._src.tiles.mask import key_range, pair_mask, query_range
from gem_kernels._src.tiles.memory import load_rows, sequence_bounds, store_rows


@triton.jit
def _accumulate_dkdv(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    dq_ptr,
    stride_qt,
    stride_dot,
    stride_dqt,
    start,
    stop,
    offs_n,
    len_q,
    len_k,
    left,
    right,
    pre_scale,
    ds_scale,  # of dQ
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    MASKED: tl.constexpr,
    WRITE_DQ: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what queries [start, stop) of one head give to the key tile's dK and dV, without their scales.

    Tiles are transposed, (keys, queries), so that both products take P and dS as they are.
    """
    for m in range(start, stop, BLOCK_M):
        q = load_rows(q_ptr, m, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * pre_scale
        p = ACTIVATION(scores)
        slope = DERIVATIVE(scores)
        if MASKED:
            offs_m = m + tl.arange(0, BLOCK_M)
            mask = pair_mask(offs_m[None, :], offs_n[:, None], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(mask, p, 0.0)
            slope = tl.where(mask, slope, 0.0)
        do = load_rows(do_ptr, m, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (slope * dp).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if WRITE_DQ:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * ds_scale
            store_rows(dq_ptr, dq, tl.cast(m, tl.int32), len_q, stride_dqt, BLOCK_M, D, BLOCK_D)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _gdpa_bwd_dkdv_kernel(
    q_ptr,  # (T_q, H, D)
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    dq_ptr,  # (T_q, H, D), written only if WRITE_DQ
    dk_ptr,  # (T_k, H_kv, D)
    dv_ptr,  # (T_k, H_kv, D_v)
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    tile_offsets_ptr,  # (B + 1,), read only if SEARCH
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
    pre_scale,
    post_scale,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
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
    ds_scale = pre_scale * post_scale
    low, split, high = query_range(first, len_q, left, right, BLOCK_N, BLOCK_M, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        split = high
    for group in range(GROUP):
        head = head_kv * GROUP + group
        q_h = q_ptr + start_q * stride_qt + head * stride_qh
        do_h = do_ptr + start_q * stride_dot + head * stride_doh
        dq_h = dq_ptr + (start_q * num_heads + head) * D
        if HAS_LEFT or HAS_RIGHT:
            dk, dv = _accumulate_dkdv(
                dk, dv, k, v, q_h, do_h, dq_h, stride_qt, stride_dot, num_heads * D,
                low, tl.minimum(split, high), offs_n, len_q, len_k, left, right, pre_scale, ds_scale,
                ACTIVATION, DERIVATIVE, True, WRITE_DQ, HAS_LEFT, HAS_RIGHT,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
        if not HAS_LEFT:
            dk, dv = _accumulate_dkdv(
                dk, dv, k, v, q_h, do_h, dq_h, stride_qt, stride_dot, num_heads * D,
                split, high, offs_n, len_q, len_k, left, right, pre_scale, ds_scale,
                ACTIVATION, DERIVATIVE, False, WRITE_DQ, HAS_LEFT, HAS_RIGHT,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip

    store_rows(dk_ptr, dk * ds_scale, first, len_k, num_heads_kv * D, BLOCK_N, D, BLOCK_D)
    store_rows(dv_ptr, dv * post_scale, first, len_k, num_heads_kv * D_V, BLOCK_N, D_V, BLOCK_DV)


@triton.jit
def _accumulate_dq(
    dq,
    q,
    do,
    k_ptr,
    v_ptr,
    stride_kt,
    stride_vt,
    start,
    stop,
    offs_m,
    len_k,
    left,
    right,
    pre_scale,
    DERIVATIVE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
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
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pre_scale
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        slope = DERIVATIVE(scores)
        if MASKED:
            offs_n = n + tl.arange(0, BLOCK_N)
            mask = pair_mask(offs_m[:, None], offs_n[None, :], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            slope = tl.where(mask, slope, 0.0)
        ds = slope * dp
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _gdpa_bwd_dq_kernel(
    q_ptr,  # (T_q, H, D)
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    dq_ptr,  # (T_q, H, D)
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    tile_offsets_ptr,  # (B + 1,), read only if SEARCH
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
    pre_scale,
    post_scale,
    DERIVATIVE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
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

    q = load_rows(q_ptr, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
    do = load_rows(do_ptr, first, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    offs_m = first + tl.arange(0, BLOCK_M)
    low, split, high = key_range(first, len_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        split = low
    elif not HAS_RIGHT:
        split = high
    if not HAS_LEFT:
        dq = _accumulate_dq(
            dq, q, do, k_ptr, v_ptr, stride_kt, stride_vt, low, split, offs_m, len_k, left, right, pre_scale,
            DERIVATIVE, False, HAS_LEFT, HAS_RIGHT, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    if HAS_LEFT or HAS_RIGHT:
        dq = _accumulate_dq(
            dq, q, do, k_ptr, v_ptr, stride_kt, stride_vt, split, high, offs_m, len_k, left, right, pre_scale,
            DERIVATIVE, True, HAS_LEFT, HAS_RIGHT, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    store_rows(dq_ptr, dq * (pre_scale * post_scale), first, len_q, num_heads * D, BLOCK_M, D, BLOCK_D)


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq (T_q, H, D), dk (T_k, H_kv, D), dv (T_k, H_kv, D_v), contiguous."""
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    offsets_q, offsets_k = offsets_q.contiguous(), offsets_k.contiguous()
    (total_q, num_heads, dim), (total_k, num_heads_kv, dim_v) = q.shape, v.shape
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if total_q == 0 or total_k == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    left, right = clamp_window(left, right)
    widest, capability = max(dim, dim_v), capability_of(q)
    act = activation_pair(activation, hardware=q.is_cuda)
    shared = {
        "DERIVATIVE": act.derivative,
        "GROUP": num_heads // num_heads_kv,
        "D": dim,
        "D_V": dim_v,
        "BLOCK_D": power_of_two(dim),
        "BLOCK_DV": power_of_two(dim_v),
        "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0,
        "PRECISION": precision_of(q.dtype),
    }
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2])
    with device_guard(q):
        write_dq = one_key_tile(select, q, v, max_seqlen_k, left, right, offsets_k.shape[0] - 1)
        config = select("dqdkdv" if write_dq else "dkdv", widest, q.dtype, capability)
        config = fit_lengths(config, max_seqlen_q, max_seqlen_k)
        grid = make_grid("gdpa", offsets_k, total_k, max_seqlen_k, config.block_n, num_heads_kv, padded=write_dq)
        _gdpa_bwd_dkdv_kernel[(grid.size,)](
            q,
            k,
            v,
            do,
            dq,
            dk,
            dv,
            offsets_q,
            offsets_k,
            grid.tile_offsets,
            *strides,
            offsets_k.shape[0] - 1,
            num_heads_kv,
            grid.num_tiles,
            grid.num_steps,
            left,
            right,
            pre_scale,
            post_scale,
            ACTIVATION=act.value,
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
        config = fit_lengths(select("dq", widest, q.dtype, capability), max_seqlen_q, max_seqlen_k)
        grid = make_grid("gdpa", offsets_q, total_q, max_seqlen_q, config.block_m, num_heads)
        _gdpa_bwd_dq_kernel[(grid.size,)](
            q,
            k,
            v,
            do,
            dq,
            offsets_q,
            offsets_k,
            grid.tile_offsets,
            *strides,
            offsets_q.shape[0] - 1,
            num_heads,
            grid.num_tiles,
            grid.num_steps,
            left,
            right,
            pre_scale,
            post_scale,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SEARCH=grid.search,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **shared,
        )
    return dq, dk, dv
