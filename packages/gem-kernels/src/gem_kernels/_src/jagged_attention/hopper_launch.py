"""When jagged attention takes Hopper's own kernels, and their launches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call, descriptor, sequence_descriptor
from gem_kernels._src.attention.hopper.launch import is_copyable, multiprocessors, query_chunks, serves
from gem_kernels._src.attention.hopper.schedule import make_schedule
from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.attention.reuse import once
from gem_kernels._src.jagged_attention.bias import Bias

HEAD_DIM = 128
MIN_SEQLEN = 128
"""Rows of a tile: where no sequence fills one, the portable kernels cut their tiles to fit."""
BLOCK_N = 128
"""Keys of a tile."""
STAGES = 2
"""Key tiles in shared memory: what Q and the output leave of 227 KiB."""
DQ_BLOCK_N = 64
DQ_STAGES = 4
DKDV_STAGES = 3
"""Of 64 query rows each."""


def applies(q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, left: int, right: int, bias: Bias) -> bool:
    """Whether the kernel computes this call: what ``serves`` asks, D = D_v = 128, no bias, and whole tiles of queries.

    A pure function of shapes, strides, dtype, ``max_seqlen_q`` and capability.
    """
    return (
        not bias.is_set
        and pairing.max_seqlen_q >= MIN_SEQLEN
        and serves(q, k, v, pairing, left, right, head_dims=(HEAD_DIM,))
    )


def backward_applies(
    q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, max_seqlen_k: int, left: int, right: int, bias: Bias
) -> bool:
    """Whether the backward kernels compute this call: as ``applies``, in bfloat16, and whole key tiles.

    Float16 has not run with them. A pure function of shapes, strides, dtype, ``max_seqlen_q``, ``max_seqlen_k`` and
    capability.
    """
    return q.dtype == torch.bfloat16 and max_seqlen_k >= MIN_SEQLEN and applies(q, k, v, pairing, left, right, bias)


def launch_hopper_forward(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, scale: float
) -> None:
    """Write ``out`` (T_q, H, D) and ``lse`` (T_q, H), contiguous, with a row; the caller has asked ``applies``."""
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.jagged_attention.hopper_forward import _jagged_attention_hopper_fwd_kernel

    if k.shape[0] == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return
    num_heads = q.shape[1]
    constants = {"GROUP": num_heads // k.shape[1], "STAGES": STAGES, "BLOCK_N": BLOCK_N, "D": HEAD_DIM, "num_warps": 4}
    with device_guard(q):
        arguments = (
            descriptor(q, ROWS),
            sequence_descriptor(k, BLOCK_N),
            sequence_descriptor(v, BLOCK_N),
            sequence_descriptor(out, ROWS),
            lse,
            *once(query_chunks, q, offsets_q, offsets_k, BLOCK_N * STAGES),
            num_heads,
            scale * math.log2(math.e),
        )
        call(_jagged_attention_hopper_fwd_kernel, multiprocessors(q.device), arguments, constants, q.device)


def launch_hopper_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk and dv, contiguous; at least one row on both sides, and the caller has asked for it.

    ``out`` (T_q, H, D) and ``lse`` (T_q, H) are contiguous.
    """
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.jagged_attention.hopper_backward import (
        _jagged_attention_hopper_dkdv_kernel,
        _jagged_attention_hopper_dq_kernel,
    )
    from gem_kernels._src.jagged_attention.hopper_stats import launch_stats

    do = do if is_copyable(do) else do.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    num_heads, num_heads_kv = q.shape[1], k.shape[1]
    group = num_heads // num_heads_kv
    scale_log2 = scale * math.log2(math.e)
    programs = multiprocessors(q.device)
    with device_guard(q):
        stats = launch_stats(out, do, lse, dlse)
        dkdv_arguments = (
            descriptor(q, ROWS),
            descriptor(do, ROWS),
            descriptor(k, TILE_ROWS),
            descriptor(v, TILE_ROWS),
            descriptor(dk, ROWS),
            descriptor(dv, ROWS),
            dk,
            dv,
            dk.stride(0),
            stats,
            stats.stride(0),
            # Chunks of keys, with the queries in the place of the other side.
            *once(make_schedule, offsets_k, offsets_q, k.shape[0], tile_rows=TILE_ROWS, resident_keys=0, max_tiles=1),
            num_heads_kv,
            scale_log2,
            scale,
        )
        constants = {"GROUP": group, "STAGES": DKDV_STAGES, "D": HEAD_DIM, "num_warps": 4}
        call(_jagged_attention_hopper_dkdv_kernel, programs, dkdv_arguments, constants, q.device)
        dq_arguments = (
            descriptor(q, ROWS),
            descriptor(do, ROWS),
            descriptor(k, DQ_BLOCK_N),
            descriptor(v, DQ_BLOCK_N),
            descriptor(dq, ROWS),
            dq,
            dq.stride(0),
            stats,
            stats.stride(0),
            *once(make_schedule, offsets_q, offsets_k, q.shape[0], tile_rows=TILE_ROWS, resident_keys=0, max_tiles=1),
            num_heads,
            scale_log2,
            scale,
        )
        constants = {"GROUP": group, "STAGES": DQ_STAGES, "BLOCK_N": DQ_BLOCK_N, "D": HEAD_DIM, "num_warps": 4}
        call(_jagged_attention_hopper_dq_kernel, programs, dq_arguments, constants, q.device)
    return dq, dk, dv
