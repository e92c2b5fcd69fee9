"""Roles that the backward kernels of gdpa and of jagged attention share: what copies their operands, and zeroes rows.

One kernel makes the gradients of keys and values, the other that of the queries.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS, load_chunk, num_key_tiles, tma_load, zero_rows

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def produce_dkdv(
    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, empty, raw, kv_ready,
    kv_empty, num_works, num_heads_kv, GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of a unit of work, and a ring of tiles of q and dO of all its query heads."""
    stage = 0
    pass_index = 0  # passes over a sequence's queries so far
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_k, _len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        head_kv = work % num_heads_kv
        slot = index & 1
        mbarrier.wait(kv_empty.index(slot), ((index >> 1) & 1) ^ 1)
        mbarrier.expect(kv_ready.index(slot), 2 * _TILE_ROWS * D * 2)
        tma_load(k_desc, [first_k, head_kv * D], kv_ready.index(slot), k_tiles.index(slot))
        tma_load(v_desc, [first_k, head_kv * D], kv_ready.index(slot), v_tiles.index(slot))
        num_tiles = num_key_tiles(len_q, _ROWS)
        for g in range(GROUP):
            channel = (head_kv * GROUP + g) * D
            for i in range(num_tiles):
                s = stage % STAGES
                mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
                if i == num_tiles - 1:
                    r = pass_index % STAGES
                    mbarrier.expect(raw.index(r), 2 * _ROWS * D * 2)
                    tma_load(q_desc, [first_q + i * _ROWS, channel], raw.index(r), q_ring.index(s))
                    tma_load(do_desc, [first_q + i * _ROWS, channel], raw.index(r), do_ring.index(s))
                else:
                    mbarrier.expect(ready.index(s), 2 * _ROWS * D * 2)
                    tma_load(q_desc, [first_q + i * _ROWS, channel], ready.index(s), q_ring.index(s))
                    tma_load(do_desc, [first_q + i * _ROWS, channel], ready.index(s), do_ring.index(s))
                stage += 1
            pass_index += 1
        index += 1  # noqa: SIM113


@gluon.jit
def produce_dq(
    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, q_ready, q_empty, ready, empty, raw,
    num_works, num_heads, GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copy a unit's query tiles of q and dO, and its keys and values into a ring, where they stay for all of them."""
    tile = 0
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        head = work % num_heads
        channel_q = head * D
        channel_k = (head // GROUP) * D
        num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
        num_keys = num_key_tiles(len_k, BLOCK_N)
        for t in range(num_tiles):
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (tile & 1) ^ 1)
                mbarrier.expect(q_ready.index(w), 2 * _ROWS * D * 2)
                row = first_q + t * _TILE_ROWS + w * _ROWS
                tma_load(q_desc, [row, channel_q], q_ready.index(w), q_tiles.index(w))
                tma_load(do_desc, [row, channel_q], q_ready.index(w), do_tiles.index(w))
            tile += 1
            if t == 0:
                for j in range(num_keys):
                    s = stage % STAGES
                    mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
                    row_k = first_k + j * BLOCK_N
                    if j == num_keys - 1:
                        r = index % STAGES
                        mbarrier.expect(raw.index(r), 2 * BLOCK_N * D * 2)
                        tma_load(k_desc, [row_k, channel_k], raw.index(r), k_ring.index(s))
                        tma_load(v_desc, [row_k, channel_k], raw.index(r), v_ring.index(s))
                    else:
                        mbarrier.expect(ready.index(s), 2 * BLOCK_N * D * 2)
                        tma_load(k_desc, [row_k, channel_k], ready.index(s), k_ring.index(s))
                        tma_load(v_desc, [row_k, channel_k], ready.index(s), v_ring.index(s))
                    stage += 1
        index += 1  # noqa: SIM113


@gluon.jit
def clean_dq(
    chunks_ptr, k_ring, v_ring, ready, raw, num_works, num_heads, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Zero the rows behind a sequence in its last tile of keys and values."""
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_q, _len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        num_keys = num_key_tiles(len_k, BLOCK_N)
        s = (stage + num_keys - 1) % STAGES
        rest = len_k - (num_keys - 1) * BLOCK_N
        mbarrier.wait(raw.index(index % STAGES), (index // STAGES) & 1)
        if rest < BLOCK_N:
            zero_rows(k_ring.index(s), rest, BLOCK_N, D)
            zero_rows(v_ring.index(s), rest, BLOCK_N, D)
            fence_async_shared()
        mbarrier.arrive(ready.index(s), count=1)
        stage += num_keys
        index += 1  # noqa: SIM113
