"""All pairwise products of a sample's tokens, projected to a few columns: x (xᵀ y), as factorization machines take.

torch reads x twice for it and four times for its gradients, and adds two of these. On CUDA, in half precision, a
kernel each way reads x once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels._src.eager import launches_directly
from gem_kernels._src.validate import check_float, check_same, check_tensor

__all__ = ["token_products"]

MAX_TOKENS = 128
MAX_RANK = 64
_DTYPES = (torch.bfloat16, torch.float16)


class _TokenProducts(torch.autograd.Function):
    """Both kernels without torch.library between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        from gem_kernels._src.token_products.kernels import launch_forward

        ctx.save_for_backward(x, y)
        return launch_forward(x, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from gem_kernels._src.token_products.kernels import launch_backward

        x, y = ctx.saved_tensors
        return launch_backward(x, y, grads[0])


def token_products(x: Tensor, y: Tensor) -> Tensor:
    """Products of all pairs of tokens, ``x @ (x.T @ y)`` for every sample.

    Args:
        x: (B, n, d), any float dtype.
        y: (B, n, k), dtype and device of x.

    Returns:
        (B, n, k) in the dtype of x.

    Raises:
        ValueError: on shapes or devices that do not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: sums in float32; xᵀ y is rounded to the dtype of x, as its gradient is.
    """
    op = "token_products"
    for name, tensor in (("x", x), ("y", y)):
        check_tensor(op, name, tensor)
        check_float(op, name, tensor)
    check_same(op, {"x": x, "y": y})
    if x.dim() != 3:
        raise ValueError(f"{op}: `x` must have shape (B, n, d), got {tuple(x.shape)}; add or flatten dims.")
    if y.dim() != 3 or y.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"{op}: `y` must have shape (B, n, k) = {(*x.shape[:2], 'k')}, got {tuple(y.shape)}; give it the rows of "
            "`x`."
        )
    if (
        launches_directly(x, y)
        and x.dtype in _DTYPES
        and not torch.is_autocast_enabled(x.device.type)
        and x.shape[1] <= MAX_TOKENS
        and y.shape[2] <= MAX_RANK
    ):
        out: Tensor = _TokenProducts.apply(x, y)
        return out
    return torch.bmm(x, torch.bmm(x.transpose(1, 2), y))
