"""Blocks of 32 tokens that start at each sequence's own start, so that no block holds tokens of two sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class JaggedBlocks:
    """Where each packed row stands in a layout in which every sequence begins at a multiple of 32."""

    index: Tensor
    """(T,) int64, distinct."""
    num_rows: int
    """Rows of that layout, a multiple of 32; an upper bound that follows from sizes alone, without a device sync."""

    @classmethod
    def of(cls, offsets: Tensor, total: int, max_seqlen: int) -> JaggedBlocks:
        """The layout of ``total`` packed rows of sequences up to ``max_seqlen`` long."""
        num_sequences = offsets.shape[0] - 1
        offsets = offsets.to(torch.int64)
        num_blocks = (torch.diff(offsets) + (BLOCK - 1)) // BLOCK
        starts = (num_blocks.cumsum(0) - num_blocks) * BLOCK
        rows = torch.arange(total, device=offsets.device)
        # Rows behind the last sequence get number B, whose shift is 0.
        sequence = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
        shift = torch.nn.functional.pad(starts - offsets[:-1], (0, 1))
        # At most 31 empty rows per sequence; at most as many rows as sequences of the longest length would take.
        most = min((total + (BLOCK - 1) * num_sequences) // BLOCK, num_sequences * ((max_seqlen + BLOCK - 1) // BLOCK))
        num_rows = max(most, 1) * BLOCK
        # Offsets that do not fit the rows are reported by the attention op, which reads them later, not by an index.
        return cls(index=(shift[sequence] + rows).clamp(0, num_rows - 1), num_rows=num_rows)

    def spread(self, x: Tensor) -> Tensor:
        """Packed (T, H, D) -> (H * num_rows, D) with zeros between the sequences, one head after the other."""
        wide = x.new_zeros(x.shape[1], self.num_rows, x.shape[2])
        return wide.index_copy_(1, self.index, x.transpose(0, 1)).flatten(0, 1)

    def gather(self, wide: Tensor, num_heads: int) -> Tensor:
        """Inverse of ``spread``: (H * num_rows, D) -> (T, H, D)."""
        shaped = wide.view(num_heads, self.num_rows, wide.shape[1])
        return shaped.index_select(1, self.index).transpose(0, 1).contiguous()
