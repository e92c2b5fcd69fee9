"""A joined batch (``KeyedJaggedIds``) checked by one CUDA kernel, which writes ids as rows of their engine.

How many ids a feature has is known to the device only: each program reads where the features begin, and which of them
its ids are of. Faults are noted in the host's memory, as by ``layout_kernel``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_parallel._src.embeddings.transfer import Flag

__all__ = ["launch_keyed"]

BLOCK = 2048
"""Elements of a program."""


@triton.jit(
    do_not_specialize=["num_values", "num_offsets", "num_keys", "num_bags", "num_value_programs"],
    # These two are the caller's, and may begin anywhere.
    do_not_specialize_on_alignment=["values", "offsets"],
)
def _check_keyed_kernel(
    values,  # int64 (num_values,)
    offsets,  # int64 (num_offsets,)
    tables,  # int64 (num_keys, 2) of each key: the last row of its table, and where the table begins in the engine
    laid,  # int32 or int64: values as rows of the engine, then, if POOLED, offsets
    faults,  # int64 number of the host, written only if there is a fault
    starts_out,  # int64 (num_keys,) of the host, written unless POOLED: where each key's ids begin
    num_values,
    num_offsets,
    num_keys,
    num_bags,
    num_value_programs,
    KEYS: tl.constexpr,  # power of 2, at least num_keys
    BLOCK: tl.constexpr,
    POOLED: tl.constexpr,
    DROP: tl.constexpr,  # bad values become last row + 1, else the nearest valid one
):
    program = tl.program_id(0)
    if program < num_value_programs:
        keys = tl.arange(0, KEYS)
        stride = num_bags.to(tl.int64)
        starts = tl.load(offsets + keys * stride, mask=keys < num_keys, other=9223372036854775807)
        if not POOLED:
            tl.store(starts_out + keys, starts, mask=keys < tl.where(program == 0, num_keys, 0))
        begin = program.to(tl.int64) * BLOCK
        at = begin + tl.arange(0, BLOCK)
        here = at < num_values
        end = tl.minimum(begin + BLOCK, num_values) - 1
        # With offsets that fall this is some key, of which the ids become rows: wrong ones, which nobody gets.
        first = tl.maximum(tl.sum((starts <= begin).to(tl.int32)) - 1, 0)
        last = tl.maximum(tl.sum((starts <= end).to(tl.int32)) - 1, 0)
        top = tl.full([BLOCK], 0, tl.int64) + tl.load(tables + 2 * first)
        base = tl.full([BLOCK], 0, tl.int64) + tl.load(tables + 2 * first + 1)
        for key in range(first + 1, last + 1):
            after = at >= tl.load(offsets + key * stride)
            top = tl.where(after, tl.load(tables + 2 * key), top)
            base = tl.where(after, tl.load(tables + 2 * key + 1), base)
        found = tl.load(values + at, mask=here, other=0)
        safe = tl.minimum(tl.maximum(found, 0), top)
        bad = here & (safe != found)
        if DROP:
            safe = tl.where(bad, top + 1, safe)
        tl.store(laid + at, (safe + base).to(laid.dtype.element_ty), mask=here)
    else:
        at = (program - num_value_programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < num_offsets
        found = tl.load(offsets + at, mask=here, other=0)
        following = tl.load(offsets + at + 1, mask=at + 1 < num_offsets, other=9223372036854775807)
        low = tl.where(at == num_offsets - 1, num_values, 0)
        high = tl.where(at == 0, 0, num_values)
        safe = tl.minimum(tl.maximum(found, low), high)
        bad = here & ((safe != found) | (following < found))
        if POOLED:
            tl.store(laid + num_values + at, safe.to(laid.dtype.element_ty), mask=here)
    if tl.max(bad.to(tl.int32)) > 0:
        tl.store(faults, 1)


_compiled: dict[tuple[int | None, int, bool, bool, torch.dtype], Any] = {}
"""(device, KEYS, pooled, drop, dtype) -> the kernel; other arguments are typed alike in every launch, so that Triton
need not look at them again."""


def launch_keyed(
    values: Tensor,
    offsets: Tensor,
    tables: Tensor,
    flag: Flag,
    *,
    num_bags: int,
    pooled: bool,
    drop: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Start the kernel on the current stream.

    Args:
        values: (N,) int64, contiguous, N > 0, on the current device.
        offsets: (F * B + 1,) int64, likewise, B > 0.
        tables: (F, 2) int64 of each key: last row of its table, where the table begins in the engine.
        flag: Becomes other than 0 if there is a fault; no other batch has it. Unless pooled, the first F numbers of its
            ``stage(F)`` become the keys' first values.
        num_bags: B.
        pooled: Whether offsets are written, too.
        drop: Whether bad values become the row after their table's last.
        dtype: int32 or int64, of what is written; rows, ids and offsets must fit.

    Returns:
        Rows of the engine (N,), and if pooled offsets (F * B + 1,), both valid whatever came.
    """
    num_values, num_offsets, num_keys = values.numel(), offsets.numel(), tables.shape[0]
    device = values.device
    starts = flag.number if pooled else flag.stage(num_keys)[0]
    flag.clear()
    laid = torch.empty(num_values + num_offsets if pooled else num_values, dtype=dtype, device=device)
    programs = -(-num_values // BLOCK)
    grid = (programs - (-num_offsets // BLOCK), 1, 1)
    size = 1 << (num_keys - 1).bit_length()
    key = device.index, size, pooled, drop, dtype
    arguments = (
        *(values, offsets, tables, laid, flag.number, starts, num_values, num_offsets, num_keys, num_bags, programs),
        *(size, BLOCK, pooled, drop),
    )
    compiled = _compiled.get(key)
    if compiled is None:
        # None where Triton interprets.
        _compiled[key] = _check_keyed_kernel[grid](*arguments, num_warps=4)
    else:
        compiled[grid](*arguments)
    return laid.split((num_values, num_offsets)) if pooled else (laid,)
