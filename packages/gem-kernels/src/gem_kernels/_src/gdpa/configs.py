"""Tile shapes of GDPA, chosen so that every variant compiles for its GPU without exceeding shared memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from gem_kernels._src.attention.configs import (
    TileConfig,
    fit_lengths,
    power_of_two,
    select_from,
    with_candidates,
)
from gem_kernels._src.tables.attention import CANDIDATES, HOPPER, Kernel


def select(kernel: Kernel, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> TileConfig:
    """Configuration of one kernel; a pure function, so that all ranks of a job agree.

    ``head_dim`` is the larger of D and D_v. Afterwards the lengths choose what tuning found for them, and shrink tiles
    that are longer (``fit_lengths``).
    """
    config = select_from(kernel, head_dim, dtype, capability, hopper=HOPPER["gdpa"])
    return with_candidates(config, "gdpa", kernel, head_dim, dtype, capability, CANDIDATES)


# Targets, seeds and requests hold more in registers than plain pairs do. These tiles build without spills where the
# tables' would not; at head dims up to 64 and in the forward those do too.
_INDEXED_LIMITS: dict[tuple[Kernel, int], tuple[int, int]] = {
    ("dkdv", 128): (32, 128),
    ("dkdv", 256): (16, 32),
    ("dq", 128): (128, 32),
    ("dq", 256): (32, 32),
}
_REQUESTS_BLOCK_N = 64
"""Of dkdv at head dims above 64: its accumulators live across a loop over sequences as well."""


def select_fitting(
    kernel: Kernel,
    dims: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    indexed: bool,
    requests: bool = False,
) -> TileConfig:
    """Configuration for head dims (D, D_v) and longest sequences.

    ``indexed`` kernels read more than offsets (targets, seeds, a request index); in ``requests`` a program loops over
    the query sequences of one key sequence.
    """
    config = select(kernel, max(dims), dtype, capability)
    width = power_of_two(max(dims))
    if indexed:
        # Not tunable: other tiles have not been built with so much in registers.
        config = replace(config, tunable=None)
    if indexed and dtype != torch.float32 and (kernel, width) in _INDEXED_LIMITS:
        block_m, block_n = _INDEXED_LIMITS[kernel, width]
        if requests:
            block_n = min(block_n, _REQUESTS_BLOCK_N)
        config = replace(config, block_m=min(config.block_m, block_m), block_n=min(config.block_n, block_n))
    columns = power_of_two(dims[0]) + power_of_two(dims[1]) if kernel in ("dkdv", "dqdkdv") else 0
    return fit_lengths(config, max_seqlen_q, max_seqlen_k, columns_per_key=columns)
