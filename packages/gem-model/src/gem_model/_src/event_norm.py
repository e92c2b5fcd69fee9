"""LayerNorm of the events for all that read it, normalised or not, with one backward for all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gem_kernels.jagged import jagged_last_k
from gem_kernels.layer_norm_rows import layer_norm_rows, layer_norm_rows_backward
from gem_model._src.blocks import normalize, uses_own_norm

_EPS = 1e-5


class NormalizedEvents(NamedTuple):
    """What the parts of a layer read of the events."""

    rows: Tensor
    """(T, d), as they came: for a residual sum."""
    normalized: tuple[Tensor, ...]
    """(T, d) each, rows with mean 0 and variance 1, one for every reader: a gradient each."""
    recent: Tensor | None
    """(B, k, d), the last k normalised rows of each sequence, zeros before the first; None with k = 0."""


class _Normalize(torch.autograd.Function):
    """Added by autograd, each gradient costs passes over all rows, that of a gather one of T rows, nearly all zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor | None, valid: Tensor | None, num_readers: int, adds: bool
    ) -> tuple[Tensor | None, ...]:
        ctx.adds = adds
        if adds:
            normalized, mean, rstd = layer_norm_rows(x, eps=_EPS)
        else:
            normalized, mean, rstd = torch.native_layer_norm(x, [x.shape[1]], None, None, _EPS)
        ctx.save_for_backward(x, mean, rstd, index, valid)
        ctx.set_materialize_grads(False)
        recent = None
        if index is not None and valid is not None:
            # Chosen and not multiplied: a broken value of one sample must not reach another.
            recent = torch.where(valid, normalized.index_select(0, index), 0.0)
        # A function must return neither its input nor one tensor twice.
        others = (normalized.view_as(normalized) for _ in range(num_readers - 1))
        return x.view_as(x), recent, normalized, *others

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, direct: Tensor | None, grad_recent: Tensor | None, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, mean, rstd, index, valid = ctx.saved_tensors
        given = [grad for grad in grads if grad is not None]
        # The norm's backward is linear in the gradient and knows no other row: rows gathered get theirs separately.
        if given:
            dx = _backward(ctx.adds, given, x, mean, rstd, direct)
        else:
            dx = torch.zeros_like(x) if direct is None else direct.clone()
        if grad_recent is not None:
            rows = _backward(ctx.adds, [grad_recent], x[index], mean[index], rstd[index], None)
            dx.index_add_(0, index, torch.where(valid, rows, 0.0))
        return dx, None, None, None, None


def _backward(adds: bool, grads: list[Tensor], x: Tensor, mean: Tensor, rstd: Tensor, direct: Tensor | None) -> Tensor:
    if adds:
        return layer_norm_rows_backward(grads, x, mean, rstd, direct=direct)
    (grad,) = grads
    dx: Tensor = torch.ops.aten.native_layer_norm_backward(
        grad, x, [x.shape[1]], mean, rstd, None, None, [True, False, False]
    )[0]
    return dx


def normalize_events(values: Tensor, offsets: Tensor, num_recent: int, num_readers: int) -> NormalizedEvents:
    """LayerNorm without parameters, and the last rows of each sequence.

    Args:
        values: (T, d).
        offsets: (B + 1,) int64.
        num_recent: k.
        num_readers: Parts that read the normalised rows, at most four.
    """
    # One kernel adds all gradients and goes back through the norm; on the CPU autograd adds them.
    adds = uses_own_norm(values)
    # A compiler joins the gradients by itself; no rows can be gathered from none.
    is_plain = torch.is_autocast_enabled(values.device.type) or torch.compiler.is_compiling() or values.shape[0] == 0
    if is_plain or not (adds or num_recent):
        normalized = normalize(values)
        recent = jagged_last_k(normalized, offsets, num_recent)[0] if num_recent else None
        return NormalizedEvents(values, (normalized,) * num_readers, recent)
    index = valid = None
    if num_recent:
        index = offsets[1:, None] + torch.arange(-num_recent, 0, device=offsets.device)
        valid = index >= offsets[:-1, None]
        index, valid = torch.where(valid, index, 0).flatten(), valid.view(-1, 1)
    rows, recent, *readers = _Normalize.apply(values, index, valid, num_readers if adds else 1, adds)
    if recent is not None:
        recent = recent.view(-1, num_recent, values.shape[1])
    if adds:
        return NormalizedEvents(rows, tuple(readers), recent)
    return NormalizedEvents(values, tuple(readers) * num_readers, recent)
