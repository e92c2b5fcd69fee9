"""When GDPA takes Hopper's own kernels, and their launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call, descriptor, sequence_descriptor
from gem_kernels._src.attention.hopper.launch import is_copyable, multiprocessors, query_chunks, serves
from gem_kernels._src.attention.hopper.schedule import make_schedule
from gem_kernels._src.attention.hopper.units import one_kernel_arguments
from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.attention.reuse import once

if TYPE_CHECKING:
    from gem_kernels._src.gdpa.hopper_activation import PairActivation

HEAD_DIMS = (64, 128)
BLOCK_N = 128
"""Keys of a tile."""
STAGES = {64: 4, 128: 2}
"""Key tiles in shared memory, by head dim: what Q and the output leave of 227 KiB."""
DQ_BLOCK_N = 64
DQ_STAGES = {64: 8, 128: 4}
DKDV_STAGES = {64: 6, 128: 3}
"""Of 64 query rows each."""
PAIRS_HEAD_DIM = 128
PAIRS_STAGES = 2
"""Of 64 query rows each, in the backward in pairs."""


def applies(
    q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, num_targets: Tensor | None, left: int, right: int
) -> bool:
    """Whether the kernels compute this call: what ``serves`` asks, D = D_v of 64 or 128, and no targets."""
    return num_targets is None and serves(q, k, v, pairing, left, right, head_dims=HEAD_DIMS)


def leaves_out_ends(k: Tensor, offsets_k: Tensor) -> bool:
    """Whether the forward leaves out what lies behind the ends of sequences, by code that costs time elsewhere.

    Not where the mean sequence has one tile of keys or less, or just whole ones, as in a batch of equal lengths. A pure
    function of shapes.
    """
    tiles = (offsets_k.shape[0] - 1) * BLOCK_N
    return k.shape[0] > tiles and k.shape[0] % tiles != 0


def launch_hopper_forward(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    activation: str,
    pre_scale: float,
    post_scale: float,
    *,
    add_queries: bool = False,
) -> None:
    """Write ``out`` (T_q, H, D), contiguous, with at least one row; the caller has asked ``applies``.

    With ``add_queries``, which asks for a key, q is added to the output before it is rounded.
    """
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.gdpa.hopper_activation import forward_activation
    from gem_kernels._src.gdpa.hopper_forward import _gdpa_hopper_fwd_kernel

    if k.shape[0] == 0:
        out.zero_()
        return
    num_heads, dim = q.shape[1:]
    of_activation, scale = forward_activation(activation, q.dtype, pre_scale, post_scale)
    constants = {
        **of_activation,
        "ADD_QUERIES": add_queries,
        "ENDS": leaves_out_ends(k, offsets_k),
        "GROUP": num_heads // k.shape[1],
        "STAGES": STAGES[dim],
        "BLOCK_N": BLOCK_N,
        "D": dim,
        "num_warps": 4,
    }
    with device_guard(q):
        arguments = (
            descriptor(q, ROWS),
            sequence_descriptor(k, BLOCK_N),
            sequence_descriptor(v, BLOCK_N),
            descriptor(out, ROWS),
            out,
            out.stride(0),
            *once(query_chunks, q, offsets_q, offsets_k, BLOCK_N * STAGES[dim]),
            num_heads,
            pre_scale,
            scale,
        )
        call(_gdpa_hopper_fwd_kernel, multiprocessors(q.device), arguments, constants, q.device)


def launch_hopper_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk and dv, contiguous; at least one row on both sides, and the caller has asked ``applies``."""
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.gdpa.hopper_activation import pair_activation, scaled_activation
    from gem_kernels._src.gdpa.hopper_backward import _gdpa_hopper_dkdv_kernel, _gdpa_hopper_dq_kernel

    do = do if is_copyable(do) else do.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    num_heads, num_heads_kv, dim = q.shape[1], k.shape[1], q.shape[2]
    pairs = pair_activation(activation, q.dtype)
    if pairs is not None and dim == PAIRS_HEAD_DIM:
        _launch_in_pairs(do, q, k, v, dq, dk, dv, offsets_q, offsets_k, max_seqlen_k, pairs, pre_scale, post_scale)
        return dq, dk, dv
    act = scaled_activation(activation)
    ds_scale = pre_scale * post_scale * act.derivative_scale
    shared = {
        "ACTIVATION_DERIVATIVE": act.derivative,
        "HAS_PRE_SCALE": pre_scale != 1.0,
        "GROUP": num_heads // num_heads_kv,
    }
    programs = multiprocessors(q.device)
    with device_guard(q):
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
            # Chunks of keys, with the queries in the place of the other side.
            *once(make_schedule, offsets_k, offsets_q, k.shape[0], tile_rows=TILE_ROWS, resident_keys=0, max_tiles=1),
            num_heads_kv,
            pre_scale,
            post_scale * act.value_scale,
            ds_scale,
        )
        constants = {"ACTIVATION": act.value, **shared, "STAGES": DKDV_STAGES[dim], "D": dim, "num_warps": 4}
        call(_gdpa_hopper_dkdv_kernel, programs, dkdv_arguments, constants, q.device)
        dq_arguments = (
            descriptor(q, ROWS),
            descriptor(do, ROWS),
            descriptor(k, DQ_BLOCK_N),
            descriptor(v, DQ_BLOCK_N),
            descriptor(dq, ROWS),
            dq,
            dq.stride(0),
            *once(query_chunks, q, offsets_q, offsets_k, DQ_BLOCK_N * DQ_STAGES[dim]),
            num_heads,
            pre_scale,
            ds_scale,
        )
        constants = {**shared, "STAGES": DQ_STAGES[dim], "BLOCK_N": DQ_BLOCK_N, "D": dim, "num_warps": 4}
        call(_gdpa_hopper_dq_kernel, programs, dq_arguments, constants, q.device)
    return dq, dk, dv


def _launch_in_pairs(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_k: int,
    pairs: PairActivation,
    pre_scale: float,
    post_scale: float,
) -> None:
    """All gradients by one kernel, head dim 128.

    Of sequences with more than two tiles of keys it sums dq in new memory, 4 bytes for each element of q.
    """
    from gem_kernels._src.attention.hopper.tiles import TILE_ROWS
    from gem_kernels._src.gdpa.hopper_backward_pairs import _gdpa_hopper_bwd_pairs_kernel

    constants = {
        "VALUE_AND_SLOPE": pairs.value_and_slope,
        "GROUP": q.shape[1] // k.shape[1],
        "STAGES": PAIRS_STAGES,
        "D": PAIRS_HEAD_DIM,
        "num_warps": 4,
    }
    with device_guard(q):
        gradients = dq, dk, dv
        has_sums = max_seqlen_k > 2 * TILE_ROWS
        tensors, work = one_kernel_arguments(do, q, k, v, gradients, offsets_q, offsets_k, has_sums=has_sums)
        arguments = (*tensors, *work, pre_scale, post_scale * pre_scale * pairs.scale)
        call(_gdpa_hopper_bwd_pairs_kernel, multiprocessors(q.device), arguments, constants, q.device)
