"""Sums over the rows of a tall matrix: the gradient of a bias. torch's reduction reads it at a fraction of its rate."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.eager import launches_directly
from gem_kernels._src.validate import check_constant, check_float, check_tensor

__all__ = ["column_sums"]

MIN_ROWS = 16384
"""From which a kernel of its own is worth two launches in place of torch's one."""


def column_sums(x: Tensor) -> Tensor:
    """Sum every column in float32. Not differentiable by itself.

    Args:
        x: (M, N), any float dtype.

    Returns:
        (N,) in float32 (float64 for float64), the same bits on every run.

    Raises:
        ValueError: on another number of dims, or a tensor that requires a gradient.
        TypeError: on a dtype or argument type that does not fit.
    """
    check_tensor("column_sums", "x", x)
    check_float("column_sums", "x", x)
    check_constant("column_sums", "x", x)
    if x.dim() != 2:
        raise ValueError(f"column_sums: `x` must have shape (M, N), got {tuple(x.shape)}; flatten it.")
    if x.dtype != torch.float64 and x.shape[0] >= MIN_ROWS and launches_directly(x):
        from gem_kernels._src.column_sums.kernels import launch

        return launch(x.detach())
    return x.detach().sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
