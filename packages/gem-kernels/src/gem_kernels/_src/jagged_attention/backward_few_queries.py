"""Triton backward of jagged attention where one tile holds all queries of a sequence: pooling by few queries.

One program per (sequence, head) keeps its queries, meets every key once and so writes dQ, dK and dV: five matmuls and
one reading of the keys, in place of seven and two by the kernels of the two sides.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import TileConfig, power_of_two
from gem_kernels._src.attention.launch import row_strides
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.jagged_attention.backward_dkdv import load_log2_lse
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.tiles.memory import load_row_scalars, load_rows, sequence_bounds, store_rows

_LOG2E = tl.constexpr(math.log2(math.e))
MAX_QUERIES = 64
"""Of a sequence, for which registers hold their gradient beside those of a key tile."""
MAX_HEAD_DIM = 128
_MIN_PROGRAMS = 512
"""Some for each multiprocessor: one program goes over all keys of a sequence."""


@triton.jit(do_not_specialize=["num_heads"])
def _jagged_attention_bwd_few_queries_kernel(
    q_ptr,  # (T_q, H, D)
    k_ptr,  # (T_k, H, D)
    v_ptr,  # (T_k, H, D_v)
    do_ptr,  # (T_q, H, D_v)
    out_ptr,  # (T_q, H, D_v) contiguous
    lse_ptr,  # (T_q, H) float32 contiguous
    dlse_ptr,  # (T_q, H) float32 contiguous, or None
    dq_ptr,  # (T_q, H, D) contiguous
    dk_ptr,  # (T_k, H, D) contiguous
    dv_ptr,  # (T_k, H, D_v) contiguous
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dot,
    stride_doh,
    num_heads,
    scale,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SHARED: tl.constexpr,  # k and v are one tensor, and dk is the gradient of both
):
    b = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    heads = num_heads.to(tl.int64)
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    start_k, len_k = sequence_bounds(offsets_k_ptr, b)
    row = start_q * heads + head
    q = load_rows(q_ptr + start_q * stride_qt + head * stride_qh, 0, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
    do = load_rows(do_ptr + start_q * stride_dot + head * stride_doh, 0, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
    out = load_rows(out_ptr + row * D_V, 0, len_q, heads * D_V, BLOCK_M, D_V, BLOCK_DV)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= load_row_scalars(dlse_ptr + row, 0, len_q, heads, BLOCK_M, 0.0)
    lse = load_log2_lse(lse_ptr + row, 0, len_q, heads, BLOCK_M)
    k_ptr += start_k * stride_kt + head * stride_kh
    v_ptr += start_k * stride_vt + head * stride_vh
    dk_ptr += (start_k * heads + head) * D
    dv_ptr += (start_k * heads + head) * D_V
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for n in range(0, len_k, BLOCK_N):
        k = load_rows(k_ptr, n, len_k, stride_kt, BLOCK_N, D, BLOCK_D)
        if SHARED:
            v = k
        else:
            v = load_rows(v_ptr, n, len_k, stride_vt, BLOCK_N, D_V, BLOCK_DV)
        # Tiles are (keys, queries). A row past the keys has a score of 0, and exp2(-lse) need not be finite.
        scores = tl.where(((n + tl.arange(0, BLOCK_N)) < len_k)[:, None], tl.dot(k, tl.trans(q)), float("-inf"))
        p = tl.exp2(scores * (scale * _LOG2E) - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do)
        if not SHARED:
            store_rows(dv_ptr, dv, tl.cast(n, tl.int32), len_k, heads * D_V, BLOCK_N, D_V, BLOCK_DV)
        ds = (p * (tl.dot(v, tl.trans(do)) - delta[None, :]) * scale).to(q.dtype)
        dk = tl.dot(ds, q, dv) if SHARED else tl.dot(ds, q)
        store_rows(dk_ptr, dk, tl.cast(n, tl.int32), len_k, heads * D, BLOCK_N, D, BLOCK_D)
        dq = tl.dot(tl.trans(ds), k, dq)
    store_rows(dq_ptr + row * D, dq, 0, len_q, heads * D, BLOCK_M, D, BLOCK_D)


def few_queries(q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, left: int, right: int, bias: Bias) -> bool:
    """Whether the kernel computes this call: half precision, heads in pairs, no mask, and enough sequences.

    A pure function of shapes, dtype and ``max_seqlen_q``.
    """
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[1] == k.shape[1]
        and max(q.shape[2], v.shape[2]) <= MAX_HEAD_DIM
        and pairing.max_seqlen_q <= MAX_QUERIES
        and not pairing.indexed
        and left < 0
        and right < 0
        and not bias.is_set
        and pairing.num_queries * q.shape[1] >= _MIN_PROGRAMS
    )


def select_few_queries(max_seqlen_q: int, head_dim: int) -> TileConfig:
    """Tiles of the kernel; ``head_dim`` is the larger of D and D_v. Timed on Hopper."""
    block_n = 64 if head_dim <= 64 else 32
    return TileConfig(block_m=power_of_two(max(max_seqlen_q, 1)), block_n=block_n, num_warps=4, num_stages=3)


def launch_few_queries(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairing: Pairing,
    scale: float,
    *,
    keys_are_values: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients dq, dk and dv, contiguous; None for dv where dk is that of both. ``out`` and ``lse`` are contiguous."""
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    dv = None if keys_are_values else torch.empty(v.shape, dtype=v.dtype, device=v.device)
    config = select_few_queries(pairing.max_seqlen_q, max(q.shape[2], v.shape[2]))
    _jagged_attention_bwd_few_queries_kernel[(pairing.num_queries * q.shape[1],)](
        q,
        k,
        v,
        do,
        out,
        lse,
        None if dlse is None else dlse.to(torch.float32).contiguous(),
        dq,
        dk,
        dk if dv is None else dv,
        pairing.offsets_q,
        pairing.offsets_k,
        *row_strides(q, k, v, do),
        q.shape[1],
        scale,
        D=q.shape[2],
        D_V=v.shape[2],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=power_of_two(q.shape[2]),
        BLOCK_DV=power_of_two(v.shape[2]),
        SHARED=keys_are_values,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return dq, dk, dv
