"""Triton dQ of GDPA, deterministic: over the keys of a tile of query rows, and of seeds over the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.launch import capability_of, cut_batch, make_grid, row_strides
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.gdpa.configs import select_fitting
from gem_kernels._src.gdpa.forward import RUNTIME_SIZES
from gem_kernels._src.tiles.index import key_sequence, locate_tile
from gem_kernels._src.tiles.mask import history_length, key_range, pair_mask
from gem_kernels._src.tiles.memory import load_rows, sequence_bounds, store_rows

_SEED_PROGRAMS = 1024
"""Programs that share the seeds' gradient: enough to fill a GPU, few enough that their partial sums stay small."""


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
    DIAGONAL: tl.constexpr,  # only pairs of a row with itself
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
        if DIAGONAL:
            slope = tl.where(offs_m[:, None] == (n + tl.arange(0, BLOCK_N))[None, :], slope, 0.0)
        ds = slope * dp
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _accumulate_history(
    dq,
    q,
    do,
    k_ptr,
    v_ptr,
    stride_kt,
    stride_vt,
    first,
    history,
    left,
    right,
    pre_scale,
    DERIVATIVE: tl.constexpr,
    TARGETS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the history of one key sequence, all of it without targets, gives to dQ of rows first, first + 1, ..."""
    positions = first + tl.arange(0, BLOCK_M)
    nearest = first
    if TARGETS:
        positions = tl.minimum(positions, history)
        nearest = tl.minimum(first, history)
    low, split, high = key_range(nearest, history, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        split = low
    elif not HAS_RIGHT:
        split = high
    if not HAS_LEFT:
        dq = _accumulate_dq(
            dq, q, do, k_ptr, v_ptr, stride_kt, stride_vt, low, split, positions, history, left, right, pre_scale,
            DERIVATIVE, False, False, HAS_LEFT, HAS_RIGHT, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    if HAS_LEFT or HAS_RIGHT:
        dq = _accumulate_dq(
            dq, q, do, k_ptr, v_ptr, stride_kt, stride_vt, split, high, positions, history, left, right, pre_scale,
            DERIVATIVE, True, False, HAS_LEFT, HAS_RIGHT, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _gdpa_bwd_dq_kernel(
    q_ptr,  # (T_q, H, D)
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    dq_ptr,  # (T_q, H, D)
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (R + 1,), R = B without request_index
    tile_offsets_ptr,  # (B + 1,), read only if SEARCH
    num_targets_ptr,  # (B,) or None
    request_index_ptr,  # (B,) or None
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
    start_k, len_k = sequence_bounds(offsets_k_ptr, key_sequence(request_index_ptr, b))
    history = history_length(num_targets_ptr, b, len_k)
    head = head.to(tl.int64)
    q_ptr += start_q * stride_qt + head * stride_qh
    do_ptr += start_q * stride_dot + head * stride_doh
    k_ptr += start_k * stride_kt + head // GROUP * stride_kh
    v_ptr += start_k * stride_vt + head // GROUP * stride_vh
    dq_ptr += (start_q * num_heads + head) * D

    q = load_rows(q_ptr, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
    do = load_rows(do_ptr, first, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    dq = _accumulate_history(
        dq, q, do, k_ptr, v_ptr, stride_kt, stride_vt, first, history, left, right, pre_scale,
        DERIVATIVE, num_targets_ptr is not None, HAS_LEFT, HAS_RIGHT,
        D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
    )  # fmt: skip
    if num_targets_ptr is not None:
        # Each target meets itself.
        dq = _accumulate_dq(
            dq, q, do, k_ptr, v_ptr, stride_kt, stride_vt, tl.maximum(first, history),
            tl.minimum(first + BLOCK_M, len_k), first + tl.arange(0, BLOCK_M), len_k, left, right, pre_scale,
            DERIVATIVE, False, True, HAS_LEFT, HAS_RIGHT, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    store_rows(dq_ptr, dq * (pre_scale * post_scale), first, len_q, num_heads * D, BLOCK_M, D, BLOCK_D)


@triton.jit(do_not_specialize=[*RUNTIME_SIZES[:1], "num_tiles", "num_seeds", "sequences_per_part", "left", "right"])
def _gdpa_bwd_dq_seeds_kernel(
    q_ptr,  # (S, H, D)
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (B S, H, D_v)
    partial_ptr,  # (P, S, H, D) float32
    offsets_k_ptr,  # (R + 1,), R = B without request_index
    request_index_ptr,  # (B,) or None
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
    PRECISION: tl.constexpr,
):
    """The dQ of one tile of seeds, summed over the sequences of one part of the batch in their order."""
    pid = tl.program_id(0)
    first = pid % num_tiles * BLOCK_M
    head = (pid // num_tiles % num_heads).to(tl.int64)
    part = pid // (num_tiles * num_heads)
    q = load_rows(q_ptr + head * stride_qh, first, num_seeds, stride_qt, BLOCK_M, D, BLOCK_D)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    begin = part * sequences_per_part
    for b in range(begin, tl.minimum(begin + sequences_per_part, num_sequences)):
        start_k, len_k = sequence_bounds(offsets_k_ptr, key_sequence(request_index_ptr, b))
        do_b = do_ptr + tl.cast(b, tl.int64) * num_seeds * stride_dot + head * stride_doh
        do = load_rows(do_b, first, num_seeds, stride_dot, BLOCK_M, D_V, BLOCK_DV)
        dq = _accumulate_history(
            dq, q, do,
            k_ptr + start_k * stride_kt + head // GROUP * stride_kh,
            v_ptr + start_k * stride_vt + head // GROUP * stride_vh,
            stride_kt, stride_vt, first, len_k, left, right, pre_scale, DERIVATIVE, False, HAS_LEFT, HAS_RIGHT,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    partial_ptr += (part.to(tl.int64) * num_seeds * num_heads + head) * D
    store_rows(partial_ptr, dq * (pre_scale * post_scale), first, num_seeds, num_heads * D, BLOCK_M, D, BLOCK_D)


def launch_dq_of_rows(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairing: Pairing,
    max_seqlen_k: int,
    num_targets: Tensor | None,
    left: int,
    right: int,
    pre_scale: float,
    post_scale: float,
    shared: Mapping[str, Any],
) -> Tensor:
    """The dq (T_q, H, D), contiguous; ``shared`` are the compile-time arguments of all backward kernels."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    config = select_fitting(
        "dq",
        (q.shape[2], v.shape[2]),
        q.dtype,
        capability_of(q),
        pairing.max_seqlen_q,
        max_seqlen_k,
        indexed=False,
    )
    grid = make_grid("gdpa", pairing.offsets_q, q.shape[0], pairing.max_seqlen_q, config.block_m, q.shape[1])
    _gdpa_bwd_dq_kernel[(grid.size,)](
        q,
        k,
        v,
        do,
        dq,
        pairing.offsets_q,
        pairing.offsets_k,
        grid.tile_offsets,
        num_targets,
        pairing.request_index,
        *row_strides(q, k, v, do),
        pairing.num_queries,
        q.shape[1],
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
    return dq


def launch_dq_of_seeds(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairing: Pairing,
    max_seqlen_k: int,
    num_targets: Tensor | None,
    left: int,
    right: int,
    pre_scale: float,
    post_scale: float,
    shared: Mapping[str, Any],
) -> Tensor:
    """The dq (S, H, D), contiguous: partial sums over parts of the batch, then their sum, all in float32."""
    assert num_targets is None  # by check_targets
    config = select_fitting(
        "dq",
        (q.shape[2], v.shape[2]),
        q.dtype,
        capability_of(q),
        pairing.max_seqlen_q,
        max_seqlen_k,
        indexed=True,
    )
    num_seeds, num_heads, dim = q.shape
    num_tiles = -(-num_seeds // config.block_m)
    num_parts, sequences_per_part = cut_batch(pairing.num_queries, _SEED_PROGRAMS, num_tiles * num_heads)
    partial = torch.empty(num_parts, num_seeds, num_heads, dim, dtype=torch.float32, device=q.device)
    _gdpa_bwd_dq_seeds_kernel[(num_tiles * num_heads * num_parts,)](
        q,
        k,
        v,
        do,
        partial,
        pairing.offsets_k,
        pairing.request_index,
        *row_strides(q, k, v, do),
        pairing.num_queries,
        num_heads,
        num_tiles,
        num_seeds,
        sequences_per_part,
        left,
        right,
        pre_scale,
        post_scale,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **shared,
    )
    return partial.sum(0).to(q.dtype)
