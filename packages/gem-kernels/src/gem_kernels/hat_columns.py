"""Age and place of events as columns of numbers that a linear layer reads: weights of interpolation between knots."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.eager import launches_directly
from gem_kernels._src.jagged.index import can_read
from gem_kernels._src.validate import (
    check_constant,
    check_device,
    check_float,
    check_int,
    check_max_seqlen,
    check_offset_values,
    check_offsets,
    check_scalar,
    check_tensor,
)

__all__ = ["hat_columns", "hat_encoding", "recency"]


def hat_encoding(x: Tensor, num_knots: int, largest: float) -> Tensor:
    """Weights of linear interpolation between equidistant knots 0 to ``largest``.

    A linear layer over them is a learned piecewise linear function of x, constant beyond the last knot. As products
    with a matrix they need no table lookup, whose backward scatters.

    Args:
        x: (T,), >= 0.
        num_knots: Columns of the result, >= 2.
        largest: Position of the last knot.

    Returns:
        (T, num_knots), rows sum to 1.
    """
    position = x.clamp(0.0, largest) * ((num_knots - 1) / largest)
    knots = torch.arange(num_knots, device=x.device, dtype=x.dtype)
    return (position[:, None] - knots).abs_().neg_().add_(1.0).clamp_(min=0.0)


def recency(offsets: Tensor, num_events: int) -> Tensor:
    """(T,) float32: how many later events the same sequence holds."""
    last = torch.repeat_interleave(offsets[1:], torch.diff(offsets), output_size=num_events)
    return (last - 1 - torch.arange(num_events, device=offsets.device)).float()


def _check_knots(op: str, name: str, knots: tuple[int, float]) -> None:
    if not isinstance(knots, (tuple, list)) or len(knots) != 2:
        raise TypeError(
            f"{op}: `{name}` must be a pair of the number of knots and the position of the last, got {knots!r}; pass "
            "such as (16, 12.0)."
        )
    count, largest = knots
    check_int(op, f"{name}[0]", count)
    check_scalar(op, f"{name}[1]", largest)
    if count < 2 or not largest > 0.0:
        raise ValueError(
            f"{op}: `{name}` must be at least two knots up to a positive number, got {count, largest}; raise both."
        )


def hat_columns(
    dense: Tensor,
    age: Tensor,
    offsets: Tensor,
    *,
    max_seqlen: int,
    age_knots: tuple[int, float],
    recency_knots: tuple[int, float],
    width: int,
) -> Tensor:
    """Numbers of each event side by side: its own, hats of log(1 + age) and of log(1 + later events), then zeros.

    Args:
        dense: (T, n), any float dtype.
        age: (T,), any float dtype, >= 0.
        offsets: (B + 1,) int64 or int32; sequence b owns events ``offsets[b]:offsets[b + 1]``.
        max_seqlen: Upper bound of the lengths.
        age_knots: Number of knots, >= 2, and position of the last.
        recency_knots: Likewise.
        width: Columns of the result, at least those that are filled.

    Returns:
        (T, width) float32, without a gradient: data, not results, have ages.

    Raises:
        ValueError: on shapes, devices or numbers that do not fit, on tensors that require a gradient, and on the CPU,
            on CUDA while debugging, on offsets that do not rise from 0 to T or a sequence above ``max_seqlen``.
        TypeError: on a dtype or argument type that does not fit.
    """
    op = "hat_columns"
    for name, tensor in (("dense", dense), ("age", age)):
        check_tensor(op, name, tensor)
        check_float(op, name, tensor)
        check_constant(op, name, tensor)
    check_device(op, "dense", dense, "age", age)
    if age.dim() != 1:
        raise ValueError(f"{op}: `age` must have shape (T,), got {tuple(age.shape)}; flatten it.")
    if dense.dim() != 2 or dense.shape[0] != age.shape[0]:
        raise ValueError(
            f"{op}: `dense` must have shape (T, n) with T = {age.shape[0]}, got {tuple(dense.shape)}; give a row for "
            "each token."
        )
    check_offsets(op, "offsets", offsets, age)
    check_max_seqlen(op, "max_seqlen", max_seqlen)
    if can_read(offsets):
        check_offset_values(op, "offsets", offsets, age.shape[0], "max_seqlen", max_seqlen)
    for name, knots in (("age_knots", age_knots), ("recency_knots", recency_knots)):
        _check_knots(op, name, knots)
    check_int(op, "width", width)
    filled = dense.shape[1] + age_knots[0] + recency_knots[0]
    if width < filled:
        raise ValueError(
            f"{op}: `width` must be at least the {filled} columns that are filled, got {width}; pass at least that."
        )
    if launches_directly(dense, age, offsets) and torch.float64 not in (dense.dtype, age.dtype):
        from gem_kernels._src.hat_columns.kernel import launch

        return launch(dense.detach(), age.detach(), offsets, max_seqlen, age_knots, recency_knots, width)
    columns = [
        dense.float(),
        hat_encoding(torch.log1p(age.float()), *age_knots),
        hat_encoding(torch.log1p(recency(offsets, age.shape[0])), *recency_knots),
    ]
    if width > filled:
        columns.append(columns[1].new_zeros(age.shape[0], width - filled))
    return torch.cat(columns, dim=1)
