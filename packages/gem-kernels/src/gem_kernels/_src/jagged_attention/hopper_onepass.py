"""Hopper backward of jagged attention in one kernel, in Gluon: every product once, five of them.

For long sequences (``hopper_launch``); ``hopper_backward`` computes scores and score gradients twice and adds nothing
across programs. A unit of work is 128 keys of one sequence and key head, against all its queries in tiles of 64
(``hopper_units``). The gradients of keys and values stay in registers. Each query tile's part of dq is added in float32
by the copy engine, in the order of the sequence's key tiles, so that the result is the same on every run: a counter for
each tile says how many have been added, and whose turn it is. ``finish`` scales and rounds the sums.

Programs claim units in the order of the list, and a unit waits for units before it alone, which are done or run on a
program that has begun: there is always one that waits for nobody, however many programs run at a time.

Six roles share a program:

* the producer claims units, and copies keys, values, and a ring of tiles of q and dO;
* the cleaner zeroes rows behind a sequence in its last tiles, and brings the log-sum-exp and delta of queries;
* two consumers own 64 keys each, products transposed as in ``hopper_backward``, and write their score gradients to
  shared memory, where each takes those of both for one half of the channels of dq. It does so one query tile later,
  when the other has long written its part;
* an adder for each half sends the parts of dq to the copy engine when it is their turn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_kernels._src.attention.hopper.call import call
from gem_kernels._src.attention.hopper.tiles import (
    ROWS,
    TILE_ROWS,
    allocate_barriers,
    load_chunk,
    store_tile,
    tma_add,
    tma_load,
    tma_store,
    view_as,
    zero_rows,
)
from gem_kernels._src.attention.hopper.turns import (
    NUM_WORKS,
    announce,
    await_work,
    claim,
    fence_turn,
    pass_turn,
    turn_of,
)
from gem_kernels._src.jagged_attention.hopper_forward import _exp2

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)
_NUM_WORKS = gl.constexpr(NUM_WORKS)
FINISH_ROWS = 32


@gluon.jit
def _num_query_tiles(len_q, GROUP: gl.constexpr):
    """At least one, which writes zero gradients of keys without queries, and two for each unit of work.

    A unit's keys are read until the first tile of the next one, and its own last tile waits for the next one's keys,
    whose place is that of the unit before: with one tile both would be the same.
    """
    return gl.maximum((len_q + _ROWS - 1) // _ROWS, 2 if GROUP == 1 else 1)


# ---------------------------------------------------------------- roles


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tile, q_ready, q_empty, do_ready,
    do_empty, raw, k_ready, k_raw, v_ready, works, work_ready, work_empty, claims_ptr, num_works, num_heads_kv,
    GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0  # query tiles so far
    num_raw = 0  # of them, those that the cleaner touches
    index = 0  # units of work so far
    num_partial = 0  # key tiles that the cleaner touches
    count = 0  # query tiles of the unit before
    work = claim(claims_ptr)
    announce(works, work_ready, work_empty, 0, work)
    while work < num_works:
        first_k, len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        head_kv = work % num_heads_kv
        slot = index & 1
        # Keys are read until the first query tile behind them. The ring has waited for it if there were more than two.
        if count <= STAGES:
            mbarrier.wait(q_empty.index(stage % STAGES), ((stage // STAGES) & 1) ^ 1)
        if len_k < _TILE_ROWS:
            place = num_partial & 1
            mbarrier.expect(k_raw.index(place), _TILE_ROWS * D * 2)
            tma_load(k_desc, [first_k, head_kv * D], k_raw.index(place), k_tiles.index(slot))
            num_partial += 1
        else:
            mbarrier.expect(k_ready.index(slot), _TILE_ROWS * D * 2)
            tma_load(k_desc, [first_k, head_kv * D], k_ready.index(slot), k_tiles.index(slot))
        num_tiles = _num_query_tiles(len_q, GROUP)
        for g in range(GROUP):
            head = head_kv * GROUP + g
            for i in range(num_tiles):
                s = stage % STAGES
                row = first_q + i * _ROWS
                is_partial = len_q - i * _ROWS < _ROWS
                r = num_raw % STAGES
                mbarrier.wait(do_empty.index(s), ((stage // STAGES) & 1) ^ 1)
                if is_partial:
                    mbarrier.expect(raw.index(r), 2 * _ROWS * D * 2)
                    tma_load(do_desc, [row, head * D], raw.index(r), do_ring.index(s))
                else:
                    mbarrier.expect(do_ready.index(s), _ROWS * D * 2)
                    tma_load(do_desc, [row, head * D], do_ready.index(s), do_ring.index(s))
                mbarrier.wait(q_empty.index(s), ((stage // STAGES) & 1) ^ 1)
                if is_partial:
                    tma_load(q_desc, [row, head * D], raw.index(r), q_ring.index(s))
                    num_raw += 1
                else:
                    mbarrier.expect(q_ready.index(s), _ROWS * D * 2)
                    tma_load(q_desc, [row, head * D], q_ready.index(s), q_ring.index(s))
                if (g == 0) & (i == 0):
                    # Values are read as long as dO of the last query tile is.
                    if stage > 0:
                        mbarrier.wait(do_empty.index((stage - 1) % STAGES), ((stage - 1) // STAGES) & 1)
                    mbarrier.expect(v_ready.index(0), _TILE_ROWS * D * 2)
                    tma_load(v_desc, [first_k, head_kv * D], v_ready.index(0), v_tile.index(0))
                stage += 1
        count = GROUP * num_tiles
        index += 1
        # Not earlier: a unit whose program is still busy with another holds up those that wait for its turns.
        work = claim(claims_ptr)
        announce(works, work_ready, work_empty, index, work)


@gluon.jit
def _clean(
    stats_ptr, stride_s, chunks_ptr, q_ring, do_ring, stats, k_tiles, q_ready, do_ready, do_empty, raw, k_ready, k_raw,
    works, work_ready, work_empty, num_works, num_heads_kv, GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    rows = gl.arange(0, _ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    stage = 0
    num_raw = 0
    index = 0
    num_partial = 0
    work = await_work(works, work_ready, work_empty, 0, 1)
    while work < num_works:
        _first_k, len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        if len_k < _TILE_ROWS:
            mbarrier.wait(k_raw.index(num_partial & 1), (num_partial >> 1) & 1)
            zero_rows(k_tiles.index(index & 1), len_k, _TILE_ROWS, D)
            fence_async_shared()
            mbarrier.arrive(k_ready.index(index & 1), count=1)
            num_partial += 1
        num_tiles = _num_query_tiles(len_q, GROUP)
        for g in range(GROUP):
            head = (work % num_heads_kv) * GROUP + g
            place = stats_ptr + 2 * head.to(gl.int64) * stride_s + first_q + rows
            rest = len_q  # queries from this tile on
            for _i in range(num_tiles):
                s = stage % STAGES
                # On their way before there is room for them.
                lse = gl.load(place, mask=rows < rest, other=float("inf"))
                delta = gl.load(place + stride_s, mask=rows < rest, other=0.0)
                mbarrier.wait(do_empty.index(s), ((stage // STAGES) & 1) ^ 1)
                stats.index(2 * s).store(lse)
                stats.index(2 * s + 1).store(delta)
                if rest >= _ROWS:
                    mbarrier.arrive(do_ready.index(s), count=1)
                else:
                    mbarrier.wait(raw.index(num_raw % STAGES), (num_raw // STAGES) & 1)
                    num_raw += 1
                    zero_rows(q_ring.index(s), rest, _ROWS, D)
                    zero_rows(do_ring.index(s), rest, _ROWS, D)
                    fence_async_shared()
                    mbarrier.arrive(q_ready.index(s), count=1)
                    # For the copy, too.
                    mbarrier.arrive(do_ready.index(s), count=2)
                place += _ROWS
                rest -= _ROWS
                stage += 1
        index += 1
        work = await_work(works, work_ready, work_empty, index, 1)


@gluon.jit
def _store_rows(sums_ptr, tile, row, rest, channel, stride, HALF: gl.constexpr):
    """The first ``rest`` < 64 rows of a tile (64, D / 2), eight at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    channels = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    base = sums_ptr + row.to(gl.int64) * stride + channel
    places = base + (rows[:, None] * stride + channels[None, :])
    for r in gl.static_range(8):
        if rest > r * 8:
            part = tile.slice(r * 8, 8, dim=0).load(layout)
            mask = (rows + r * 8 < rest)[:, None] & (channels < HALF)[None, :]
            gl.store(places + r * 8 * stride, part, mask=mask)


@gluon.jit
def _add(
    sums_desc, sums_ptr, stride_st, turns_ptr, chunks_ptr, blocks_ptr, dq_tiles, dq_ready, dq_empty, works, work_ready,
    work_empty, num_works, num_heads_kv, W: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    num_heads = num_heads_kv * GROUP
    next_tile = 2 * _ROWS * num_heads  # from one turn to that of the next query tile
    dq_tile = dq_tiles.index(W)
    tile = 0
    index = 0
    work = await_work(works, work_ready, work_empty, 0, 1)
    while work < num_works:
        _first_k, _len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        block = gl.load(blocks_ptr + work // num_heads_kv)
        num_tiles = _num_query_tiles(len_q, GROUP)
        for g in range(GROUP):
            head = (work % num_heads_kv) * GROUP + g
            channel = head * D + W * HALF
            turn_ptr = turns_ptr + (2 * (first_q * num_heads + head) + W)
            turn = block
            if (block > 0) & (len_q > 0):
                turn = turn_of(turn_ptr)
            for i in range(num_tiles):
                row = first_q + i * _ROWS
                rest = len_q - i * _ROWS
                mbarrier.wait(dq_ready.index(2 * W + (tile & 1)), (tile >> 1) & 1)
                if rest > 0:
                    while turn < block:
                        turn = turn_of(turn_ptr)
                    if block > 0:
                        fence_turn(turn)
                        # Rows past the queries are zeros: nothing is added to the next sequence.
                        tma_add(sums_desc, [row, channel], dq_tile)
                    elif rest >= _ROWS:
                        tma_store(sums_desc, [row, channel], dq_tile)
                    else:
                        _store_rows(sums_ptr, dq_tile, row, rest, channel, stride_st, HALF)
                    if (block > 0) & (rest > _ROWS):
                        # While the tile is read.
                        turn = turn_of(turn_ptr + next_tile)
                    tma.store_wait(pendings=0)
                mbarrier.arrive(dq_empty.index(W), count=1)
                if rest > 0:
                    pass_turn(turn_ptr)
                turn_ptr += next_tile
                tile += 1
        index += 1
        work = await_work(works, work_ready, work_empty, index, 1)


@gluon.jit
def _consume(
    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tile, ds_tiles,
    dq_tiles, q_ready, q_empty, do_ready, do_empty, k_ready, v_ready, ds_ready, dq_ready, dq_empty, works, work_ready,
    work_empty, num_works, num_heads_kv, scale_log2, ds_scale, W: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    HALF: gl.constexpr = D // 2
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    column_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    stage_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, D], dtype)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    no_dq = gl.zeros([_ROWS, HALF], gl.float32, dq_layout)
    keys = gl.arange(0, _ROWS, gl.SliceLayout(1, scores_layout)) + W * _ROWS
    queries = gl.arange(0, _ROWS, gl.SliceLayout(1, dq_layout))
    dq_tile = dq_tiles.index(W)
    out_tile = view_as(dq_tile, dtype, [_ROWS, D], stage_layout)
    stage = 0  # query tiles so far
    index = 0  # units of work so far
    rest_before = 0
    work = await_work(works, work_ready, work_empty, 0, 4)
    if work < num_works:
        mbarrier.wait(k_ready.index(0), 0)
        mbarrier.wait(q_ready.index(0), 0)
        first_own = k_tiles.index(0).slice(W * _ROWS, _ROWS, dim=0)
        first = warpgroup_mma(first_own, q_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[first])
        while work < num_works:
            first_k, len_k, _first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
            next_work = work
            v = v_tile.index(0).slice(W * _ROWS, _ROWS, dim=0)
            dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
            dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
            mbarrier.wait(v_ready.index(0), index & 1)
            count = GROUP * _num_query_tiles(len_q, GROUP)
            rest = len_q  # queries from this tile on
            for i in range(count):
                s = stage % STAGES
                q = q_ring.index(s)
                do = do_ring.index(s)
                mbarrier.wait(do_ready.index(s), (stage // STAGES) & 1)
                grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                lse = stats.index(2 * s).load(column_layout)
                p = _exp2(scores * scale_log2 - lse[None, :])
                p_half = gl.convert_layout(p.to(dtype), p_layout)
                dv = warpgroup_mma(p_half, do, dv, is_async=True)
                delta = stats.index(2 * s + 1).load(column_layout)
                grad = warpgroup_mma_wait(1, deps=[grad])
                ds = p * (grad - delta[None, :])
                # Rows past the keys, which reach dq otherwise. A loop of one turn or none, as the compiler would turn a
                # branch into selections for every tile.
                for _ in range(len_k, _TILE_ROWS, _TILE_ROWS):
                    ds = gl.where((keys < len_k)[:, None], ds, 0.0)
                ds_own = ds.to(dtype)
                if stage > 1:
                    # The other consumer has read what was here.
                    mbarrier.wait(dq_ready.index(2 * (1 - W) + (stage & 1)), ((stage - 2) >> 1) & 1)
                ds_tiles.index(stage & 1).slice(W * _ROWS, _ROWS, dim=0).store(ds_own)
                fence_async_shared()
                mbarrier.arrive(ds_ready.index(stage & 1), count=1)
                ds_half = gl.convert_layout(ds_own, p_layout)
                dv, p_half = warpgroup_mma_wait(0, deps=[dv, p_half])
                mbarrier.arrive(do_empty.index(s), count=1)
                # dq of the query tile before, which may be the last of another unit.
                before = stage - 1
                before_index = index - gl.where(i == 0, 1, 0)
                if stage > 0:
                    mbarrier.wait(ds_ready.index(before & 1), (before >> 1) & 1)
                k_half = k_tiles.index(before_index & 1).slice(W * HALF, HALF, dim=1)
                dq = warpgroup_mma(
                    ds_tiles.index(before & 1).permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True
                )
                dk = warpgroup_mma(ds_half, q, dk, is_async=True)
                is_end = i == count - 1
                following = stage + 1
                next_index = index + gl.where(is_end, 1, 0)
                if is_end:
                    next_work = await_work(works, work_ready, work_empty, next_index, 4)
                if next_work < num_works:
                    mbarrier.wait(k_ready.index(next_index & 1), (next_index >> 1) & 1)
                    mbarrier.wait(q_ready.index(following % STAGES), (following // STAGES) & 1)
                next_k = k_tiles.index(next_index & 1).slice(W * _ROWS, _ROWS, dim=0)
                next_q = q_ring.index(following % STAGES)
                next_scores = warpgroup_mma(next_k, next_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                dk, ds_half, scores, dq = warpgroup_mma_wait(0, deps=[dk, ds_half, next_scores, dq])
                mbarrier.arrive(q_empty.index(s), count=1)
                if stage > 0:
                    for _ in range(rest_before, _ROWS, _ROWS):
                        dq = gl.where((queries < rest_before)[:, None], dq, 0.0)
                    mbarrier.wait(dq_empty.index(W), (before & 1) ^ 1)
                    tma.store_wait(pendings=0)
                    dq_tile.store(dq)
                    fence_async_shared()
                    mbarrier.arrive(dq_ready.index(2 * W + (before & 1)), count=1)
                rest_before = rest
                rest -= _ROWS
                if GROUP > 1:
                    rest = gl.where(rest <= 0, len_q, rest)
                stage += 1
            # The place of dq takes the gradients of keys and values on their way out.
            channel = (work % num_heads_kv) * D
            rows = len_k - W * _ROWS
            row = first_k + W * _ROWS
            mbarrier.wait(dq_empty.index(W), ((stage - 1) & 1) ^ 1)
            store_tile(dk_desc, dk_ptr, out_tile, (dk * ds_scale).to(dtype), row, rows, channel, stride_dt, D)
            store_tile(dv_desc, dv_ptr, out_tile, dv.to(dtype), row, rows, channel, stride_dt, D)
            index += 1
            work = next_work
        before = stage - 1
        mbarrier.wait(ds_ready.index(before & 1), (before >> 1) & 1)
        k_half = k_tiles.index((index - 1) & 1).slice(W * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds_tiles.index(before & 1).permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        dq = gl.where((queries < rest_before)[:, None], dq, 0.0)
        mbarrier.wait(dq_empty.index(W), (before & 1) ^ 1)
        tma.store_wait(pendings=0)
        dq_tile.store(dq)
        fence_async_shared()
        mbarrier.arrive(dq_ready.index(2 * W + (before & 1)), count=1)


@gluon.jit(do_not_specialize=["num_heads_kv"])
def _jagged_attention_hopper_onepass_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (128, D)
    v_desc,
    dk_desc,  # (T_k, H_kv * D), tiles of (64, D)
    dv_desc,
    sums_desc,  # (T_q, H * D) float32, tiles of (64, D / 2)
    dk_ptr,
    dv_ptr,
    stride_dt,
    stats_ptr,  # (2 * H, stride_s) float32
    stride_s,
    sums_ptr,  # (T_q, H, D) float32 contiguous
    stride_st,
    turns_ptr,  # (T_q, H, 2) int32, zeros
    claims_ptr,  # (1,) int32, zero
    chunks_ptr,  # (N, 4) int32
    blocks_ptr,  # (N,) int32: tiles of the same sequence's keys before it
    num_chunks_ptr,
    num_heads_kv,
    scale_log2,
    ds_scale,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE_ROWS, _ROWS], dtype)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], do_desc.layout)
    stats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, _TILE_ROWS, D], v_desc.layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, _ROWS], ds_layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, _ROWS, D // 2], sums_desc.layout)
    q_ready = allocate_barriers(STAGES)
    q_empty = allocate_barriers(STAGES)
    do_ready = allocate_barriers(STAGES)
    do_empty = allocate_barriers(STAGES)
    # Where the copies of a query or key tile report that the cleaner passes on.
    raw = allocate_barriers(STAGES)
    k_raw = allocate_barriers(2)
    k_ready = allocate_barriers(2)
    v_ready = allocate_barriers(1)
    ds_ready = allocate_barriers(2)
    # Of each half two, as a consumer may be a query tile ahead of the other.
    dq_ready = allocate_barriers(4)
    dq_empty = allocate_barriers(2)
    works = gl.allocate_shared_memory(gl.int32, [_NUM_WORKS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_ready = allocate_barriers(_NUM_WORKS)
    work_empty = allocate_barriers(_NUM_WORKS)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_ready.index(i), count=2)
        mbarrier.init(do_empty.index(i), count=2)
        mbarrier.init(raw.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_raw.index(i), count=1)
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(ds_ready.index(i), count=2)
        mbarrier.init(dq_empty.index(i), count=1)
    mbarrier.init(v_ready.index(0), count=1)
    for i in gl.static_range(4):
        mbarrier.init(dq_ready.index(i), count=1)
    for i in gl.static_range(_NUM_WORKS):
        mbarrier.init(work_ready.index(i), count=1)
        # Consumers, cleaner and adders.
        mbarrier.init(work_empty.index(i), count=5)
    num_works = gl.load(num_chunks_ptr) * num_heads_kv
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tile,
                    ds_tiles, dq_tiles, q_ready, q_empty, do_ready, do_empty, k_ready, v_ready, ds_ready, dq_ready,
                    dq_empty, works, work_ready, work_empty, num_works, num_heads_kv, scale_log2, ds_scale, 0, GROUP,
                    STAGES, D,
                ),
            ),
            (
                _consume,
                (
                    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tile,
                    ds_tiles, dq_tiles, q_ready, q_empty, do_ready, do_empty, k_ready, v_ready, ds_ready, dq_ready,
                    dq_empty, works, work_ready, work_empty, num_works, num_heads_kv, scale_log2, ds_scale, 1, GROUP,
                    STAGES, D,
                ),
            ),
            (
                _produce,
                (
                    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tile, q_ready, q_empty,
                    do_ready, do_empty, raw, k_ready, k_raw, v_ready, works, work_ready, work_empty, claims_ptr,
                    num_works, num_heads_kv, GROUP, STAGES, D,
                ),
            ),
            (
                _clean,
                (
                    stats_ptr, stride_s, chunks_ptr, q_ring, do_ring, stats, k_tiles, q_ready, do_ready, do_empty, raw,
                    k_ready, k_raw, works, work_ready, work_empty, num_works, num_heads_kv, GROUP, STAGES, D,
                ),
            ),
            (
                _add,
                (
                    sums_desc, sums_ptr, stride_st, turns_ptr, chunks_ptr, blocks_ptr, dq_tiles, dq_ready, dq_empty,
                    works, work_ready, work_empty, num_works, num_heads_kv, 0, GROUP, D,
                ),
            ),
            (
                _add,
                (
                    sums_desc, sums_ptr, stride_st, turns_ptr, chunks_ptr, blocks_ptr, dq_tiles, dq_ready, dq_empty,
                    works, work_ready, work_empty, num_works, num_heads_kv, 1, GROUP, D,
                ),
            ),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )  # fmt: skip


# ---------------------------------------------------------------- from sums to dq


@triton.jit(do_not_specialize=["num_rows", "num_heads", "stride_s"])
def _jagged_attention_hopper_finish_kernel(
    sums_ptr,  # (T_q, H, D) float32 contiguous
    stats_ptr,  # (2 * H, stride_s) float32
    dq_ptr,  # (T_q, H, D) contiguous
    stride_s,
    num_rows,  # T_q * H
    num_heads,
    scale,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < num_rows
    place = rows[:, None] * D + tl.arange(0, D)
    # Nobody has written the sums of a row without keys; its log-sum-exp says so.
    head = rows % num_heads
    lse = tl.load(stats_ptr + 2 * head * stride_s + rows // num_heads, mask=mask, other=float("inf"))
    has_keys = mask & (lse < float("inf"))
    x = tl.load(sums_ptr + place, mask=has_keys[:, None], other=0.0)
    tl.store(dq_ptr + place, (x * scale).to(dq_ptr.dtype.element_ty), mask=mask[:, None])


def finish(sums: Tensor, stats: Tensor, dq: Tensor, scale: float) -> None:
    """Write dq (T_q, H, D), contiguous: ``scale`` times the float32 ``sums``; ``stats`` of ``launch_stats``."""
    total, num_heads, dim = dq.shape
    arguments = (sums, stats, dq, stats.stride(0), total * num_heads, num_heads, scale)
    constants = {"D": dim, "BLOCK_R": FINISH_ROWS}
    call(
        _jagged_attention_hopper_finish_kernel,
        triton.cdiv(total * num_heads, FINISH_ROWS),
        arguments,
        constants,
        dq.device,
    )
