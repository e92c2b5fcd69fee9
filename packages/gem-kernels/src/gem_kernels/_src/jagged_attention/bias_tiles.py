"""Bias of a tile of pairs in registers: entries of the two tables, gathered through the cache."""

import math

import triton
import triton.language as tl

_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def time_bucket(times_m, times_n, num_buckets, TIME_SHIFT: tl.constexpr):
    """int32 bucket of every pair, see ``bias.time_buckets``; the arguments broadcast."""
    gap = tl.abs(times_m - times_n).to(tl.float32)
    bucket = (gap.to(tl.int32, bitcast=True) >> (23 - TIME_SHIFT)) - (127 << TIME_SHIFT)
    return tl.minimum(tl.maximum(bucket, 0), num_buckets - 1)


@triton.jit
def load_times(times_ptr, first, num_rows, ROWS: tl.constexpr, HAS_TIME: tl.constexpr):
    """(ROWS,) times of a tile, 0 past the sequence; without a time bias something that is not read."""
    local = tl.arange(0, ROWS)
    if HAS_TIME:
        times = tl.load(times_ptr + tl.cast(first, tl.int64) + local, mask=local < num_rows - first, other=0)
        # A difference of two int32 may need 33 bits.
        return times.to(tl.int64) if times.dtype == tl.int32 else times
    else:
        return local


@triton.jit
def add_bias(
    scores,  # q kᵀ, unscaled
    scale_log2,
    position_ptr,  # (2 P + 1,) of this head
    time_ptr,  # (num_buckets,) of this head
    offs_m,
    offs_n,
    times_m,
    times_n,
    radius,
    num_buckets,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    TIME_SHIFT: tl.constexpr,
):
    """(scale * scores + bias) in base 2. Rows and keys past the sequence get some entry: indices never leave a table.

    ``offs_m`` with ``offs_n``, and the times, broadcast: (M, 1) with (1, N), or (1, M) with (N, 1) where transposed.
    """
    scores = scores * scale_log2
    # Always taken. Loads of a loop are staged through shared memory, which these gathers would fill; in a branch they
    # are left alone.
    if radius >= 0:
        if HAS_POSITION:
            index = tl.minimum(tl.maximum(offs_n - offs_m, -radius), radius) + radius
            scores += tl.load(position_ptr + index) * _LOG2E
        if HAS_TIME:
            scores += tl.load(time_ptr + time_bucket(times_m, times_n, num_buckets, TIME_SHIFT)) * _LOG2E
    return scores
