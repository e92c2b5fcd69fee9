"""The jagged helpers as plain loops over sequences: the oracle of ``gem_kernels.jagged``.

Built from slices and ``torch.cat``, so autograd gives the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _split(values: Tensor, offsets: Tensor) -> list[Tensor]:
    bounds = offsets.tolist()
    return [values[bounds[b] : bounds[b + 1]] for b in range(len(bounds) - 1)]


def jagged_to_padded(values: Tensor, offsets: Tensor, max_seqlen: int, fill: float = 0.0) -> Tensor:
    """(B, max_seqlen, ...); arguments as in ``gem_kernels.jagged``."""
    rows = [values[:0].reshape(0, max_seqlen, *values.shape[1:])]
    for x in _split(values, offsets):
        kept = x[:max_seqlen]
        tail = x.new_full((max_seqlen - kept.shape[0], *x.shape[1:]), fill)
        rows.append(torch.cat([kept, tail])[None])
    return torch.cat(rows)


def padded_to_jagged(padded: Tensor, offsets: Tensor) -> Tensor:
    """(offsets[-1], ...); arguments as in ``gem_kernels.jagged``."""
    rows = [padded[:0].reshape(0, *padded.shape[2:])]
    for b, length in enumerate(torch.diff(offsets).tolist()):
        present = padded[b, :length]
        rows += [present, present.new_zeros((length - present.shape[0], *present.shape[1:]))]
    return torch.cat(rows)


def jagged_concat(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """``(values, offsets)``; arguments as in ``gem_kernels.jagged``."""
    rows = [a[0][:0], b[0][:0]]
    for x, y in zip(_split(*a), _split(*b), strict=True):
        rows += [x, y]
    return torch.cat(rows), a[1].long() + b[1].long()


def jagged_split(
    values: Tensor, offsets: Tensor, offsets_a: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``(values, offsets)`` of both parts; arguments as in ``gem_kernels.jagged``."""
    first, second = [values[:0]], [values[:0]]
    for x, length in zip(_split(values, offsets), torch.diff(offsets_a).tolist(), strict=True):
        first.append(x[:length])
        second.append(x[length:])
    return (torch.cat(first), offsets_a.long()), (torch.cat(second), offsets.long() - offsets_a.long())


def jagged_last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``(last, mask)`` of shapes (B, k, ...) and (B, k); arguments as in ``gem_kernels.jagged``."""
    rows, masks = [values[:0].reshape(0, k, *values.shape[1:])], [torch.empty(0, k, dtype=torch.bool)]
    for x in _split(values, offsets):
        kept = x[max(x.shape[0] - k, 0) :]
        front = k - kept.shape[0]
        rows.append(torch.cat([x.new_zeros((front, *x.shape[1:])), kept])[None])
        masks.append((torch.arange(k) >= front)[None])
    return torch.cat(rows), torch.cat(masks)
