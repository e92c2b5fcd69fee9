"""Tile shapes of block attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gem_kernels._src.attention.configs import power_of_two

Direction = Literal["forward", "backward"]
BLOCK_SIZES = (32, 64, 128)
_FULL_SWIZZLE = 64
"""Channels of half precision from which on a row of a tile spans the widest swizzle of shared memory, 128 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkConfig:
    """How a program computes its block and head; the rows and keys of the tile are always the whole block."""

    block_d: int
    """Channels of q and k at a time, a power of two >= 16."""
    block_dv: int
    """Channels of v at a time, a power of two >= 16."""
    num_warps: int


def select(
    direction: Direction,
    dtype: torch.dtype,
    block_size: int,
    head_dim: int,
    head_dim_v: int,
    *,
    rotary: bool = False,
) -> ChunkConfig:
    """Configuration of one kernel; a pure function, so that all ranks of a job agree.

    Chosen so that no variant spills registers on sm_90 and sm_100, few do a little on sm_80, and all fit the 99 KiB of
    shared memory that a block has on sm_86 and sm_89.
    """
    widest = max(power_of_two(head_dim), power_of_two(head_dim_v))
    largest_d = largest_dv = 128
    if dtype == torch.float32:
        # Full float32 products keep their operands in registers.
        largest_d = largest_dv = 16
    elif block_size == 128:
        # One or two (128, 128) tiles stay in registers all along; no wide product fits beside them.
        largest_d = largest_dv = 64
        if direction == "backward" and widest > 64:
            largest_dv = 32
    block_d, block_dv = min(power_of_two(head_dim), largest_d), min(power_of_two(head_dim_v), largest_dv)
    if block_dv < _FULL_SWIZZLE:
        # With chunks of q and k in a wider swizzle than those of v, the ptxas of Triton 3.6 (12.8) computes a wrong
        # address of v in shared memory. The compile test looks for such code.
        block_d = min(block_d, block_dv)
    # A rotation takes a tile of float32 and one of angles through registers.
    many = block_size == 128 or (block_size == 64 and widest > (64 if rotary else 128))
    return ChunkConfig(block_d=block_d, block_dv=block_dv, num_warps=8 if many else 4)
