"""When the forward of jagged attention takes Hopper's own kernel, and its launch."""

from __future__ import annotations

import math

from torch import Tensor

from gem_kernels._src.attention.hopper.call import call, descriptor
from gem_kernels._src.attention.hopper.launch import multiprocessors, query_chunks, serves
from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.jagged_attention.bias import Bias

HEAD_DIM = 128
MIN_SEQLEN_Q = 128
"""Query rows of a tile: where no sequence fills one, the portable kernel cuts its tiles to fit."""
BLOCK_N = 128
"""Keys of a tile."""
STAGES = 2
"""Key tiles in shared memory: what Q and the output leave of 227 KiB."""


def applies(q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, left: int, right: int, bias: Bias) -> bool:
    """Whether the kernel computes this call: what ``serves`` asks, D = D_v = 128, no bias, and whole tiles of queries.

    A pure function of shapes, strides, dtype, ``max_seqlen_q`` and capability.
    """
    return (
        not bias.is_set
        and pairing.max_seqlen_q >= MIN_SEQLEN_Q
        and serves(q, k, v, pairing, left, right, head_dims=(HEAD_DIM,))
    )


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
            descriptor(k, BLOCK_N),
            descriptor(v, BLOCK_N),
            descriptor(out, ROWS),
            out,
            out.stride(0),
            lse,
            *query_chunks(q, offsets_q, offsets_k, BLOCK_N * STAGES),
            num_heads,
            scale * math.log2(math.e),
        )
        call(_jagged_attention_hopper_fwd_kernel, multiprocessors(q.device), arguments, constants, q.device)
