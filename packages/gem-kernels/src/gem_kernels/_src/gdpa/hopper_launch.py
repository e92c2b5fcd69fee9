"""When GDPA takes Hopper's own forward kernel, and its launch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.tiles.activation import activation_pair

HEAD_DIMS = (64, 128)
BLOCK_N = 128
"""Keys of a tile."""
STAGES = {64: 4, 128: 2}
"""Key tiles in shared memory, by head dim: what Q and the output leave of 227 KiB."""
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


def applies(q: Tensor, k: Tensor, v: Tensor, left: int, right: int, capability: tuple[int, int]) -> bool:
    """Whether the kernel computes this call: half precision, no window, D = D_v of 64 or 128, heads side by side.

    A pure function of shapes, strides, dtype and capability, so that all ranks of a job agree. Everything else runs on
    the portable kernel, with the same result up to rounding.
    """
    return (
        not _portable_only
        and q.is_cuda
        and capability == (9, 0)
        and has_tested_gluon()
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] in HEAD_DIMS
        and q.shape[2] == v.shape[2]
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
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from gem_kernels._src.gdpa import hopper_forward
    from gem_kernels._src.gdpa.hopper_schedule import MAX_TILES, make_schedule

    total, num_heads, dim = q.shape
    if k.shape[0] == 0:
        out.zero_()
        return
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[q.dtype]

    def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor(
            x, [x.shape[0], x.shape[1] * dim], [x.stride(0), 1], [rows, dim], _shared_layout(rows, dim, dtype)
        )

    num_programs = _multiprocessors(q.device)
    tile_rows = hopper_forward.TILE_ROWS
    num_sequences = offsets_q.shape[0] - 1
    # Long chunks read their keys once, but leave programs without work when there are few.
    max_tiles = (total // tile_rows + num_sequences) * num_heads // (_CHUNKS_PER_SM * num_programs)
    with device_guard(q):
        schedule = make_schedule(
            offsets_q,
            offsets_k,
            total,
            tile_rows=tile_rows,
            resident_keys=BLOCK_N * STAGES[dim],
            max_tiles=min(max(max_tiles, 1), MAX_TILES),
        )
        hopper_forward._gdpa_hopper_fwd_kernel[(num_programs,)](
            descriptor(q, hopper_forward.ROWS),
            descriptor(k, BLOCK_N),
            descriptor(v, BLOCK_N),
            descriptor(out, hopper_forward.ROWS),
            out,
            out.stride(0),
            *schedule,
            num_heads,
            pre_scale,
            post_scale,
            ACTIVATION=activation_pair(activation, hardware=True).value,
            HAS_PRE_SCALE=pre_scale != 1.0,
            GROUP=num_heads // k.shape[1],
            STAGES=STAGES[dim],
            BLOCK_N=BLOCK_N,
            D=dim,
            num_warps=4,
        )


@functools.cache
def _shared_layout(rows: int, dim: int, dtype: Any) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([rows, dim], dtype)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
