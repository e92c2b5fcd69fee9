"""Units of work of a backward in one kernel: 128 rows of one side of a sequence, against all rows of the other side.

All units of a sequence stand together, so that those of its queries find in cache what those of its keys have read.
Sequences with most to do come first, so that the last units are short. Made on the device by one launch, because
lengths are there and reading them would stall the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call
from gem_kernels._src.attention.hopper.schedule import BLOCK, MAX_SORTED, OTHERS

ROW_BITS = 8
"""Of the second number of a unit, whose other bits say its kind."""


class Units(NamedTuple):
    """Units of a batch, for each key head."""

    units: Tensor
    """(N, 4) int32: first own row, own rows | kind << ROW_BITS, first row of the other side, its rows.

    Kind 0 owns keys, kind 1 + g queries of the g-th head of a group. N is a bound, not all of it is written.
    """
    num_units: Tensor
    """(1,) int32, on the device: how many rows of ``units`` are written."""


@triton.jit
def _plan(offsets_q_ptr, offsets_k_ptr, b, num_sequences, tile_rows, group, SORTED: tl.constexpr):
    """(first query row, query rows, first key row, keys, units that own keys, all units, rank) of sequences ``b``."""
    mask = b < num_sequences
    first_q = tl.load(offsets_q_ptr + b, mask=mask, other=0).to(tl.int32)
    len_q = tl.load(offsets_q_ptr + b + 1, mask=mask, other=0).to(tl.int32) - first_q
    first_k = tl.load(offsets_k_ptr + b, mask=mask, other=0).to(tl.int32)
    len_k = tl.load(offsets_k_ptr + b + 1, mask=mask, other=0).to(tl.int32) - first_k
    of_keys = (len_k + tile_rows - 1) // tile_rows
    units = tl.where(mask, of_keys + group * ((len_q + tile_rows - 1) // tile_rows), 0)
    rank = num_sequences - b.to(tl.int64)
    if SORTED:
        rank += tl.maximum(len_q, len_k).to(tl.int64) * (num_sequences + 1)
    return first_q, len_q, first_k, len_k, of_keys, units, rank


@triton.jit(do_not_specialize=["num_sequences", "tile_rows", "group"])
def _units_kernel(
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    units_ptr,  # (N, 4) int32
    num_units_ptr,  # (1,) int32
    num_sequences,
    tile_rows,
    group,
    ROW_BITS: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_q, len_q, first_k, len_k, of_keys, units, rank = _plan(
        offsets_q_ptr, offsets_k_ptr, b, num_sequences, tile_rows, group, SORTED
    )
    before = tl.zeros([BLOCK], tl.int32)
    total = 0
    for start in range(0, num_sequences, OTHERS):
        others = start + tl.arange(0, OTHERS)
        _fq, _lq, _fk, _lk, _of_keys, other_units, other_rank = _plan(
            offsets_q_ptr, offsets_k_ptr, others, num_sequences, tile_rows, group, SORTED
        )
        before += tl.sum(tl.where(other_rank[None, :] > rank[:, None], other_units[None, :], 0), 1)
        total += tl.sum(other_units, 0)
    if tl.program_id(0) == 0:
        tl.store(num_units_ptr, total)
    for i in range(tl.max(units, 0)):
        ptr = units_ptr + (before + i).to(tl.int64) * 4
        mask = i < units
        owns_keys = i < of_keys
        row = tl.where(owns_keys, i, (i - of_keys) // group) * tile_rows
        rows = tl.minimum(tl.where(owns_keys, len_k, len_q) - row, tile_rows)
        kind = tl.where(owns_keys, 0, (i - of_keys) % group + 1)
        tl.store(ptr, tl.where(owns_keys, first_k, first_q) + row, mask=mask)
        tl.store(ptr + 1, rows | (kind << ROW_BITS), mask=mask)
        tl.store(ptr + 2, tl.where(owns_keys, first_q, first_k), mask=mask)
        tl.store(ptr + 3, tl.where(owns_keys, len_q, len_k), mask=mask)


def backward_units(
    offsets_q: Tensor, offsets_k: Tensor, total_q: int, total_k: int, *, tile_rows: int, group: int
) -> Units:
    """Cut both sides of every sequence into units of ``tile_rows``.

    Args:
        offsets_q: (B + 1,) on a CUDA device, contiguous.
        offsets_k: (B + 1,) on the same device, contiguous.
        total_q: Query rows of the batch, below 2**31.
        total_k: Key rows of the batch, below 2**31.
        tile_rows: Own rows of a unit, below 2**ROW_BITS.
        group: Query heads of a key head.
    """
    assert tile_rows < 2**ROW_BITS
    num_sequences = offsets_q.shape[0] - 1
    # Every unit but the last of its side holds a whole tile.
    of_queries, of_keys = (min(n // tile_rows + num_sequences, n) for n in (total_q, total_k))
    units = torch.empty(of_keys + group * of_queries, 4, dtype=torch.int32, device=offsets_q.device)
    num_units = torch.empty(1, dtype=torch.int32, device=offsets_q.device)
    arguments = (offsets_q, offsets_k, units, num_units, num_sequences, tile_rows, group)
    constants = {"ROW_BITS": ROW_BITS, "SORTED": num_sequences <= MAX_SORTED, "BLOCK": BLOCK, "OTHERS": OTHERS}
    call(_units_kernel, triton.cdiv(num_sequences, BLOCK), arguments, constants, offsets_q.device)
    return Units(units, num_units)
