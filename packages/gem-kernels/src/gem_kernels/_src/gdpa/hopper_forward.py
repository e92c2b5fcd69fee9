"""Hopper forward of GDPA in Gluon: persistent, loads by TMA, two warpgroups that overlap products and activation.

A unit of work is a head and a chunk of query rows of one sequence (``schedule.py``). Four roles share a program:

* one producer copies tiles of K and V into a ring of stages. Rows past the end of a sequence come as zeros, so that no
  product needs a mask: a zero value adds nothing, whatever the activation makes of the score of a zero key;
* another copies tiles of Q, so that none of these waits for a place that keys have to leave;
* two consumers own 64 query rows each and take a key tile in two halves. A consumer issues the scores of the next
  half, be it of the next chunk, before it activates the scores it has, so short keys overlap as well as long ones, and
  the first half's values are multiplied while the second half is activated.

A chunk of several query tiles keeps its keys in the ring until its last tile has met them. Where the query rows are
added to the output (``gdpa_norm_block``), a query tile stays until the output of its rows is there.

Where sequences end inside tiles (``ENDS``), the half of a key tile that holds no key is left out, and so are the keys
of a query tile in which the second consumer has no row. That takes code between the tiles, which costs time elsewhere.

The order of scores, activation and barriers in the consumer is such that the compiler issues products and activation
by turns. Products all issued ahead of the activation look as if they would overlap better, and cost up to a sixth.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
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
    store_tile,
)

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def _produce(
    k_desc, v_desc, chunks_ptr, k_ring, v_ring, k_ready, k_empty, v_ready, v_empty, num_works, num_heads,
    GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0  # key tiles so far
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_q, _len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        channel_k = (work % num_heads // GROUP) * D
        for j in range(num_key_tiles(len_k, BLOCK_N)):
            s = stage % STAGES
            phase = ((stage // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(s), phase)
            load_rows(k_desc, k_ring, k_ready, first_k, len_k, j * BLOCK_N, channel_k, s, BLOCK_N, D)
            mbarrier.wait(v_empty.index(s), phase)
            load_rows(v_desc, v_ring, v_ready, first_k, len_k, j * BLOCK_N, channel_k, s, BLOCK_N, D)
            stage += 1


@gluon.jit
def _produce_queries(
    q_desc, chunks_ptr, q_tiles, q_ready, q_empty, num_works, num_heads, D: gl.constexpr
):  # fmt: skip
    tile = 0  # query tiles so far
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, _len_k = load_chunk(chunks_ptr, work, num_heads)
        channel = (work % num_heads) * D
        for t in range((len_q + _TILE_ROWS - 1) // _TILE_ROWS):
            load_queries(q_desc, q_tiles, q_ready, q_empty, first_q, t, channel, tile, D)
            tile += 1


@gluon.jit
def _activate(
    scores, pre_scale, ACTIVATION: gl.constexpr, IN_PAIRS: gl.constexpr, HAS_PRE_SCALE: gl.constexpr,
    dtype: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Activated scores as the left operand of the second product."""
    if IN_PAIRS:
        p = ACTIVATION(scores, pre_scale)
    else:
        if HAS_PRE_SCALE:
            scores = scores * pre_scale
        p = ACTIVATION(scores).to(dtype)
    return gl.convert_layout(p, layout)


@gluon.jit
def _await_scores(q_ready, k_ready, tile, stage, W: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the operands of the next scores."""
    mbarrier.wait(q_ready.index(W * 2 + (tile & 1)), (tile >> 1) & 1)
    mbarrier.wait(k_ready.index(stage % STAGES), (stage // STAGES) & 1)


@gluon.jit
def _consume(
    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready, k_empty,
    v_ready, v_empty, num_works, num_heads, pre_scale, post_scale, ACTIVATION: gl.constexpr, IN_PAIRS: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr, ADD_QUERIES: gl.constexpr, ENDS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_tiles.dtype
    HALF: gl.constexpr = BLOCK_N // 2
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, HALF], gl.float32, scores_layout)
    acc = gl.zeros([_ROWS, D], gl.float32, out_layout)
    out_tile = out_tiles.index(W)
    step = gl.num_programs(0)
    work = gl.program_id(0)
    if work < num_works:
        first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        mbarrier.wait(q_ready.index(W * 2), 0)
        mbarrier.wait(k_ready.index(0), 0)
        k_first = k_ring.index(0).slice(0, HALF, dim=0)
        scores = warpgroup_mma(q_tiles.index(W * 2), k_first.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        tile = 0  # query tiles so far
        base = 0  # key tiles of earlier chunks
        for work in range(gl.program_id(0), num_works, step):
            following = gl.minimum(work + step, num_works - 1)
            next_q, next_len_q, _next_first_k, next_len_k = load_chunk(chunks_ptr, following, num_heads)
            is_final_work = work + step >= num_works
            num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
            num_keys = num_key_tiles(len_k, BLOCK_N)
            num_whole = num_keys
            if ENDS:
                num_whole = (len_k + HALF - 1) // HALF // 2  # key tiles with keys in both halves
            for t in range(num_tiles):
                is_last_tile = t == num_tiles - 1
                q = q_tiles.index(W * 2 + (tile & 1))
                num_pairs = num_whole
                if ENDS:
                    # Without rows, in the last tile of a sequence, one half is left: with it come the next scores.
                    is_resting = t * _TILE_ROWS + W * _ROWS >= len_q
                    num_pairs = gl.where(is_resting, 0, num_whole)
                    if W == 1:
                        for j in range(gl.where(is_resting, num_keys - 1, 0)):
                            s = (base + j) % STAGES
                            phase = ((base + j) // STAGES) & 1
                            mbarrier.wait(k_ready.index(s), phase)
                            mbarrier.arrive(k_empty.index(s), count=1)
                            mbarrier.wait(v_ready.index(s), phase)
                            mbarrier.arrive(v_empty.index(s), count=1)
                for j in range(num_pairs):
                    s = (base + j) % STAGES
                    phase = ((base + j) // STAGES) & 1
                    is_last_key = j == num_keys - 1
                    has_next = (is_last_key & is_last_tile & is_final_work) == 0
                    # What the next scores are of: the next key tile, else the next query tile's first.
                    next_stage = gl.where(is_last_key, gl.where(is_last_tile, base + num_keys, base), base + j + 1)
                    next_tile = gl.where(is_last_key, tile + 1, tile)
                    next_q_tile = q_tiles.index(W * 2 + (next_tile & 1))
                    k_second = k_ring.index(s).slice(HALF, HALF, dim=0)
                    other_scores = warpgroup_mma(q, k_second.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    p = _activate(scores, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, dtype, p_layout)
                    mbarrier.wait(v_ready.index(s), phase)
                    acc = warpgroup_mma(p, v_ring.index(s).slice(0, HALF, dim=0), acc, use_acc=(j > 0), is_async=True)
                    other_scores = warpgroup_mma_wait(1, deps=[other_scores])
                    # A key tile leaves the ring with the last query tile of its chunk.
                    mbarrier.arrive(k_empty.index(s), count=1, pred=is_last_tile)
                    if not ADD_QUERIES:
                        mbarrier.arrive(q_empty.index(W * 2 + (tile & 1)), count=1, pred=is_last_key)
                    if has_next:
                        _await_scores(q_ready, k_ready, next_tile, next_stage, W, STAGES)
                    k_next = k_ring.index(next_stage % STAGES).slice(0, HALF, dim=0)
                    scores = warpgroup_mma(next_q_tile, k_next.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    other_p = _activate(other_scores, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, dtype, p_layout)
                    acc = warpgroup_mma(other_p, v_ring.index(s).slice(HALF, HALF, dim=0), acc, is_async=True)
                    scores, acc, p, other_p = warpgroup_mma_wait(0, deps=[scores, acc, p, other_p])
                    mbarrier.arrive(v_empty.index(s), count=1, pred=is_last_tile)
                if ENDS:
                    # A loop of one turn or none: out of a branch, ptxas lets products end wrong.
                    for _i in range(gl.where(is_resting, 1, num_keys - num_whole)):
                        s = (base + num_keys - 1) % STAGES
                        phase = ((base + num_keys - 1) // STAGES) & 1
                        has_next = (is_last_tile & is_final_work) == 0
                        next_stage = gl.where(is_last_tile, base + num_keys, base)
                        next_q_tile = q_tiles.index(W * 2 + ((tile + 1) & 1))
                        if W == 1:
                            mbarrier.wait(k_ready.index(s), phase)
                        mbarrier.arrive(k_empty.index(s), count=1, pred=is_last_tile)
                        if not ADD_QUERIES:
                            mbarrier.arrive(q_empty.index(W * 2 + (tile & 1)), count=1)
                        if has_next:
                            _await_scores(q_ready, k_ready, tile + 1, next_stage, W, STAGES)
                        k_next = k_ring.index(next_stage % STAGES).slice(0, HALF, dim=0)
                        next_scores = warpgroup_mma(
                            next_q_tile, k_next.permute((1, 0)), zeros, use_acc=False, is_async=True
                        )
                        p = _activate(scores, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, dtype, p_layout)
                        mbarrier.wait(v_ready.index(s), phase)
                        v_first = v_ring.index(s).slice(0, HALF, dim=0)
                        acc = warpgroup_mma(p, v_first, acc, use_acc=(num_pairs > 0), is_async=True)
                        scores, acc, p = warpgroup_mma_wait(0, deps=[next_scores, acc, p])
                        mbarrier.arrive(v_empty.index(s), count=1, pred=is_last_tile)
                row = first_q + t * _TILE_ROWS + W * _ROWS
                out = acc * post_scale
                if ADD_QUERIES:
                    out += q.load(out_layout).to(gl.float32)
                out = out.to(dtype)
                if ADD_QUERIES:
                    # Reads may still be under way at the barrier: without the fence the copy engine overwrites them.
                    fence_async_shared()
                    mbarrier.arrive(q_empty.index(W * 2 + (tile & 1)), count=1)
                store_tile(
                    out_desc, out_ptr, out_tile, out, row, len_q - t * _TILE_ROWS - W * _ROWS,
                    (work % num_heads) * D, stride_ot, D,
                )  # fmt: skip
                tile += 1
            base += num_keys
            first_q = next_q
            len_q = next_len_q
            len_k = next_len_k
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads"])
def _gdpa_hopper_fwd_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D) that end with a sequence
    v_desc,
    out_desc,  # (T_q, H * D), tiles of (64, D)
    out_ptr,
    stride_ot,
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,  # () int32
    num_heads,
    pre_scale,
    post_scale,
    ACTIVATION: gl.constexpr,
    IN_PAIRS: gl.constexpr,  # ACTIVATION takes scores and pre_scale, and makes bfloat16
    HAS_PRE_SCALE: gl.constexpr,  # pre_scale is not 1; not asked in pairs
    ADD_QUERIES: gl.constexpr,  # the output is that of the attention plus its query rows, of which it costs no read
    ENDS: gl.constexpr,  # leave out what lies behind the ends of sequences, as far as that is half a tile
    GROUP: gl.constexpr,  # query heads per key head
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], q_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], out_desc.layout)
    ring_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
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
                    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty,
                    k_ready, k_empty, v_ready, v_empty, num_works, num_heads, pre_scale, post_scale, ACTIVATION,
                    IN_PAIRS, HAS_PRE_SCALE, ADD_QUERIES, ENDS, 0, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _consume,
                (
                    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty,
                    k_ready, k_empty, v_ready, v_empty, num_works, num_heads, pre_scale, post_scale, ACTIVATION,
                    IN_PAIRS, HAS_PRE_SCALE, ADD_QUERIES, ENDS, 1, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _produce,
                (
                    k_desc, v_desc, chunks_ptr, k_ring, v_ring, k_ready, k_empty, v_ready, v_empty, num_works,
                    num_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
            (_produce_queries, (q_desc, chunks_ptr, q_tiles, q_ready, q_empty, num_works, num_heads, D)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
