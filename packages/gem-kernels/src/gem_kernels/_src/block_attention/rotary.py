"""Rotary encoding of packed rows from a table, in torch operations: what the CPU kernels and float32 on CUDA run."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate neighbouring channels of x (T, H, D) by the angles of table (T, D) = [sin (D / 2) | cos (D / 2)].

    Channels (2 i, 2 i + 1) = (a, b) become (a cos_i - b sin_i, b cos_i + a sin_i), in every head; ``inverse``
    turns back. Computed in the wider dtype of the two, at least float32, and rounded once to that of x.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, table.dtype), torch.float32)
    sin, cos = table.to(dtype)[:, None, :].chunk(2, dim=2)
    if inverse:
        sin = -sin
    a, b = x.to(dtype).unflatten(2, (-1, 2)).unbind(3)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=3).flatten(2).to(x.dtype)


def rotate_all(tensors: tuple[Tensor, ...], table: Tensor | None, *, inverse: bool = False) -> tuple[Tensor, ...]:
    """``rotate`` of several tensors; as they are without a table."""
    return tensors if table is None else tuple(rotate(x, table, inverse=inverse) for x in tensors)
