"""Triton forward of GDPA: one program per (sequence, head, tile of queries), no softmax and so no running statistics.

Padded keys and values are zero, so that act(0), whatever it is, adds nothing: only a window needs masks, a causal one
only on its edge, and a tile of targets, whose rows see the history and, in a step of their own, themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.launch import (
    call_flags,
    capability_of,
    check_head_dims,
    clamp_window,
    device_guard,
    make_grid,
    row_strides,
    unit_stride,
)
from gem_kernels._src.attention.pairing import Pairing, num_output_rows, pair_sequences
from gem_kernels._src.gdpa import hopper_launch
from gem_kernels._src.gdpa.configs import select_fitting
from gem_kernels._src.tiles.activation import activation_pair
from gem_kernels._src.tiles.index import key_sequence, locate_tile
from gem_kernels._src.tiles.mask import history_length, key_range, pair_mask
from gem_kernels._src.tiles.memory import load_rows, sequence_bounds, store_rows

# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
RUNTIME_SIZES = ["num_sequences", "num_tiles", "num_steps", "left", "right"]


@triton.jit
def _attend(
    acc,
    q,
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
    ACTIVATION: tl.constexpr,
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
    """Add the activated scores of keys [start, stop) times their values."""
    for n in range(start, stop, BLOCK_N):
        k = load_rows(k_ptr, n, len_k, stride_kt, BLOCK_N, D, BLOCK_D)
        v = load_rows(v_ptr, n, len_k, stride_vt, BLOCK_N, D_V, BLOCK_DV)
        p = ACTIVATION(tl.dot(q, tl.trans(k), input_precision=PRECISION) * pre_scale)
        if MASKED:
            offs_n = n + tl.arange(0, BLOCK_N)
            mask = pair_mask(offs_m[:, None], offs_n[None, :], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(mask, p, 0.0)
        if DIAGONAL:
            p = tl.where(offs_m[:, None] == (n + tl.arange(0, BLOCK_N))[None, :], p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _gdpa_fwd_kernel(
    q_ptr,  # (T_q, H, D), or (S, H, D) if BROADCAST_Q
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    out_ptr,  # (T_q, H, D_v), or (B S, H, D_v)
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
    stride_ot,
    stride_oh,
    num_sequences,
    num_heads,
    num_tiles,
    num_steps,
    left,
    right,
    pre_scale,
    post_scale,
    ACTIVATION: tl.constexpr,
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
    BROADCAST_Q: tl.constexpr,
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
    q_ptr += head * stride_qh
    if not BROADCAST_Q:
        q_ptr += start_q * stride_qt
    k_ptr += start_k * stride_kt + head // GROUP * stride_kh
    v_ptr += start_k * stride_vt + head // GROUP * stride_vh
    out_ptr += start_q * stride_ot + head * stride_oh

    q = load_rows(q_ptr, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    offs_m = first + tl.arange(0, BLOCK_M)
    # Targets stand right behind the history, which alone they see here; themselves they see below.
    positions = offs_m
    nearest = first
    if num_targets_ptr is not None:
        positions = tl.minimum(offs_m, history)
        nearest = tl.minimum(first, history)
    low, split, high = key_range(nearest, history, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        # A sliding window cuts nearly every tile it meets: one loop, always masked.
        split = low
    elif not HAS_RIGHT:
        split = high
    if not HAS_LEFT:
        acc = _attend(
            acc, q, k_ptr, v_ptr, stride_kt, stride_vt, low, split, positions, history, left, right, pre_scale,
            ACTIVATION, False, False, HAS_LEFT, HAS_RIGHT, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    if HAS_LEFT or HAS_RIGHT:
        acc = _attend(
            acc, q, k_ptr, v_ptr, stride_kt, stride_vt, split, high, positions, history, left, right, pre_scale,
            ACTIVATION, True, False, HAS_LEFT, HAS_RIGHT, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    if num_targets_ptr is not None:
        acc = _attend(
            acc, q, k_ptr, v_ptr, stride_kt, stride_vt, tl.maximum(first, history),
            tl.minimum(first + BLOCK_M, len_k), offs_m, len_k, left, right, pre_scale,
            ACTIVATION, False, True, HAS_LEFT, HAS_RIGHT, D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    store_rows(out_ptr, acc * post_scale, first, len_q, stride_ot, BLOCK_M, D_V, BLOCK_DV)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    left: int,
    right: int,
    *,
    num_targets: Tensor | None = None,
    request_index: Tensor | None = None,
) -> Tensor:
    """Output (T_q, H, D_v), or (B S, H, D_v) of seeds, contiguous, in the dtype of q."""
    check_head_dims("gdpa", q.shape[2], v.shape[2])
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    num_rows = num_output_rows(q, offsets_q, offsets_k, request_index)
    out = torch.empty(num_rows, q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    left, right = clamp_window(left, right)
    pairing = pair_sequences(q, offsets_q, offsets_k, request_index, max_seqlen_q, left, right)
    if hopper_launch.applies(q, k, v, pairing, num_targets, left, right):
        hopper_launch.launch_hopper_forward(
            out, q, k, v, pairing.offsets_q, pairing.offsets_k, activation, pre_scale, post_scale
        )
        return out
    _launch_tiles(out, q, k, v, pairing, max_seqlen_k, activation, pre_scale, post_scale, left, right, num_targets)
    return out


def _launch_tiles(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairing: Pairing,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    left: int,
    right: int,
    num_targets: Tensor | None,
) -> None:
    """Write ``out`` with this module's kernel, which serves every argument on every GPU."""
    num_heads = q.shape[1]
    config = select_fitting(
        "forward",
        (q.shape[2], v.shape[2]),
        q.dtype,
        capability_of(q),
        pairing.max_seqlen_q,
        max_seqlen_k,
        indexed=pairing.indexed or num_targets is not None,
    )
    with device_guard(q):
        grid = make_grid("gdpa", pairing.offsets_q, out.shape[0], pairing.max_seqlen_q, config.block_m, num_heads)
        _gdpa_fwd_kernel[(grid.size,)](
            q,
            k,
            v,
            out,
            pairing.offsets_q,
            pairing.offsets_k,
            grid.tile_offsets,
            None if num_targets is None else num_targets.contiguous(),
            pairing.request_index,
            *row_strides(q, k, v, out),
            pairing.num_queries,
            num_heads,
            grid.num_tiles,
            grid.num_steps,
            left,
            right,
            pre_scale,
            post_scale,
            ACTIVATION=activation_pair(activation, hardware=q.is_cuda).value,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SEARCH=grid.search,
            BROADCAST_Q=pairing.broadcast_q,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **call_flags(q, k, v, left, right),
        )
