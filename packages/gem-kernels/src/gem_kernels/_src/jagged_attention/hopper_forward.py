"""Hopper forward of jagged attention in Gluon: persistent, loads by TMA, softmax under the products.

A unit of work is a head and a chunk of query rows of one sequence (``schedule.py``). Three roles share a program:

* the producer copies tiles of Q, and of K and V into a ring of stages. Rows past the end of a sequence come as zeros:
  their probability is 0, but 0 times an infinity, which the next sequence may hold, is not;
* two consumers own 64 query rows each. A consumer issues the scores of the next key tile, be it of the next chunk,
  and the product of this tile's probabilities with its values. It takes the maxima of those scores while the values are
  multiplied, and the exponentials behind that, where the other consumer's products run (FlashAttention-3, Shah et al.,
  arXiv:2407.08608).

A chunk of several query tiles keeps its keys in the ring until its last tile has met them. Where sequences end inside
tiles (``RESTS``), the second consumer leaves out the keys of a query tile in which it has no row.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_kernels._src.attention.hopper.tiles import (
    ROWS,
    TILE_ROWS,
    allocate_barriers,
    load_queries,
    load_rows,
    num_key_tiles,
    release,
    thread_barrier,
    write_rows,
)

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)
_LN2 = gl.constexpr(math.log(2.0))


@gluon.jit
def _load_chunk(chunks_ptr, chunk, pred):
    """(first query row, query rows, first key row, keys) of a chunk; zeros without ``pred``."""
    ptr = chunks_ptr + chunk * 4
    return (
        gl.load(ptr, mask=pred, other=0),
        gl.load(ptr + 1, mask=pred, other=0),
        gl.load(ptr + 2, mask=pred, other=0),
        gl.load(ptr + 3, mask=pred, other=0),
    )


@gluon.jit
def _next_unit(chunk, head, num_heads, step_chunks, step_heads):
    """Chunk and head of a program's next unit of work, without a division."""
    head += step_heads
    wraps = (head >= num_heads).to(gl.int32)
    return chunk + step_chunks + wraps, head - wraps * num_heads


@gluon.jit
def _advance(place, phase, STAGES: gl.constexpr):
    """The next place of a ring, and the phase of its barriers."""
    place = (place + 1) & (STAGES - 1)
    return place, phase ^ (place == 0).to(gl.int32)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, chunks_ptr, q_tiles, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    num_works, num_heads, step_chunks, step_heads, GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    tile = 0  # query tiles so far
    stage = 0  # key tiles so far
    work = gl.program_id(0)
    chunk = work // num_heads
    head = work % num_heads
    first_q, len_q, first_k, len_k = _load_chunk(chunks_ptr, chunk, work < num_works)
    while work < num_works:
        channel_q = head * D
        channel_k = (head // GROUP) * D
        # A unit ahead, so that neither this role nor, in the cache by then, a consumer waits for it.
        work += gl.num_programs(0)
        chunk, head = _next_unit(chunk, head, num_heads, step_chunks, step_heads)
        next_first_q, next_len_q, next_first_k, next_len_k = _load_chunk(chunks_ptr, chunk, work < num_works)
        num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
        num_keys = num_key_tiles(len_k, BLOCK_N)
        # Scores come one tile before values.
        for j in range(num_keys + 1):
            if j < num_keys:
                s = stage % STAGES
                mbarrier.wait(k_empty.index(s), ((stage // STAGES) & 1) ^ 1)
                load_rows(k_desc, k_ring, k_ready, first_k, len_k, j * BLOCK_N, channel_k, s, BLOCK_N, D)
            if j == 0:
                load_queries(q_desc, q_tiles, q_ready, q_empty, first_q, 0, channel_q, tile, D)
            else:
                s_v = (stage - 1) % STAGES
                mbarrier.wait(v_empty.index(s_v), (((stage - 1) // STAGES) & 1) ^ 1)
                load_rows(v_desc, v_ring, v_ready, first_k, len_k, (j - 1) * BLOCK_N, channel_k, s_v, BLOCK_N, D)
            stage += 1
        stage -= 1
        tile += 1
        for t in range(1, num_tiles):
            load_queries(q_desc, q_tiles, q_ready, q_empty, first_q + t * _TILE_ROWS, 0, channel_q, tile, D)
            tile += 1
        first_q = next_first_q
        len_q = next_len_q
        first_k = next_first_k
        len_k = next_len_k


@gluon.jit
def _exp2(x):
    # Without the two multiplications that keep subnormal results, which no sum with a 1 in it would show.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _mask(scores, num_keys, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """Scores of a tile whose first ``num_keys`` keys are valid."""
    if num_keys < BLOCK_N:
        columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        scores = gl.where((columns < num_keys)[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def _shift(row_max, scale_log2):
    # A row that has met no key yet has maximum -inf; exp2(-inf - 0) = 0 keeps it empty.
    return gl.where(row_max == float("-inf"), 0.0, row_max * scale_log2)


@gluon.jit
def _consume(
    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready, k_empty,
    v_ready, v_empty, passed, num_works, num_heads, step_chunks, step_heads, scale_log2,
    RESTS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, scores_layout)
    acc = gl.zeros([_ROWS, D], gl.float32, out_layout)
    rows = gl.arange(0, _ROWS, row_layout)
    out_tile = out_tiles.index(W)
    work = gl.program_id(0)
    if work < num_works:
        chunk = work // num_heads
        head = work % num_heads
        row, left, _first_k, len_k = _load_chunk(chunks_ptr, chunk, True)
        mbarrier.wait(q_ready.index(W * 2), 0)
        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma(
            q_tiles.index(W * 2), k_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        thread_barrier()
        release(k_empty.index(0), left <= _TILE_ROWS)
        scores = _mask(scores, len_k, scores_layout, BLOCK_N)
        row_max = gl.max(scores, 1)
        e = _exp2(scores * scale_log2 - _shift(row_max, scale_log2)[:, None])
        row_sum = gl.sum(e, 1)
        p = gl.convert_layout(e.to(dtype), p_layout)
        tile = 0  # query tiles so far
        first_place = 0  # of this chunk's first key tile in the rings
        first_phase = 0
        while work < num_works:
            # A query tile: ``left`` rows from ``row`` on are left of its chunk.
            is_last_tile = left <= _TILE_ROWS
            num_keys = num_key_tiles(len_k, BLOCK_N)
            q = q_tiles.index(W * 2 + (tile & 1))
            place_v = first_place
            phase_v = first_phase
            place_k, phase_k = _advance(place_v, phase_v, STAGES)
            num_left = num_keys
            if RESTS and W == 1:
                # In the last tile of a sequence. The first keys' product is there already, and worth nothing.
                is_resting = left <= W * _ROWS
                num_left = gl.where(is_resting, 1, num_keys)
                for _j in range(1, gl.where(is_resting, num_keys, 1)):
                    mbarrier.wait(k_ready.index(place_k), phase_k)
                    release(k_empty.index(place_k), True)
                    mbarrier.wait(v_ready.index(place_v), phase_v)
                    release(v_empty.index(place_v), True)
                    place_v = place_k
                    phase_v = phase_k
                    place_k, phase_k = _advance(place_v, phase_v, STAGES)
                    thread_barrier()
            for j in range(1, num_left):
                mbarrier.wait(k_ready.index(place_k), phase_k)
                scores = warpgroup_mma(q, k_ring.index(place_k).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(place_v), phase_v)
                acc = warpgroup_mma(p, v_ring.index(place_v), acc, use_acc=(j > 1), is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                scores = _mask(scores, len_k - j * BLOCK_N, scores_layout, BLOCK_N)
                new_max = gl.maximum(row_max, gl.max(scores, 1))
                shift = _shift(new_max, scale_log2)
                factor = _exp2(row_max * scale_log2 - shift)
                # Ends at once. Without it, the next wait would come before the maxima, which the product covers.
                mbarrier.wait(passed.index(0), 1)
                acc, p, scores = warpgroup_mma_wait(0, deps=[acc, p, scores])
                thread_barrier()
                # A key tile leaves the ring with the last query tile of its chunk.
                release(k_empty.index(place_k), is_last_tile)
                release(v_empty.index(place_v), is_last_tile)
                place_v = place_k
                phase_v = phase_k
                place_k, phase_k = _advance(place_v, phase_v, STAGES)
                acc = acc * gl.convert_layout(factor, out_row_layout)[:, None]
                e = _exp2(scores * scale_log2 - shift[:, None])
                row_sum = row_sum * factor + gl.sum(e, 1)
                row_max = new_max
                p = gl.convert_layout(e.to(dtype), p_layout)
            # The last values, beside the first scores of the next query tile, be it of the next chunk.
            next_work = gl.where(is_last_tile, work + gl.num_programs(0), work)
            has_next = next_work < num_works
            first_place = gl.where(is_last_tile, place_k, first_place)
            first_phase = gl.where(is_last_tile, phase_k, first_phase)
            slot = W * 2 + ((tile + 1) & 1)
            mbarrier.wait(q_ready.index(slot), ((tile + 1) >> 1) & 1, pred=has_next)
            mbarrier.wait(k_ready.index(first_place), first_phase, pred=has_next)
            scores = warpgroup_mma(
                q_tiles.index(slot), k_ring.index(first_place).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            # Arrives while the scores are multiplied.
            chunk_after, head_after = _next_unit(chunk, head, num_heads, step_chunks, step_heads)
            chunk = gl.where(is_last_tile, chunk_after, chunk)
            next_row, next_rows, _first_k, len_k = _load_chunk(chunks_ptr, chunk, has_next)
            mbarrier.wait(v_ready.index(place_v), phase_v)
            acc = warpgroup_mma(p, v_ring.index(place_v), acc, use_acc=(num_keys > 1), is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            scores = _mask(scores, len_k, scores_layout, BLOCK_N)
            next_max = gl.max(scores, 1)
            shift = _shift(next_max, scale_log2)
            mbarrier.wait(passed.index(0), 1)
            acc, p, scores = warpgroup_mma_wait(0, deps=[acc, p, scores])
            tma.store_wait(pendings=0)
            next_left = gl.where(is_last_tile, next_rows, left - _TILE_ROWS)
            release(q_empty.index(W * 2 + (tile & 1)), True)
            release(k_empty.index(first_place), has_next & (next_left <= _TILE_ROWS))
            release(v_empty.index(place_v), is_last_tile)
            is_empty = row_sum == 0.0
            total = gl.where(is_empty, 1.0, row_sum)
            first_row = row + W * _ROWS
            num_rows = left - W * _ROWS
            out = (acc * gl.convert_layout(_reciprocal(total), out_row_layout)[:, None]).to(dtype)
            write_rows(out_desc, out_tile, out, first_row, num_rows, head * D)
            lse = gl.where(is_empty, float("-inf"), (row_max * scale_log2 + _log2(total)) * _LN2)
            lse_row_ptr = lse_ptr + first_row.to(gl.int64) * num_heads + head
            gl.store(lse_row_ptr + rows * num_heads, lse, mask=rows < num_rows)
            e = _exp2(scores * scale_log2 - shift[:, None])
            row_sum = gl.sum(e, 1)
            row_max = next_max
            p = gl.convert_layout(e.to(dtype), p_layout)
            tile += 1
            row = gl.where(is_last_tile, next_row, row + _TILE_ROWS)
            left = next_left
            work = next_work
            head = gl.where(is_last_tile, head_after, head)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads"])
def _jagged_attention_hopper_fwd_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D) that end with a sequence
    v_desc,
    out_desc,  # (T_q, H * D), tiles of (64, D) that end with a sequence
    lse_ptr,  # (T_q, H) float32, natural logarithm
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,  # () int32
    num_heads,
    scale_log2,  # scale * log2(e), positive
    RESTS: gl.constexpr,  # the second consumer leaves out keys where it has no row
    GROUP: gl.constexpr,  # query heads per key head
    STAGES: gl.constexpr,  # a power of two
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    ring_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], q_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], ring_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], ring_layout)
    q_ready = allocate_barriers(4)
    q_empty = allocate_barriers(4)
    k_ready = allocate_barriers(STAGES)
    k_empty = allocate_barriers(STAGES)
    v_ready = allocate_barriers(STAGES)
    v_empty = allocate_barriers(STAGES)
    passed = allocate_barriers(1)  # nobody arrives, and a wait for the phase before its first ends at once
    for i in gl.static_range(4):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(passed.index(0), count=1)
    num_works = gl.load(num_chunks_ptr) * num_heads
    step_chunks = gl.num_programs(0) // num_heads
    step_heads = gl.num_programs(0) % num_heads
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready,
                    k_empty, v_ready, v_empty, passed, num_works, num_heads, step_chunks, step_heads,
                    scale_log2, RESTS, 0, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _consume,
                (
                    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready,
                    k_empty, v_ready, v_empty, passed, num_works, num_heads, step_chunks, step_heads,
                    scale_log2, RESTS, 1, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, chunks_ptr, q_tiles, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty,
                    v_ready, v_empty, num_works, num_heads, step_chunks, step_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
