"""What Hopper's backward of jagged attention needs of a query row: its log-sum-exp and delta, laid out head by head.

Those of a tile's rows are then one piece of memory.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_R = 16
"""Rows of one program: memory-bound, so many small programs."""
_ALIGNMENT = 16
"""Of the distance between two heads: Triton compiles another variant where it is no multiple of 16."""
_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _jagged_attention_hopper_stats_kernel(
    out_ptr,  # (T_q, H, D) contiguous
    do_ptr,  # (T_q, H, D), heads side by side
    lse_ptr,  # (T_q, H) float32 contiguous
    dlse_ptr,  # (T_q, H) float32 contiguous, read only if HAS_DLSE
    stats_ptr,  # (H, 2, stride_s) float32
    stride_dot,
    stride_s,
    num_rows,  # T_q
    num_heads,
    HAS_DLSE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the LSE in base 2 and delta = rowsum(dO * O) - dLSE; +inf as the LSE of a row without keys.

    exp2(score - LSE) is then 0 there, and dS = P * (dP - delta) holds with and without a gradient of the LSE.
    """
    head = tl.program_id(0) % num_heads
    rows = (tl.program_id(0) // num_heads).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < num_rows
    offs_d = tl.arange(0, D)
    out = tl.load(out_ptr + (rows[:, None] * num_heads + head) * D + offs_d, mask=mask[:, None], other=0.0)
    do = tl.load(do_ptr + rows[:, None] * stride_dot + head * D + offs_d, mask=mask[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(lse_ptr + rows * num_heads + head, mask=mask, other=0.0)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows * num_heads + head, mask=mask, other=0.0)
    stats_ptr += 2 * head.to(tl.int64) * stride_s + rows
    tl.store(stats_ptr, tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E), mask=mask)
    tl.store(stats_ptr + stride_s, delta, mask=mask)


def launch_stats(out: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """(2 H, T_q or a few more) float32: rows 2 h and 2 h + 1 are the base-2 LSE and delta of head h."""
    total, num_heads, dim = out.shape
    columns = -(-total // _ALIGNMENT) * _ALIGNMENT
    stats = torch.empty(2 * num_heads, columns, dtype=torch.float32, device=out.device)
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    _jagged_attention_hopper_stats_kernel[(triton.cdiv(total, BLOCK_R) * num_heads,)](
        out,
        do,
        lse,
        dlse,
        stats,
        do.stride(0),
        columns,
        total,
        num_heads,
        HAS_DLSE=dlse is not None,
        D=dim,
        BLOCK_R=BLOCK_R,
        num_warps=2,
    )
    return stats
