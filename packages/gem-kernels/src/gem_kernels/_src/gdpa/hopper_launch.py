"""When GDPA takes Hopper's own kernels, and their launches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from gem_kernels._src.attention.launch import capability_of, device_guard
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.gdpa.hopper_call import call
from gem_kernels._src.gdpa.hopper_call import descriptor as _descriptor
from gem_kernels._src.gdpa.hopper_schedule import MAX_TILES, Schedule, make_schedule

HEAD_DIMS = (64, 128)
BLOCK_N = 128
"""Keys of a tile."""
STAGES = {64: 4, 128: 2}
"""Key tiles in shared memory, by head dim: what Q and the output leave of 227 KiB."""
DQ_BLOCK_N = 64
DQ_STAGES = {64: 8, 128: 4}
DKDV_STAGES = {64: 6, 128: 3}
"""Of 64 query rows each."""
_MAX_ROWS = 2**31 - 1 - BLOCK_N
"""Coordinates of the copy engine have 32 bits."""
_CHUNKS_PER_SM = 4
_portable_only = False


@contextlib.contextmanager
def portable_only() -> Iterator[None]:
    """Leave Hopper's kernel aside inside the block: for tests and benchmarks, not for users."""
    global _portable_only
    before, _portable_only = _portable_only, True
    try:
        yield
    finally:
        _portable_only = before


@functools.cache
def has_tested_gluon() -> bool:
    """Whether the installed Triton brings the Gluon that this kernel has run with: it is an experimental interface."""
    return triton.__version__.split(".")[:2] == ["3", "6"]


def applies(
    q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, num_targets: Tensor | None, left: int, right: int
) -> bool:
    """Whether the kernels compute this call: half precision, no window, D = D_v of 64 or 128, heads side by side.

    Neither targets, nor shared seeds, nor requests that ``pairing`` could not merge. A pure function of shapes,
    strides, dtype and capability, so that all ranks of a job agree. Everything else runs on the portable kernel, with
    the same result up to rounding.
    """
    return (
        not _portable_only
        and q.is_cuda
        and capability_of(q) == (9, 0)
        and has_tested_gluon()
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] in HEAD_DIMS
        and q.shape[2] == v.shape[2]
        and not pairing.indexed
        and num_targets is None
        and left < 0
        and right < 0
        and max(q.shape[0], k.shape[0]) <= _MAX_ROWS
        and all(_is_copyable(x) for x in (q, k, v))
    )


def _is_copyable(x: Tensor) -> bool:
    """Whether the copy engine reads x (T, H, D) as a matrix (T, H * D): 16-byte rows, no gap between heads."""
    side_by_side = x.shape[1] == 1 or x.stride(1) == x.shape[2]
    return x.stride(2) == 1 and side_by_side and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


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
) -> None:
    """Write ``out`` (T_q, H, D), contiguous, with at least one row; the caller has asked ``applies``."""
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.gdpa.hopper_activation import scaled_activation
    from gem_kernels._src.gdpa.hopper_forward import ROWS, _gdpa_hopper_fwd_kernel

    if k.shape[0] == 0:
        out.zero_()
        return
    num_heads, dim = q.shape[1:]
    act = scaled_activation(activation)
    constants = {
        "ACTIVATION": act.value,
        "HAS_PRE_SCALE": pre_scale != 1.0,
        "GROUP": num_heads // k.shape[1],
        "STAGES": STAGES[dim],
        "BLOCK_N": BLOCK_N,
        "D": dim,
        "num_warps": 4,
    }
    with device_guard(q):
        arguments = (
            _descriptor(q, ROWS),
            _descriptor(k, BLOCK_N),
            _descriptor(v, BLOCK_N),
            _descriptor(out, ROWS),
            out,
            out.stride(0),
            *_query_chunks(q, offsets_q, offsets_k, BLOCK_N * STAGES[dim]),
            num_heads,
            pre_scale,
            post_scale * act.value_scale,
        )
        call(_gdpa_hopper_fwd_kernel, _multiprocessors(q.device), arguments, constants, q.device)


def launch_hopper_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    activation: str,
    pre_scale: float,
    post_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk and dv, contiguous; at least one row on both sides, and the caller has asked ``applies``."""
    from gem_kernels._src.gdpa.hopper_activation import scaled_activation
    from gem_kernels._src.gdpa.hopper_backward import _gdpa_hopper_dkdv_kernel, _gdpa_hopper_dq_kernel
    from gem_kernels._src.gdpa.hopper_forward import ROWS, TILE_ROWS

    do = do if _is_copyable(do) else do.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    num_heads, num_heads_kv, dim = q.shape[1], k.shape[1], q.shape[2]
    act = scaled_activation(activation)
    ds_scale = pre_scale * post_scale * act.derivative_scale
    shared = {
        "ACTIVATION_DERIVATIVE": act.derivative,
        "HAS_PRE_SCALE": pre_scale != 1.0,
        "GROUP": num_heads // num_heads_kv,
    }
    programs = _multiprocessors(q.device)
    with device_guard(q):
        dkdv_arguments = (
            _descriptor(q, ROWS),
            _descriptor(do, ROWS),
            _descriptor(k, TILE_ROWS),
            _descriptor(v, TILE_ROWS),
            _descriptor(dk, ROWS),
            _descriptor(dv, ROWS),
            dk,
            dv,
            dk.stride(0),
            # Chunks of keys, with the queries in the place of the other side.
            *make_schedule(offsets_k, offsets_q, k.shape[0], tile_rows=TILE_ROWS, resident_keys=0, max_tiles=1),
            num_heads_kv,
            pre_scale,
            post_scale * act.value_scale,
            ds_scale,
        )
        constants = {"ACTIVATION": act.value, **shared, "STAGES": DKDV_STAGES[dim], "D": dim, "num_warps": 4}
        call(_gdpa_hopper_dkdv_kernel, programs, dkdv_arguments, constants, q.device)
        dq_arguments = (
            _descriptor(q, ROWS),
            _descriptor(do, ROWS),
            _descriptor(k, DQ_BLOCK_N),
            _descriptor(v, DQ_BLOCK_N),
            _descriptor(dq, ROWS),
            dq,
            dq.stride(0),
            *_query_chunks(q, offsets_q, offsets_k, DQ_BLOCK_N * DQ_STAGES[dim]),
            num_heads,
            pre_scale,
            ds_scale,
        )
        constants = {**shared, "STAGES": DQ_STAGES[dim], "BLOCK_N": DQ_BLOCK_N, "D": dim, "num_warps": 4}
        call(_gdpa_hopper_dq_kernel, programs, dq_arguments, constants, q.device)
    return dq, dk, dv


def _query_chunks(q: Tensor, offsets_q: Tensor, offsets_k: Tensor, resident_keys: int) -> Schedule:
    """Chunks of query rows: long ones read their keys once, but leave programs without work when there are few."""
    from gem_kernels._src.gdpa.hopper_forward import TILE_ROWS

    num_tiles = (q.shape[0] // TILE_ROWS + offsets_q.shape[0] - 1) * q.shape[1]
    max_tiles = min(max(num_tiles // (_CHUNKS_PER_SM * _multiprocessors(q.device)), 1), MAX_TILES)
    return make_schedule(
        offsets_q,
        offsets_k,
        q.shape[0],
        tile_rows=TILE_ROWS,
        resident_keys=resident_keys,
        max_tiles=max_tiles,
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
