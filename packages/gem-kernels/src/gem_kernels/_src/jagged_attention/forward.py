"""Triton forward of jagged attention: one program per (sequence, head, tile of queries), online softmax over its keys.

Steps of keys in which every pair is valid run without a mask; only the causal edge and the sequence's last, partial
step pay for one. A sliding window is masked throughout.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import fit_lengths
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
from gem_kernels._src.attention.pairing import num_output_rows
from gem_kernels._src.jagged_attention import hopper_launch
from gem_kernels._src.jagged_attention.bias import Bias, pair_with_bias
from gem_kernels._src.jagged_attention.bias_tiles import add_bias, load_times
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.short import fit_pairs
from gem_kernels._src.tiles.index import key_sequence, locate_tile
from gem_kernels._src.tiles.mask import key_range, pair_mask
from gem_kernels._src.tiles.memory import load_rows, sequence_bounds, store_rows

# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
RUNTIME_SIZES = ["num_sequences", "num_tiles", "num_steps", "left", "right", "radius", "num_buckets"]
_LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
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
    """Fold keys [start, stop) into the running maximum, sum and weighted values of one query tile."""
    for n in range(start, stop, BLOCK_N):
        k = load_rows(k_ptr, n, len_k, stride_kt, BLOCK_N, D, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        offs_n = n + tl.arange(0, BLOCK_N)
        if HAS_POSITION or HAS_TIME:
            times_n = load_times(times_k_ptr, n, len_k, BLOCK_N, HAS_TIME)
            scores = add_bias(
                scores, scale_log2, position_ptr, time_ptr, offs_m[:, None], offs_n[None, :], times_m[:, None],
                times_n[None, :], radius, num_buckets, HAS_POSITION, HAS_TIME, TIME_SHIFT,
            )  # fmt: skip
            factor = 1.0
        else:
            # The factor joins the subtraction of the maximum in one instruction.
            factor = scale_log2
        if MASKED:
            mask = pair_mask(offs_m[:, None], offs_n[None, :], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            scores = tl.where(mask, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        shift = new_max
        if MASKED:
            # A row that has met no key yet has maximum -inf; exp2(-inf - 0) = 0 keeps it empty.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * factor - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v = load_rows(v_ptr, n, len_k, stride_vt, BLOCK_N, D_V, BLOCK_DV)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _jagged_attention_fwd_kernel(
    q_ptr,  # (T_q, H, D), or (S, H, D) if BROADCAST_Q; T_q is B S below
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    out_ptr,  # (T_q, H, D_v)
    lse_ptr,  # (T_q, H) float32, natural logarithm
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
    stride_ot,
    stride_oh,
    num_sequences,
    num_heads,
    num_tiles,
    num_steps,
    left,
    right,
    scale_log2,  # scale * log2(e), positive
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
    q_ptr += head * stride_qh
    if not BROADCAST_Q:
        q_ptr += start_q * stride_qt
    k_ptr += start_k * stride_kt + head // GROUP * stride_kh
    v_ptr += start_k * stride_vt + head // GROUP * stride_vh
    out_ptr += start_q * stride_ot + head * stride_oh
    lse_ptr += start_q * num_heads + head
    if HAS_POSITION:
        position_ptr += head * (2 * radius + 1)
    if HAS_TIME:
        time_ptr += head * num_buckets
        times_q_ptr += start_q
        times_k_ptr += start_k

    q = load_rows(q_ptr, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    offs_m = first + tl.arange(0, BLOCK_M)
    times_m = load_times(times_q_ptr, first, len_q, BLOCK_M, HAS_TIME)
    low, split, high = key_range(first, len_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_LEFT:
        # A sliding window cuts nearly every tile it meets: one loop, always masked.
        split = low
    else:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_ptr, v_ptr, position_ptr, time_ptr, times_k_ptr, times_m, stride_kt, stride_vt,
            low, split, offs_m, len_k, left, right, scale_log2, radius, num_buckets,
            False, HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
            D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, position_ptr, time_ptr, times_k_ptr, times_m, stride_kt, stride_vt,
        split, high, offs_m, len_k, left, right, scale_log2, radius, num_buckets,
        True, HAS_LEFT, HAS_RIGHT, HAS_POSITION, HAS_TIME, TIME_SHIFT,
        D, D_V, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
    )  # fmt: skip

    is_empty = row_sum == 0.0
    total = tl.where(is_empty, 1.0, row_sum)
    store_rows(out_ptr, acc / total[:, None], first, len_q, stride_ot, BLOCK_M, D_V, BLOCK_DV)
    lse = tl.where(is_empty, float("-inf"), row_max * _LN2 + tl.log(total))
    tl.store(lse_ptr + offs_m.to(tl.int64) * num_heads, lse, mask=offs_m < len_q)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    bias: Bias | None = None,
    request_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (T_q, H, D_v) in the dtype of q and log-sum-exp (T_q, H) float32, both contiguous; T_q = B S of seeds."""
    check_head_dims("jagged_attention", q.shape[2], v.shape[2])
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    bias = (bias or Bias()).tables(torch.float32)
    num_heads, dim, dim_v = q.shape[1], q.shape[2], v.shape[2]
    total = num_output_rows(q, offsets_q, offsets_k, request_index)
    out = torch.empty(total, num_heads, dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(total, num_heads, dtype=torch.float32, device=q.device)
    if total == 0:
        return out, lse
    left, right = clamp_window(left, right)
    pairing = pair_with_bias(q, offsets_q, offsets_k, request_index, max_seqlen_q, left, right, bias)
    if hopper_launch.applies(q, k, v, pairing, bias):
        call = (out, lse, q, k, v, pairing.offsets_q, pairing.offsets_k, scale)
        if left >= 0 or right >= 0:
            hopper_launch.launch_hopper_window_forward(*call, left, right)
        else:
            hopper_launch.launch_hopper_forward(*call)
        return out, lse
    config = select("forward", max(dim, dim_v), q.dtype, capability_of(q), has_bias=bias.is_set)
    config = fit_pairs("forward", config, max(dim, dim_v), pairing, left, right, bias)
    config = fit_lengths(config, pairing.max_seqlen_q, max_seqlen_k)
    with device_guard(q):
        grid = make_grid("jagged_attention", pairing.offsets_q, total, pairing.max_seqlen_q, config.block_m, num_heads)
        _jagged_attention_fwd_kernel[(grid.size,)](
            q,
            k,
            v,
            out,
            lse,
            pairing.offsets_q,
            pairing.offsets_k,
            grid.tile_offsets,
            pairing.request_index,
            bias.position,
            bias.time,
            bias.times_q,
            bias.times_k,
            *row_strides(q, k, v, out),
            pairing.num_queries,
            num_heads,
            grid.num_tiles,
            grid.num_steps,
            left,
            right,
            scale * math.log2(math.e),
            bias.radius,
            bias.num_buckets,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SEARCH=grid.search,
            BROADCAST_Q=pairing.broadcast_q,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **call_flags(q, k, v, left, right),
            **bias.flags(),
        )
    return out, lse
