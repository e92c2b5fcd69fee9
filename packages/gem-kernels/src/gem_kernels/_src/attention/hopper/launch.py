"""When the attention ops may take Hopper's own kernels, and how these cut a batch over the multiprocessors."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Collection, Iterator

import torch
import triton
from torch import Tensor

from gem_kernels._src.attention.hopper.call import SEQUENCE_END
from gem_kernels._src.attention.hopper.schedule import MAX_TILES, Schedule, make_schedule
from gem_kernels._src.attention.launch import capability_of
from gem_kernels._src.attention.pairing import Pairing

MAX_ROWS = SEQUENCE_END
"""Coordinates of the copy engine have 32 bits, and those of a row count from its sequence's end."""
_CHUNKS_PER_SM = 4
_portable_only = False


@contextlib.contextmanager
def portable_only() -> Iterator[None]:
    """Leave Hopper's kernels aside inside the block: for tests and benchmarks, not for users."""
    global _portable_only
    before, _portable_only = _portable_only, True
    try:
        yield
    finally:
        _portable_only = before


@functools.cache
def has_tested_gluon() -> bool:
    """Whether the installed Triton brings the Gluon, an experimental interface, that these kernels have run with."""
    return triton.__version__.split(".")[:2] == ["3", "6"]


@functools.cache
def _warn_of_gluon() -> None:
    """Once a process: the portable kernels are right, but slower."""
    warnings.warn(
        f"gem_kernels: its kernels for Hopper have run with Triton 3.6 alone, got {triton.__version__}: the portable "
        "ones are used, at about half the speed; install triton 3.6 for Hopper's.",
        stacklevel=2,
    )


def is_on_hopper(x: Tensor) -> bool:
    """Whether kernels in Gluon for Hopper can run where x lies, and are not set aside."""
    if _portable_only or not x.is_cuda or capability_of(x) != (9, 0):
        return False
    if not has_tested_gluon():
        _warn_of_gluon()
        return False
    return True


def serves(
    q: Tensor, k: Tensor, v: Tensor, pairing: Pairing, left: int, right: int, *, head_dims: Collection[int]
) -> bool:
    """Whether a Hopper kernel for ``head_dims`` serves a call: half precision, no window, D = D_v, heads side by side.

    Neither shared seeds nor requests that ``pairing`` could not merge. A pure function of shapes, strides, dtype and
    capability, so that all ranks of a job agree. Everything else runs on the portable kernels, with the same result up
    to rounding.
    """
    return (
        is_on_hopper(q)
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[2] in head_dims
        and q.shape[2] == v.shape[2]
        and not pairing.indexed
        and left < 0
        and right < 0
        and max(q.shape[0], k.shape[0]) <= MAX_ROWS
        and all(is_copyable(x) for x in (q, k, v))
    )


def is_copyable(x: Tensor) -> bool:
    """Whether the copy engine reads x (T, H, D) as a matrix (T, H * D): 16-byte rows, no gap between heads."""
    side_by_side = x.shape[1] == 1 or x.stride(1) == x.shape[2]
    return x.stride(2) == 1 and side_by_side and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def query_chunks(q: Tensor, offsets_q: Tensor, offsets_k: Tensor, resident_keys: int) -> Schedule:
    """Chunks of query rows: long ones read their keys once, but leave programs without work when there are few."""
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import TILE_ROWS

    num_tiles = (q.shape[0] // TILE_ROWS + offsets_q.shape[0] - 1) * q.shape[1]
    max_tiles = min(max(num_tiles // (_CHUNKS_PER_SM * multiprocessors(q.device)), 1), MAX_TILES)
    return make_schedule(
        offsets_q,
        offsets_k,
        q.shape[0],
        tile_rows=TILE_ROWS,
        resident_keys=resident_keys,
        max_tiles=max_tiles,
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Programs of a persistent kernel: one for each multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
