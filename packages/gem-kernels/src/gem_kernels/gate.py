"""A gate: x sigmoid(z), in one pass over memory each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels._src.eager import launches_directly
from gem_kernels._src.validate import check_float, check_same, check_tensor

__all__ = ["gate"]


class _Gate(torch.autograd.Function):
    """Both kernels without torch.library between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor) -> Tensor:
        from gem_kernels._src.gate.kernels import launch_forward

        x, z = x.contiguous(), z.contiguous()
        ctx.save_for_backward(x, z)
        return launch_forward(x, z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from gem_kernels._src.gate.kernels import launch_backward

        return launch_backward(grads[0].contiguous(), *ctx.saved_tensors)


def gate(x: Tensor, z: Tensor) -> Tensor:
    """Let pass of x what ``sigmoid(z)`` says, elementwise.

    Args:
        x: Any shape and float dtype.
        z: Shape, dtype and device of x.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: on shapes or devices that do not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: in float32 on CUDA, with one rounding at the end; elsewhere the sigmoid is rounded, too.
    """
    for name, tensor in (("x", x), ("z", z)):
        check_tensor("gate", name, tensor)
        check_float("gate", name, tensor)
    check_same("gate", {"x": x, "z": z})
    if x.shape != z.shape:
        raise ValueError(
            f"gate: `z` must have the shape of `x`, {tuple(x.shape)}, got {tuple(z.shape)}; broadcast it with "
            "expand_as."
        )
    if launches_directly(x, z) and x.dtype != torch.float64:
        out: Tensor = _Gate.apply(x, z)
        return out
    return x * torch.sigmoid(z)
