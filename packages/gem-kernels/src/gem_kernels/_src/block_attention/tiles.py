"""Device code shared by the passes of block attention: which block a program owns, its tiles, its probabilities."""

import triton
import triton.language as tl


@triton.jit
def locate_block(slot, offsets_ptr, num_sequences, num_steps, BLOCK: tl.constexpr):
    """First row of the block of ``slot`` and its number of rows; an unused slot has 0 rows or fewer.

    Sequence b owns the slots from offsets[b] // BLOCK + b on (``num_slots`` says why they suffice). That start needs
    no prefix sum over block counts, so the offsets are searched as they come.
    """
    low = slot * 0
    high = low + num_sequences
    for _ in range(num_steps):
        middle = (low + high) // 2
        is_right = tl.load(offsets_ptr + middle).to(tl.int64) // BLOCK + middle <= slot
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    start = tl.load(offsets_ptr + low).to(tl.int64)
    stop = tl.load(offsets_ptr + low + 1).to(tl.int64)
    first = start + (slot - (start // BLOCK + low)) * BLOCK
    return first, tl.minimum(stop - first, BLOCK).to(tl.int32)


@triton.jit
def load_tile(ptr, offs_t, mask_t, stride_t, first_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D) of channels first_d + [0, BLOCK_D) of one head; 0 outside the block's rows and the head."""
    offs_d = first_d + tl.arange(0, BLOCK_D)
    mask = mask_t[:, None]
    if DIM % BLOCK_D != 0:
        mask = mask & (offs_d < DIM)[None, :]
    return tl.load(ptr + offs_t[:, None] * stride_t + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def rotate_tile(x, table_ptr, offs_t, mask_t, first_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SIGN: tl.constexpr):
    """Channels first_d + [0, BLOCK_D) rotated in float32, pair by pair, by SIGN times the angles of their rows.

    ``table_ptr`` is (T, DIM) = [sin | cos], contiguous, one angle for each pair of channels.
    """
    HALF: tl.constexpr = DIM // 2
    offs_p = first_d // 2 + tl.arange(0, BLOCK_D // 2)
    mask = mask_t[:, None]
    if DIM % BLOCK_D != 0:
        mask = mask & (offs_p < HALF)[None, :]
    ptrs = table_ptr + offs_t[:, None] * DIM + offs_p[None, :]
    sin = SIGN * tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], BLOCK_D // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (x.shape[0], BLOCK_D))


@triton.jit
def load_rotated_tile(
    ptr, table_ptr, offs_t, mask_t, stride_t, first_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr
):
    """``load_tile``, rotated by the table if ROTARY and then rounded to the dtype of ``ptr`` again."""
    x = load_tile(ptr, offs_t, mask_t, stride_t, first_d, DIM, BLOCK_D)
    if ROTARY:
        x = rotate_tile(x, table_ptr, offs_t, mask_t, first_d, DIM, BLOCK_D, 1).to(x.dtype)
    return x


@triton.jit
def store_unrotated_tile(
    ptr, table_ptr, x, offs_t, mask_t, stride_t, first_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr
):
    """``store_tile`` of a gradient: if ROTARY, of the rotated channels, turned back to those before the rotation."""
    if ROTARY:
        x = rotate_tile(x, table_ptr, offs_t, mask_t, first_d, DIM, BLOCK_D, -1)
    store_tile(ptr, x, offs_t, mask_t, stride_t, first_d, DIM, BLOCK_D)


@triton.jit
def store_tile(ptr, x, offs_t, mask_t, stride_t, first_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a (BLOCK, BLOCK_D) tile in the dtype of ``ptr``; nothing outside the block's rows and the head."""
    offs_d = first_d + tl.arange(0, BLOCK_D)
    mask = mask_t[:, None]
    if DIM % BLOCK_D != 0:
        mask = mask & (offs_d < DIM)[None, :]
    tl.store(ptr + offs_t[:, None] * stride_t + offs_d[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def exp_scores(scores, mask_n, scale_log2):
    """exp(scale (scores - row maximum)) and its row sums; keys outside ``mask_n`` give 0. A block has a key."""
    scores = tl.where(mask_n[None, :], scores * scale_log2, float("-inf"))
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p, tl.sum(p, 1)
