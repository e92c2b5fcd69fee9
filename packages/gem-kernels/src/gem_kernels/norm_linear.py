"""A linear layer and the norm before or after it as one op.

``rmsnorm_linear`` is an RMS norm and then a linear layer: scaling a row commutes with the product, so the kernel
multiplies the rows as they are, sums their squares in the same loop, and scales the result (a lazy norm). The norm's
weight is folded into the linear layer's. ``linear_norm`` is a linear layer and then a layer norm or RMS norm, taken
where the product still lies in registers.

Source: the norm fusions of Meta's GEM training posts and ads_model_kernel_library.
"""

from __future__ import annotations

from torch import Tensor

from gem_kernels._src.autocast import autocast_operands
from gem_kernels._src.norm_linear.check import check_linear
from gem_kernels._src.norm_linear.op import linear_norm_op, rmsnorm_linear_op

__all__ = ["linear_norm", "rmsnorm_linear"]

_NORMS = ("layer", "rms")


def _autocast(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """``autocast_operands`` on the device of ``x``, of the parameters that are given."""
    return tuple(None if p is None else autocast_operands(x, p)[1] for p in parameters)


def rmsnorm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm_weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """RMS norm over the last dim, then a linear layer: ``linear(rms_norm(x) * norm_weight, weight, bias)``.

    With r = (mean(x²) + eps)^-½ of each row: ``out = r * (x @ (norm_weight * weight).T) + bias``.

    Args:
        x: (..., K). float16, bfloat16 or float32; float64 too on CPU. Any strides; a last dim that is not contiguous is
            copied.
        weight: (N, K), as in ``torch.nn.Linear``; dtype and device of x, as all that follow.
        bias: (N,).
        norm_weight: (K,).
        eps: Added to the mean square.

    Returns:
        (..., N) in the dtype of x, contiguous.

    Raises:
        ValueError: on a shape, device or ``eps`` that does not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: products and sums in float32 (float64 for float64). In half precision the normalised rows are never
    rounded, but the product of the two weights is. float32 on CUDA is torch's own matmul, under
    ``torch.set_float32_matmul_precision``. The backward reads x and r, and both give the same bits on every run. Under
    autocast all tensors are cast to the autocast dtype.
    """
    x, weight = autocast_operands(x, weight)
    bias, norm_weight = _autocast(x, bias, norm_weight)
    check_linear("rmsnorm_linear", x, weight, eps, per_output={"bias": bias}, per_input={"norm_weight": norm_weight})
    out, _ = rmsnorm_linear_op(x.reshape(-1, x.shape[-1]), weight, bias, norm_weight, float(eps))
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str = "layer",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """A linear layer, then a norm over its output: ``norm(linear(x, weight, bias)) * norm_weight + norm_bias``.

    Args:
        x: (..., K). float16, bfloat16 or float32; float64 too on CPU. Any strides; a last dim that is not contiguous is
            copied.
        weight: (N, K), as in ``torch.nn.Linear``; dtype and device of x, as all that follow. On CUDA N <= 16384; up to
            N = 512 in half precision the norm is part of the matmul, above it a second kernel in place.
        bias: (N,), of the linear layer.
        norm: ``layer`` (subtract the mean, divide by the standard deviation) or ``rms`` (divide by the root mean
            square).
        norm_weight: (N,).
        norm_bias: (N,).
        eps: Added to the variance or mean square.

    Returns:
        (..., N) in the dtype of x, contiguous.

    Raises:
        ValueError: on a shape, device, norm or ``eps`` that does not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: products, statistics and sums in float32 (float64 for float64). float32 on CUDA is torch's own matmul,
    under ``torch.set_float32_matmul_precision``. The backward reads the normalised rows, which without norm_weight and
    norm_bias are the output itself, and one number per row. Both give the same bits on every run. Under autocast all
    tensors are cast to the autocast dtype.
    """
    x, weight = autocast_operands(x, weight)
    bias, norm_weight, norm_bias = _autocast(x, bias, norm_weight, norm_bias)
    per_output = {"bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    check_linear("linear_norm", x, weight, eps, per_output=per_output)
    if norm not in _NORMS:
        raise ValueError(f"linear_norm: `norm` must be one of {', '.join(_NORMS)}, got {norm!r}; name one of them.")
    flat = x.reshape(-1, x.shape[-1])
    out, _, _ = linear_norm_op(flat, weight, bias, norm_weight, norm_bias, norm == "layer", float(eps))
    return out.view(*x.shape[:-1], weight.shape[0])
