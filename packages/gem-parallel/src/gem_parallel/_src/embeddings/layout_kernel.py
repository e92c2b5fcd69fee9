"""A batch laid out and checked by one CUDA kernel, however many features it has.

The operators of ``flat_batch`` each read and write the whole batch. Here every id and offset is read once, where the
caller has it, compared with its bounds and written where fbgemm wants it. The kernel reads what it needs to know of the
batch, and notes faults, in the host's own memory: no copy of either is started, and nothing is summed for the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_parallel._src.embeddings.batch_layout import FIELDS, BatchLayout
from gem_parallel._src.embeddings.transfer import Flag

__all__ = ["launch"]


@triton.jit
def _field(fields, number: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 8) == number, fields, 0))


@triton.jit(do_not_specialize=["num_segments"])
def _lay_out_kernel(
    plan,  # int64 of the host: (num_segments, 8) segments, then the segment of each program
    laid,  # int32 or int64: values as rows of their engine, then bags
    given,  # int64: values and offsets as they came
    faults,  # int64 number of the host, written only if there is a fault
    num_segments,
    BLOCK: tl.constexpr,
    DROP: tl.constexpr,  # bad values become top + 1, else the nearest valid one
):
    """Ids, kind 0, lie in [0, top]; offsets, kind 1, rise from 0 to top; kind 2 is 0, 1, ... and has no source."""
    program = tl.program_id(0).to(tl.int64)
    segment = tl.load(plan + 8 * num_segments.to(tl.int64) + program)
    # One read for all: each takes a microsecond.
    fields = tl.load(plan + 8 * segment + tl.arange(0, 8))
    first, length, top, shift = _field(fields, 0), _field(fields, 2), _field(fields, 3), _field(fields, 4)
    place, place_given, kind = _field(fields, 5), _field(fields, 6), _field(fields, 7)
    source = _field(fields, 1).to(tl.pointer_type(tl.int64))

    at = (program - first) * BLOCK + tl.arange(0, BLOCK)
    here = at < length
    if kind == 2:
        tl.store(laid + place + at, at.to(laid.dtype.element_ty), mask=here)
    else:
        found = tl.load(source + at, mask=here, other=0)
        tl.store(given + place_given + at, found, mask=here)
        if kind == 1:
            following = tl.load(source + at + 1, mask=at + 1 < length, other=9223372036854775807)
            low = tl.where(at == length - 1, top, 0)
            high = tl.where(at == 0, 0, top)
            safe = tl.minimum(tl.maximum(found, low), high)
            bad = here & ((safe != found) | (following < found))
        else:
            safe = tl.minimum(tl.maximum(found, 0), top)
            bad = here & (safe != found)
            if DROP:
                safe = tl.where(bad, top + 1, safe)
        # Offsets of unpooled features are only checked. Where one feature's bags end and the next one's begin, both
        # write the same number.
        safe = (safe + shift).to(laid.dtype.element_ty)
        tl.store(laid + place + at, safe, mask=at < tl.where(place < 0, 0, length))
        if tl.max(bad.to(tl.int32)) > 0:
            tl.store(faults, 1)


_compiled: dict[tuple[int | None, int, bool, torch.dtype], Any] = {}
"""(device, elements of a program, drop, dtype) -> the kernel; its arguments are aligned and typed alike in every
launch, so that Triton need not look at them again."""


def launch(
    layout: BatchLayout, parts: Sequence[Tensor], flag: Flag, *, drop: bool, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Start the kernel on the current stream.

    Args:
        layout: With a ``plan``.
        parts: All features' values, then their offsets, contiguous and on the current device.
        flag: Becomes other than 0 if there is a fault; no other batch has it.
        drop: Whether bad values become the row after their table's last.
        dtype: int32 or int64, of rows and bags, which must fit.

    Returns:
        ``layout.parts``, and (L,) int64 all that came.
    """
    plan, device = layout.plan, parts[0].device
    assert plan is not None
    staged, numbers = flag.stage(plan.numbers.size)
    numbers[:] = plan.numbers
    numbers[1 : FIELDS * len(parts) : FIELDS] = list(map(Tensor.data_ptr, parts))
    flag.clear()
    laid = torch.empty(plan.num_elements, dtype=dtype, device=device)
    given = torch.empty(layout.num_elements, dtype=torch.int64, device=device)
    grid, key = (plan.num_programs, 1, 1), (device.index, plan.block, drop, dtype)
    arguments = staged, laid, given, flag.number, plan.num_segments, plan.block, drop
    compiled = _compiled.get(key)
    if compiled is None:
        # None where Triton interprets.
        _compiled[key] = _lay_out_kernel[grid](*arguments, num_warps=4)
    else:
        compiled[grid](*arguments)
    return laid.split(layout.parts), given
