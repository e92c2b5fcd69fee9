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
def key_range(
    first,  # of the tile's queries
    len_k,
    left,
    right,
    ROWS: tl.constexpr,  # queries of the tile
    STEP: tl.constexpr,  # keys of one step
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(low, split, high): keys [low, high) hold every valid pair of the tile, in steps from low.

    Without HAS_LEFT, all pairs in [low, split) are valid, so that those steps need no mask.
    """
    low = first * 0
    high = len_k
    split = len_k // STEP * STEP
    if HAS_RIGHT:
        high = tl.minimum(len_k, first + ROWS + right)
        split = tl.minimum(len_k, first + right + 1) // STEP * STEP
    if HAS_LEFT:
        low = tl.maximum(first - left, 0) // STEP * STEP
    return low, split, high


@triton.jit
def query_range(
    first,  # of the tile's keys
    len_q,
    left,
    right,
    ROWS: tl.constexpr,  # keys of the tile
    STEP: tl.constexpr,  # queries of one step
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """(low, split, high): queries [low, high) hold every valid pair of the tile, in steps from low.

    Without HAS_LEFT, every key of the tile that exists is valid for the queries from ``split`` on.
    """
    low = first * 0
    split = low
    high = len_q
    if HAS_RIGHT:
        low = tl.maximum(first - right, 0) // STEP * STEP
        split = (tl.maximum(first + ROWS - 1 - right, 0) + STEP - 1) // STEP * STEP
        split = tl.minimum(split, (len_q + STEP - 1) // STEP * STEP)
        split = tl.maximum(split, low)
    if HAS_LEFT:
        high = tl.minimum(len_q, first + ROWS + left)
    return low, split, high


@triton.jit
def history_length(
    num_targets_ptr,  # (B,) or None
    b,
    len_k,
):
    """Rows of sequence b before its targets, held within [0, len_k] whatever the count says; all without targets."""
    if num_targets_ptr is not None:
        targets = tl.load(num_targets_ptr + b).to(tl.int32)
        len_k = len_k - tl.minimum(tl.maximum(targets, 0), len_k)
    return len_k
