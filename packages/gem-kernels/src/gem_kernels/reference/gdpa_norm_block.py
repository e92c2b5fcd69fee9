"""GDPA between a layer norm and an RMS norm over all heads, written out: the oracle of the block of that name."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gem_kernels.reference.gdpa import gdpa, gdpa_backward
from gem_kernels.reference.norm_linear import _normalize, _normalize_backward


class GDPANormBlockGradients(NamedTuple):
    """Gradients of ``gdpa_norm_block``; None for a parameter that was not given."""

    dq: Tensor
    """(T_q, H, D)."""
    dk: Tensor
    """(T_k, H_kv, D)."""
    dv: Tensor
    """(T_k, H_kv, D)."""
    dnorm_weight: Tensor | None
    """(H * D,), as the two that follow."""
    dnorm_bias: Tensor | None
    drms_weight: Tensor | None


def _scale(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _inner(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: dict[str, Any],
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    layer_norm: bool,
    query_residual: bool,
    rms_norm: bool,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Layer norm before and after its affine part, its factors, and the RMS norm of the sum with its factors.

    Without a norm its input and no factors.
    """
    unit, rstd = _normalize(q.flatten(1), "layer", eps) if layer_norm else (q.flatten(1), None)
    normed = _scale(unit, norm_weight)
    if norm_bias is not None:
        normed = normed + norm_bias
    total = gdpa(normed.view(q.shape), k, v, **attention).flatten(1)
    if query_residual:
        total = total + normed
    inner, rrms = _normalize(total, "rms", eps) if rms_norm else (total, None)
    return unit, rstd, normed, inner, rrms


def gdpa_norm_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor,
    offsets_k: Tensor,
    activation: str = "gelu",
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    rms_weight: Tensor | None = None,
    layer_norm: bool = True,
    query_residual: bool = True,
    rms_norm: bool = True,
    residual: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    """Output (T_q, H, D) in the dtype of q; arguments as in ``gem_kernels.gdpa_norm_block``."""
    attention: dict[str, Any] = {
        "offsets_q": offsets_q,
        "offsets_k": offsets_k,
        "activation": activation,
        "pre_scale": pre_scale,
        "post_scale": post_scale,
    }
    *_, inner, _ = _inner(q, k, v, attention, norm_weight, norm_bias, layer_norm, query_residual, rms_norm, eps)
    out = _scale(inner, rms_weight).view(q.shape)
    return out + q if residual else out


def gdpa_norm_block_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor,
    offsets_k: Tensor,
    activation: str = "gelu",
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    rms_weight: Tensor | None = None,
    layer_norm: bool = True,
    query_residual: bool = True,
    rms_norm: bool = True,
    residual: bool = True,
    eps: float = 1e-5,
) -> GDPANormBlockGradients:
    """Gradients from ``do`` (T_q, H, D): back through the RMS norm, the attention and the layer norm."""
    attention: dict[str, Any] = {
        "offsets_q": offsets_q,
        "offsets_k": offsets_k,
        "activation": activation,
        "pre_scale": pre_scale,
        "post_scale": post_scale,
    }
    unit, rstd, normed, inner, rrms = _inner(
        q, k, v, attention, norm_weight, norm_bias, layer_norm, query_residual, rms_norm, eps
    )
    dout = do.flatten(1)
    dtotal = dout if rrms is None else _normalize_backward(_scale(dout, rms_weight), inner, rrms, "rms")
    dnormed, dk, dv = gdpa_backward(
        dtotal.view(q.shape),
        normed.view(q.shape),
        k,
        v,
        **attention,
    )
    dnormed = dnormed.flatten(1)
    if query_residual:
        dnormed = dnormed + dtotal
    dq = dnormed if rstd is None else _normalize_backward(_scale(dnormed, norm_weight), unit, rstd, "layer")
    if residual:
        dq = dq + dout
    return GDPANormBlockGradients(
        dq=dq.view(q.shape),
        dk=dk,
        dv=dv,
        dnorm_weight=None if norm_weight is None else (dnormed * unit).sum(0),
        dnorm_bias=None if norm_bias is None else dnormed.sum(0),
        drms_weight=None if rms_weight is None else (dout * inner).sum(0),
    )
