"""Where each packed row belongs: index arithmetic of the jagged helpers, in int64 and without a device sync."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gem_kernels._src.validate import check_dense, check_int, check_offset_values, check_offsets, reads_values


def check_jagged(op: str, name: str, values: Tensor, offsets_name: str, offsets: Tensor) -> None:
    """Raise unless ``values`` (T, ...) and ``offsets`` (B + 1,) form a jagged pair; reads data only on the CPU."""
    check_jagged_values(op, name, values)
    check_offsets(op, offsets_name, offsets, values)
    check_values_of_offsets(op, offsets_name, offsets, values.shape[0])


def check_jagged_values(op: str, name: str, values: Tensor) -> None:
    """Raise unless ``values`` is a tensor with at least one dim."""
    check_dense(op, name, values)
    if values.dim() < 1:
        raise ValueError(f"{op}: `{name}` must have shape (T, ...), got (); pack the rows along dim 0 first.")


def can_read(x: Tensor) -> bool:
    """Whether values are checked: always on the CPU, where it costs nothing, on CUDA only while debugging."""
    # A traced program cannot branch on data.
    return not torch.compiler.is_compiling() and (
        x.device.type == "cpu" or (x.device.type == "cuda" and reads_values(validate=False))
    )


def check_values_of_offsets(op: str, name: str, offsets: Tensor, total: int) -> None:
    """Raise on offsets that do not rise from 0 to ``total``, where they can be read."""
    if can_read(offsets):
        check_offset_values(op, name, offsets, total, "max_seqlen", total)


def check_size(op: str, name: str, size: int) -> None:
    """Raise unless ``size`` is an int >= 0."""
    check_int(op, name, size)
    if size < 0:
        raise ValueError(f"{op}: `{name}` must be >= 0 tokens, got {size}; pass the length, or 0.")


def size_of(op: str, name: str, size: int | None, offsets: Tensor) -> int:
    """``size``, or without one the last offset, which waits for the device."""
    if size is None:
        size = int(offsets[-1])
        if torch.compiler.is_compiling():
            # A number that is not known while a program is traced: the program itself checks it.
            torch._check(size >= 0)
            return size
    check_size(op, name, size)
    return size


def check_fill(op: str, fill: float, values: Tensor) -> None:
    """Raise unless ``fill`` is a number that the dtype of ``values`` holds; infinities are for floats."""
    if not isinstance(fill, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: `fill` must be a Python number, got {type(fill).__name__}; pass float(x).")
    if not (values.dtype.is_floating_point or values.dtype.is_complex) and fill % 1 != 0:
        raise ValueError(
            f"{op}: `fill` must be an integer for `values` in {values.dtype}, got {fill}; it would be cut off."
        )
    low, high = _range_of(values.dtype)
    # NaN and infinities are such in every float dtype.
    if (fill < low or fill > high) and not (math.isinf(fill) and values.dtype.is_floating_point):
        raise ValueError(
            f"{op}: `fill` must be a number that {values.dtype} of `values` holds, {low} to {high}, got {fill}; pass "
            "another or cast the values."
        )


def _range_of(dtype: torch.dtype) -> tuple[float, float]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    return info.min, info.max


def check_pair(op: str, name: str, pair: tuple[Tensor, Tensor]) -> None:
    """Raise unless ``pair`` is ``(values, offsets)``."""
    # A tensor could be unpacked, too: into its rows.
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} entries" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise TypeError(f"{op}: `{name}` must be a pair (values, offsets), got {got}; pass both as a tuple.")


def sequence_and_position(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of ``total`` packed rows, its sequence and its position there, both (total,) int64.

    Rows at or past ``offsets[-1]`` get sequence B and a position >= 0.
    """
    rows = torch.arange(total, device=offsets.device)
    offsets = offsets.to(torch.int64)
    sequence = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    return sequence, rows - offsets[sequence]


def scatter_rows(values: Tensor, index: Tensor, num_rows: int, fill: float) -> Tensor:
    """(num_rows, ...) with ``values[i]`` at ``index[i]`` and ``fill`` elsewhere; index ``num_rows`` drops the row.

    The gradient is a gather, so it needs no atomics and is deterministic.
    """
    out = values.new_full((num_rows + 1, *values.shape[1:]), fill)
    return out.index_copy_(0, index, values)[:num_rows]


def gather_rows(values: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """``values[index]`` where ``valid``, else 0; index (N,) may hold anything where it is not valid."""
    if values.shape[0] == 0:
        # Nothing can be valid; the empty sum keeps the result in the graph.
        return values.sum(0, dtype=values.dtype).expand(index.shape[0], *values.shape[1:]).clone()
    rows = values.index_select(0, torch.where(valid, index, 0))
    return torch.where(valid.view(-1, *[1] * (values.dim() - 1)), rows, rows.new_zeros(()))
