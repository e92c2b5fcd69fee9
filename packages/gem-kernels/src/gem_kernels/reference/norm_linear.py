"""A linear layer with a norm before or after it, written out: the oracle of ``gem_kernels.norm_linear``.

Works in the dtype of its inputs, float64 for the oracle; statistics of a row are float32 at least, as in torch's norms.
The backwards are the closed forms, not autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RMSNormLinearGradients(NamedTuple):
    """Gradients of ``rmsnorm_linear``; None for an argument that was not given."""

    dx: Tensor
    """(M, K)."""
    dweight: Tensor
    """(N, K)."""
    dbias: Tensor | None
    """(N,)."""
    dnorm_weight: Tensor | None
    """(K,)."""


class LinearNormGradients(NamedTuple):
    """Gradients of ``linear_norm``; None for an argument that was not given."""

    dx: Tensor
    """(M, K)."""
    dweight: Tensor
    """(N, K)."""
    dbias: Tensor | None
    """(N,)."""
    dnorm_weight: Tensor | None
    """(N,)."""
    dnorm_bias: Tensor | None
    """(N,)."""


def _normalize(x: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised rows in the dtype of x, and the factor (M, 1) that made them."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm == "layer":
        wide = wide - wide.mean(1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    return (wide * rstd).to(x.dtype), rstd


def _normalize_backward(dy: Tensor, normalized: Tensor, rstd: Tensor, norm: str) -> Tensor:
    """Rstd * (dy - [mean(dy)] - normalized * mean(dy * normalized)), row by row; the mean for a layer norm only."""
    wide, unit = dy.to(rstd.dtype), normalized.to(rstd.dtype)
    rest = wide - unit * (wide * unit).mean(1, keepdim=True)
    if norm == "layer":
        rest = rest - wide.mean(1, keepdim=True)
    return (rstd * rest).to(dy.dtype)


def rmsnorm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm_weight: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Output (M, N) of x (M, K); arguments as in ``gem_kernels.rmsnorm_linear``."""
    normalized, _ = _normalize(x, "rms", eps)
    if norm_weight is not None:
        normalized = normalized * norm_weight
    out = normalized @ weight.T
    return out if bias is None else out + bias


def rmsnorm_linear_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> RMSNormLinearGradients:
    """Gradients from ``dout`` (M, N). With u the normalised rows and y = u * norm_weight: dy = dout weight."""
    normalized, rrms = _normalize(x, "rms", eps)
    dy = dout @ weight
    scaled = normalized if norm_weight is None else normalized * norm_weight
    return RMSNormLinearGradients(
        dx=_normalize_backward(dy if norm_weight is None else dy * norm_weight, normalized, rrms, "rms"),
        dweight=dout.T @ scaled,
        dbias=None if bias is None else dout.sum(0),
        dnorm_weight=None if norm_weight is None else (dy * normalized).sum(0),
    )


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
    """Output (M, N) of x (M, K); arguments as in ``gem_kernels.linear_norm``."""
    hidden = x @ weight.T
    out, _ = _normalize(hidden if bias is None else hidden + bias, norm, eps)
    if norm_weight is not None:
        out = out * norm_weight
    return out if norm_bias is None else out + norm_bias


def linear_norm_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str = "layer",
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
) -> LinearNormGradients:
    """Gradients from ``dout`` (M, N): through the affine part, the norm (the closed form) and the linear layer."""
    hidden = x @ weight.T
    normalized, rstd = _normalize(hidden if bias is None else hidden + bias, norm, eps)
    dhidden = _normalize_backward(dout if norm_weight is None else dout * norm_weight, normalized, rstd, norm)
    return LinearNormGradients(
        dx=dhidden @ weight,
        dweight=dhidden.T @ x,
        dbias=None if bias is None else dhidden.sum(0),
        dnorm_weight=None if norm_weight is None else (dout * normalized).sum(0),
        dnorm_bias=None if norm_bias is None else dout.sum(0),
    )
