"""From a program id of a one-dimensional grid to a sequence, a head and a tile of rows."""

import triton
import triton.language as tl


@triton.jit
def find_sequence(tile_offsets_ptr, tile, num_sequences, num_steps):
    """Largest b with tile_offsets[b] <= tile, by bisection; tile_offsets is (B + 1,) int64 and starts at 0."""
    low = tile * 0
    high = low + num_sequences
    for _ in range(num_steps):
        middle = (low + high) // 2
        is_right = tl.load(tile_offsets_ptr + middle) <= tile
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return low


@triton.jit
def locate_tile(
    pid,
    tile_offsets_ptr,  # (B + 1,) int64: tiles before sequence b; read only if SEARCH
    num_sequences,
    num_heads,
    num_tiles,  # tiles per sequence of a padded grid, used only if not SEARCH
    num_steps,
    SEARCH: tl.constexpr,
):
    """(sequence, head, tile within the sequence); the tile may lie past the sequence's end.

    Padded grid: tiles of one (sequence, head) are neighbours, so that its keys stay in cache.
    Searched grid: one program per tile that can exist, for batches in which one long sequence would pad all others.
    """
    if SEARCH:
        head = pid % num_heads
        tile = pid // num_heads
        b = find_sequence(tile_offsets_ptr, tile, num_sequences, num_steps)
        tile = (tile - tl.load(tile_offsets_ptr + b)).to(tl.int32)
    else:
        tile = pid % num_tiles
        head = (pid // num_tiles) % num_heads
        b = pid // (num_tiles * num_heads)
    return b, head, tile


@triton.jit
def key_sequence(
    request_index_ptr,  # (B,) or None
    b,
):
    """Key sequence that query sequence b reads."""
    if request_index_ptr is not None:
        b = tl.load(request_index_ptr + b)
    return b
