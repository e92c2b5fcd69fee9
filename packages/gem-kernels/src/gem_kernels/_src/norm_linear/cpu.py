"""CPU kernels of the linear layers with a norm: matrix products and row statistics in float32, float64 for float64."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.attention.batching import compute_dtype


def fold(weight: Tensor, norm_weight: Tensor | None) -> Tensor:
    """Weight (N, K) with the norm's weight (K,) multiplied into its columns, in the dtype of both."""
    return weight if norm_weight is None else weight * norm_weight


def unfold_gradients(
    dfolded: Tensor, weight: Tensor, norm_weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of ``weight`` and ``norm_weight`` (empty if there is none) from that of the folded weight."""
    if norm_weight is None:
        return dfolded.to(weight.dtype), weight.new_empty(0)
    wide = dfolded.to(dtype)
    return (wide * norm_weight).to(weight.dtype), (wide * weight).sum(0).to(norm_weight.dtype)


def rmsnorm_linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Output (M, N) in the dtype of x, and the reciprocal root mean squares (M,) of its rows."""
    dtype = compute_dtype(x.dtype)
    wide = x.to(dtype)
    rrms = torch.rsqrt(torch.linalg.vecdot(wide, wide) / x.shape[1] + eps)
    out = torch.mm(wide, fold(weight.to(dtype), norm_weight).T).mul_(rrms[:, None])
    if bias is not None:
        out += bias
    return out.to(x.dtype), rrms


def rmsnorm_linear_backward(
    dout: Tensor, x: Tensor, weight: Tensor, norm_weight: Tensor | None, rrms: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and norm_weight; of the last two, that of an absent one is empty."""
    dtype = rrms.dtype
    dout = dout.to(dtype)
    normalized = x.to(dtype) * rrms[:, None]
    dy = dout @ fold(weight.to(dtype), norm_weight)
    dy -= normalized * (torch.linalg.vecdot(dy, normalized) / x.shape[1])[:, None]
    dweight, dnorm_weight = unfold_gradients(dout.T @ normalized, weight, norm_weight, dtype)
    dbias = dout.sum(0).to(x.dtype) if has_bias else x.new_empty(0)
    return dy.mul_(rrms[:, None]).to(x.dtype), dweight, dbias, dnorm_weight


def linear_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    is_layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (M, N), its value before the affine part (empty if there is none) and the factors (M,) of the norm."""
    dtype = compute_dtype(x.dtype)
    hidden = torch.mm(x.to(dtype), weight.to(dtype).T)
    if bias is not None:
        hidden += bias
    if is_layer:
        out, _, rstd = torch.native_layer_norm(hidden, [weight.shape[0]], None, None, eps)
        rstd = rstd.view(-1)
    else:
        rstd = torch.rsqrt(torch.linalg.vecdot(hidden, hidden) / weight.shape[0] + eps)
        out = hidden.mul_(rstd[:, None])
    if norm_weight is None and norm_bias is None:
        return out.to(x.dtype), x.new_empty(0, weight.shape[0]), rstd
    normalized = out.to(x.dtype)
    if norm_weight is not None:
        out = out * norm_weight
    if norm_bias is not None:
        out = out + norm_bias
    # One tensor must not be returned twice: `out` is another one from the affine part on.
    return out.to(x.dtype), normalized, rstd


def linear_norm_backward(
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
    dtype = rstd.dtype
    dout, unit = dout.to(dtype), normalized.to(dtype)
    dy = dout if norm_weight is None else dout * norm_weight
    dhidden = dy - unit * (torch.linalg.vecdot(dy, unit) / weight.shape[0])[:, None]
    if is_layer:
        dhidden -= dy.mean(1, keepdim=True)
    dhidden *= rstd[:, None]
    totals = (dhidden.sum(0), torch.linalg.vecdot(dout, unit, dim=0), dout.sum(0)) if sums else (x.new_empty(0),) * 3
    dbias, dnorm_weight, dnorm_bias = (total.to(x.dtype, copy=True) for total in totals)
    dx, dweight = dhidden @ weight.to(dtype), dhidden.T @ x.to(dtype)
    return dx.to(x.dtype), dweight.to(x.dtype), dbias, dnorm_weight, dnorm_bias
