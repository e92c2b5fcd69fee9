"""Which (query, key) pairs of a tile may meet, and which tiles need no mask at all."""

import triton
import triton.language as tl


@triton.jit
def pair_mask(offs_m, offs_n, len_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Mask of j < len_k and i - left <= j <= i + right; a side without HAS_... is unbounded.

    ``offs_m`` and ``offs_n`` broadcast: (M, 1) with (1, N), or (1, M) with (N, 1) for a transposed tile.
    """
    mask = (offs_n < len_k) & (offs_m >= 0)
    if HAS_LEFT:
        mask = mask & (offs_n >= offs_m - left)
    if HAS_RIGHT:
        mask = mask & (offs_n <= offs_m + right)
    return mask


@triton.jit
def valid_range(
    first,
    length,
    left,
    right,
    TILE: tl.constexpr,  # rows of this program's tile
    STEP: tl.constexpr,  # columns of one step
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(low, full_low, full_high, high) for rows [first, first + TILE) that meet columns i - left .. i + right.

    Columns [low, high) hold every valid pair and low is a multiple of STEP. In [full_low, full_high), whole steps
    only, every pair is valid, so that they run without a mask. Always low <= full_low <= full_high, and
    [low, full_low), [full_low, full_high), [full_high, high) together cover [low, high).
    """
    low = first * 0
    high = length
    full_low = low
    full_high = length
    if HAS_LEFT:
        low = tl.maximum(first - left, 0) // STEP * STEP
        full_low = (tl.maximum(first + TILE - 1 - left, 0) + STEP - 1) // STEP * STEP
    if HAS_RIGHT:
        high = tl.minimum(length, first + TILE + right)
        full_high = tl.minimum(length, first + right + 1)
    full_high = full_high // STEP * STEP
    # A window narrower than a tile has no full step: all of [low, high) then counts as before full_low.
    last = (tl.maximum(high, low) + STEP - 1) // STEP * STEP
    full_low = tl.minimum(full_low, last)
    full_high = tl.maximum(full_high, full_low)
    return low, full_low, full_high, high
