"""Columns of several tensors side by side in one dtype: ``torch.cat`` along dim 1 and a cast, in one pass each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels._src.eager import launches_directly
from gem_kernels._src.validate import check_device, check_float, check_tensor

__all__ = ["join_columns", "split_thirds"]

MAX_PARTS = 8
"""Tensors that one kernel reads; more are joined by torch."""


class _JoinColumns(torch.autograd.Function):
    """The kernel without torch.library between."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        from gem_kernels._src.join_columns.kernels import launch_join

        ctx.layout = [(part.shape[1], part.dtype) for part in parts]
        return launch_join(parts, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gem_kernels._src.join_columns.kernels import launch_apart

        widths, dtypes = zip(*ctx.layout, strict=True)
        wanted = [x if needed else None for x, needed in zip(dtypes, ctx.needs_input_grad[1:], strict=True)]
        return None, *launch_apart(grads[0], widths, wanted)


def join_columns(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Join the columns of tensors with equally many rows, each cast to one dtype; gradients are cast back.

    Args:
        parts: (M, w_i) each, of any float dtype; at least one.
        dtype: Of the result, a float dtype.

    Returns:
        (M, sum of w_i), contiguous.

    Raises:
        ValueError: on no part, or a shape or device that does not fit.
        TypeError: on a dtype or argument type that does not fit.
    """
    op = "join_columns"
    if not isinstance(parts, Sequence):
        raise TypeError(f"{op}: `parts` must be a sequence of tensors, got {type(parts).__name__}; put it in a list.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(
            f"{op}: `dtype` must be a floating point dtype, got {dtype!r}; name one such as torch.bfloat16."
        )
    if not parts:
        raise ValueError(f"{op}: `parts` must hold at least one tensor, got none; give the tensors to join.")
    for index, part in enumerate(parts):
        check_tensor(op, f"parts[{index}]", part)
        check_float(op, f"parts[{index}]", part)
        check_device(op, f"parts[{index}]", part, "parts[0]", parts[0])
        if part.dim() != 2 or part.shape[0] != parts[0].shape[0]:
            raise ValueError(
                f"{op}: `parts[{index}]` must have shape (M, w) with the rows of `parts[0]`, got {tuple(part.shape)} "
                f"beside {tuple(parts[0].shape)}; give all the same rows."
            )
    if launches_directly(*parts) and len(parts) <= MAX_PARTS and all(part.shape[1] for part in parts):
        joined: Tensor = _JoinColumns.apply(dtype, *parts)
        return joined
    return torch.cat([part.to(dtype) for part in parts], dim=1)


class _SplitThirds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second, third = x.tensor_split(3, dim=1)
        return first, second, third

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        first, second, third = grads
        width = first.shape[1]
        step = width * first.element_size()
        if (
            all(grad.stride() == (3 * width, 1) and grad.dtype == first.dtype for grad in grads)
            and second.data_ptr() == first.data_ptr() + step
            and third.data_ptr() == second.data_ptr() + step
        ):
            # They lie side by side already, as attention lays them for such queries, keys and values.
            return first.as_strided((first.shape[0], 3 * width), (3 * width, 1))
        return torch.cat(grads, dim=1)


def split_thirds(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a third of the columns each; gradients that lie side by side in memory are joined without a copy.

    ``jagged_attention`` with a window lays the gradients of queries, keys and values so where these are such views.

    Args:
        x: (M, 3 n), rows contiguous.

    Returns:
        Three views (M, n).

    Raises:
        ValueError: on a shape that does not fit.
        TypeError: if x is no dense tensor.
    """
    check_tensor("split_thirds", "x", x)
    if x.dim() != 2 or x.shape[1] % 3:
        raise ValueError(
            f"split_thirds: `x` must have shape (M, 3 n), got {tuple(x.shape)}; give columns in three equal parts."
        )
    thirds: tuple[Tensor, Tensor, Tensor] = _SplitThirds.apply(x)
    return thirds
