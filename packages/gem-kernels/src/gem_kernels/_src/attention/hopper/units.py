"""Units of work of the backwards in one kernel: tiles of keys, and the order in which parts of dq are handed on.

Programs take units by turns, the first P at once, and each tile of queries meets the key tiles of its sequence in
ascending order. Were those neighbours, they would all wait for one another. Key tiles of a few sequences, of about the
same work, take turns instead: by the time that a program begins with one, the one before it is that much ahead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call, sequence_descriptor, sums_descriptor
from gem_kernels._src.attention.hopper.order import length_of, order_by_work
from gem_kernels._src.attention.hopper.schedule import OTHERS
from gem_kernels._src.attention.reuse import once

FIELDS = 8
"""Numbers of a unit."""
_SIDE_TILES = 256
"""Query tiles, in the mean and over all heads, of the sequences whose tiles of keys take turns."""
_MAX_SIDE = 16
"""Sequences of them."""


class Units(NamedTuple):
    """Units of a batch, for each head."""

    units: Tensor
    """(N, 8) int32: first key row, keys, first query row, queries, key tiles of the same sequence before this one,
    whether it is the last, the place of the sequence's first query tile, and whether the sequence has two tiles of
    keys. N is a bound, not all of it is written.
    """
    num_units: Tensor
    """(1,) int32, on the device: how many rows of ``units`` are written."""
    num_places: int
    """Places of query tiles, no two of which have the same."""


@triton.jit
def _tiles(offsets_k_ptr, b, inside, TILE_ROWS: tl.constexpr):
    """Key tiles of sequences: at least one, which writes zeros."""
    tiles = (length_of(offsets_k_ptr, b, inside) + TILE_ROWS - 1) // TILE_ROWS
    return tl.where(inside, tl.maximum(tiles, 1), 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_sequences"])
def units_kernel(
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    order_ptr,  # (B,) int32
    units_ptr,  # (N, 8) int32
    num_units_ptr,  # (1,) int32
    num_sequences,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    OTHERS: tl.constexpr,
):
    first = tl.program_id(0) * SIDE
    before = 0
    total = 0
    for start in range(0, num_sequences, OTHERS):
        places = start + tl.arange(0, OTHERS)
        inside = places < num_sequences
        tiles = _tiles(offsets_k_ptr, tl.load(order_ptr + places, mask=inside, other=0), inside, TILE_ROWS)
        total += tl.sum(tiles, 0)
        before += tl.sum(tl.where(places < first, tiles, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(num_units_ptr, total)
    places = first + tl.arange(0, SIDE)
    inside = places < num_sequences
    b = tl.load(order_ptr + places, mask=inside, other=0)
    first_q = tl.load(offsets_q_ptr + b, mask=inside, other=0).to(tl.int32)
    first_k = tl.load(offsets_k_ptr + b, mask=inside, other=0).to(tl.int32)
    len_q = length_of(offsets_q_ptr, b, inside).to(tl.int32)
    len_k = length_of(offsets_k_ptr, b, inside).to(tl.int32)
    tiles = _tiles(offsets_k_ptr, b, inside, TILE_ROWS)
    for i in range(tl.max(tiles, 0)):
        mask = i < tiles
        count = tl.cumsum(mask.to(tl.int32), 0)
        ptr = units_ptr + (before + count - 1).to(tl.int64) * 8
        tl.store(ptr, first_k + i * TILE_ROWS, mask=mask)
        tl.store(ptr + 1, tl.minimum(len_k - i * TILE_ROWS, TILE_ROWS), mask=mask)
        tl.store(ptr + 2, first_q, mask=mask)
        tl.store(ptr + 3, len_q, mask=mask)
        tl.store(ptr + 4, i, mask=mask)
        tl.store(ptr + 5, (i == tiles - 1).to(tl.int32), mask=mask)
        # The last tile of a sequence may be partial: one place more for each sequence before.
        tl.store(ptr + 6, first_q // ROWS + b, mask=mask)
        tl.store(ptr + 7, (tiles == 2).to(tl.int32), mask=mask)
        before += tl.max(count, 0)


def sequences_in_turn(total_q: int, num_sequences: int, num_heads: int, *, rows: int) -> int:
    """How many sequences' tiles of keys take turns, a power of two: a pure function of shapes.

    Args:
        total_q: Query rows of the batch.
        num_sequences: At least one.
        num_heads: Of queries.
        rows: Queries of a tile.
    """
    num_tiles = num_heads * max(total_q // (rows * num_sequences), 1)
    return 1 << min(max(_SIDE_TILES // num_tiles, 1), _MAX_SIDE).bit_length() - 1


def backward_units(
    offsets_q: Tensor, offsets_k: Tensor, total_q: int, total_k: int, *, tile_rows: int, rows: int, side: int
) -> Units:
    """Cut the keys of every sequence into tiles; those of ``side`` sequences take turns.

    Args:
        offsets_q: (B + 1,) on a CUDA device, contiguous, as is ``offsets_k``.
        offsets_k: (B + 1,) on the same device.
        total_q: Query rows of the batch, below 2**31.
        total_k: Key rows of the batch, below 2**31.
        tile_rows: Keys of a tile.
        rows: Queries of a tile.
        side: A power of two.
    """
    num_sequences = offsets_k.shape[0] - 1
    device = offsets_k.device
    order = order_by_work(offsets_q, offsets_k)
    # Every tile but the last of its sequence is whole.
    units = torch.empty(total_k // tile_rows + num_sequences, FIELDS, dtype=torch.int32, device=device)
    num_units = torch.empty(1, dtype=torch.int32, device=device)
    call(
        units_kernel,
        triton.cdiv(num_sequences, side),
        (offsets_q, offsets_k, order, units, num_units, num_sequences),
        {"TILE_ROWS": tile_rows, "ROWS": rows, "SIDE": side, "OTHERS": OTHERS},
        device,
    )
    return Units(units, num_units, total_q // rows + num_sequences)


class OneKernelArguments(NamedTuple):
    """What the backwards in one kernel take alike, in their order."""

    tensors: tuple[Any, ...]
    """Descriptors of q, dO, k, v, dq by halves of its channels, dk, dv and the sums of dq."""
    work: tuple[Any, ...]
    """Turns, claims, units, their number, and key heads."""


def one_kernel_arguments(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, gradients: tuple[Tensor, Tensor, Tensor], offsets_q: Tensor,
    offsets_k: Tensor, *, has_sums: bool,
) -> OneKernelArguments:  # fmt: skip
    """Cut a batch into units, with new memory for turns and for sums of dq, 4 bytes an element of whole tiles.

    Args:
        do: (T_q, H, D), as is q; all by rows that the copy engine can read.
        q: Of at least one row, as is k.
        k: (T_k, H_kv, D), as is v.
        v: (T_k, H_kv, D).
        gradients: dq, dk and dv, contiguous.
        offsets_q: (B + 1,), contiguous, as is ``offsets_k``.
        offsets_k: (B + 1,).
        has_sums: Whether some part of dq is handed on in float32; else there is no memory for them.
    """
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS

    num_heads, half = q.shape[1], q.shape[2] // 2
    side = sequences_in_turn(q.shape[0], offsets_q.shape[0] - 1, num_heads, rows=ROWS)
    units, num_units, num_places = once(
        backward_units, offsets_q, offsets_k, q.shape[0], k.shape[0], tile_rows=TILE_ROWS, rows=ROWS, side=side
    )
    num_sums = num_places * num_heads * 2
    sums = torch.empty((num_sums if has_sums else 1) * ROWS, half, dtype=torch.float32, device=q.device)
    # Claims of units of work, and turns: from a multiple of 16 bytes, as other alignments are other variants.
    counters = torch.zeros(4 + num_sums, dtype=torch.int32, device=q.device)
    dq, dk, dv = gradients
    tensors = (
        *(sequence_descriptor(x, rows) for x, rows in ((q, ROWS), (do, ROWS), (k, TILE_ROWS), (v, TILE_ROWS))),
        sequence_descriptor(dq.unflatten(2, (2, -1)).flatten(1, 2), ROWS),
        *(sequence_descriptor(x, ROWS) for x in (dk, dv)),
        sums_descriptor(sums, ROWS, half),
    )
    return OneKernelArguments(tensors, (counters[4:], counters[:1], units, num_units, k.shape[1]))
