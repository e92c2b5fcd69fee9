"""Tile shapes of GDPA."""

from __future__ import annotations

from typing import Literal

import torch

from gem_kernels._src.attention.configs import TileConfig, power_of_two

Kernel = Literal["forward", "dq", "dkdv"]


def select(kernel: Kernel, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> TileConfig:
    """Configuration of one kernel; a pure function, so that all ranks of a job agree.

    ``head_dim`` is the larger of D and D_v. Short sequences shrink the tiles afterwards (``fit_lengths``).
    """
    dim = power_of_two(head_dim)
    if dtype == torch.float32:
        # Full float32 products run on the ordinary arithmetic units, operands in registers: small tiles.
        block = 32 if dim <= 64 else 16
        return TileConfig(block_m=block, block_n=block, num_warps=4, num_stages=1)
    large = capability in ((9, 0), (10, 0), (10, 3))
    if kernel == "forward":
        if dim <= 64:
            return TileConfig(block_m=128, block_n=128 if large else 64, num_warps=4 if not large else 8, num_stages=3)
        if dim == 128:
            if large:
                return TileConfig(block_m=128, block_n=128, num_warps=8, num_stages=2)
            return TileConfig(block_m=128, block_n=32, num_warps=4, num_stages=2)
        if large:
            return TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
        return TileConfig(block_m=64, block_n=16, num_warps=4, num_stages=2)
    if dim <= 64:
        if large:
            return (
                TileConfig(block_m=128, block_n=64, num_warps=4, num_stages=2)
                if kernel == "dq"
                else TileConfig(block_m=64, block_n=128, num_warps=4, num_stages=2)
            )
        return TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    if dim == 128:
        if large:
            return (
                TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
                if kernel == "dq"
                else TileConfig(block_m=64, block_n=128, num_warps=8, num_stages=2)
            )
        return (
            TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)
            if kernel == "dq"
            else TileConfig(block_m=32, block_n=64, num_warps=4, num_stages=1)
        )
    if large:
        return (
            TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)
            if kernel == "dq"
            else TileConfig(block_m=32, block_n=64, num_warps=8, num_stages=2)
        )
    return (
        TileConfig(block_m=32, block_n=16, num_warps=4, num_stages=1)
        if kernel == "dq"
        else TileConfig(block_m=16, block_n=32, num_warps=4, num_stages=1)
    )
