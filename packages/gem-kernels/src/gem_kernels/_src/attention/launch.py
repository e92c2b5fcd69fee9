"""Host side shared by the packed attention kernels: grids without a device read, strides, windows, device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_kernels._src.attention.configs import (
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_DQDKDV,
    TileConfig,
    power_of_two,
    precision_of,
)
from gem_kernels._src.attention.reuse import once
from gem_kernels._src.tables.attention import Kernel

_MAX_GRID = 2**31 - 1
_MAX_WINDOW = 2**30
"""No sequence is longer, and i + right stays in 32 bits."""
_PADDED_GRID_FACTOR = 4
"""A padded grid may hold this many times the tiles that can exist; a program without rows ends after two loads."""


_MIN_PROGRAMS = 128
"""About the multiprocessors of a large GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A one-dimensional grid over (sequence, head, tile) whose size is known on the host."""

    size: int
    """Programs."""
    num_tiles: int
    """Tiles per sequence of a padded grid."""
    search: bool
    """Programs find their sequence by bisection in ``tile_offsets``."""
    num_steps: int
    """Steps of that bisection."""
    tile_offsets: Tensor
    """(B + 1,) int64 tiles before each sequence if ``search``; else the offsets, which are not read as such."""


def make_grid(
    op: str, offsets: Tensor, total: int, max_seqlen: int, block: int, num_heads: int, *, padded: bool = False
) -> Grid:
    """Grid over tiles of ``block`` rows of all sequences and heads.

    Padded to the longest sequence where that costs little, else with one program for each tile that can exist: at most
    ``total // block + B``, a bound that needs no device read. ``padded=True`` forces the first form.
    """
    num_sequences = offsets.shape[0] - 1
    num_tiles = -(-max_seqlen // block)
    padded_size = num_tiles * num_sequences
    bound = total // block + num_sequences
    search = not padded and padded_size > _PADDED_GRID_FACTOR * bound
    size = (bound if search else padded_size) * num_heads
    if size > _MAX_GRID:
        raise ValueError(
            f"{op}: one launch holds at most {_MAX_GRID} tiles of {block} rows, got {size}; split the batch."
        )
    tile_offsets = offsets
    if search:
        tile_offsets = once(_tile_offsets, offsets, block)
    return Grid(
        size=size,
        num_tiles=num_tiles,
        search=search,
        num_steps=num_sequences.bit_length(),
        tile_offsets=tile_offsets,
    )


def _tile_offsets(offsets: Tensor, block: int) -> Tensor:
    """(B + 1,) int64 tiles of ``block`` rows before each sequence."""
    tiles = (torch.diff(offsets.to(torch.int64)) + (block - 1)) // block
    return torch.nn.functional.pad(torch.cumsum(tiles, 0), (1, 0))


def one_key_tile(
    select: Callable[[Kernel, int, torch.dtype, tuple[int, int]], TileConfig],
    q: Tensor,
    v: Tensor,
    max_seqlen_k: int,
    left: int,
    right: int,
    num_sequences: int,
) -> bool:
    """Whether the dK/dV kernel, one program per (sequence, key head), should write dQ as well.

    It may when all keys of a query lie in its tile and every query meets them; it pays, five matmuls in place of
    seven, when there are enough programs to fill a GPU.
    """
    dim = max(q.shape[2], v.shape[2])
    if left >= 0 or right >= 0 or dim > MAX_HEAD_DIM_DQDKDV or num_sequences * v.shape[1] < _MIN_PROGRAMS:
        return False
    return 0 < max_seqlen_k <= select("dqdkdv", dim, q.dtype, capability_of(q)).block_n


def call_flags(q: Tensor, k: Tensor, v: Tensor, left: int, right: int) -> dict[str, Any]:
    """Compile-time arguments that all kernels of one call take: heads, head dims, window sides, precision."""
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[2],
        "D_V": v.shape[2],
        "BLOCK_D": power_of_two(q.shape[2]),
        "BLOCK_DV": power_of_two(v.shape[2]),
        "HAS_LEFT": left >= 0,
        "HAS_RIGHT": right >= 0,
        "PRECISION": precision_of(q.dtype),
    }


def row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of rows and of heads of each (T, H, D) tensor, in the order of the kernels' arguments."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def cut_batch(num_sequences: int, programs: int, programs_per_part: int) -> tuple[int, int]:
    """(parts, sequences of a part) of a batch whose parts are summed one by one, by about ``programs`` in all.

    A function of sizes only: the same sum on every run and every rank.
    """
    num_parts = min(num_sequences, -(-programs // programs_per_part))
    sequences_per_part = -(-num_sequences // num_parts)
    return -(-num_sequences // sequences_per_part), sequences_per_part


def unit_stride(x: Tensor) -> Tensor:
    """``x`` with contiguous channels, copied only if it has other ones."""
    return x if x.stride(2) == 1 else x.contiguous()


def device_guard(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def capability_of(x: Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's GPU; interpreted kernels on CPU tensors take Hopper's configurations."""
    return torch.cuda.get_device_capability(x.device) if x.device.type == "cuda" else (9, 0)


def clamp_window(left: int, right: int) -> tuple[int, int]:
    """Window sides as the kernels take them: below 2**30."""
    return min(left, _MAX_WINDOW), min(right, _MAX_WINDOW)


def check_head_dims(op: str, head_dim: int, head_dim_v: int) -> None:
    """Raise for head dims that no tile of the Triton kernels holds."""
    for name, dim in (("q", head_dim), ("v", head_dim_v)):
        if dim > MAX_HEAD_DIM:
            raise ValueError(
                f"{op}: the head dim of `{name}` must be at most {MAX_HEAD_DIM} on CUDA, got {dim}; use more heads."
            )
