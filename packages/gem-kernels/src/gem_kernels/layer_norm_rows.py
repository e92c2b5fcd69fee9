"""A layer norm without weights and its backward, as two functions for an ``autograd.Function`` of the caller.

Where several layers read the same normalised rows, and others the rows themselves, autograd adds their gradients one by
one, a pass over all rows each. Here the backward reads them all and writes the gradient of the rows once.

With n = (x - mean) rstd of each row and dy the sum of ``grads``: ``dx = rstd (dy - mean(dy) - n mean(dy n)) + direct``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_kernels._src.eager import launches_directly
from gem_kernels._src.layer_norm_rows.op import layer_norm_rows_backward_op, layer_norm_rows_op
from gem_kernels._src.validate import check_constant, check_device, check_float, check_same, check_scalar, check_tensor

__all__ = ["layer_norm_rows", "layer_norm_rows_backward"]

MAX_READERS = 4
"""Gradients that one backward adds."""


def layer_norm_rows(x: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of every row, and what its backward needs. Not differentiable by itself.

    Args:
        x: (M, N). float16, bfloat16 or float32 with N <= 16384 on CUDA; float64 too on CPU. Rows that are not
            contiguous are copied.
        eps: Added to the variance.

    Returns:
        Normalised rows (M, N) in the dtype of x, contiguous; means and reciprocal standard deviations (M,) in float32
        (float64 for float64).

    Raises:
        ValueError: on another number of dims, too many features, a negative ``eps``, or rows that require a gradient.
        TypeError: on a dtype or argument type that does not fit.
    """
    _check_rows("layer_norm_rows", x)
    check_constant("layer_norm_rows", "x", x)
    check_scalar("layer_norm_rows", "eps", eps)
    if eps < 0:
        raise ValueError(f"layer_norm_rows: `eps` must be >= 0, got {eps}; pass a small number such as 1e-5.")
    if launches_directly(x):
        # Imported here: Triton is absent where only the CPU kernels are used.
        from gem_kernels._src.layer_norm_rows.kernels import launch_forward
        from gem_kernels._src.norm_linear.rows import check_features

        check_features("layer_norm_rows", x.shape[1])
        return launch_forward(x, float(eps))
    return layer_norm_rows_op(x, float(eps))


def layer_norm_rows_backward(
    grads: Sequence[Tensor], x: Tensor, mean: Tensor, rstd: Tensor, *, direct: Tensor | None = None
) -> Tensor:
    """Gradient of the rows from the gradients of all that read them, normalised or not.

    Args:
        grads: One to four gradients (M, N) of the normalised rows, dtype and device of x, which are added.
        x: (M, N), as given to ``layer_norm_rows``.
        mean: (M,), of ``layer_norm_rows``.
        rstd: (M,), of ``layer_norm_rows``.
        direct: (M, N), gradient of x from those that read it as it is.

    Returns:
        (M, N) in the dtype of x, contiguous.

    Raises:
        ValueError: on no gradient or more than four, or on a shape or device that does not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: sums in float32 (float64 for float64), one rounding at the end; the same bits on every run.
    """
    op = "layer_norm_rows_backward"
    _check_rows(op, x)
    if not isinstance(grads, Sequence):
        raise TypeError(f"{op}: `grads` must be a sequence of tensors, got {type(grads).__name__}; put it in a list.")
    if not 1 <= len(grads) <= MAX_READERS:
        raise ValueError(f"{op}: `grads` must hold 1 to {MAX_READERS} tensors, got {len(grads)}; add some first.")
    given = {f"grads[{index}]": grad for index, grad in enumerate(grads)}
    if direct is not None:
        given["direct"] = direct
    for name, tensor in {**given, "mean": mean, "rstd": rstd}.items():
        check_tensor(op, name, tensor)
    check_same(op, {"x": x, **given})
    for name, grad in given.items():
        if grad.shape != x.shape:
            raise ValueError(
                f"{op}: `{name}` must have the shape of `x`, {tuple(x.shape)}, got {tuple(grad.shape)}; pass the "
                "gradient of these rows."
            )
    statistic_dtype = torch.promote_types(x.dtype, torch.float32)
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        check_device(op, name, statistic, "x", x)
        if statistic.dtype != statistic_dtype:
            raise TypeError(
                f"{op}: `{name}` must be {statistic_dtype}, got {statistic.dtype}; pass what layer_norm_rows returned."
            )
        if statistic.shape != x.shape[:1]:
            raise ValueError(
                f"{op}: `{name}` must have shape (M,) = ({x.shape[0]},), got {tuple(statistic.shape)}; pass what "
                "layer_norm_rows returned."
            )
    if launches_directly(x, *given.values()):
        from gem_kernels._src.layer_norm_rows.kernels import launch_backward

        return launch_backward(grads, x, mean, rstd, direct)
    return layer_norm_rows_backward_op(list(grads), x, mean, rstd, direct)


def _check_rows(op: str, x: Tensor) -> None:
    check_tensor(op, "x", x)
    check_float(op, "x", x)
    if x.dim() != 2:
        raise ValueError(f"{op}: `x` must have shape (M, N), got {tuple(x.shape)}; flatten it.")
