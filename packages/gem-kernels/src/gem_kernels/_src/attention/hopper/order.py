"""Sequences in the order of their work, for the lists of units of Hopper's backwards in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call
from gem_kernels._src.attention.hopper.schedule import BLOCK, MAX_SORTED, OTHERS


@triton.jit
def length_of(offsets_ptr, b, mask):
    return tl.load(offsets_ptr + b + 1, mask=mask, other=0) - tl.load(offsets_ptr + b, mask=mask, other=0)


@triton.jit
def _work(offsets_q_ptr, offsets_k_ptr, b, mask, num_sequences):
    """Distinct numbers that order sequences ``b``: by work, and the first first where it is equal."""
    work = length_of(offsets_q_ptr, b, mask).to(tl.int64) * length_of(offsets_k_ptr, b, mask).to(tl.int64)
    return work * (num_sequences + 1) + num_sequences - b


@triton.jit(do_not_specialize=["num_sequences"])
def order_by_work_kernel(
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    order_ptr,  # (B,) int32
    num_sequences,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Sequences by work, the most first, or as they come."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = b < num_sequences
    rank = b
    if SORTED:
        rank = tl.zeros([BLOCK], tl.int32)
        work = _work(offsets_q_ptr, offsets_k_ptr, b, mask, num_sequences)
        for start in range(0, num_sequences, OTHERS):
            others = start + tl.arange(0, OTHERS)
            inside = others < num_sequences
            other_work = _work(offsets_q_ptr, offsets_k_ptr, others, inside, num_sequences)
            ahead = inside[None, :] & (other_work[None, :] > work[:, None])
            rank += tl.sum(ahead.to(tl.int32), 1)
    tl.store(order_ptr + rank, b, mask=mask)


def order_by_work(offsets_q: Tensor, offsets_k: Tensor) -> Tensor:
    """Numbers of the sequences, those with most pairs first, in (B,) int32; as they come where there are very many.

    Args:
        offsets_q: (B + 1,) on a CUDA device, contiguous, as is ``offsets_k``.
        offsets_k: (B + 1,) on the same device.
    """
    num_sequences = offsets_k.shape[0] - 1
    order = torch.empty(num_sequences, dtype=torch.int32, device=offsets_k.device)
    call(
        order_by_work_kernel,
        triton.cdiv(num_sequences, BLOCK),
        (offsets_q, offsets_k, order, num_sequences),
        {"SORTED": num_sequences <= MAX_SORTED, "BLOCK": BLOCK, "OTHERS": OTHERS // 2},
        offsets_k.device,
    )
    return order
