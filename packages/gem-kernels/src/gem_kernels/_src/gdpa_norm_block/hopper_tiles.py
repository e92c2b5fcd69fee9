"""Norms of rows in shared memory, for Hopper's kernels of the block: the layer norm, and the RMS norm's backward."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_kernels._src.attention.hopper.tiles import ROWS

_ROWS = gl.constexpr(ROWS)


@gluon.jit
def allocate_factors(NUM: gl.constexpr):
    """``NUM`` numbers for each of 64 rows."""
    return gl.allocate_shared_memory(gl.float32, [NUM, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_norm_factors(mean_ptr, rstd_ptr, factors, place, row, num_rows):
    """What 64 rows of q are multiplied by, to ``place``, and what is added then, to the next; 0 from ``num_rows`` on.

    For one warp, which may wait for memory.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = gl.arange(0, _ROWS, layout)
    mask = rows < num_rows
    mean = gl.load(mean_ptr + row + rows, mask=mask, other=0.0)
    rstd = gl.load(rstd_ptr + row + rows, mask=mask, other=0.0)
    factors.index(place).store(rstd)
    factors.index(place + 1).store(-mean * rstd)


@gluon.jit
def load_gradient_factors(rrms_ptr, along_ptr, factors, place, row, num_rows):
    """The same of rows of dout, to ``place``, and of rows of the sum before the RMS norm, to the next."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = gl.arange(0, _ROWS, layout)
    mask = rows < num_rows
    factors.index(place).store(gl.load(rrms_ptr + row + rows, mask=mask, other=0.0))
    factors.index(place + 1).store(gl.load(along_ptr + row + rows, mask=mask, other=0.0))


@gluon.jit
def normalize_rows(
    tile, factors, place, weight_ptr, bias_ptr, channel, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Replace 64 rows of q by those after the layer norm; rows behind a sequence stay finite."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    channels = channel + gl.arange(0, D, gl.SliceLayout(0, layout))
    if HAS_WEIGHT:
        weight = gl.load(weight_ptr + channels).to(gl.float32)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + channels).to(gl.float32)
    # As one: between reads and writes of parts of a tile the compiler puts a barrier each time.
    factor = factors.index(place).load(row_layout)
    shift = factors.index(place + 1).load(row_layout)
    x = tile.load(layout).to(gl.float32) * factor[:, None] + shift[:, None]
    if HAS_WEIGHT:
        x *= weight[None, :]
    if HAS_BIAS:
        x += bias[None, :]
    tile.store(x.to(tile.dtype))


@gluon.jit
def differentiate_rows(
    tile, dout_halves, half, factors, place, weight_ptr, channel, HAS_WEIGHT: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Replace 64 rows of the sum before the RMS norm by its gradient.

    The rows of dout, the gradient of the norm's output, are two tiles of half the columns, from tile ``half`` on.
    """
    HALF: gl.constexpr = D // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 8), HALF // 8], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    channels = channel + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    rrms = factors.index(place).load(row_layout)
    along = factors.index(place + 1).load(row_layout)
    for h in gl.static_range(2):
        dout = dout_halves.index(half + h).load(layout).to(gl.float32)
        if HAS_WEIGHT:
            dout *= gl.load(weight_ptr + h * HALF + channels).to(gl.float32)[None, :]
        part = tile.slice(h * HALF, HALF, dim=1)
        part.store((rrms[:, None] * dout - along[:, None] * part.load(layout).to(gl.float32)).to(tile.dtype))
