"""Hopper forward of jagged attention in Gluon: persistent, loads by TMA, softmax under the products of the same warps.

A unit of work is a head and a chunk of query rows of one sequence (``schedule.py``). Three roles share a program:

* the producer copies tiles of Q, and of K and V into a ring of stages. Rows past the end of a sequence come as zeros:
  their probability is 0, but 0 times an infinity, which the next sequence may hold, is not;
* two consumers own 64 query rows each. A consumer issues the scores of the next key tile, be it of the next chunk,
  and the product of this tile's probabilities with its values, and takes the softmax of those scores while the values
  are multiplied (FlashAttention-3, Shah et al., arXiv:2407.08608).

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
    load_chunk,
    load_queries,
    load_rows,
    num_key_tiles,
    store_rows,
)

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)
_LN2 = gl.constexpr(math.log(2.0))


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, chunks_ptr, q_tiles, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    num_works, num_heads, GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    tile = 0  # query tiles so far
    stage = 0  # key tiles so far
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        head = work % num_heads
        channel_q = head * D
        channel_k = (head // GROUP) * D
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


@gluon.jit
def _exp2(x):
    # Without the two multiplications that keep subnormal results, which no sum with a 1 in it would show.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _softmax(scores, row_max, row_sum, num_keys, scale_log2, layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """(probabilities, maximum, sum, factor of earlier sums) of a tile whose first ``num_keys`` keys are valid."""
    if num_keys < BLOCK_N:
        columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        scores = gl.where((columns < num_keys)[None, :], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    # A row that has met no key yet has maximum -inf; exp2(-inf - 0) = 0 keeps it empty.
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)
    p = _exp2(scores * scale_log2 - shift[:, None])
    factor = _exp2(row_max * scale_log2 - shift)
    return p, new_max, row_sum * factor + gl.sum(p, 1), factor


@gluon.jit
def _consume(
    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready, k_empty,
    v_ready, v_empty, num_works, num_heads, scale_log2, RESTS: gl.constexpr, W: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
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
    no_max = gl.full([_ROWS], float("-inf"), gl.float32, row_layout)
    no_sum = gl.zeros([_ROWS], gl.float32, row_layout)
    acc = gl.zeros([_ROWS, D], gl.float32, out_layout)
    rows = gl.arange(0, _ROWS, row_layout)
    out_tile = out_tiles.index(W)
    step = gl.num_programs(0)
    work = gl.program_id(0)
    if work < num_works:
        first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        mbarrier.wait(q_ready.index(W * 2), 0)
        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma(
            q_tiles.index(W * 2), k_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(0), count=1, pred=len_q <= _TILE_ROWS)
        mbarrier.arrive(q_empty.index(W * 2), count=1, pred=len_k <= BLOCK_N)
        e, row_max, row_sum, _factor = _softmax(scores, no_max, no_sum, len_k, scale_log2, scores_layout, BLOCK_N)
        p = gl.convert_layout(e.to(dtype), p_layout)
        tile = 0  # query tiles so far
        base = 0  # key tiles of earlier chunks
        for work in range(gl.program_id(0), num_works, step):
            following = gl.minimum(work + step, num_works - 1)
            next_q, next_len_q, _next_first_k, next_len_k = load_chunk(chunks_ptr, following, num_heads)
            is_final_work = work + step >= num_works
            num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
            num_keys = num_key_tiles(len_k, BLOCK_N)
            for t in range(num_tiles):
                is_last_tile = t == num_tiles - 1
                q = q_tiles.index(W * 2 + (tile & 1))
                num_left = num_keys
                if RESTS and W == 1:
                    # In the last tile of a sequence. The first keys' product is there already, and worth nothing.
                    is_resting = t * _TILE_ROWS + W * _ROWS >= len_q
                    num_left = gl.where(is_resting, 1, num_keys)
                    for j in range(1, gl.where(is_resting, num_keys, 1)):
                        s = (base + j) % STAGES
                        s_v = (base + j - 1) % STAGES
                        mbarrier.wait(k_ready.index(s), ((base + j) // STAGES) & 1)
                        mbarrier.arrive(k_empty.index(s), count=1)
                        mbarrier.wait(v_ready.index(s_v), ((base + j - 1) // STAGES) & 1)
                        mbarrier.arrive(v_empty.index(s_v), count=1)
                        mbarrier.arrive(q_empty.index(W * 2 + (tile & 1)), count=1, pred=j == num_keys - 1)
                for j in range(1, num_left):
                    s = (base + j) % STAGES
                    s_v = (base + j - 1) % STAGES
                    mbarrier.wait(k_ready.index(s), ((base + j) // STAGES) & 1)
                    scores = warpgroup_mma(q, k_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                    mbarrier.wait(v_ready.index(s_v), ((base + j - 1) // STAGES) & 1)
                    acc = warpgroup_mma(p, v_ring.index(s_v), acc, use_acc=(j > 1), is_async=True)
                    scores = warpgroup_mma_wait(1, deps=[scores])
                    e, row_max, row_sum, factor = _softmax(
                        scores, row_max, row_sum, len_k - j * BLOCK_N, scale_log2, scores_layout, BLOCK_N
                    )
                    next_p = gl.convert_layout(e.to(dtype), p_layout)
                    acc, p, next_p = warpgroup_mma_wait(0, deps=[acc, p, next_p])
                    # A key tile leaves the ring with the last query tile of its chunk, and behind the softmax, which
                    # the barriers would hold back.
                    mbarrier.arrive(k_empty.index(s), count=1, pred=is_last_tile)
                    mbarrier.arrive(q_empty.index(W * 2 + (tile & 1)), count=1, pred=j == num_keys - 1)
                    mbarrier.arrive(v_empty.index(s_v), count=1, pred=is_last_tile)
                    acc = acc * gl.convert_layout(factor, out_row_layout)[:, None]
                    p = next_p
                # The last values, beside the first scores of the next query tile, be it of the next chunk.
                has_next = (is_last_tile & is_final_work) == 0
                next_stage = gl.where(is_last_tile, base + num_keys, base)
                following_len_k = gl.where(is_last_tile, next_len_k, len_k)
                rows_after = gl.where(is_last_tile, next_len_q, len_q - (t + 1) * _TILE_ROWS)
                s = next_stage % STAGES
                s_v = (base + num_keys - 1) % STAGES
                slot = W * 2 + ((tile + 1) & 1)
                if has_next:
                    mbarrier.wait(q_ready.index(slot), ((tile + 1) >> 1) & 1)
                    mbarrier.wait(k_ready.index(s), (next_stage // STAGES) & 1)
                scores = warpgroup_mma(
                    q_tiles.index(slot), k_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                mbarrier.wait(v_ready.index(s_v), ((base + num_keys - 1) // STAGES) & 1)
                acc = warpgroup_mma(p, v_ring.index(s_v), acc, use_acc=(num_keys > 1), is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                e, next_max, next_sum, _factor = _softmax(
                    scores, no_max, no_sum, following_len_k, scale_log2, scores_layout, BLOCK_N
                )
                next_p = gl.convert_layout(e.to(dtype), p_layout)
                acc, p, next_p = warpgroup_mma_wait(0, deps=[acc, p, next_p])
                mbarrier.arrive(k_empty.index(s), count=1, pred=has_next & (rows_after <= _TILE_ROWS))
                mbarrier.arrive(q_empty.index(slot), count=1, pred=has_next & (following_len_k <= BLOCK_N))
                mbarrier.arrive(v_empty.index(s_v), count=1, pred=is_last_tile)
                is_empty = row_sum == 0.0
                total = gl.where(is_empty, 1.0, row_sum)
                row = first_q + t * _TILE_ROWS + W * _ROWS
                num_rows = len_q - t * _TILE_ROWS - W * _ROWS
                head = work % num_heads
                out = (acc * gl.convert_layout(1.0 / total, out_row_layout)[:, None]).to(dtype)
                store_rows(out_desc, out_tile, out, row, num_rows, head * D, D)
                lse = gl.where(is_empty, float("-inf"), row_max * scale_log2 * _LN2 + gl.log(total))
                gl.store(lse_ptr + row.to(gl.int64) * num_heads + head + rows * num_heads, lse, mask=rows < num_rows)
                p = next_p
                row_max = next_max
                row_sum = next_sum
                tile += 1
            base += num_keys
            first_q = next_q
            len_q = next_len_q
            len_k = next_len_k
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
    STAGES: gl.constexpr,
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
    for i in gl.static_range(4):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    num_works = gl.load(num_chunks_ptr) * num_heads
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready,
                    q_empty, k_ready, k_empty, v_ready, v_empty, num_works, num_heads, scale_log2, RESTS,
                    0, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _consume,
                (
                    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready,
                    q_empty, k_ready, k_empty, v_ready, v_empty, num_works, num_heads, scale_log2, RESTS,
                    1, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, chunks_ptr, q_tiles, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty,
                    v_ready, v_empty, num_works, num_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
