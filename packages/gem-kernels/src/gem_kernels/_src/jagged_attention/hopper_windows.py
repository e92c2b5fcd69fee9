"""Windows in the Hopper kernels, in Gluon: which tiles a consumer's 64 rows meet, and which pairs of a tile.

The other side of a unit begins where the window of its first row does (``window_schedule``), ``shift`` rows before the
unit's own first row: own row i and other row c of a unit may meet where shift - left <= c - i <= shift + right.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gem_kernels._src.attention.hopper.tiles import ROWS, load_chunk, num_key_tiles

_ROWS = gl.constexpr(ROWS)


@gluon.jit
def load_unit(chunks_ptr, shifts_ptr, work, num_heads, num_works, HAS_WINDOW: gl.constexpr):
    """(first own row, own rows, other rows, shift) of a unit of work, of the last one where there is none."""
    place = gl.minimum(work, num_works - 1)
    first, length, _first_other, other_length = load_chunk(chunks_ptr, place, num_heads)
    shift = 0
    if HAS_WINDOW:
        shift = gl.load(shifts_ptr + place // num_heads)
    return first, length, other_length, shift


@gluon.jit
def tiles_met(length, shift, left, right, W: gl.constexpr, BLOCK_N: gl.constexpr):
    """[begin, end), at least one, of the tiles of ``length`` other rows that the rows of consumer ``W`` may meet."""
    num_tiles = num_key_tiles(length, BLOCK_N)
    begin = gl.maximum(W * _ROWS + shift - left, 0) // BLOCK_N
    end = (W * _ROWS + _ROWS - 1 + shift + right) // BLOCK_N + 1
    begin = gl.minimum(begin, num_tiles - 1)
    return begin, gl.maximum(gl.minimum(end, num_tiles), begin + 1)


@gluon.jit
def pass_tile(ready, empty, stage, STAGES: gl.constexpr):
    """Let a tile go that this consumer does not need; once it is there, as its place may still hold the one before."""
    s = stage % STAGES
    mbarrier.wait(ready.index(s), (stage // STAGES) & 1)
    mbarrier.arrive(empty.index(s), count=1)


@gluon.jit
def in_window(low, high, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """Mask (64, BLOCK_N): low <= column - row <= high."""
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    # One comparison: what is below low wraps around.
    distance = columns[None, :] - (rows + low)[:, None]
    return distance.to(gl.uint32, bitcast=True) <= (high - low).to(gl.uint32, bitcast=True)


@gluon.jit
def keep_window(scores, low, high, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """Scores (64, BLOCK_N), -inf outside of low <= column - row <= high; nothing is compared where all lie inside."""
    if (low > 1 - _ROWS) | (high < BLOCK_N - 1):
        scores = gl.where(in_window(low, high, layout, BLOCK_N), scores, float("-inf"))
    return scores
