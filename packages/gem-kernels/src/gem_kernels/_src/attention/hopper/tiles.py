"""What Hopper's kernels of the attention ops share on the device: tiles of 64 rows, copied, cleaned and stored."""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gem_kernels._src.attention.hopper.call import SEQUENCE_END

ROWS = 64
"""Rows of one consumer, the height of a warpgroup's matrix instruction."""
TILE_ROWS = 2 * ROWS
"""Rows of the two consumers together."""
# Triton 3.9 has renamed them.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@builtin
def _reduce_by_tma(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


# Triton 3.6 has no name for it.
tma_add = getattr(tma, "async_atomic_add", _reduce_by_tma)


@builtin
def view_as(tile: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The memory of a tile as another; Triton 3.9 has renamed the method."""
    view = tile.reinterpret if hasattr(tile, "reinterpret") else tile._reinterpret
    return view(dtype, shape, layout, _semantic=_semantic)


_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)
_END = gl.constexpr(SEQUENCE_END)
_HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _as_tile_of(tile, desc):
    """The memory of a tile in the shape of those of a descriptor."""
    if _HAS_REINTERPRET:
        return tile.reinterpret(tile.dtype, desc.block_shape, desc.layout)
    else:
        return tile._reinterpret(tile.dtype, desc.block_shape, desc.layout)


@gluon.jit
def load_chunk(chunks_ptr, work, num_heads):
    """(first query row, query rows, first key row, keys) of a unit of work."""
    ptr = chunks_ptr + (work // num_heads) * 4
    return gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3)


@gluon.jit
def num_key_tiles(len_k, BLOCK_N: gl.constexpr):
    """At least one: a sequence without keys meets one tile of zeros, which writes its zero output."""
    return gl.maximum((len_k + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def zero_rows(tile, num_rows, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a shared tile from ``num_rows`` on, eight at a time: the cleaner is one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    zeros = gl.zeros([8, D], tile.dtype, layout)
    for r in gl.static_range(BLOCK_N // 8):
        part = tile.slice(r * 8, 8, dim=0)
        if num_rows <= r * 8:
            part.store(zeros)
        else:
            if num_rows < r * 8 + 8:
                keep = (rows < num_rows - r * 8)[:, None] & gl.full([8, D], True, gl.int1, layout)
                part.store(gl.where(keep, part.load(layout), zeros))


@gluon.jit
def store_tile(out_desc, out_ptr, out_tile, out, row, num_rows, channel, stride_ot, D: gl.constexpr):
    """Write 64 output rows: whole tiles by TMA, the last rows of a sequence one by one."""
    tma.store_wait(pendings=0)
    out_tile.store(out)
    if num_rows >= _ROWS:
        fence_async_shared()
        tma_store(out_desc, [row, channel], out_tile)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
        rows = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
        channels = gl.arange(0, D, gl.SliceLayout(0, layout))
        pointers = out_ptr + row.to(gl.int64) * stride_ot + channel + (rows[:, None] * stride_ot + channels[None, :])
        mask = (rows < num_rows)[:, None] & (channels < D)[None, :]
        gl.store(pointers, out_tile.load(layout), mask=mask)


@gluon.jit
def copy_rows(desc, first, length, row, channel, barrier, tile):
    """Copy rows of the sequence [first, first + length) from ``row`` on by a ``sequence_descriptor``, then zeros."""
    place = _as_tile_of(tile, desc)
    tma_load(desc, [_END, first + length, _END - length + row, channel], barrier, place)


@gluon.jit
def write_rows(desc, tile, out, row, num_rows, channel):
    """Write the first ``num_rows`` of 64 rows by a ``sequence_descriptor``; ``tile`` is free until the copy ends."""
    tile.store(out)
    fence_async_shared()
    send_rows(desc, tile, row, num_rows, channel)


@gluon.jit
def send_rows(desc, tile, row, num_rows, channel):
    """The second half of ``write_rows``: the rows are in the tile, and fenced."""
    length = gl.minimum(gl.maximum(num_rows, 0), _ROWS)
    place = _as_tile_of(tile, desc)
    tma_store(desc, [_END, row + length, _END - length, channel], place)


@gluon.jit
def allocate_barriers(NUM: gl.constexpr):
    """``NUM`` barriers, not yet initialised."""
    return gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())


@gluon.jit
def release(barrier, pred):
    """Arrive, by expecting no bytes: around an arrival the compiler puts barriers of the warpgroup, around this none.

    A ``thread_barrier`` behind the waits for products that read what is given back must have come before.
    """
    mbarrier.expect(barrier, 0, pred=pred)


@gluon.jit
def load_queries(q_desc, q_tiles, q_ready, q_empty, first, t, channel, tile, D: gl.constexpr):
    """Copy the query tiles of both consumers, ``t`` tiles behind row ``first``; each consumer has two places."""
    for w in gl.static_range(2):
        slot = w * 2 + (tile & 1)
        mbarrier.wait(q_empty.index(slot), ((tile >> 1) & 1) ^ 1)
        mbarrier.expect(q_ready.index(slot), _ROWS * D * 2)
        tma_load(q_desc, [first + t * _TILE_ROWS + w * _ROWS, channel], q_ready.index(slot), q_tiles.index(slot))


@gluon.jit
def load_rows(desc, ring, ready, first, length, row, channel, s, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Copy rows [row, row + BLOCK_N) of a sequence to place ``s`` of a ring; rows past its end become zeros.

    ``desc`` is a ``sequence_descriptor``: its coordinates are those of the row counted from the sequence's end.
    """
    mbarrier.expect(ready.index(s), BLOCK_N * D * 2)
    place = _as_tile_of(ring.index(s), desc)
    tma_load(desc, [_END, first + length, _END - length + row, channel], ready.index(s), place)
