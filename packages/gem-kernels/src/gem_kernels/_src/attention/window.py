"""The valid (query, key) pairs of one sequence: causal and sliding windows, as masks and as counts."""

from __future__ import annotations

import torch
from torch import Tensor


def normalize_window(causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """Fold ``causal`` into the window: keys i - left <= j <= i + right, -1 = unbounded on that side."""
    left, right = window_size
    if causal:
        right = 0
    return left, right


def pair_mask(positions_q: Tensor, positions_k: Tensor, left: int, right: int) -> Tensor:
    """(len(positions_q), len(positions_k)) bool: True where query i may meet key j."""
    distance = positions_k[None, :] - positions_q[:, None]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def count_pairs(offsets_q: Tensor, offsets_k: Tensor, left: int, right: int) -> int:
    """Number of valid (query, key) pairs of the whole batch; waits for the device of the offsets."""
    lengths_q = torch.diff(offsets_q.to(device="cpu", dtype=torch.int64))
    lengths_k = torch.diff(offsets_k.to(device="cpu", dtype=torch.int64))
    if left < 0 and right < 0:
        return int((lengths_q * lengths_k).sum())
    keys = torch.repeat_interleave(lengths_k, lengths_q)
    starts = torch.repeat_interleave(torch.cumsum(lengths_q, 0) - lengths_q, lengths_q)
    positions = torch.arange(keys.shape[0]) - starts
    low = (positions - left).clamp(min=0) if left >= 0 else torch.zeros_like(positions)
    high = torch.minimum(keys, positions + right + 1) if right >= 0 else keys
    return int((high - low).clamp(min=0).sum())
