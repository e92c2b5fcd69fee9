"""Tile shapes of the packed attention kernels: pure functions of head dims, dtype, compute capability and lengths."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from gem_kernels._src.override import replaced
from gem_kernels._src.tables.attention import FLOAT32, LARGE, SMALL, Kernel, Sizes, Table
from gem_kernels._src.tuning.choices import Key
from gem_kernels._src.tuning.state import choose

_SHARED_MEMORY_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
_SHARED_MEMORY_KIB_SMALL = 99
"""Of one block, by compute capability; the small figure is that of sm_86, sm_89 and sm_120."""

MAX_HEAD_DIM = 256
_LARGEST_TILE = 128
"""Rows of the longest side of any tile."""


class Tunable(NamedTuple):
    """What a default stands for, and its alternatives."""

    op: str
    kernel: str
    dtype: str
    sizes: str
    others: tuple[TileConfig, ...]


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
    tunable: Tunable | None = field(default=None, compare=False, repr=False)
    """Of a default: what tuning may choose in its place, once the lengths are known (``fit_lengths``)."""

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"TileConfig: `{name}` must be a power of two >= 16, got {size}; round it up to one.")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(
                f"TileConfig: `num_warps` must be 1, 2, 4, 8 or 16, got {self.num_warps}; choose one of them."
            )
        if self.num_stages < 1:
            raise ValueError(f"TileConfig: `num_stages` must be >= 1, got {self.num_stages}; 1 is no pipeline.")


_ACCUMULATORS = 128
"""Registers of a thread's 255 that sums over the inner loop may take."""


def power_of_two(size: int) -> int:
    """Smallest power of two >= ``size``, and >= 16, which the matrix instructions need."""
    return max(16, 1 << (size - 1).bit_length())


def shared_memory_bytes(capability: tuple[int, int]) -> int:
    """Shared memory one block may use on a GPU of this compute capability."""
    return 1024 * _SHARED_MEMORY_KIB.get(capability, _SHARED_MEMORY_KIB_SMALL)


def length_class(max_seqlen_q: int, max_seqlen_k: int) -> str:
    """Class of the longest sequences that shares a choice: whether the largest tiles are filled on either side.

    Within a class tiles shrink by powers of two only, so that the lengths of a batch still choose between few variants.
    """
    sides = ("long" if power_of_two(max(x, 1)) >= _LARGEST_TILE else "short" for x in (max_seqlen_q, max_seqlen_k))
    return "-".join(sides)


def fit_lengths(config: TileConfig, max_seqlen_q: int, max_seqlen_k: int, *, columns_per_key: int = 0) -> TileConfig:
    """Shrink tiles that are longer than the longest sequence.

    Sizes stay powers of two, so that any sequence of batches compiles a bounded number of kernels. A kernel that
    accumulates ``columns_per_key`` float32 columns for every key row keeps the warps to hold them.

    Before, a configuration that tuning has chosen for the class of these lengths takes the place of a default.
    """
    if config.tunable is not None:
        op, kernel, dtype, sizes, others = config.tunable
        config = choose(Key(op, kernel, dtype, sizes, length_class(max_seqlen_q, max_seqlen_k)), config, others)
    block_m = min(config.block_m, power_of_two(max(max_seqlen_q, 1)))
    block_n = min(config.block_n, power_of_two(max(max_seqlen_k, 1)))
    # Half the tile has no work for twice the warps; four are one warpgroup of Hopper's matrix instructions.
    shrunk = config.block_m * config.block_n // (block_m * block_n)
    num_warps = max(min(4, config.num_warps), config.num_warps // shrunk)
    while num_warps < config.num_warps and block_n * columns_per_key > _ACCUMULATORS * 32 * num_warps:
        num_warps *= 2
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=config.num_stages)


def precision_of(dtype: torch.dtype) -> str:
    """Input precision of ``tl.dot``: full float32 products for float32; half precision ignores it."""
    return "ieee" if dtype == torch.float32 else "tf32"


MAX_HEAD_DIM_DQDKDV = 128
"""Wider tiles do not leave registers for a third gradient."""

_override: dict[Kernel, TileConfig] = {}


def override(kernel: Kernel, config: TileConfig) -> AbstractContextManager[None]:
    """Use ``config`` for ``kernel`` of both ops inside the block: for tests and for tuning, not for users."""
    return replaced(_override, kernel, config)


def select_from(
    kernel: Kernel, head_dim: int, dtype: torch.dtype, capability: tuple[int, int], *, hopper: Table
) -> TileConfig:
    """The entry for a head dim: from an op's table for Hopper there, else by the shared memory of a block."""
    if kernel in _override:
        return _override[kernel]
    half = hopper if capability == (9, 0) else LARGE if shared_memory_bytes(capability) >= 227 * 1024 else SMALL
    sizes = (FLOAT32 if dtype == torch.float32 else half)[kernel]
    for limit, (block_m, block_n, num_warps, num_stages) in sizes.items():
        if head_dim <= limit:
            return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
    raise ValueError(f"select: `head_dim` must be at most {max(sizes)} for {kernel}, got {head_dim}; use more heads.")


def with_candidates(
    config: TileConfig,
    op: str,
    kernel: Kernel,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    candidates: Mapping[Kernel, Mapping[int, tuple[Sizes, ...]]],
) -> TileConfig:
    """A default with the alternatives that tuning may choose: in half precision, where large tiles fit, if any do."""
    if kernel in _override or dtype == torch.float32 or shared_memory_bytes(capability) < 227 * 1024:
        return config
    for limit, sizes in candidates[kernel].items():
        if head_dim <= limit:
            return _with_others(config, op, kernel, head_dim, dtype, sizes)
    return config


@functools.cache
def _with_others(
    config: TileConfig, op: str, kernel: Kernel, head_dim: int, dtype: torch.dtype, sizes: tuple[Sizes, ...]
) -> TileConfig:
    built = (TileConfig(block_m=m, block_n=n, num_warps=w, num_stages=s) for m, n, w, s in sizes)
    others = tuple(other for other in built if other != config)
    name = str(dtype).removeprefix("torch.")
    return replace(config, tunable=Tunable(op, kernel, name, f"D{head_dim}", others))


def candidates(kernel: Kernel, head_dim: int, capability: tuple[int, int]) -> list[TileConfig]:
    """Half-precision configurations worth timing for a kernel; those that exceed shared memory are left out.

    The estimate counts the resident tiles and the streamed ones of every stage; the compiler may still refuse one.
    """
    width = power_of_two(head_dim)
    found = []
    for block_m in (16, 32, 64, 128):
        for block_n in (16, 32, 64, 128):
            resident, streamed = (block_n, block_m) if kernel in ("dkdv", "dqdkdv") else (block_m, block_n)
            if resident < 64 or streamed > resident or (streamed < 32 and width < 256):
                continue
            for num_stages in (1, 2, 3):
                num_bytes = 2 * width * ((1 if kernel == "forward" else 2) * resident + 2 * num_stages * streamed)
                if num_bytes > shared_memory_bytes(capability):
                    continue
                found += [
                    TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
                    for num_warps in (4, 8)
                ]
    return found
