"""Registrations of the linear layers with a norm: forward and backward ops, CPU and CUDA kernels, fakes, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_kernels._src.attention.batching import compute_dtype
from gem_kernels._src.norm_linear import cpu


@torch.library.custom_op("gem_kernels::rmsnorm_linear", mutates_args=(), device_types="cuda")
def rmsnorm_linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Output (M, N) in the dtype of x; reciprocal root mean squares (M,) in float32, float64 for float64."""
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.norm_linear.matmul import launch_rmsnorm_linear

    with torch.autocast("cuda", enabled=False):
        return launch_rmsnorm_linear(x, weight, bias, norm_weight, eps)


@rmsnorm_linear_op.register_kernel("cpu")
def _rmsnorm_linear_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.rmsnorm_linear_forward(x, weight, bias, norm_weight, eps)


@rmsnorm_linear_op.register_fake
def _rmsnorm_linear_fake(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype))


@torch.library.custom_op("gem_kernels::rmsnorm_linear_backward", mutates_args=(), device_types="cuda")
def rmsnorm_linear_backward_op(
    dout: Tensor, x: Tensor, weight: Tensor, norm_weight: Tensor | None, rrms: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and norm_weight; of the last two, that of an absent one is empty."""
    from gem_kernels._src.norm_linear.backward import launch_rmsnorm_linear_backward

    with torch.autocast("cuda", enabled=False):
        return launch_rmsnorm_linear_backward(dout, x, weight, norm_weight, rrms, has_bias)


@rmsnorm_linear_backward_op.register_kernel("cpu")
def _rmsnorm_linear_backward_cpu(
    dout: Tensor, x: Tensor, weight: Tensor, norm_weight: Tensor | None, rrms: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        return cpu.rmsnorm_linear_backward(dout, x, weight, norm_weight, rrms, has_bias)


@rmsnorm_linear_backward_op.register_fake
def _rmsnorm_linear_backward_fake(
    dout: Tensor, x: Tensor, weight: Tensor, norm_weight: Tensor | None, rrms: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        x.new_empty(weight.shape[0] if has_bias else 0),
        x.new_empty(0 if norm_weight is None else x.shape[1]),
    )


def _rmsnorm_linear_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, norm_weight, _eps = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, norm_weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _rmsnorm_linear_backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 5
    x, weight, norm_weight, rrms = ctx.saved_tensors
    dx, dweight, dbias, dnorm_weight = rmsnorm_linear_backward_op(dout, x, weight, norm_weight, rrms, ctx.has_bias)
    return dx, dweight, dbias if ctx.has_bias else None, None if norm_weight is None else dnorm_weight, None


rmsnorm_linear_op.register_autograd(_rmsnorm_linear_backward, setup_context=_rmsnorm_linear_setup_context)


@torch.library.custom_op("gem_kernels::linear_norm", mutates_args=(), device_types="cuda")
def linear_norm_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    is_layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (M, N), its value before the affine part (empty if there is none), and the factors (M,) of the norm."""
    from gem_kernels._src.norm_linear.matmul import launch_linear_norm
    from gem_kernels._src.norm_linear.rows import check_features

    check_features("linear_norm", weight.shape[0])
    with torch.autocast("cuda", enabled=False):
        return launch_linear_norm(x, weight, bias, norm_weight, norm_bias, is_layer, eps)


@linear_norm_op.register_kernel("cpu")
def _linear_norm_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    is_layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        return cpu.linear_norm_forward(x, weight, bias, norm_weight, norm_bias, is_layer, eps)


@linear_norm_op.register_fake
def _linear_norm_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    is_layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    is_affine = norm_weight is not None or norm_bias is not None
    return (
        x.new_empty(x.shape[0], weight.shape[0]),
        x.new_empty(x.shape[0] if is_affine else 0, weight.shape[0]),
        x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype)),
    )


@torch.library.custom_op("gem_kernels::linear_norm_backward", mutates_args=(), device_types="cuda")
def linear_norm_backward_op(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    normalized: Tensor,
    rstd: Tensor,
    is_layer: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias, norm_weight and norm_bias; the last three are empty unless ``sums``."""
    from gem_kernels._src.norm_linear.backward import launch_linear_norm_backward

    with torch.autocast("cuda", enabled=False):
        return launch_linear_norm_backward(dout, x, weight, norm_weight, normalized, rstd, is_layer, sums)


@linear_norm_backward_op.register_kernel("cpu")
def _linear_norm_backward_cpu(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    normalized: Tensor,
    rstd: Tensor,
    is_layer: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", enabled=False):
        return cpu.linear_norm_backward(dout, x, weight, norm_weight, normalized, rstd, is_layer, sums)


@linear_norm_backward_op.register_fake
def _linear_norm_backward_fake(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    normalized: Tensor,
    rstd: Tensor,
    is_layer: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    features = weight.shape[0] if sums else 0
    dbias, dnorm_weight, dnorm_bias = (x.new_empty(features) for _ in range(3))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, dnorm_weight, dnorm_bias


def _linear_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, norm_weight, norm_bias, ctx.is_layer, _eps = inputs
    out, normalized, rstd = output
    ctx.given = (bias is not None, norm_weight is not None, norm_bias is not None)
    is_affine = norm_weight is not None or norm_bias is not None
    # Without an affine part the output is all that the backward of the norm reads.
    ctx.save_for_backward(x, weight, norm_weight, normalized if is_affine else out, rstd)
    ctx.mark_non_differentiable(normalized, rstd)
    ctx.set_materialize_grads(False)


def _linear_norm_backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 7
    dx, dweight, *sums = linear_norm_backward_op(dout, *ctx.saved_tensors, ctx.is_layer, any(ctx.given))
    return dx, dweight, *(x if given else None for x, given in zip(sums, ctx.given, strict=True)), None, None


linear_norm_op.register_autograd(_linear_norm_backward, setup_context=_linear_norm_setup_context)


def _matmul_flops(x: Tensor, weight: Tensor) -> int:
    return 2 * x.shape[0] * weight.shape[0] * weight.shape[1]


@register_flop_formula(torch.ops.gem_kernels.rmsnorm_linear, get_raw=True)
def _rmsnorm_linear_flops(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return _matmul_flops(x, weight)


@register_flop_formula(torch.ops.gem_kernels.linear_norm, get_raw=True)
def _linear_norm_flops(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return _matmul_flops(x, weight)


@register_flop_formula(torch.ops.gem_kernels.rmsnorm_linear_backward, get_raw=True)
def _rmsnorm_linear_backward_flops(dout: Tensor, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * _matmul_flops(x, weight)


@register_flop_formula(torch.ops.gem_kernels.linear_norm_backward, get_raw=True)
def _linear_norm_backward_flops(dout: Tensor, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * _matmul_flops(x, weight)
