"""Queries, keys and values as thirds of the rows of one tensor, and their gradients as thirds of another.

A model that makes the three by one product takes their gradients back by one, without joining them first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def are_thirds(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v (T, H, D) lie side by side in rows of 3 H D numbers."""
    width = q.shape[1] * q.shape[2]
    step = width * q.element_size()
    return (
        q.shape == k.shape == v.shape
        and q.dtype == k.dtype == v.dtype
        and all(x.stride() == (3 * width, q.shape[2], 1) for x in (q, k, v))
        and k.data_ptr() == q.data_ptr() + step
        and v.data_ptr() == k.data_ptr() + step
    )


def empty_thirds(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors of the shape of q (T, H, D) that lie side by side."""
    num_rows, num_heads, dim = q.shape
    rows = torch.empty(num_rows, 3, num_heads, dim, dtype=q.dtype, device=q.device)
    first, second, third = rows.unbind(1)
    return first, second, third
