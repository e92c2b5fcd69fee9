"""Triton backward of GDPA, deterministic: no gradient row is written by two programs. Nothing was saved but q, k, v.

One kernel per side: dK and dV over the queries of a key tile, here, which are those of all query sequences that share
the keys; dQ over the keys of a query tile, in ``backward_dq``. Where every key sequence fits one tile and all pairs are
valid, the first kernel sees all keys of its queries, writes dQ too, and the second is not launched. Padded rows are
zero, so only a window needs masks, and targets, which meet the history in one pass and themselves in another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.launch import (
    call_flags,
    capability_of,
    clamp_window,
    device_guard,
    make_grid,
    one_key_tile,
    row_strides,
    unit_stride,
)
from gem_kernels._src.attention.pairing import pair_sequences
from gem_kernels._src.gdpa import hopper_launch
from gem_kernels._src.gdpa.backward_dq import launch_dq_of_rows, launch_dq_of_seeds
from gem_kernels._src.gdpa.configs import select, select_fitting
from gem_kernels._src.gdpa.forward import RUNTIME_SIZES
from gem_kernels._src.tiles.activation import activation_pair
from gem_kernels._src.tiles.index import locate_tile
from gem_kernels._src.tiles.mask import history_length, pair_mask, query_range
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
    history,
    left,
    right,
    pre_scale,
    ds_scale,  # of dQ
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    MASKED: tl.constexpr,
    DIAGONAL: tl.constexpr,  # only pairs of a row with itself
    TARGETS: tl.constexpr,
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
            # Targets, the rows from history on, stand right behind it; without targets only padding is there.
            positions = tl.minimum(m + tl.arange(0, BLOCK_M), history) if TARGETS else m + tl.arange(0, BLOCK_M)
            mask = pair_mask(positions[None, :], offs_n[:, None], history, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(mask, p, 0.0)
            slope = tl.where(mask, slope, 0.0)
        if DIAGONAL:
            own = (m + tl.arange(0, BLOCK_M))[None, :] == offs_n[:, None]
            p = tl.where(own, p, 0.0)
            slope = tl.where(own, slope, 0.0)
        do = load_rows(do_ptr, m, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = (slope * dp).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if WRITE_DQ:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * ds_scale
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
    dq_ptr,
    offsets_q_ptr,
    stride_qt,
    stride_qh,
    stride_dot,
    stride_doh,
    b,  # the query sequence
    head_kv,
    num_heads,
    first,  # of the tile's keys
    history,
    left,
    right,
    pre_scale,
    ds_scale,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    TARGETS: tl.constexpr,
    BROADCAST_Q: tl.constexpr,
    WRITE_DQ: tl.constexpr,
    GROUP: tl.constexpr,
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
    """Add what the queries of one sequence and of all heads of the group give to the key tile's dK and dV."""
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    offs_n = first + tl.arange(0, BLOCK_N)
    low, split, high = query_range(first, len_q, left, right, BLOCK_N, BLOCK_M, HAS_LEFT, HAS_RIGHT)
    if TARGETS:
        if HAS_LEFT:
            # A window that reaches past the history reaches every target.
            high = tl.where(high > history, len_q, high)
        if first >= history:
            # The tile holds targets only, which no other row sees.
            low, split, high = len_q, len_q, len_q
    if HAS_LEFT:
        split = high
    for group in range(GROUP):
        head = head_kv * GROUP + group
        q_h = q_ptr + head * stride_qh
        if not BROADCAST_Q:
            q_h += start_q * stride_qt
        do_h = do_ptr + start_q * stride_dot + head * stride_doh
        dq_h = dq_ptr + (start_q * num_heads + head) * D
        if HAS_LEFT or HAS_RIGHT:
            dk, dv = _accumulate_dkdv(
                dk, dv, k, v, q_h, do_h, dq_h, stride_qt, stride_dot, num_heads * D,
                low, tl.minimum(split, high), offs_n, len_q, history, left, right, pre_scale, ds_scale,
                ACTIVATION, DERIVATIVE, True, False, TARGETS, WRITE_DQ, HAS_LEFT, HAS_RIGHT,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
        if not HAS_LEFT:
            dk, dv = _accumulate_dkdv(
                dk, dv, k, v, q_h, do_h, dq_h, stride_qt, stride_dot, num_heads * D,
                split, high, offs_n, len_q, history, left, right, pre_scale, ds_scale,
                ACTIVATION, DERIVATIVE, False, False, TARGETS, WRITE_DQ, HAS_LEFT, HAS_RIGHT,
                D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
    return dk, dv


@triton.jit
def _accumulate_own_targets(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    offsets_q_ptr,
    stride_qt,
    stride_qh,
    stride_dot,
    stride_doh,
    b,
    head_kv,
    first,
    history,
    len_k,
    pre_scale,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the targets of the key tile give to their own rows of dK and dV."""
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    offs_n = first + tl.arange(0, BLOCK_N)
    start = tl.maximum(first, history)
    stop = tl.minimum(first + BLOCK_N, len_k)
    for group in range(GROUP):
        head = head_kv * GROUP + group
        dk, dv = _accumulate_dkdv(
            dk, dv, k, v, q_ptr + start_q * stride_qt + head * stride_qh,
            do_ptr + start_q * stride_dot + head * stride_doh, q_ptr, stride_qt, stride_dot, 0,
            start, stop, offs_n, len_q, history, 0, 0, pre_scale, 1.0,
            ACTIVATION, DERIVATIVE, False, True, True, False, False, False,
            D, D_V, BLOCK_M, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _gdpa_bwd_dkdv_kernel(
    q_ptr,  # (T_q, H, D), or (S, H, D) if BROADCAST_Q
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v), or (B S, H, D_v)
    dq_ptr,  # (T_q, H, D), written only if WRITE_DQ
    dk_ptr,  # (T_k, H_kv, D)
    dv_ptr,  # (T_k, H_kv, D_v)
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (R + 1,), R = B without request_starts
    tile_offsets_ptr,  # (R + 1,), read only if SEARCH
    num_targets_ptr,  # (B,) or None
    request_starts_ptr,  # (R + 1,) or None
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
    history = history_length(num_targets_ptr, b, len_k)
    head_kv = head_kv.to(tl.int64)
    num_heads = num_heads_kv * GROUP
    k_ptr += start_k * stride_kt + head_kv * stride_kh
    v_ptr += start_k * stride_vt + head_kv * stride_vh
    dk_ptr += (start_k * num_heads_kv + head_kv) * D
    dv_ptr += (start_k * num_heads_kv + head_kv) * D_V

    # Targets read as zero here.
    k = load_rows(k_ptr, first, history, stride_kt, BLOCK_N, D, BLOCK_D)
    v = load_rows(v_ptr, first, history, stride_vt, BLOCK_N, D_V, BLOCK_DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    ds_scale = pre_scale * post_scale
    if request_starts_ptr is not None:
        for i in range(tl.load(request_starts_ptr + b), tl.load(request_starts_ptr + b + 1)):
            dk, dv = _accumulate_sequence(
                dk, dv, k, v, q_ptr, do_ptr, dq_ptr, offsets_q_ptr, stride_qt, stride_qh, stride_dot, stride_doh,
                i, head_kv, num_heads, first, history, left, right, pre_scale, ds_scale,
                ACTIVATION, DERIVATIVE, False, BROADCAST_Q, WRITE_DQ, GROUP, HAS_LEFT, HAS_RIGHT,
                D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
            )  # fmt: skip
    else:
        dk, dv = _accumulate_sequence(
            dk, dv, k, v, q_ptr, do_ptr, dq_ptr, offsets_q_ptr, stride_qt, stride_qh, stride_dot, stride_doh,
            b, head_kv, num_heads, first, history, left, right, pre_scale, ds_scale,
            ACTIVATION, DERIVATIVE, num_targets_ptr is not None, BROADCAST_Q, WRITE_DQ, GROUP, HAS_LEFT, HAS_RIGHT,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip
    if num_targets_ptr is not None:
        # dV of a zero key is act(0) times its queries, which is not 0 for every activation.
        dv = tl.where((first + tl.arange(0, BLOCK_N) < history)[:, None], dv, 0.0)
        k = load_rows(k_ptr, first, len_k, stride_kt, BLOCK_N, D, BLOCK_D)
        v = load_rows(v_ptr, first, len_k, stride_vt, BLOCK_N, D_V, BLOCK_DV)
        dk, dv = _accumulate_own_targets(
            dk, dv, k, v, q_ptr, do_ptr, offsets_q_ptr, stride_qt, stride_qh, stride_dot, stride_doh,
            b, head_kv, first, history, len_k, pre_scale, ACTIVATION, DERIVATIVE, GROUP,
            D, D_V, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION,
        )  # fmt: skip

    store_rows(dk_ptr, dk * ds_scale, first, len_k, num_heads_kv * D, BLOCK_N, D, BLOCK_D)
    store_rows(dv_ptr, dv * post_scale, first, len_k, num_heads_kv * D_V, BLOCK_N, D_V, BLOCK_DV)


def launch_backward(
    do: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk and dv in the shapes of q, k and v, contiguous."""
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    num_heads_kv = k.shape[1]
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    if do.shape[0] == 0 or k.shape[0] == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format), dk.zero_(), dv.zero_()
    left, right = clamp_window(left, right)
    pairing = pair_sequences(q, offsets_q, offsets_k, request_index, max_seqlen_q, left, right)
    if hopper_launch.applies(q, k, v, pairing, num_targets, left, right):
        return hopper_launch.launch_hopper_backward(
            do, q, k, v, pairing.offsets_q, pairing.offsets_k, max_seqlen_k, activation, pre_scale, post_scale
        )
    num_targets = None if num_targets is None else num_targets.contiguous()
    act = activation_pair(activation, hardware=q.is_cuda)
    shared = {"DERIVATIVE": act.derivative, **call_flags(q, k, v, left, right)}
    with device_guard(q):
        write_dq = (
            num_targets is None
            and not pairing.broadcast_q
            and one_key_tile(select, q, v, max_seqlen_k, left, right, pairing.num_keys)
        )
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if write_dq else None
        config = select_fitting(
            "dqdkdv" if write_dq else "dkdv",
            (q.shape[2], v.shape[2]),
            q.dtype,
            capability_of(q),
            pairing.max_seqlen_q,
            max_seqlen_k,
            indexed=pairing.indexed or num_targets is not None,
            requests=pairing.request_index is not None,
        )
        grid = make_grid(
            "gdpa", pairing.offsets_k, k.shape[0], max_seqlen_k, config.block_n, num_heads_kv, padded=write_dq
        )
        _gdpa_bwd_dkdv_kernel[(grid.size,)](
            q,
            k,
            v,
            do,
            q if dq is None else dq,
            dk,
            dv,
            pairing.offsets_q,
            pairing.offsets_k,
            grid.tile_offsets,
            num_targets,
            pairing.request_starts(),
            *row_strides(q, k, v, do),
            pairing.num_keys,
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
            BROADCAST_Q=pairing.broadcast_q,
            WRITE_DQ=write_dq,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **shared,
        )
        if dq is None:
            launch_dq = launch_dq_of_seeds if pairing.broadcast_q else launch_dq_of_rows
            dq = launch_dq(do, q, k, v, pairing, max_seqlen_k, num_targets, left, right, pre_scale, post_scale, shared)
    return dq, dk, dv
