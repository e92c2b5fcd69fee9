"""Triton backward of block attention: one program per (block, head) recomputes P and the row sums of P * dP in its
tile, so the forward saves nothing but its inputs and no other program writes the same gradient rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import precision_of
from gem_kernels._src.attention.launch import device_guard, unit_stride
from gem_kernels._src.block_attention.blocks import block_offsets
from gem_kernels._src.block_attention.configs import select
from gem_kernels._src.block_attention.forward import launch_float32_forward
from gem_kernels._src.block_attention.launch import block_grid
from gem_kernels._src.block_attention.rotary import rotate_all
from gem_kernels._src.block_attention.tiles import (
    exp_scores,
    load_rotated_tile,
    load_tile,
    locate_block,
    store_unrotated_tile,
)
from gem_kernels._src.jagged_attention.backward import launch_backward as launch_jagged_backward


# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
@triton.jit(do_not_specialize=["num_sequences", "num_steps"])
def _block_attention_bwd_kernel(
    do_ptr,  # (T, H, D_v)
    q_ptr,  # (T, H, D)
    k_ptr,  # (T, H_kv, D)
    v_ptr,  # (T, H_kv, D_v)
    dq_ptr,  # (T, H, D)
    dk_ptr,  # (T, H, D): one gradient per query head
    dv_ptr,  # (T, H, D_v)
    table_ptr,  # (T, D) sines and cosines, read only if ROTARY
    offsets_ptr,  # (B + 1,)
    stride_dot,
    stride_doh,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    num_sequences,
    num_steps,
    num_heads,
    scale,
    scale_log2,  # scale * log2(e)
    GROUP: tl.constexpr,  # query heads per key head
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROTARY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    head = pid % num_heads
    first, num_rows = locate_block(pid // num_heads, offsets_ptr, num_sequences, num_steps, BLOCK)
    if num_rows <= 0:
        return
    offs_n = tl.arange(0, BLOCK)
    mask_t = offs_n < num_rows
    offs_t = first + offs_n
    do_ptr += head * stride_doh
    q_ptr += head * stride_qh
    k_ptr += head // GROUP * stride_kh
    v_ptr += head // GROUP * stride_vh
    # The gradients are contiguous. A cast, not .to(): Triton passes a single head as a constant.
    dq_ptr += head * D
    dk_ptr += head * D
    dv_ptr += head * D_V
    stride_dqt = tl.cast(num_heads, tl.int64) * D
    stride_dvt = tl.cast(num_heads, tl.int64) * D_V

    scores = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for d in tl.static_range(0, D, BLOCK_D):
        q = load_rotated_tile(q_ptr, table_ptr, offs_t, mask_t, stride_qt, d, D, BLOCK_D, ROTARY)
        k = load_rotated_tile(k_ptr, table_ptr, offs_t, mask_t, stride_kt, d, D, BLOCK_D, ROTARY)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
    dp = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for d in tl.static_range(0, D_V, BLOCK_DV):
        do = load_tile(do_ptr, offs_t, mask_t, stride_dot, d, D_V, BLOCK_DV)
        v = load_rotated_tile(v_ptr, table_ptr, offs_t, mask_t, stride_vt, d, D_V, BLOCK_DV, ROTARY)
        dp = tl.dot(do, tl.trans(v), dp, input_precision=PRECISION)
    p, row_sum = exp_scores(scores, mask_t, scale_log2)
    p = p / row_sum[:, None]
    # Rows behind the block have do = 0, hence dp = 0 and ds = 0: they add nothing to dk and dv.
    ds = p * (dp - tl.sum(p * dp, 1)[:, None])
    p = p.to(v_ptr.dtype.element_ty)
    ds = ds.to(q_ptr.dtype.element_ty)

    # A head in one chunk still has its tiles; a head in several is read again, mostly from L2.
    for d in tl.static_range(0, D_V, BLOCK_DV):
        if BLOCK_DV < D_V:
            do = load_tile(do_ptr, offs_t, mask_t, stride_dot, d, D_V, BLOCK_DV)
        dv = tl.dot(tl.trans(p), do, input_precision=PRECISION)
        store_unrotated_tile(dv_ptr, table_ptr, dv, offs_t, mask_t, stride_dvt, d, D_V, BLOCK_DV, ROTARY)
    for d in tl.static_range(0, D, BLOCK_D):
        if BLOCK_D < D:
            q = load_rotated_tile(q_ptr, table_ptr, offs_t, mask_t, stride_qt, d, D, BLOCK_D, ROTARY)
            k = load_rotated_tile(k_ptr, table_ptr, offs_t, mask_t, stride_kt, d, D, BLOCK_D, ROTARY)
        dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION) * scale
        store_unrotated_tile(dk_ptr, table_ptr, dk, offs_t, mask_t, stride_dqt, d, D, BLOCK_D, ROTARY)
        dq = tl.dot(ds, k, input_precision=PRECISION) * scale
        store_unrotated_tile(dq_ptr, table_ptr, dq, offs_t, mask_t, stride_dqt, d, D, BLOCK_D, ROTARY)


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    block_size: int,
    scale: float,
    rotary: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv, contiguous, in the dtype of q, k, v."""
    if q.dtype == torch.float32:
        q, k, v = rotate_all((q, k, v), rotary)
        dq, dk, dv = _launch_float32_backward(do, q, k, v, offsets, block_size, scale)
        dq, dk, dv = rotate_all((dq, dk, dv), rotary, inverse=True)
        return dq, dk, dv
    return launch_tile_backward(do, q, k, v, offsets, block_size, scale, rotary)


def _launch_float32_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block_size: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By jagged attention over the blocks as sequences, as in the forward, whose output is computed again."""
    if scale < 0:
        dq, dk, dv = _launch_float32_backward(do, -q, k, v, offsets, block_size, -scale)
        return dq.neg_(), dk, dv
    out, lse = launch_float32_forward(q, k, v, offsets, block_size, scale)
    blocks = block_offsets(offsets, q.shape[0], block_size)
    return launch_jagged_backward(do, None, q, k, v, out, lse, blocks, blocks, block_size, block_size, scale, -1, -1)


def launch_tile_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    block_size: int,
    scale: float,
    rotary: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``launch_backward`` by the kernel of this module."""
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    offsets = offsets.contiguous()
    total, num_heads, dim = q.shape
    num_heads_kv, dim_v = v.shape[1:]
    group = num_heads // num_heads_kv
    # With several query heads per key head each writes its own float32 share, summed below in a fixed order.
    dtype_kv = q.dtype if group == 1 else torch.float32
    dq = torch.empty(total, num_heads, dim, dtype=q.dtype, device=q.device)
    dk = torch.empty(total, num_heads, dim, dtype=dtype_kv, device=q.device)
    dv = torch.empty(total, num_heads, dim_v, dtype=dtype_kv, device=q.device)
    if total > 0:
        config = select("backward", q.dtype, block_size, dim, dim_v, rotary=rotary is not None)
        grid = block_grid(offsets, total, block_size, num_heads)
        with device_guard(q):
            _block_attention_bwd_kernel[(grid.size,)](
                do,
                q,
                k,
                v,
                dq,
                dk,
                dv,
                q if rotary is None else rotary.contiguous(),
                offsets,
                *do.stride()[:2],
                *q.stride()[:2],
                *k.stride()[:2],
                *v.stride()[:2],
                grid.num_sequences,
                grid.num_steps,
                num_heads,
                scale,
                scale * math.log2(math.e),
                GROUP=group,
                D=dim,
                D_V=dim_v,
                BLOCK=block_size,
                BLOCK_D=config.block_d,
                BLOCK_DV=config.block_dv,
                ROTARY=rotary is not None,
                PRECISION=precision_of(q.dtype),
                num_warps=config.num_warps,
                num_stages=1,
            )
    if group > 1:
        dk = dk.view(total, num_heads_kv, group, dim).sum(2).to(k.dtype)
        dv = dv.view(total, num_heads_kv, group, dim_v).sum(2).to(v.dtype)
    return dq, dk, dv
