"""Grid of the block attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gem_kernels._src.block_attention.blocks import num_slots

_MAX_GRID = 2**31 - 1
"""Programs of a one-dimensional CUDA grid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGrid:
    """A one-dimensional grid over (slot, head), heads innermost."""

    size: int
    """Programs."""
    num_sequences: int
    num_steps: int
    """Bisection steps that tell the sequences apart."""


def block_grid(offsets: Tensor, total: int, block_size: int, num_heads: int) -> BlockGrid:
    """Grid for T = ``total`` packed rows; reads no offset."""
    num_sequences = offsets.shape[0] - 1
    size = num_slots(total, num_sequences, block_size) * num_heads
    if size > _MAX_GRID:
        raise ValueError(
            f"block_attention: one launch holds at most {_MAX_GRID} (block, head) pairs, got {size}; split the batch."
        )
    return BlockGrid(size=size, num_sequences=num_sequences, num_steps=num_sequences.bit_length())
