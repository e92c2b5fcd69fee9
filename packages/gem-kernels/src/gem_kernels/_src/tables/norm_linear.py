"""Tiles of the products of linear layers with a norm: the defaults, and what tuning may choose in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["rmsnorm_linear", "linear_norm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulConfig:
    """Shape of one program of a matmul, and how Triton runs it."""

    block_m: int
    """Rows of x."""
    block_n: int
    """Rows of the weight at a time, which are columns of the output."""
    block_k: int
    """Features of the input at a time."""
    num_warps: int
    num_stages: int
    """Depth of the load pipeline over the input features."""


LARGE: dict[Kernel, MatmulConfig] = {
    "rmsnorm_linear": MatmulConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3),
    "linear_norm": MatmulConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3),
}
SMALL: dict[Kernel, MatmulConfig] = {
    "rmsnorm_linear": MatmulConfig(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=3),
    "linear_norm": MatmulConfig(block_m=64, block_n=256, block_k=32, num_warps=8, num_stages=3),
}
CANDIDATES: dict[Kernel, tuple[MatmulConfig, ...]] = {
    "rmsnorm_linear": (
        MatmulConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3),
        MatmulConfig(block_m=64, block_n=256, block_k=64, num_warps=4, num_stages=3),
    ),
    "linear_norm": (MatmulConfig(block_m=64, block_n=256, block_k=64, num_warps=8, num_stages=3),),
}
"""What ``python -m gem_kernels warm`` times beside ``LARGE``; few, and all built by the compile test."""
