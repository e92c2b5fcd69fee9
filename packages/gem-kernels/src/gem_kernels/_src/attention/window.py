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
    """(..., rows, keys) bool for positions (..., rows) and (keys,): True where query i may meet key j."""
    distance = positions_k - positions_q[..., None]
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def target_pair_mask(rows: Tensor, keys: Tensor, history: Tensor, left: int, right: int) -> Tensor:
    """(..., rows, keys) bool of sequences whose rows from ``history`` (...,) on are targets.

    Every row sees the history within the window, a target as if it stood right behind the history; a target also sees
    itself, and no row sees another target.
    """
    in_window = pair_mask(torch.minimum(rows, history[..., None]), keys, left, right)
    return (in_window & (keys < history[..., None, None])) | (rows[:, None] == keys)


def count_pairs(
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    left: int,
    right: int,
    *,
    num_seeds: int = 0,
    request_index: Tensor | None = None,
    num_targets: Tensor | None = None,
) -> int:
    """Number of valid (query, key) pairs of the whole batch; waits for the device of the offsets.

    Without ``offsets_q``, every query sequence has ``num_seeds`` rows.
    """
    lengths_k = torch.diff(offsets_k.to(device="cpu", dtype=torch.int64))
    if request_index is not None:
        lengths_k = lengths_k[request_index.to(device="cpu", dtype=torch.int64)]
    if offsets_q is None:
        lengths_q = torch.full_like(lengths_k, num_seeds)
    else:
        lengths_q = torch.diff(offsets_q.to(device="cpu", dtype=torch.int64))
    if left < 0 and right < 0 and num_targets is None:
        return int((lengths_q * lengths_k).sum())
    targets = torch.zeros_like(lengths_k)
    if num_targets is not None:
        targets = num_targets.to(device="cpu", dtype=torch.int64)
    history = torch.repeat_interleave(lengths_k - targets, lengths_q)
    starts = torch.repeat_interleave(torch.cumsum(lengths_q, 0) - lengths_q, lengths_q)
    positions = torch.arange(history.shape[0]) - starts
    itself = torch.zeros_like(positions)
    if num_targets is not None:
        itself = (positions >= history).long()
        positions = torch.minimum(positions, history)
    low = (positions - left).clamp(min=0) if left >= 0 else torch.zeros_like(positions)
    high = torch.minimum(history, positions + right + 1) if right >= 0 else history
    return int(((high - low).clamp(min=0) + itself).sum())
