"""Triton kernels that put columns of several tensors side by side in another dtype, and take them apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.launch import device_guard

MAX_PARTS = 8
ROWS = 32
"""Rows of one program: memory-bound, so many small programs."""


@triton.jit
def _copy(src_ptr, dst_ptr, first, num_rows, stride_src, stride_dst, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Rows first, first + 1, ... of WIDTH columns, cast to the dtype of the destination."""
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    tile = tl.load(src_ptr + rows[:, None] * stride_src + columns[None, :], mask=mask, other=0.0)
    tl.store(dst_ptr + rows[:, None] * stride_dst + columns[None, :], tile.to(dst_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _copy_part(
    joined_ptr,
    part_ptr,
    first,
    num_rows,
    stride,
    column: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    APART: tl.constexpr,
):
    if part_ptr is not None:
        if APART:
            _copy(joined_ptr + column, part_ptr, first, num_rows, stride, WIDTH, WIDTH, ROWS)
        else:
            _copy(part_ptr, joined_ptr + column, first, num_rows, WIDTH, stride, WIDTH, ROWS)


@triton.jit(do_not_specialize=["num_rows"])
def join_columns_kernel(
    joined_ptr,  # (M, sum of widths), rows contiguous
    part0_ptr,  # (M, W0) contiguous, or None: not copied
    part1_ptr,
    part2_ptr,
    part3_ptr,
    part4_ptr,
    part5_ptr,
    part6_ptr,
    part7_ptr,
    stride_joined,
    num_rows,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    W4: tl.constexpr,
    W5: tl.constexpr,
    W6: tl.constexpr,
    W7: tl.constexpr,
    ROWS: tl.constexpr,
    APART: tl.constexpr,  # from the joined rows to the parts
):
    # int64 before the stride: a batch may have more than 2**31 elements.
    first = tl.program_id(0).to(tl.int64) * ROWS
    C1: tl.constexpr = W0
    C2: tl.constexpr = C1 + W1
    C3: tl.constexpr = C2 + W2
    C4: tl.constexpr = C3 + W3
    C5: tl.constexpr = C4 + W4
    C6: tl.constexpr = C5 + W5
    C7: tl.constexpr = C6 + W6
    _copy_part(joined_ptr, part0_ptr, first, num_rows, stride_joined, 0, W0, ROWS, APART)
    _copy_part(joined_ptr, part1_ptr, first, num_rows, stride_joined, C1, W1, ROWS, APART)
    _copy_part(joined_ptr, part2_ptr, first, num_rows, stride_joined, C2, W2, ROWS, APART)
    _copy_part(joined_ptr, part3_ptr, first, num_rows, stride_joined, C3, W3, ROWS, APART)
    _copy_part(joined_ptr, part4_ptr, first, num_rows, stride_joined, C4, W4, ROWS, APART)
    _copy_part(joined_ptr, part5_ptr, first, num_rows, stride_joined, C5, W5, ROWS, APART)
    _copy_part(joined_ptr, part6_ptr, first, num_rows, stride_joined, C6, W6, ROWS, APART)
    _copy_part(joined_ptr, part7_ptr, first, num_rows, stride_joined, C7, W7, ROWS, APART)


def launch(joined: Tensor, parts: Sequence[Tensor | None], widths: Sequence[int], *, apart: bool) -> None:
    """Fill ``joined`` (M, sum of widths) from the parts (M, w), or the parts that are no None from ``joined``."""
    num_rows = joined.shape[0]
    if num_rows == 0:
        return
    absent = MAX_PARTS - len(parts)
    with device_guard(joined):
        join_columns_kernel[(triton.cdiv(num_rows, ROWS),)](
            joined,
            *parts,
            *(None,) * absent,
            joined.stride(0),
            num_rows,
            *widths,
            *(1,) * absent,
            ROWS=ROWS,
            APART=apart,
            num_warps=4,
        )


def launch_join(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(M, sum of widths) in ``dtype``, contiguous."""
    widths = [part.shape[1] for part in parts]
    joined = torch.empty(parts[0].shape[0], sum(widths), dtype=dtype, device=parts[0].device)
    launch(joined, [part.contiguous() for part in parts], widths, apart=False)
    return joined


def launch_apart(joined: Tensor, widths: Sequence[int], dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    """Parts (M, w) of ``joined``, contiguous, in their dtypes; None where the dtype is."""
    joined = joined if joined.stride(1) == 1 else joined.contiguous()
    parts = [
        None if dtype is None else torch.empty(joined.shape[0], width, dtype=dtype, device=joined.device)
        for width, dtype in zip(widths, dtypes, strict=True)
    ]
    launch(joined, parts, widths, apart=True)
    return parts
