"""Helpers for jagged tensors: packed ``values`` (T, ...) with ``offsets`` (B + 1,).

Sequence b owns rows ``offsets[b]:offsets[b + 1]``; ``offsets`` is int32 or int64, starts at 0 and ends at T
(FlashAttention's ``cu_seqlens``). Row arithmetic is int64. Every helper is differentiable in its float arguments with
a deterministic gradient, and runs without waiting for the device wherever the size of its result is known on the host.
Offsets are checked for order and range on the CPU; on CUDA that would cost a sync and is done with
``GEM_KERNELS_DEBUG=1`` only, inside ``torch.compile`` never.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.jagged.index import (
    can_read,
    check_fill,
    check_jagged,
    check_jagged_values,
    check_pair,
    check_size,
    check_values_of_offsets,
    gather_rows,
    scatter_rows,
    sequence_and_position,
    size_of,
)
from gem_kernels._src.validate import DtypeError, check_offsets, check_same

__all__ = [
    "jagged_concat",
    "jagged_last_k",
    "jagged_split",
    "jagged_to_padded",
    "lengths_to_offsets",
    "offsets_to_lengths",
    "padded_to_jagged",
]


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Offsets of sequences with the given lengths.

    Args:
        lengths: (B,), int32 or int64, tokens per sequence, each >= 0.

    Returns:
        (B + 1,) int64 on the device of ``lengths``; starts at 0 and ends at the total.

    Raises:
        TypeError: if ``lengths`` is not an integer tensor.
        ValueError: if it is not one-dimensional, or holds a negative length (checked as offsets are).
    """
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        got, error = (lengths.dtype, DtypeError) if isinstance(lengths, Tensor) else (type(lengths).__name__, TypeError)
        raise error(f"lengths_to_offsets: `lengths` must be an int32 or int64 Tensor, got {got}; cast it first.")
    if lengths.dim() != 1:
        raise ValueError(f"lengths_to_offsets: `lengths` must have shape (B,), got {tuple(lengths.shape)}; flatten it.")
    if can_read(lengths) and lengths.numel() and int(lengths.min()) < 0:
        b = int(lengths.argmin())
        raise ValueError(
            f"lengths_to_offsets: `lengths` must be >= 0 tokens, got {int(lengths[b])} at sequence {b}; use 0 for an "
            "empty sequence."
        )
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)])


def offsets_to_lengths(offsets: Tensor) -> Tensor:
    """Tokens per sequence.

    Args:
        offsets: (B + 1,), int32 or int64.

    Returns:
        (B,), dtype and device of ``offsets``.

    Raises:
        TypeError: if ``offsets`` is not an int32 or int64 tensor.
        ValueError: if it is not one-dimensional with at least one entry, and on the CPU if it does not rise from 0.
    """
    check_offsets("offsets_to_lengths", "offsets", offsets, offsets)
    if can_read(offsets):
        check_values_of_offsets("offsets_to_lengths", "offsets", offsets, int(offsets[-1]))
    return torch.diff(offsets)


def jagged_to_padded(values: Tensor, offsets: Tensor, max_seqlen: int, fill: float = 0.0) -> Tensor:
    """Lay each sequence out from the start of a row of ``max_seqlen`` tokens.

    Args:
        values: (T, ...), any dtype.
        offsets: (B + 1,), int32 or int64, on the device of ``values``.
        max_seqlen: Length of the padded dim, in tokens. Of a longer sequence only the first ``max_seqlen`` tokens
            are kept; the others get zero gradient.
        fill: What stands behind the end of a shorter sequence.

    Returns:
        (B, max_seqlen, ...), dtype of ``values``.

    Raises:
        TypeError, ValueError: on dtype, shape or device mismatch, and on the CPU on offsets that do not rise from 0
            to T.
    """
    op = "jagged_to_padded"
    check_jagged(op, "values", values, "offsets", offsets)
    check_size(op, "max_seqlen", max_seqlen)
    check_fill(op, fill, values)
    num_sequences = offsets.shape[0] - 1
    sequence, position = sequence_and_position(offsets, values.shape[0])
    num_rows = num_sequences * max_seqlen
    is_kept = (position < max_seqlen) & (sequence < num_sequences)
    index = torch.where(is_kept, sequence * max_seqlen + position, num_rows)
    return scatter_rows(values, index, num_rows, fill).view(num_sequences, max_seqlen, *values.shape[1:])


def padded_to_jagged(padded: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """Pack the tokens of a padded batch: the inverse of ``jagged_to_padded``.

    Args:
        padded: (B, L, ...), any dtype; sequence b in ``padded[b, :length_b]``.
        offsets: (B + 1,), int32 or int64, on the device of ``padded``. Tokens of a sequence longer than L are 0.
        total: ``offsets[-1]`` as a Python int. Without it the value is read from the device, which waits for it.

    Returns:
        (total, ...), dtype of ``padded``.

    Raises:
        TypeError, ValueError: on dtype, shape or device mismatch, and on the CPU on offsets that do not rise from 0
            to ``total``.
    """
    op = "padded_to_jagged"
    check_jagged_values(op, "padded", padded)
    if padded.dim() < 2:
        raise ValueError(
            f"{op}: `padded` must have shape (B, L, ...), got {tuple(padded.shape)}; add a dim of length 1."
        )
    check_offsets(op, "offsets", offsets, padded)
    if offsets.shape[0] != padded.shape[0] + 1:
        raise ValueError(
            f"{op}: `offsets` must have shape (B + 1,) = ({padded.shape[0] + 1},) for the B of `padded`, got "
            f"({offsets.shape[0]},); pass the offsets of these sequences."
        )
    total = size_of(op, "total", total, offsets)
    check_values_of_offsets(op, "offsets", offsets, total)
    num_sequences, length = padded.shape[:2]
    sequence, position = sequence_and_position(offsets, total)
    is_present = (position < length) & (sequence < num_sequences)
    return gather_rows(padded.flatten(0, 1), sequence * length + position, is_present)


def jagged_concat(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate two jagged tensors sequence by sequence: each result is the sequence of ``a``, then that of ``b``.

    Args:
        a: ``(values, offsets)`` with values (T_a, ...) and offsets (B + 1,).
        b: ``(values, offsets)`` with values (T_b, ...) and offsets (B + 1,); same trailing dims, dtype and device.

    Returns:
        ``(values, offsets)`` with values (T_a + T_b, ...) and offsets (B + 1,) int64.

    Raises:
        TypeError, ValueError: on dtype, shape or device mismatch, and on the CPU on offsets that do not rise from 0
            to the number of rows.
    """
    op = "jagged_concat"
    check_pair(op, "a", a)
    check_pair(op, "b", b)
    (values_a, offsets_a), (values_b, offsets_b) = a, b
    check_jagged(op, "values of a", values_a, "offsets of a", offsets_a)
    check_jagged(op, "values of b", values_b, "offsets of b", offsets_b)
    check_same(op, {"values of a": values_a, "values of b": values_b})
    if values_a.shape[1:] != values_b.shape[1:]:
        raise ValueError(
            f"{op}: `b` must have rows of the shape of `a`, {tuple(values_a.shape[1:])}, got "
            f"{tuple(values_b.shape[1:])}; reshape one of them."
        )
    if offsets_a.shape != offsets_b.shape:
        raise ValueError(
            f"{op}: `b` must have as many sequences as `a`, {offsets_a.shape[0] - 1}, got {offsets_b.shape[0] - 1}; "
            "give both the same sequences, with length 0 where one is empty."
        )
    total_a, total_b = values_a.shape[0], values_b.shape[0]
    num_sequences = offsets_a.shape[0] - 1
    offsets = offsets_a.to(torch.int64) + offsets_b.to(torch.int64)
    sequence_a, position_a = sequence_and_position(offsets_a, total_a)
    sequence_b, position_b = sequence_and_position(offsets_b, total_b)
    # Sequence B stands for rows behind the last sequence: they have no place and are dropped.
    lengths_a = torch.diff(offsets_a, append=offsets_a[-1:]).to(torch.int64)
    index_a = offsets[sequence_a] + position_a
    index_b = offsets[sequence_b] + lengths_a[sequence_b] + position_b
    index = torch.where(
        torch.cat([sequence_a, sequence_b]) < num_sequences, torch.cat([index_a, index_b]), total_a + total_b
    )
    values = scatter_rows(torch.cat([values_a, values_b]), index, total_a + total_b, 0.0)
    return values, offsets


def jagged_split(
    values: Tensor, offsets: Tensor, offsets_a: Tensor, total_a: int | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split each sequence in two: the inverse of ``jagged_concat``.

    Args:
        values: (T, ...), any dtype.
        offsets: (B + 1,), int32 or int64, on the device of ``values``.
        offsets_a: (B + 1,), offsets of the first parts, none longer than its sequence.
        total_a: ``offsets_a[-1]`` as a Python int. Without it the value is read from the device, which waits for it.

    Returns:
        ``(values, offsets)`` of the first parts and of the second, with values (T_a, ...) and (T - T_a, ...) and
        offsets (B + 1,) int64.

    Raises:
        TypeError, ValueError: on dtype, shape or device mismatch, and on the CPU on offsets that do not rise from 0
            to the number of rows or on a first part that is longer than its sequence.
    """
    op = "jagged_split"
    check_jagged(op, "values", values, "offsets", offsets)
    check_offsets(op, "offsets_a", offsets_a, values)
    if offsets_a.shape != offsets.shape:
        raise ValueError(
            f"{op}: `offsets_a` must have as many sequences as `offsets`, {offsets.shape[0] - 1}, got "
            f"{offsets_a.shape[0] - 1}; give both the same sequences, with length 0 where one is empty."
        )
    total_a = size_of(op, "total_a", total_a, offsets_a)
    check_values_of_offsets(op, "offsets_a", offsets_a, total_a)
    offsets, offsets_a = offsets.to(torch.int64), offsets_a.to(torch.int64)
    offsets_b = offsets - offsets_a
    if can_read(offsets) and (torch.diff(offsets_b) < 0).any():
        b = int(torch.diff(offsets_b).argmin())
        lengths = torch.diff(offsets), torch.diff(offsets_a)
        raise ValueError(
            f"{op}: `offsets_a` must leave no part longer than its sequence, got {int(lengths[1][b])} tokens of "
            f"{int(lengths[0][b])} at sequence {b}; shorten it."
        )
    num_sequences = offsets.shape[0] - 1
    lengths_a = torch.diff(offsets_a, append=offsets_a[-1:])
    parts = []
    for part, total, start in ((offsets_a, total_a, None), (offsets_b, values.shape[0] - total_a, lengths_a)):
        sequence, position = sequence_and_position(part, total)
        index = offsets[sequence] + position
        if start is not None:
            index += start[sequence]
        parts.append((gather_rows(values, index, sequence < num_sequences), part))
    return parts[0], parts[1]


def jagged_last_k(values: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The last ``k`` tokens of each sequence, right-aligned: a shorter sequence has zeros at the front.

    Args:
        values: (T, ...), any dtype.
        offsets: (B + 1,), int32 or int64, on the device of ``values``.
        k: Tokens per sequence of the result, >= 0.

    Returns:
        ``(last, mask)`` with last (B, k, ...), dtype of ``values``, and mask (B, k) bool, True where a token stands.

    Raises:
        TypeError, ValueError: on dtype, shape or device mismatch, and on the CPU on offsets that do not rise from 0
            to T.
    """
    op = "jagged_last_k"
    check_jagged(op, "values", values, "offsets", offsets)
    check_size(op, "k", k)
    offsets = offsets.to(torch.int64)
    index = offsets[1:, None] + torch.arange(-k, 0, device=offsets.device)
    mask = index >= offsets[:-1, None]
    last = gather_rows(values, index.flatten(), mask.flatten())
    return last.view(offsets.shape[0] - 1, k, *values.shape[1:]), mask
