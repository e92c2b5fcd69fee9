"""When jagged attention takes Hopper's own kernels, and their launches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call, descriptor, sequence_descriptor
from gem_kernels._src.attention.hopper.launch import MAX_ROWS, is_copyable, multiprocessors, query_chunks, serves
from gem_kernels._src.attention.hopper.schedule import make_schedule
from gem_kernels._src.attention.hopper.units import one_kernel_arguments
from gem_kernels._src.attention.hopper.window_schedule import make_window_schedule
from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.attention.reuse import once
from gem_kernels._src.jagged_attention.bias import Bias

HEAD_DIM = 128
BACKWARD_HEAD_DIMS = (64, 128)
MIN_SEQLEN = 128
"""Rows of a tile: where no sequence fills one, the portable kernels cut their tiles to fit."""
BLOCK_N = 128
"""Keys of a tile."""
STAGES = 2
"""Key tiles in shared memory: what Q and the output leave of 227 KiB."""
WINDOW_BLOCK_N = 64
WINDOW_STAGES = 4
DQ_BLOCK_N = 64
DQ_STAGES = {64: 6, 128: 3}
DKDV_STAGES = {64: 6, 128: 3}
"""By head dim, of 64 rows each."""
ONEPASS_STAGES = 2
ONEPASS_MEAN_ROWS = 256
"""Queries of a sequence, in the mean, beyond which the backward is one kernel."""
ONEPASS_MAX_SPREAD = 4
"""Times the mean that ``max_seqlen_k`` may be there: many key tiles of few sequences would wait for one another."""


def applies(q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, bias: Bias) -> bool:
    """Whether the kernels compute this call: what ``serves`` asks, but any window, D = D_v = 128, no bias, whole tiles.

    A pure function of shapes, strides, dtype, ``max_seqlen_q`` and capability.
    """
    return (
        not bias.is_set
        and pairing.max_seqlen_q >= MIN_SEQLEN
        and serves(q, k, v, pairing, -1, -1, head_dims=(HEAD_DIM,))
    )


def backward_applies(q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, max_seqlen_k: int, bias: Bias) -> bool:
    """Whether the backward kernels compute this call: bfloat16, whole tiles of both sides, no bias, any window.

    D = D_v of ``BACKWARD_HEAD_DIMS``, and else what ``serves`` asks. Float16 has not run with them. A pure function of
    shapes, strides, dtype, ``max_seqlen_q``, ``max_seqlen_k`` and capability.
    """
    return (
        q.dtype == torch.bfloat16
        and not bias.is_set
        and min(pairing.max_seqlen_q, max_seqlen_k) >= MIN_SEQLEN
        and serves(q, k, v, pairing, -1, -1, head_dims=BACKWARD_HEAD_DIMS)
    )


def is_onepass(q: Tensor, k: Tensor, offsets_q: Tensor, max_seqlen_k: int) -> bool:
    """Whether the backward is one kernel, with sums of dq in float32: 4 bytes of memory more for each element of q.

    Where sequences are shorter, few are far longer than the others, or heads are narrower it is two, which compute the
    scores twice. A pure function of shapes and ``max_seqlen_k``.
    """
    num_sequences = offsets_q.shape[0] - 1
    return (
        q.shape[2] == HEAD_DIM
        and q.shape[0] > ONEPASS_MEAN_ROWS * num_sequences
        and max_seqlen_k * num_sequences <= ONEPASS_MAX_SPREAD * k.shape[0]
    )


def rests(q: Tensor, k: Tensor, offsets_q: Tensor) -> bool:
    """Whether the forward's second consumer leaves out keys where it has no row, by code that costs time elsewhere.

    Not where the mean sequence has one tile of keys or less, or whole tiles of queries, as in a batch of equal lengths.
    A pure function of shapes.
    """
    num_sequences = offsets_q.shape[0] - 1
    return k.shape[0] > num_sequences * BLOCK_N and q.shape[0] % (num_sequences * MIN_SEQLEN) != 0


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
    constants = {
        "RESTS": rests(q, k, offsets_q),
        "GROUP": num_heads // k.shape[1],
        "STAGES": STAGES,
        "BLOCK_N": BLOCK_N,
        "D": HEAD_DIM,
        "num_warps": 4,
    }
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


def launch_hopper_window_forward(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    scale: float,
    left: int,
    right: int,
) -> None:
    """As ``launch_hopper_forward``, with a window; -1 is unbounded on one side."""
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.jagged_attention.hopper_window_forward import _jagged_attention_hopper_window_fwd_kernel

    if k.shape[0] == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return
    num_heads = q.shape[1]
    left, right = _sides(left, right)
    constants = {"GROUP": num_heads // k.shape[1], "STAGES": WINDOW_STAGES, "BLOCK_N": WINDOW_BLOCK_N}
    constants |= {"D": HEAD_DIM, "num_warps": 4}
    with device_guard(q):
        chunks, num_chunks, shifts = once(
            make_window_schedule, offsets_q, offsets_k, q.shape[0], tile_rows=TILE_ROWS, left=left, right=right
        )
        arguments = (
            descriptor(q, ROWS),
            sequence_descriptor(k, WINDOW_BLOCK_N),
            sequence_descriptor(v, WINDOW_BLOCK_N),
            sequence_descriptor(out, ROWS),
            lse,
            chunks,
            num_chunks,
            num_heads,
            scale * math.log2(math.e),
            shifts,
            left,
            right,
        )
        call(_jagged_attention_hopper_window_fwd_kernel, multiprocessors(q.device), arguments, constants, q.device)


def _sides(left: int, right: int) -> tuple[int, int]:
    """A window's sides as the kernels take them: an unbounded one reaches as far as any sequence."""
    return MAX_ROWS if left < 0 else left, MAX_ROWS if right < 0 else right


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
    max_seqlen_k: int,
    scale: float,
    left: int = -1,
    right: int = -1,
    places: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk and dv; at least one row on both sides, and the caller has asked for it.

    Contiguous, or in ``places``, which a call with a window may have. ``out`` (T_q, H, D) and ``lse`` (T_q, H) are
    contiguous.
    """
    from gem_kernels._src.jagged_attention.hopper_stats import launch_stats

    do = do if is_copyable(do) else do.contiguous()
    with device_guard(q):
        stats = launch_stats(out, do, lse, dlse)
        if left < 0 and right < 0 and is_onepass(q, k, offsets_q, max_seqlen_k):
            return _launch_onepass(do, q, k, v, stats, offsets_q, offsets_k, scale)
        return _launch_twice(do, q, k, v, stats, offsets_q, offsets_k, scale, left, right, places)


def _launch_twice(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    scale: float,
    left: int = -1,
    right: int = -1,
    places: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One kernel for the gradients of keys and values, and one for that of the queries."""
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.jagged_attention.hopper_backward import (
        _jagged_attention_hopper_dkdv_kernel,
        _jagged_attention_hopper_dq_kernel,
    )

    dq, dk, dv = places or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dim = q.shape[2]
    has_window = left >= 0 or right >= 0
    left, right = _sides(left, right)
    num_heads, num_heads_kv = q.shape[1], k.shape[1]
    group = num_heads // num_heads_kv
    scale_log2 = scale * math.log2(math.e)
    programs = multiprocessors(q.device)
    # Chunks of keys, with the queries in the place of the other side, and so the window's sides exchanged.
    chunks, num_chunks, shifts = _tiles(offsets_k, offsets_q, k.shape[0], right, left, has_window=has_window)
    dkdv_arguments = (
        descriptor(q, ROWS),
        descriptor(do, ROWS),
        sequence_descriptor(q, ROWS),
        sequence_descriptor(do, ROWS),
        descriptor(k, ROWS),
        descriptor(v, ROWS),
        sequence_descriptor(dk, ROWS),
        sequence_descriptor(dv, ROWS),
        stats,
        stats.stride(0),
        chunks,
        num_chunks,
        num_heads_kv,
        scale_log2,
        scale,
        shifts,
        right,
        left,
    )
    constants = {"GROUP": group, "STAGES": DKDV_STAGES[dim], "D": dim, "HAS_WINDOW": has_window, "num_warps": 4}
    call(_jagged_attention_hopper_dkdv_kernel, programs, dkdv_arguments, constants, q.device)
    chunks, num_chunks, shifts = _tiles(offsets_q, offsets_k, q.shape[0], left, right, has_window=has_window)
    dq_arguments = (
        descriptor(q, ROWS),
        descriptor(do, ROWS),
        descriptor(k, DQ_BLOCK_N),
        descriptor(v, DQ_BLOCK_N),
        sequence_descriptor(k, DQ_BLOCK_N),
        sequence_descriptor(v, DQ_BLOCK_N),
        sequence_descriptor(dq, ROWS),
        stats,
        stats.stride(0),
        chunks,
        num_chunks,
        num_heads,
        scale_log2,
        scale,
        shifts,
        left,
        right,
    )
    constants = {"GROUP": group, "STAGES": DQ_STAGES[dim], "BLOCK_N": DQ_BLOCK_N, "D": dim}
    constants |= {"HAS_WINDOW": has_window, "num_warps": 4}
    call(_jagged_attention_hopper_dq_kernel, programs, dq_arguments, constants, q.device)
    return dq, dk, dv


def _tiles(
    offsets: Tensor, other_offsets: Tensor, total: int, left: int, right: int, *, has_window: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunks of one tile each, how many there are, and their shifts, which mean nothing without a window."""
    from gem_kernels._src.attention.hopper.tiles import TILE_ROWS

    if has_window:
        return once(make_window_schedule, offsets, other_offsets, total, tile_rows=TILE_ROWS, left=left, right=right)
    options = {"tile_rows": TILE_ROWS, "resident_keys": 0, "max_tiles": 1}
    chunks, num_chunks = once(make_schedule, offsets, other_offsets, total, **options)
    return chunks, num_chunks, num_chunks


def _launch_onepass(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stats: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """All three in one kernel, every product once; the sums of dq take whole tiles of queries."""
    from gem_kernels._src.jagged_attention.hopper_onepass import _jagged_attention_hopper_onepass_kernel

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tensors, work = one_kernel_arguments(do, q, k, v, (dq, dk, dv), offsets_q, offsets_k, has_sums=True)
    arguments = (*tensors, stats, stats.stride(0), *work, scale * math.log2(math.e), scale)
    constants = {"GROUP": q.shape[1] // k.shape[1], "STAGES": ONEPASS_STAGES, "D": HEAD_DIM, "num_warps": 4}
    call(_jagged_attention_hopper_onepass_kernel, multiprocessors(q.device), arguments, constants, q.device)
    return dq, dk, dv
