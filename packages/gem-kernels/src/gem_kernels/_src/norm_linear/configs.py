"""Tile shapes of the linear layers with a norm: pure functions of sizes and compute capability."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass

from gem_kernels._src.attention.configs import power_of_two, shared_memory_bytes
from gem_kernels._src.override import replaced
from gem_kernels._src.tables.norm_linear import CANDIDATES, LARGE, SMALL, Kernel, MatmulConfig
from gem_kernels._src.tuning.choices import Key
from gem_kernels._src.tuning.state import choose

MAX_FUSED_NORM = 512
"""Features of a norm whose whole rows one program of the matmul holds."""
MAX_NORM = 16384
"""Features of a norm whose rows one program of the row kernels holds."""
_ROW_ELEMENTS = 4096
"""Elements of a tile of whole rows."""
_BACKWARD_ROW_ELEMENTS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConfig:
    """Shape of one program that holds whole rows."""

    rows: int
    block_n: int
    """Power of two that covers a row."""
    num_warps: int


_override: dict[Kernel, MatmulConfig] = {}


def override(kernel: Kernel, config: MatmulConfig) -> AbstractContextManager[None]:
    """Use ``config`` for ``kernel`` inside the block: for tuning, not for users."""
    return replaced(_override, kernel, config)


def select(kernel: Kernel, in_features: int, out_features: int, capability: tuple[int, int]) -> MatmulConfig:
    """Configuration of one kernel, in half precision; a pure function and tuning, so that all ranks of a job agree."""
    if kernel in _override:
        return _fit(_override[kernel], in_features, out_features)
    if shared_memory_bytes(capability) < 227 * 1024:
        return _fit(SMALL[kernel], in_features, out_features)
    default, *others = (_fit(base, in_features, out_features) for base in (LARGE[kernel], *CANDIDATES[kernel]))
    key = Key("norm_linear", kernel, "half", f"K{in_features} N{out_features}", "any")
    return choose(key, default, tuple(other for other in others if other != default))


@functools.cache
def _fit(base: MatmulConfig, in_features: int, out_features: int) -> MatmulConfig:
    """The configuration with tiles that are no wider than the layer."""
    return MatmulConfig(
        block_m=base.block_m,
        block_n=min(base.block_n, power_of_two(out_features)),
        block_k=min(base.block_k, power_of_two(in_features)),
        num_warps=base.num_warps,
        num_stages=base.num_stages,
    )


def candidates(kernel: Kernel, capability: tuple[int, int]) -> list[MatmulConfig]:
    """Half-precision configurations worth timing; those that exceed shared memory are left out."""
    found = []
    for block_m, block_n, num_warps in ((64, 256, 4), (64, 256, 8), (128, 128, 4), (128, 128, 8), (128, 256, 8)):
        for block_k in (32, 64):
            for num_stages in (2, 3, 4):
                num_bytes = 2 * num_stages * block_k * (block_m + block_n)
                if num_bytes > shared_memory_bytes(capability) or (kernel == "linear_norm" and block_n < 256):
                    continue
                found.append(
                    MatmulConfig(
                        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages
                    )
                )
    if kernel == "linear_norm":
        # A row of 512 features in one product in place of two.
        found += [
            MatmulConfig(block_m=64, block_n=512, block_k=block_k, num_warps=8, num_stages=stages)
            for block_k, stages in ((32, 3), (32, 4), (64, 2), (64, 3))
        ]
    return found


def select_rows(features: int) -> RowConfig:
    """Configuration of the kernels that hold whole rows of ``features`` <= ``MAX_NORM`` numbers."""
    block_n = power_of_two(features)
    rows = max(1, _ROW_ELEMENTS // block_n)
    return RowConfig(rows=rows, block_n=block_n, num_warps=min(16, max(4, rows * block_n // 1024)))


def select_backward_rows(features: int) -> RowConfig:
    """The same for kernels that go back through a norm: they read several tiles at once, and smaller ones."""
    block_n = power_of_two(features)
    rows = max(_BACKWARD_ROW_ELEMENTS // block_n, min(4, _ROW_ELEMENTS // block_n), 1)
    return RowConfig(rows=rows, block_n=block_n, num_warps=min(16, max(4, rows * block_n // 1024)))
