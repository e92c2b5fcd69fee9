"""Registrations of the norm of rows and of its backward: CPU and CUDA kernels, fakes. Neither has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.attention.batching import compute_dtype


@torch.library.custom_op("gem_kernels::layer_norm_rows", mutates_args=(), device_types="cuda")
def layer_norm_rows_op(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised rows (M, N), contiguous, in the dtype of x; means and factors (M,) in float32, float64 for float64."""
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.layer_norm_rows.kernels import launch_forward
    from gem_kernels._src.norm_linear.rows import check_features

    check_features("layer_norm_rows", x.shape[1])
    return launch_forward(x, eps)


@layer_norm_rows_op.register_kernel("cpu")
def _forward_cpu(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(compute_dtype(x.dtype))
    mean = wide.mean(1, keepdim=True)
    wide = wide - mean
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    return (wide * rstd).to(x.dtype, copy=True), mean[:, 0].clone(), rstd[:, 0].clone()


@layer_norm_rows_op.register_fake
def _forward_fake(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@torch.library.custom_op("gem_kernels::layer_norm_rows_backward", mutates_args=(), device_types="cuda")
def layer_norm_rows_backward_op(
    grads: list[Tensor], x: Tensor, mean: Tensor, rstd: Tensor, direct: Tensor | None
) -> Tensor:
    """Gradient of x (M, N), contiguous, in its dtype; the same bits on every run."""
    from gem_kernels._src.layer_norm_rows.kernels import launch_backward

    return launch_backward(grads, x, mean, rstd, direct)


@layer_norm_rows_backward_op.register_kernel("cpu")
def _backward_cpu(grads: list[Tensor], x: Tensor, mean: Tensor, rstd: Tensor, direct: Tensor | None) -> Tensor:
    dy = grads[0].to(mean.dtype)
    for grad in grads[1:]:
        dy = dy + grad.to(mean.dtype)
    unit = (x.to(mean.dtype) - mean[:, None]) * rstd[:, None]
    dx = rstd[:, None] * (dy - dy.mean(1, keepdim=True) - unit * (dy * unit).mean(1, keepdim=True))
    return (dx if direct is None else dx + direct.to(mean.dtype)).to(x.dtype)


@layer_norm_rows_backward_op.register_fake
def _backward_fake(grads: list[Tensor], x: Tensor, mean: Tensor, rstd: Tensor, direct: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)
