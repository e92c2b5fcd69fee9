"""Hopper's backward of the attention of the block in Gluon: one kernel where all keys of a sequence fit in one tile.

A unit of work is one sequence and head with all its query rows, 64 at a time, so one program makes the gradients of
queries, keys and values whole: nothing is added to what another writes, and scores are made once.

* Two consumers own 64 keys each and take the products transposed, keys by queries, so that activated scores and score
  gradients are left operands in registers. They sum the gradients of their keys and values, and put the score gradients
  into shared memory.
* A third warpgroup, of the rows, multiplies these by all keys: the gradient of the queries. It adds the gradient that
  the query rows get from the sum before the RMS norm, which lies in shared memory as the output's gradient, and writes
  both.
* A warp copies tiles, whose rows behind a sequence are zeros, so that no product needs a mask.

The consumers never wait for each other. Their accumulators take half of the multiprocessor's registers, and what is
left decides the order of products in a tile: gradients of scores are made when the scores are gone. With more in
flight, ptxas has too few registers and lets no product run beside another.
"""

from __future__ import annotations

import triton
import triton.language as tl
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
    copy_rows,
    load_chunk,
    load_rows,
    num_key_tiles,
    write_rows,
)
from gem_kernels._src.gdpa.hopper_activation import times_pairs

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)


@triton.jit(do_not_specialize=["num_sequences"])
def order_kernel(
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    chunks_ptr,  # (B, 4) int32: first query row, query rows, first key row, keys
    num_sequences,
    SORTED: tl.constexpr,  # else as they come
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Sequences, those with most queries first, so that the last to be taken are short."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = b < num_sequences
    first_q = tl.load(offsets_q_ptr + b, mask=mask, other=0)
    len_q = tl.load(offsets_q_ptr + b + 1, mask=mask, other=0) - first_q
    first_k = tl.load(offsets_k_ptr + b, mask=mask, other=0)
    len_k = tl.load(offsets_k_ptr + b + 1, mask=mask, other=0) - first_k
    place = b
    if SORTED:
        place = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_sequences, OTHERS):
            others = start + tl.arange(0, OTHERS)
            inside = others < num_sequences
            length = tl.load(offsets_q_ptr + others + 1, mask=inside, other=0)
            length -= tl.load(offsets_q_ptr + others, mask=inside, other=0)
            ahead = (length[None, :] > len_q[:, None]) | (
                (length[None, :] == len_q[:, None]) & (others[None, :] < b[:, None])
            )
            place += tl.sum((ahead & inside[None, :]).to(tl.int32), 1)
    ptr = chunks_ptr + place.to(tl.int64) * 4
    tl.store(ptr, first_q.to(tl.int32), mask=mask)
    tl.store(ptr + 1, len_q.to(tl.int32), mask=mask)
    tl.store(ptr + 2, first_k.to(tl.int32), mask=mask)
    tl.store(ptr + 3, len_k.to(tl.int32), mask=mask)


@gluon.jit
def _produce(
    x_desc, do_desc, k_desc, v_desc, chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, x_ready, do_ready, empty, k_ready,
    v_ready, kv_empty, num_works, num_heads, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        channel = (work % num_heads) * D
        for i in range(num_key_tiles(len_q, _ROWS)):
            s = stage % STAGES
            mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
            load_rows(x_desc, x_ring, x_ready, first_q, len_q, i * _ROWS, channel, s, _ROWS, D)
            load_rows(do_desc, do_ring, do_ready, first_q, len_q, i * _ROWS, channel, s, _ROWS, D)
            if i == 0:
                # Behind the first tile, which need not wait for the end of the sequence before.
                mbarrier.wait(kv_empty, (index & 1) ^ 1)
                mbarrier.expect(k_ready, _TILE_ROWS * D * 2)
                mbarrier.expect(v_ready, _TILE_ROWS * D * 2)
                for w in gl.static_range(2):
                    copy_rows(k_desc, first_k, len_k, w * _ROWS, channel, k_ready, k_tiles.index(w))
                    copy_rows(v_desc, first_k, len_k, w * _ROWS, channel, v_ready, v_tiles.index(w))
            stage += 1
        index += 1  # noqa: SIM113


@gluon.jit
def _consume(
    dk_desc, dv_desc, chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, ds_tiles, x_ready, do_ready, empty, k_ready,
    v_ready, kv_empty, ds_ready, ds_empty, num_works, num_heads, pre_scale, dv_scale, ds_scale,
    ACTIVATION: gl.constexpr, ACTIVATION_DERIVATIVE: gl.constexpr, IN_PAIRS: gl.constexpr, HAS_PRE_SCALE: gl.constexpr,
    W: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    k = k_tiles.index(W)
    v = v_tiles.index(W)
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        channel = (work % num_heads) * D
        dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
        dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
        mbarrier.wait(k_ready, index & 1)
        mbarrier.wait(v_ready, index & 1)
        for _i in range(num_key_tiles(len_q, _ROWS)):
            s = stage % STAGES
            x = x_ring.index(s)
            do = do_ring.index(s)
            mbarrier.wait(x_ready.index(s), (stage // STAGES) & 1)
            scores = warpgroup_mma(k, x.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(do_ready.index(s), (stage // STAGES) & 1)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if IN_PAIRS:
                value, slope = ACTIVATION(scores, pre_scale)
                p = gl.convert_layout(value, p_layout)
            else:
                if HAS_PRE_SCALE:
                    scores = scores * pre_scale
                p = gl.convert_layout(ACTIVATION(scores).to(dtype), p_layout)
                # Rounded, because registers are few.
                slope = ACTIVATION_DERIVATIVE(scores).to(dtype)
            grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dv = warpgroup_mma(p, do, dv, is_async=True)
            grad = warpgroup_mma_wait(1, deps=[grad])
            if IN_PAIRS:
                ds = times_pairs(slope, grad)
            else:
                ds = (slope.to(gl.float32) * grad).to(dtype)
            mbarrier.wait(ds_empty, (stage & 1) ^ 1)
            ds_tiles.index(W).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_ready, count=1)
            ds = gl.convert_layout(ds, p_layout)
            dk = warpgroup_mma(ds, x, dk, is_async=True)
            dv, dk, p, ds = warpgroup_mma_wait(0, deps=[dv, dk, p, ds])
            mbarrier.arrive(empty.index(s), count=1)
            stage += 1
        # Keys and values of this consumer are read no more: their places take the gradients on the way out.
        row = first_k + W * _ROWS
        rows = len_k - W * _ROWS
        write_rows(dv_desc, v, (dv * dv_scale).to(dtype), row, rows, channel)
        # The warpgroup of the rows reads all keys for the last tile.
        mbarrier.wait(ds_empty, (stage & 1) ^ 1)
        write_rows(dk_desc, k, (dk * ds_scale).to(dtype), row, rows, channel)
        tma.store_wait(pendings=0)
        mbarrier.arrive(kv_empty, count=1)
        index += 1  # noqa: SIM113


@gluon.jit
def _make_rows(
    dx_desc, chunks_ptr, do_ring, k_tiles, ds_tiles, out_tiles, do_ready, empty, k_ready, kv_empty, ds_ready, ds_empty,
    num_works, num_heads, ds_scale, ADD: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    dtype: gl.constexpr = do_ring.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    zeros = gl.zeros([_ROWS, HALF], gl.float32, layout)
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, _len_k = load_chunk(chunks_ptr, work, num_heads)
        channel = (work % num_heads) * D
        mbarrier.wait(k_ready, index & 1)
        for i in range(num_key_tiles(len_q, _ROWS)):
            s = stage % STAGES
            # Long past; the copy has to be seen by all who read it.
            mbarrier.wait(do_ready.index(s), (stage // STAGES) & 1)
            mbarrier.wait(ds_ready, stage & 1)
            for h in gl.static_range(2):
                dx = zeros
                for w in gl.static_range(2):
                    keys = k_tiles.index(w).slice(h * HALF, HALF, dim=1)
                    dx = warpgroup_mma(ds_tiles.index(w).permute((1, 0)), keys, dx, use_acc=w > 0, is_async=True)
                dx = warpgroup_mma_wait(0, deps=[dx])
                if h == 1:
                    mbarrier.arrive(ds_empty, count=1)
                dx = dx * ds_scale
                if ADD:
                    dx += do_ring.index(s).slice(h * HALF, HALF, dim=1).load(layout).to(gl.float32)
                if h == 1:
                    # Reads of a tile may still be under way: without the fence the copy engine overwrites them.
                    fence_async_shared()
                    mbarrier.arrive(empty.index(s), count=1)
                # The copy of two halves before, from this place.
                tma.store_wait(pendings=1)
                write_rows(
                    dx_desc, out_tiles.index(h), dx.to(dtype), first_q + i * _ROWS, len_q - i * _ROWS,
                    channel + h * HALF,
                )  # fmt: skip
            stage += 1
        mbarrier.arrive(kv_empty, count=1)
        index += 1  # noqa: SIM113
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_works", "num_heads"])
def attend_bwd_kernel(
    x_desc,  # (T_q, H * D), of sequences, in tiles of (64, D), as all others but dx: rows after the layer norm
    do_desc,  # (T_q, H * D): gradient of the sum before the RMS norm
    k_desc,  # (T_k, H * D)
    v_desc,
    dx_desc,  # (T_q, H * D), tiles of (64, D / 2): gradient of the rows after the layer norm
    dk_desc,  # (T_k, H * D)
    dv_desc,
    chunks_ptr,  # (B, 4) int32
    num_works,  # sequences times heads
    num_heads,
    pre_scale,
    dv_scale,  # of the sums for dv
    ds_scale,  # of those for dx and dk
    ACTIVATION: gl.constexpr,  # value and slope if IN_PAIRS, else the value
    ACTIVATION_DERIVATIVE: gl.constexpr,  # not used in pairs
    IN_PAIRS: gl.constexpr,  # ACTIVATION takes scores and pre_scale, and makes bfloat16
    HAS_PRE_SCALE: gl.constexpr,  # pre_scale is not 1; not asked in pairs
    ADD: gl.constexpr,  # add do to dx
    STAGES: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    HALF: gl.constexpr = D // 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, D], dtype)
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, HALF], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _ROWS], dtype)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, _ROWS], ds_layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, HALF], half_layout)
    x_ready = allocate_barriers(STAGES)
    do_ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    single = allocate_barriers(5)
    k_ready = single.index(0)
    v_ready = single.index(1)
    kv_empty = single.index(2)
    ds_ready = single.index(3)
    ds_empty = single.index(4)
    for i in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    mbarrier.init(k_ready, count=1)
    mbarrier.init(v_ready, count=1)
    mbarrier.init(kv_empty, count=3)
    mbarrier.init(ds_ready, count=2)
    mbarrier.init(ds_empty, count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    dk_desc, dv_desc, chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, ds_tiles, x_ready, do_ready,
                    empty, k_ready, v_ready, kv_empty, ds_ready, ds_empty, num_works, num_heads, pre_scale, dv_scale,
                    ds_scale, ACTIVATION, ACTIVATION_DERIVATIVE, IN_PAIRS, HAS_PRE_SCALE, 0, STAGES, D,
                ),
            ),
            (
                _consume,
                (
                    dk_desc, dv_desc, chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, ds_tiles, x_ready, do_ready,
                    empty, k_ready, v_ready, kv_empty, ds_ready, ds_empty, num_works, num_heads, pre_scale, dv_scale,
                    ds_scale, ACTIVATION, ACTIVATION_DERIVATIVE, IN_PAIRS, HAS_PRE_SCALE, 1, STAGES, D,
                ),
            ),
            (
                _make_rows,
                (
                    dx_desc, chunks_ptr, do_ring, k_tiles, ds_tiles, out_tiles, do_ready, empty, k_ready, kv_empty,
                    ds_ready, ds_empty, num_works, num_heads, ds_scale, ADD, STAGES, D,
                ),
            ),
            (
                _produce,
                (
                    x_desc, do_desc, k_desc, v_desc, chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, x_ready, do_ready,
                    empty, k_ready, v_ready, kv_empty, num_works, num_heads, STAGES, D,
                ),
            ),
        ],
        [4, 4, 1],
        [208, 72, 24],
    )  # fmt: skip
