"""Backwards on CUDA: one row kernel for the norm between two matmuls of the library, or Hopper's own matmuls."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.norm_linear import hopper_launch
from gem_kernels._src.norm_linear.matmul import fold
from gem_kernels._src.norm_linear.rows import launch_norm_rows_backward, row_major


def launch_rmsnorm_linear_backward(
    dout: Tensor, x: Tensor, weight: Tensor, norm_weight: Tensor | None, rrms: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and norm_weight; of the last two, that of an absent one is empty."""
    folded, dout, x = fold(weight, norm_weight), row_major(dout), row_major(x)
    if hopper_launch.applies_backward(dout, x, folded):
        dx, dfolded = hopper_launch.launch_hopper_rmsnorm_linear_backward(dout, x, folded, rrms)
    else:
        normalized = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # The gradient of the normalised rows is read and overwritten row by row.
        dx = torch.mm(dout, folded)
        launch_norm_rows_backward(dx, x, rrms, is_layer=False, dx=dx, unit_out=normalized)
        dfolded = torch.mm(dout.T, normalized)
    dbias = torch.sum(dout, 0) if has_bias else dout.new_empty(0)
    if norm_weight is None:
        return dx, dfolded.to(weight.dtype), dbias, weight.new_empty(0)
    wide = dfolded.float()
    return dx, (wide * norm_weight).to(weight.dtype), dbias, (wide * weight).sum(0).to(norm_weight.dtype)


def launch_linear_norm_backward(
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
    dhidden, totals = launch_norm_rows_backward(
        dout, normalized, rstd, weight=norm_weight, is_layer=is_layer, sums=sums
    )
    dx, dweight = torch.mm(dhidden, weight), torch.mm(dhidden.T, x)
    if totals is None:
        return dx, dweight, weight.new_empty(0), weight.new_empty(0), weight.new_empty(0)
    # Copies even in float32: the totals are parts of one tensor, and an op must not return two views of one.
    dbias, dnorm_weight, dnorm_bias = (t.to(x.dtype, copy=True) for t in (totals.dx, totals.dweight, totals.dy))
    return dx, dweight, dbias, dnorm_weight, dnorm_bias
