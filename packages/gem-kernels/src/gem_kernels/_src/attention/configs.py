"""Tile shapes of the packed attention kernels: pure functions of head dims, dtype, compute capability and lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SHARED_MEMORY_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_SHARED_MEMORY_KIB_SMALL = 99
"""Of one block, by compute capability; the small figure is that of sm_86, sm_89 and sm_120."""

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """Shape of one program: its query rows, its key rows, and how Triton runs it."""

    block_m: int
    """Query rows of a tile."""
    block_n: int
    """Key rows of a tile."""
    num_warps: int
    num_stages: int
    """Depth of the load pipeline over the inner loop."""

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"TileConfig: `{name}` must be a power of two >= 16, got {size}.")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"TileConfig: `num_warps` must be 1, 2, 4, 8 or 16, got {self.num_warps}.")
        if self.num_stages < 1:
            raise ValueError(f"TileConfig: `num_stages` must be >= 1, got {self.num_stages}.")


def power_of_two(size: int) -> int:
    """Smallest power of two >= ``size``, and >= 16, which the matrix instructions need."""
    return max(16, 1 << (size - 1).bit_length())


def shared_memory_bytes(capability: tuple[int, int]) -> int:
    """Shared memory one block may use on a GPU of this compute capability."""
    return 1024 * _SHARED_MEMORY_KIB.get(capability, _SHARED_MEMORY_KIB_SMALL)


def fit_lengths(config: TileConfig, max_seqlen_q: int, max_seqlen_k: int) -> TileConfig:
    """Shrink tiles that are longer than the longest sequence.

    Sizes stay powers of two, so that any sequence of batches compiles a bounded number of kernels.
    """
    block_m = min(config.block_m, power_of_two(max(max_seqlen_q, 1)))
    block_n = min(config.block_n, power_of_two(max(max_seqlen_k, 1)))
    # Half the tile has no work for twice the warps; four are one warpgroup of Hopper's matrix instructions.
    shrunk = config.block_m * config.block_n // (block_m * block_n)
    num_warps = max(min(4, config.num_warps), config.num_warps // shrunk)
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=config.num_stages)


def precision_of(dtype: torch.dtype) -> str:
    """Input precision of ``tl.dot``: full float32 products for float32; half precision ignores it."""
    return "ieee" if dtype == torch.float32 else "tf32"
