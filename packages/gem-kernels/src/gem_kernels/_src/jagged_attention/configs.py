"""Tile shapes of jagged attention, chosen so that every variant compiles for its GPU within its shared memory."""

from __future__ import annotations

import dataclasses

import torch

from gem_kernels._src.attention.configs import TileConfig, select_from, with_candidates
from gem_kernels._src.tables.attention import CANDIDATES, HOPPER, Kernel


def select(
    kernel: Kernel,
    head_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    has_bias: bool = False,
    shared_rows: bool = False,
    requests: bool = False,
) -> TileConfig:
    """Configuration of one kernel; a pure function, so that all ranks of a job agree.

    ``head_dim`` is the larger of D and D_v. Afterwards the lengths choose what tuning found for them, and shrink tiles
    that are longer (``fit_lengths``). With a bias the streamed side of the tile is half as long, and wide forward tiles
    are smaller still: entries and gaps of all pairs take registers. So do sums over the sequences that share seeds or
    keys (``shared_rows``) in the backward, the more so where they live across a loop over the query sequences of a
    request (``requests``).
    """
    config = select_from(kernel, head_dim, dtype, capability, hopper=HOPPER["jagged_attention"])
    block_m, block_n = config.block_m, config.block_n
    if has_bias or (shared_rows and kernel != "forward" and head_dim > 64):
        if kernel in ("forward", "dq"):
            block_n = max(16, block_n // 2)
        else:
            block_m = max(16, block_m // 2)
    if has_bias and head_dim > 64 and (kernel == "forward" or (kernel == "dq" and shared_rows)):
        block_m, block_n = max(16, block_m // 2), min(block_n, 32)
    if requests and kernel == "dkdv" and head_dim > 64:
        block_n = min(block_n, 64)
    if has_bias or shared_rows or requests:
        # Not tunable: other tiles have not been built with so much in registers.
        return dataclasses.replace(config, block_m=block_m, block_n=block_n)
    return with_candidates(config, "jagged_attention", kernel, head_dim, dtype, capability, CANDIDATES)
