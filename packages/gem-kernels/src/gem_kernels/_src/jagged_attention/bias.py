"""The learned additive bias of jagged attention: its tensors, their checks, and which table entry a pair takes.

Both parts follow the relative attention bias of HSTU (Zhai et al., arXiv:2402.17152), with one table row per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.attention.pairing import Pairing, pair_sequences
from gem_kernels._src.validate import DtypeError, check_constant, check_float, check_tensor

TIME_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
BUCKETS_PER_OCTAVE = (1, 2, 4, 8)
_OCTAVES = 128
"""Of float32 from 1 on."""


class Bias(NamedTuple):
    """Tables and timestamps as the kernels take them; None where a part is not used."""

    position: Tensor | None = None
    """(H, 2 P + 1), entry ``clamp(j - i, -P, P) + P``."""
    time: Tensor | None = None
    """(H, N), entry ``time_buckets(...)``."""
    times_q: Tensor | None = None
    """(T_q,) seconds, one per row of the output, only with ``time``."""
    times_k: Tensor | None = None
    """(T_k,) seconds, only with ``time``."""
    buckets_per_octave: int = 1

    @property
    def is_set(self) -> bool:
        """Whether anything is added to the scores."""
        return self.position is not None or self.time is not None

    @property
    def radius(self) -> int:
        """P, the largest distance with an entry of its own; 0 without a position table."""
        return 0 if self.position is None else int(self.position.shape[1]) // 2

    @property
    def num_buckets(self) -> int:
        """Columns of the time table; 0 without one."""
        return 0 if self.time is None else int(self.time.shape[1])

    def flags(self) -> dict[str, bool | int]:
        """What the Triton kernels are specialised on."""
        return {
            "HAS_POSITION": self.position is not None,
            "HAS_TIME": self.time is not None,
            "TIME_SHIFT": self.buckets_per_octave.bit_length() - 1,
        }

    def tables(self, dtype: torch.dtype) -> Bias:
        """The same with contiguous tensors and tables of the dtype in which scores are computed."""
        return Bias(
            None if self.position is None else self.position.to(dtype).contiguous(),
            None if self.time is None else self.time.to(dtype).contiguous(),
            None if self.times_q is None else self.times_q.contiguous(),
            None if self.times_k is None else self.times_k.contiguous(),
            self.buckets_per_octave,
        )


def pair_with_bias(
    q: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    request_index: Tensor | None,
    max_seqlen_q: int,
    left: int,
    right: int,
    bias: Bias,
) -> Pairing:
    """``pair_sequences``; a position table needs the rows of each sequence counted from its own start, as a window."""
    needs_positions = bias.position is not None
    return pair_sequences(q, offsets_q, offsets_k, request_index, max_seqlen_q, left, 0 if needs_positions else right)


def position_index(positions_q: Tensor, positions_k: Tensor, radius: int) -> Tensor:
    """(len(positions_q), len(positions_k)) int64 entry of the position table for each pair."""
    return (positions_k[None, :] - positions_q[:, None]).clamp(-radius, radius) + radius


def time_buckets(times_q: Tensor, times_k: Tensor, buckets_per_octave: int, num_buckets: int) -> Tensor:
    """(..., L_q, L_k) int32 bucket of each pair, from times (..., L_q) and (..., L_k).

    The upper bits of a float32 are its octave followed by the linear position within it, so a shift gives the bucket
    without a logarithm, and CPU and GPU agree in every bit. Gaps that are NaN or infinite take the last bucket.
    """
    if times_q.dtype == torch.int32:
        times_q, times_k = times_q.long(), times_k.long()
    gap = (times_q[..., :, None] - times_k[..., None, :]).abs().to(torch.float32)
    shift = buckets_per_octave.bit_length() - 1
    return ((gap.view(torch.int32) >> (23 - shift)) - (127 << shift)).clamp_(0, num_buckets - 1)


def _check_table(op: str, name: str, table: Tensor, q: Tensor, columns: str) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(
            f"{op}: `{name}` must be a Tensor of shape (H, {columns}), got {type(table).__name__}; convert it with "
            "torch.as_tensor."
        )
    check_tensor(op, name, table)
    if table.dim() != 2 or table.shape[0] != q.shape[1] or table.shape[1] == 0:
        raise ValueError(
            f"{op}: `{name}` must have shape (H, {columns}) with one row for each of the {q.shape[1]} heads of `q`, "
            f"got {tuple(table.shape)}; give each head a row."
        )
    check_float(op, name, table)
    if table.device != q.device:
        raise ValueError(f"{op}: `{name}` must be on the device of `q`, {q.device}, got {table.device}; move it there.")


def _check_times(op: str, name: str, times: Tensor, num_rows: int, like: Tensor, of: str) -> None:
    if not isinstance(times, Tensor):
        raise TypeError(
            f"{op}: `{name}` must be a Tensor of seconds per row of {of}, got {type(times).__name__}; convert it with "
            "torch.as_tensor."
        )
    check_tensor(op, name, times)
    check_constant(op, name, times)
    if times.dim() != 1 or times.shape[0] != num_rows:
        raise ValueError(
            f"{op}: `{name}` must have shape ({num_rows},), one time per row of {of}, got {tuple(times.shape)}; drop "
            "or add times so that it does."
        )
    if times.dtype not in TIME_DTYPES:
        raise DtypeError(
            f"{op}: `{name}` must be int32, int64, float32 or float64 seconds, got {times.dtype}; cast it first."
        )
    if times.device != like.device:
        raise ValueError(
            f"{op}: `{name}` must be on the device of {of}, {like.device}, got {times.device}; move it there."
        )


def check_buckets_per_octave(op: str, time_buckets_per_octave: int) -> None:
    """Raise unless the bucket borders are exact with so many buckets."""
    # A float may equal one of them, and the op would not take it.
    if type(time_buckets_per_octave) is not int or time_buckets_per_octave not in BUCKETS_PER_OCTAVE:
        raise ValueError(
            f"{op}: `time_buckets_per_octave` must be 1, 2, 4 or 8, an int, got {time_buckets_per_octave!r}; "
            "other divisions of an octave have no exact buckets."
        )


def check_bias(
    op: str,
    q: Tensor,
    k: Tensor,
    num_rows: int,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    times_q: Tensor | None,
    times_k: Tensor | None,
    time_buckets_per_octave: int,
) -> None:
    """Raise on a table or timestamp that does not fit q, k and an output of ``num_rows``; never reads tensor data."""
    if position_bias is not None:
        _check_table(op, "position_bias", position_bias, q, "2 * P + 1")
        if position_bias.shape[1] % 2 == 0:
            raise ValueError(
                f"{op}: `position_bias` must have an odd number of columns, 2 * P + 1 for distances -P to P, got "
                f"{position_bias.shape[1]}; add or drop a column."
            )
    check_buckets_per_octave(op, time_buckets_per_octave)
    if time_bias is None:
        for name, times in (("times_q", times_q), ("times_k", times_k)):
            if times is not None:
                raise ValueError(f"{op}: `{name}` must be None without `time_bias`, got a tensor; pass the table too.")
        if time_buckets_per_octave != 1:
            raise ValueError(
                f"{op}: `time_buckets_per_octave` must be left out without `time_bias`, got {time_buckets_per_octave}; "
                "pass the table too."
            )
        return
    _check_table(op, "time_bias", time_bias, q, "num_time_buckets")
    most = _OCTAVES * time_buckets_per_octave
    if time_bias.shape[1] > most:
        raise ValueError(
            f"{op}: `time_bias` must have at most {most} columns with {time_buckets_per_octave} buckets per octave, "
            f"got {time_bias.shape[1]}; no gap reaches the others."
        )
    if times_q is None or times_k is None:
        missing = "times_q" if times_q is None else "times_k"
        raise ValueError(f"{op}: `{missing}` must be given with `time_bias`, got None; pass seconds per row.")
    _check_times(op, "times_q", times_q, num_rows, q, "`q`" if num_rows == q.shape[0] else "the output")
    _check_times(op, "times_k", times_k, k.shape[0], k, "`k`")
    if times_q.dtype != times_k.dtype:
        raise DtypeError(
            f"{op}: `times_k` must have the dtype of `times_q`, {times_q.dtype}, got {times_k.dtype}; cast one of them."
        )
