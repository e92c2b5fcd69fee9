"""Sums of rows that belong together, in a fixed order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["sum_segments"]

_PIECE = 256


def sum_segments(index: Tensor, sources: Tensor, starts: Tensor, *, piece: int | None = None) -> Tensor:
    """Sum the rows ``sources[index]`` from each start to the next, the last to the end; the same bits on every run.

    torch's kernel on CUDA adds the rows of a segment one after the other, and ids are skewed: one id may have most of a
    batch, and its segment would take as long as all others together. There, segments are cut where the position is a
    multiple of ``piece``, and the sums of the pieces summed.

    Args:
        index: (N,) int64 rows of ``sources``, segment after segment.
        sources: (M, dim).
        starts: (S,) int64, from 0, not falling; an empty segment sums to zeros.
        piece: Rows added one after the other; default: 256 on CUDA, any number elsewhere.

    Returns:
        (S, dim).
    """
    if piece is None and index.is_cuda:
        piece = _PIECE
    if piece is None or index.numel() <= piece:
        return F.embedding_bag(index, sources, starts, mode="sum")
    cuts = torch.arange(0, index.numel(), piece, device=index.device)
    # A cut that is a start leaves an empty piece before it, so that the number of pieces needs no count on the device.
    pieces = torch.cat([starts, cuts]).sort().values
    sums = F.embedding_bag(index, sources, pieces, mode="sum")
    first = torch.searchsorted(pieces, starts)
    return F.embedding_bag(torch.arange(pieces.numel(), device=index.device), sums, first, mode="sum")
