"""How the CPU kernels turn packed sequences into few dense batched matmuls.

Sequences of similar query and key length form a group that is padded to the group's longest. Padding is bounded by the
length classes (steps of a quarter) and a merge is made only where one more batch of matmuls would cost more than the
padding it saves. Everything is a pure function of the lengths, so two runs do the same arithmetic in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.results import as_result

_CLASS_GROWTH = 1.25
_GROUP_OVERHEAD = 24_576
"""Cost of one more group in (query, key, head) triples: about 0.1 ms of operator calls at 4 triples per nanosecond."""
_BLOCK_ELEMENTS = 524_288
"""Scores computed at a time: 2 MiB in float32, so that the passes over one block stay in the caches of two cores."""


class Group(NamedTuple):
    """Sequences that are computed together, padded to ``len_q`` queries and ``len_k`` keys."""

    sequences: Tensor
    """(n,) int64 indices into the batch."""
    len_q: int
    len_k: int
    min_q: int
    """Shortest query sequence; rows from here on may be padding."""
    min_k: int
    """Shortest key sequence; keys from here on may be padding."""


class Chunk(NamedTuple):
    """Query rows [q_start, q_stop) of a group and the keys [k_start, k_stop) they can meet."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


def _length_class(lengths: Tensor) -> Tensor:
    """Index of the class of each length >= 1: exact up to 8, then steps of a quarter."""
    steps = (torch.log(lengths.double() / 8) / math.log(_CLASS_GROWTH)).ceil().clamp(min=0).long()
    return torch.where(lengths <= 8, lengths, 8 + steps)


def plan_groups(lengths_q: Tensor, lengths_k: Tensor, num_heads: int) -> list[Group]:
    """Groups that hold every sequence with at least one query and one key exactly once."""
    lengths_q, lengths_k = lengths_q.long(), lengths_k.long()
    alive = torch.nonzero((lengths_q > 0) & (lengths_k > 0)).flatten()
    if alive.numel() == 0:
        return []
    lq, lk = lengths_q[alive], lengths_k[alive]
    key = _length_class(lq) * 4096 + _length_class(lk)
    order = torch.argsort(key, stable=True)
    alive, lq, lk, key = alive[order], lq[order], lk[order], key[order]
    _, inverse, counts = torch.unique_consecutive(key, return_inverse=True, return_counts=True)
    bounds = [
        torch.zeros_like(counts).scatter_reduce_(0, inverse, x, how, include_self=False).tolist()
        for x in (lq, lk)
        for how in ("amax", "amin")
    ]
    classes = list(zip(counts.tolist(), *bounds, strict=True))  # (n, max_q, min_q, max_k, min_k), sorted by class

    merged: list[list[int]] = []
    overhead = _GROUP_OVERHEAD // num_heads
    for n, max_q, min_q, max_k, min_k in classes:
        if merged:
            last = merged[-1]
            together = (last[0] + n) * max(last[1], max_q) * max(last[3], max_k)
            if together <= last[0] * last[1] * last[3] + n * max_q * max_k + overhead:
                merged[-1] = [
                    last[0] + n,
                    max(last[1], max_q),
                    min(last[2], min_q),
                    max(last[3], max_k),
                    min(last[4], min_k),
                ]
                continue
        merged.append([n, max_q, min_q, max_k, min_k])

    groups, start = [], 0
    for n, max_q, min_q, max_k, min_k in merged:
        per_block = max(1, _BLOCK_ELEMENTS // (num_heads * max_q * max_k))
        # Equal parts, so that the last one is not a remainder.
        parts = math.ceil(n / per_block)
        for part in alive[start : start + n].tensor_split(parts):
            groups.append(Group(part, max_q, max_k, min_q, min_k))
        start += n
    return groups


def plan_chunks(
    group: Group, num_heads: int, left: int, right: int, *, last_position: int | None = None
) -> Iterator[Chunk]:
    """Cut a group's queries so that a block of scores stays in cache and a window costs its width, not the length.

    Rows beyond ``last_position`` are masked as if they stood there.
    """
    num_sequences = group.sequences.numel()
    rows = max(16, _BLOCK_ELEMENTS // (num_heads * num_sequences * group.len_k))
    if left >= 0 or right >= 0:
        reach = (left if left >= 0 else group.len_k) + (right if right >= 0 else group.len_k)
        rows = min(rows, max(64, min(reach, 256)))
    num_chunks = math.ceil(group.len_q / rows)
    rows = math.ceil(group.len_q / num_chunks)
    for q_start in range(0, group.len_q, rows):
        q_stop = min(q_start + rows, group.len_q)
        position = q_start if last_position is None else min(q_start, last_position)
        k_start = min(max(0, position - left), group.len_k) if left >= 0 else 0
        k_stop = min(group.len_k, q_stop + right) if right >= 0 else group.len_k
        yield Chunk(q_start, q_stop, k_start, max(k_start, k_stop))


class Rows:
    """The packed rows of a group's sequences, (n, L) padded; reads and writes them head by head.

    ``sequences`` are the (n,) indices into ``offsets`` where they are not those of the group.
    """

    def __init__(
        self, offsets: Tensor, group: Group, length: int, min_length: int, *, sequences: Tensor | None = None
    ) -> None:
        offsets = offsets.long()
        sequences = group.sequences if sequences is None else sequences
        starts = offsets[sequences]
        lengths = offsets[sequences + 1] - starts
        positions = torch.arange(length)
        self._shape = (group.sequences.numel(), length)
        self._min_length = min_length
        # Padding reads the sequence's own last row, never another sequence's.
        self._rows = starts[:, None] + torch.minimum(positions[None, :], lengths[:, None] - 1)
        self._padding = positions[None, min_length:] >= lengths[:, None]

    @property
    def tail_padding(self) -> Tensor | None:
        """(n, L - min_length) bool, True where padding; None without padding."""
        return self._padding if self._padding.shape[1] else None

    def _flat(self, num_heads: int) -> Tensor:
        heads = torch.arange(num_heads)
        return self._rows[:, None, :] * num_heads + heads[None, :, None]  # (n, H, L) rows of (T * H, D)

    def gather(self, x: Tensor, dtype: torch.dtype, *, zero_padding: bool = False) -> Tensor:
        """(T, H, D) -> (n * H, L, D), contiguous; padding rows hold real rows unless ``zero_padding``."""
        n, length = self._shape
        num_heads, dim = x.shape[1], x.shape[2]
        out = x.reshape(-1, dim).index_select(0, self._flat(num_heads).flatten()).to(dtype)
        out = out.view(n, num_heads, length, dim)
        if zero_padding and self.tail_padding is not None:
            out[:, :, self._min_length :].masked_fill_(self._padding[:, None, :, None], 0.0)
        return out.view(n * num_heads, length, dim)

    def scatter(self, out: PackedOutput, x: Tensor) -> None:
        """(n * H, L, D) -> rows of ``out``; padding is dropped."""
        out.rows.index_copy_(0, self._targets(out), x.reshape(-1, x.shape[-1]).to(out.rows.dtype))

    def scatter_add(self, out: PackedOutput, x: Tensor) -> None:
        """Like ``scatter``, added in the order of the group's sequences: for rows that several of them share."""
        out.rows.index_add_(0, self._targets(out), x.reshape(-1, x.shape[-1]).to(out.rows.dtype))

    def _targets(self, out: PackedOutput) -> Tensor:
        index = self._flat(out.num_heads)
        if self.tail_padding is not None:
            index[:, :, self._min_length :].masked_fill_(self._padding[:, None, :], out.spare_row)
        return index.flatten()


class PackedOutput:
    """A (T, H, D) result under construction, with one spare row behind it that takes the padding."""

    def __init__(self, total: int, num_heads: int, dim: int, dtype: torch.dtype, fill: float = 0.0) -> None:
        self.num_heads = num_heads
        self.spare_row = total * num_heads
        self._shape = (total, num_heads, dim)
        self.rows = torch.full((total * num_heads + 1, dim), fill, dtype=dtype)

    @classmethod
    def like(cls, x: Tensor, dtype: torch.dtype | None = None) -> PackedOutput:
        """A zero result with the shape of ``x`` (T, H, D), and its dtype unless another is given."""
        total, num_heads, dim = x.shape
        return cls(total, num_heads, dim, x.dtype if dtype is None else dtype)

    def packed(self) -> Tensor:
        """The (T, H, D) tensor; rows that nothing was written to hold the fill value."""
        return as_result(self.rows[: self.spare_row].view(self._shape))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in float32; float32 and float64 in themselves."""
    return torch.float32 if dtype.itemsize < 4 else dtype
