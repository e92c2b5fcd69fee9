"""Triton forward of block attention: one program per (block, head), a plain softmax in one tile, no online update."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import precision_of
from gem_kernels._src.attention.launch import check_head_dims, device_guard, unit_stride
from gem_kernels._src.block_attention.blocks import block_offsets
from gem_kernels._src.block_attention.configs import select
from gem_kernels._src.block_attention.launch import block_grid
from gem_kernels._src.block_attention.rotary import rotate_all
from gem_kernels._src.block_attention.tiles import exp_scores, load_rotated_tile, locate_block, store_tile
from gem_kernels._src.jagged_attention.forward import launch_forward as launch_jagged_forward


# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
@triton.jit(do_not_specialize=["num_sequences", "num_steps"])
def _block_attention_fwd_kernel(
    q_ptr,  # (T, H, D)
    k_ptr,  # (T, H_kv, D)
    v_ptr,  # (T, H_kv, D_v)
    out_ptr,  # (T, H, D_v)
    table_ptr,  # (T, D) sines and cosines, read only if ROTARY
    offsets_ptr,  # (B + 1,)
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    num_sequences,
    num_steps,
    num_heads,
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
    q_ptr += head * stride_qh
    k_ptr += head // GROUP * stride_kh
    v_ptr += head // GROUP * stride_vh
    out_ptr += head * stride_oh

    scores = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for d in tl.static_range(0, D, BLOCK_D):
        q = load_rotated_tile(q_ptr, table_ptr, offs_t, mask_t, stride_qt, d, D, BLOCK_D, ROTARY)
        k = load_rotated_tile(k_ptr, table_ptr, offs_t, mask_t, stride_kt, d, D, BLOCK_D, ROTARY)
        scores = tl.dot(q, tl.trans(k), scores, input_precision=PRECISION)
    p, row_sum = exp_scores(scores, mask_t, scale_log2)
    p = p.to(v_ptr.dtype.element_ty)
    for d in tl.static_range(0, D_V, BLOCK_DV):
        v = load_rotated_tile(v_ptr, table_ptr, offs_t, mask_t, stride_vt, d, D_V, BLOCK_DV, ROTARY)
        out = tl.dot(p, v, input_precision=PRECISION) / row_sum[:, None]
        store_tile(out_ptr, out, offs_t, mask_t, stride_ot, d, D_V, BLOCK_DV)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block_size: int, scale: float, rotary: Tensor | None = None
) -> Tensor:
    """Output (T, H, D_v), contiguous, in the dtype of q."""
    check_head_dims("block_attention", q.shape[2], v.shape[2])
    if q.dtype == torch.float32:
        q, k, v = rotate_all((q, k, v), rotary)
        return launch_float32_forward(q, k, v, offsets, block_size, scale)[0]
    return launch_tile_forward(q, k, v, offsets, block_size, scale, rotary)


def launch_float32_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (T, H), by jagged attention over the blocks as sequences.

    Full float32 products keep their operands in registers, which do not hold a whole block; the smaller tiles of
    jagged attention do.
    """
    blocks = block_offsets(offsets, q.shape[0], block_size)
    if scale < 0:
        # The online softmax scales a maximum of scores, which is one only under a positive scale.
        q, scale = -q, -scale
    return launch_jagged_forward(q, k, v, blocks, blocks, block_size, block_size, scale, -1, -1)


def launch_tile_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block_size: int, scale: float, rotary: Tensor | None = None
) -> Tensor:
    """``launch_forward`` by the kernel of this module."""
    q, k, v, offsets = unit_stride(q), unit_stride(k), unit_stride(v), offsets.contiguous()
    total, num_heads, dim = q.shape
    dim_v = v.shape[2]
    out = torch.empty(total, num_heads, dim_v, dtype=q.dtype, device=q.device)
    if total == 0:
        return out
    config = select("forward", q.dtype, block_size, dim, dim_v, rotary=rotary is not None)
    grid = block_grid(offsets, total, block_size, num_heads)
    with device_guard(q):
        _block_attention_fwd_kernel[(grid.size,)](
            q,
            k,
            v,
            out,
            q if rotary is None else rotary.contiguous(),
            offsets,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *out.stride()[:2],
            grid.num_sequences,
            grid.num_steps,
            num_heads,
            scale * math.log2(math.e),
            GROUP=num_heads // k.shape[1],
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
    return out
