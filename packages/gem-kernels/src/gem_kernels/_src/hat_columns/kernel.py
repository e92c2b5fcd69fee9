"""Triton kernel of the numbers of events: a row of columns for each, from its numbers, its age and its place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.tiles.memory import sequence_bounds

ROWS = 64


@triton.jit
def _store_hats(ptr, x, largest, stride, mask, KNOTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """KNOTS columns of weights of linear interpolation between knots 0 to ``largest``."""
    position = tl.minimum(tl.maximum(x, 0.0), largest) * ((KNOTS - 1) / largest)
    knots = tl.arange(0, BLOCK_K)
    hats = tl.maximum(1.0 - tl.abs(position[:, None] - knots.to(tl.float32)[None, :]), 0.0)
    rows = tl.arange(0, x.shape[0]).to(tl.int64)
    tl.store(ptr + rows[:, None] * stride + knots[None, :], hats, mask=mask[:, None] & (knots < KNOTS)[None, :])


@triton.jit(do_not_specialize=["num_tiles", "largest_age", "largest_recency"])
def hat_columns_kernel(
    dense_ptr,  # (T, NUM_DENSE) contiguous
    age_ptr,  # (T,) contiguous
    offsets_ptr,  # (B + 1,)
    out_ptr,  # (T, WIDTH) contiguous
    num_tiles,  # of the longest sequence
    largest_age,
    largest_recency,
    NUM_DENSE: tl.constexpr,
    AGE_KNOTS: tl.constexpr,
    RECENCY_KNOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_DENSE: tl.constexpr,
    BLOCK_AGE: tl.constexpr,
    BLOCK_RECENCY: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    b = tl.program_id(0) // num_tiles
    first = tl.program_id(0) % num_tiles * ROWS
    start, length = sequence_bounds(offsets_ptr, b)
    if first >= length:
        return
    rows = tl.arange(0, ROWS)
    mask = rows < length - first
    out_ptr += (start + first) * WIDTH
    if NUM_DENSE > 0:
        columns = tl.arange(0, BLOCK_DENSE)
        places = rows.to(tl.int64)[:, None]
        tile = mask[:, None] & (columns < NUM_DENSE)[None, :]
        dense = tl.load(dense_ptr + (start + first) * NUM_DENSE + (places * NUM_DENSE + columns[None, :]), mask=tile)
        tl.store(out_ptr + places * WIDTH + columns[None, :], dense.to(tl.float32), mask=tile)
    age = tl.load(age_ptr + start + first + rows, mask=mask, other=0.0).to(tl.float32)
    _store_hats(out_ptr + NUM_DENSE, tl.log(1.0 + age), largest_age, WIDTH, mask, AGE_KNOTS, BLOCK_AGE)
    later = (length - 1 - first - rows).to(tl.float32)
    filled: tl.constexpr = NUM_DENSE + AGE_KNOTS
    _store_hats(
        out_ptr + filled, tl.log(1.0 + tl.maximum(later, 0.0)), largest_recency, WIDTH, mask, RECENCY_KNOTS,
        BLOCK_RECENCY,
    )  # fmt: skip
    rest: tl.constexpr = WIDTH - filled - RECENCY_KNOTS
    if rest > 0:
        columns = tl.arange(0, BLOCK_REST)
        places = rows.to(tl.int64)[:, None] * WIDTH + (filled + RECENCY_KNOTS) + columns[None, :]
        zeros = tl.zeros([ROWS, BLOCK_REST], dtype=tl.float32)
        tl.store(out_ptr + places, zeros, mask=mask[:, None] & (columns < rest)[None, :])


def constants(num_dense: int, age_knots: int, recency_knots: int, width: int) -> dict[str, int]:
    """Compile-time arguments."""
    return {
        "NUM_DENSE": num_dense,
        "AGE_KNOTS": age_knots,
        "RECENCY_KNOTS": recency_knots,
        "WIDTH": width,
        "BLOCK_DENSE": power_of_two(max(num_dense, 1)),
        "BLOCK_AGE": power_of_two(age_knots),
        "BLOCK_RECENCY": power_of_two(recency_knots),
        "BLOCK_REST": power_of_two(max(width - num_dense - age_knots - recency_knots, 1)),
        "ROWS": ROWS,
    }


def launch(
    dense: Tensor,
    age: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    age_knots: tuple[int, float],
    recency_knots: tuple[int, float],
    width: int,
) -> Tensor:
    """(T, width) float32, contiguous."""
    out = torch.empty(age.shape[0], width, dtype=torch.float32, device=age.device)
    num_tiles = triton.cdiv(max_seqlen, ROWS)
    programs = (offsets.shape[0] - 1) * num_tiles
    if programs and age.shape[0]:
        flags = constants(dense.shape[1], age_knots[0], recency_knots[0], width)
        with device_guard(age):
            hat_columns_kernel[(programs,)](
                dense.contiguous(),
                age.contiguous(),
                offsets,
                out,
                num_tiles,
                float(age_knots[1]),
                float(recency_knots[1]),
                **flags,
                num_warps=4,
            )
    return out
