"""CPU kernels of the block: row norms in torch operations around the CPU kernels of GDPA, in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.attention.batching import compute_dtype
from gem_kernels._src.gdpa.op import gdpa_backward_op, gdpa_op
from gem_kernels._src.gdpa_norm_block.arguments import Gradients, Kept, Options, Parameters, Statistics


def _scale(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _attention(
    unit: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, parameters: Parameters, options: Options
) -> tuple[Tensor, Tensor]:
    """Layer norm with its affine part (T_q, H * D), and what goes into the RMS norm."""
    normed = _scale(unit, parameters.norm_weight)
    if parameters.norm_bias is not None:
        normed = normed + parameters.norm_bias
    x = normed.view(unit.shape[0], unit.shape[1] // k.shape[2], k.shape[2])
    total = gdpa_op(x, k, v, offsets_q, offsets_k, *options[:5], -1, -1, None, None, False).flatten(1)
    return normed, total + normed if options.query_residual else total


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    parameters: Parameters,
    options: Options,
    *,
    keep: bool = False,
) -> tuple[Tensor, Statistics, Kept | None]:
    """Output (T_q, H, D) in the dtype of q, and what the backward reads."""
    dtype = compute_dtype(q.dtype)
    rows, k, v = q.to(dtype).flatten(1), k.to(dtype), v.to(dtype)
    unit, mean, rstd = torch.native_layer_norm(rows, [rows.shape[1]], None, None, options.eps)
    normed, total = _attention(unit, k, v, offsets_q, offsets_k, parameters, options)
    rrms = torch.rsqrt(torch.linalg.vecdot(total, total) / rows.shape[1] + options.eps)
    out = _scale(total * rrms[:, None], parameters.rms_weight)
    if options.residual:
        out = out + rows
    # One tensor must not be returned twice.
    kept = Kept(*(x.to(q.dtype, copy=True).view(q.shape) for x in (normed, total))) if keep else None
    return out.to(q.dtype).view(q.shape), Statistics(mean.view(-1), rstd.view(-1), rrms), kept


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    parameters: Parameters,
    statistics: Statistics,
    options: Options,
    kept: Kept | None = None,
) -> Gradients:
    """All gradients, in the dtypes of what they belong to."""
    dtype = compute_dtype(q.dtype)
    mean, rstd, rrms = (x[:, None] for x in statistics)
    norm_weight, norm_bias, rms_weight = parameters
    dout, rows, wide_k, wide_v = do.to(dtype).flatten(1), q.to(dtype).flatten(1), k.to(dtype), v.to(dtype)
    features = rows.shape[1]
    unit = (rows - mean) * rstd
    if kept is None:
        normed, total = _attention(unit, wide_k, wide_v, offsets_q, offsets_k, parameters, options)
    else:
        normed, total = (x.to(dtype).flatten(1) for x in kept)
    inner = total * rrms
    dinner = _scale(dout, rms_weight)
    dtotal = rrms * (dinner - inner * (torch.linalg.vecdot(dinner, inner) / features)[:, None])
    dnormed, dk, dv = gdpa_backward_op(
        dtotal.view(q.shape),
        normed.view(q.shape),
        wide_k,
        wide_v,
        offsets_q,
        offsets_k,
        *options[:5],
        -1,
        -1,
        None,
        None,
    )
    dnormed = dnormed.flatten(1)
    if options.query_residual:
        dnormed = dnormed + dtotal
    dunit = _scale(dnormed, norm_weight)
    dq = dunit - unit * (torch.linalg.vecdot(dunit, unit) / features)[:, None]
    dq = rstd * (dq - dunit.mean(1, keepdim=True))
    if options.residual:
        dq = dq + dout
    empty = (0,)
    return Gradients(
        dq.to(q.dtype).view(q.shape),
        dk.to(k.dtype),
        dv.to(v.dtype),
        q.new_empty(empty) if norm_weight is None else torch.linalg.vecdot(dnormed, unit, dim=0).to(q.dtype),
        q.new_empty(empty) if norm_bias is None else dnormed.sum(0).to(q.dtype),
        q.new_empty(empty) if rms_weight is None else torch.linalg.vecdot(dout, inner, dim=0).to(q.dtype),
    )
