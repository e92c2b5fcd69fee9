"""LayerNorm of the events, and the latest events of it, with one backward for both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gem_kernels.jagged import jagged_last_k
from gem_model._src.blocks import normalize

_EPS = 1e-5


class NormalizedEvents(NamedTuple):
    """What the cross step reads of the events."""

    values: Tensor
    """(T, d), each row with mean 0 and variance 1."""
    recent: Tensor | None
    """(B, k, d), the last k rows of each sequence, zeros before the first; None with k = 0."""


class _NormalizeAndGather(torch.autograd.Function):
    """Gathering alone has a gradient of T rows, nearly all of them zeros, to be made, scattered into and added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        normalized, mean, rstd = torch.native_layer_norm(x, [x.shape[1]], None, None, _EPS)
        ctx.save_for_backward(x, index, valid, mean, rstd)
        # Chosen and not multiplied: a broken value of one sample must not reach another.
        return normalized, torch.where(valid, normalized.index_select(0, index), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_rows: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # The norm's backward is linear in the gradient and knows no other row: rows gathered get theirs separately.
        x, index, valid, mean, rstd = ctx.saved_tensors
        dx = _layer_norm_backward(grad, x, mean, rstd)
        rows = _layer_norm_backward(grad_rows, x[index], mean[index], rstd[index])
        rows = torch.where(valid, rows, 0.0)
        return dx.index_add_(0, index, rows), None, None


def _layer_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    dx: Tensor = torch.ops.aten.native_layer_norm_backward(
        grad, x, [x.shape[1]], mean, rstd, None, None, [True, False, False]
    )[0]
    return dx


def normalize_events(values: Tensor, offsets: Tensor, num_recent: int) -> NormalizedEvents:
    """LayerNorm without parameters, and the last rows of each sequence.

    Args:
        values: (T, d).
        offsets: (B + 1,) int64.
        num_recent: k.
    """
    if not num_recent:
        return NormalizedEvents(normalize(values), None)
    # Autocast widens a norm; a compiler joins the gradients by itself; no rows can be gathered from none.
    if torch.is_autocast_enabled(values.device.type) or torch.compiler.is_compiling() or values.shape[0] == 0:
        normalized = normalize(values)
        return NormalizedEvents(normalized, jagged_last_k(normalized, offsets, num_recent)[0])
    index = offsets[1:, None] + torch.arange(-num_recent, 0, device=offsets.device)
    valid = index >= offsets[:-1, None]
    index = torch.where(valid, index, 0).flatten()
    normalized, rows = _NormalizeAndGather.apply(values, index, valid.view(-1, 1))
    return NormalizedEvents(normalized, rows.view(-1, num_recent, values.shape[1]))
