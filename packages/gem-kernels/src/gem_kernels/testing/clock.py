"""Clock of the multiprocessors between two moments of a stream, read from their own counters.

Power holds it far below the highest: two rates compare only where the clocks do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264
"""Enough to meet most multiprocessors twice."""


@triton.jit
def _stamp_kernel(stamps_ptr):
    pid = tl.program_id(0)
    zero = tl.full([1], 0, tl.int32)
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1)
    cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [zero], dtype=tl.int64, is_pure=False, pack=1)
    time = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [zero], dtype=tl.int64, is_pure=False, pack=1)
    ptr = stamps_ptr + pid * 3 + tl.arange(0, 1)
    tl.store(ptr, sm.to(tl.int64))
    tl.store(ptr + 1, cycles)
    tl.store(ptr + 2, time)


def stamp(device: torch.device) -> Tensor:
    """(N, 3) int64 on the device: multiprocessor, its cycles, nanoseconds, when the stream gets here."""
    stamps = torch.empty(_PROGRAMS, 3, dtype=torch.int64, device=device)
    _stamp_kernel[(_PROGRAMS,)](stamps, num_warps=1)
    return stamps


def megahertz(before: Tensor, after: Tensor) -> float:
    """Median over the multiprocessors that both stamps met; waits for the device."""
    earlier = {sm: (cycles, time) for sm, cycles, time in before.tolist()}
    rates = [
        1e3 * (cycles - earlier[sm][0]) / max(time - earlier[sm][1], 1)
        for sm, cycles, time in after.tolist()
        if sm in earlier
    ]
    return sorted(rates)[len(rates) // 2]
