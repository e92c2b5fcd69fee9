"""Which (query, key) pairs of a tile may meet."""

import triton
import triton.language as tl


@triton.jit
def window_mask(offs_m, offs_n, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """(M, N) mask of i - left <= j <= i + right; a side that is not HAS_... is unbounded."""
    mask = (offs_m[:, None] >= 0) & (offs_n[None, :] >= 0)
    if HAS_LEFT:
        mask = mask & (offs_n[None, :] >= offs_m[:, None] - left)
    if HAS_RIGHT:
        mask = mask & (offs_n[None, :] <= offs_m[:, None] + right)
    return mask
