"""Hopper's backward of the attention of the block in Gluon: one kernel where all keys of a sequence fit in one tile.

A unit of work is one sequence and head with all its query rows, 64 at a time, so one program makes the gradients of
queries, keys and values whole: nothing is added to what another writes, and scores are made once. Two consumers own 64
keys each and take the products transposed, keys by queries, so that activated scores and score gradients are left
operands in registers. For the gradient of the queries, which sums over all keys, they exchange the score gradients
through shared memory, and each makes half of its columns. On the way out it adds the gradient that the query rows get
from the sum before the RMS norm, which lies in shared memory as the output's gradient.
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
    load_chunk,
    num_key_tiles,
    store_tile,
    tma_load,
    zero_rows,
)

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)
BLOCK = 16
OTHERS = 512


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
    x_desc, do_desc, k_desc, v_desc, chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, ready, empty, raw, kv_raw, kv_empty,
    num_works, num_heads, STAGES: gl.constexpr, KV_STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, first_k, _len_k = load_chunk(chunks_ptr, work, num_heads)
        channel = (work % num_heads) * D
        num_tiles = num_key_tiles(len_q, _ROWS)
        for i in range(num_tiles):
            s = stage % STAGES
            mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
            if i == num_tiles - 1:
                # A sequence has at least one tile: no barrier of the cleaner is taken again before the ring moved on.
                r = index % STAGES
                mbarrier.expect(raw.index(r), 2 * _ROWS * D * 2)
                tma_load(x_desc, [first_q + i * _ROWS, channel], raw.index(r), x_ring.index(s))
                tma_load(do_desc, [first_q + i * _ROWS, channel], raw.index(r), do_ring.index(s))
            else:
                mbarrier.expect(ready.index(s), 2 * _ROWS * D * 2)
                tma_load(x_desc, [first_q + i * _ROWS, channel], ready.index(s), x_ring.index(s))
                tma_load(do_desc, [first_q + i * _ROWS, channel], ready.index(s), do_ring.index(s))
            if i == 0:
                # Behind the first tile, which need not wait for the end of the sequence before.
                slot = index % KV_STAGES
                mbarrier.wait(kv_empty.index(slot), ((index // KV_STAGES) & 1) ^ 1)
                mbarrier.expect(kv_raw.index(slot), 2 * _TILE_ROWS * D * 2)
                tma_load(k_desc, [first_k, channel], kv_raw.index(slot), k_tiles.index(slot))
                tma_load(v_desc, [first_k, channel], kv_raw.index(slot), v_tiles.index(slot))
            stage += 1
        index += 1  # noqa: SIM113


@gluon.jit
def _clean(
    chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, ready, raw, kv_ready, kv_raw, num_works, num_heads,
    STAGES: gl.constexpr, KV_STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Zero the rows behind a sequence in its tile of keys and in its last tile of queries."""
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        slot = index % KV_STAGES
        mbarrier.wait(kv_raw.index(slot), (index // KV_STAGES) & 1)
        if len_k < _TILE_ROWS:
            zero_rows(k_tiles.index(slot), len_k, _TILE_ROWS, D)
            zero_rows(v_tiles.index(slot), len_k, _TILE_ROWS, D)
            fence_async_shared()
        mbarrier.arrive(kv_ready.index(slot), count=1)
        num_tiles = num_key_tiles(len_q, _ROWS)
        rest = len_q - (num_tiles - 1) * _ROWS
        s = (stage + num_tiles - 1) % STAGES
        mbarrier.wait(raw.index(index % STAGES), (index // STAGES) & 1)
        if rest < _ROWS:
            zero_rows(x_ring.index(s), rest, _ROWS, D)
            zero_rows(do_ring.index(s), rest, _ROWS, D)
            fence_async_shared()
        mbarrier.arrive(ready.index(s), count=1)
        stage += num_tiles
        index += 1  # noqa: SIM113


@gluon.jit
def _consume(
    dx_desc, dk_desc, dv_desc, dx_ptr, dk_ptr, dv_ptr, stride_dxt, stride_dkt, chunks_ptr, x_ring, do_ring, k_tiles,
    v_tiles, ds_tile, out_tiles, ready, empty, kv_ready, kv_empty, ds_ready, ds_empty, num_works, num_heads, pre_scale,
    dv_scale, ds_scale, ACTIVATION: gl.constexpr, ACTIVATION_DERIVATIVE: gl.constexpr, HAS_PRE_SCALE: gl.constexpr,
    ADD: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, KV_STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ring.dtype
    HALF: gl.constexpr = D // 2
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    half_zeros = gl.zeros([_ROWS, HALF], gl.float32, half_layout)
    out_tile = out_tiles.index(W)
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        channel = (work % num_heads) * D
        slot = index % KV_STAGES
        k = k_tiles.index(slot).slice(W * _ROWS, _ROWS, dim=0)
        v = v_tiles.index(slot).slice(W * _ROWS, _ROWS, dim=0)
        k_half = k_tiles.index(slot).slice(W * HALF, HALF, dim=1)
        dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
        dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
        mbarrier.wait(kv_ready.index(slot), (index // KV_STAGES) & 1)
        for i in range(num_key_tiles(len_q, _ROWS)):
            s = stage % STAGES
            mbarrier.wait(ready.index(s), (stage // STAGES) & 1)
            x = x_ring.index(s)
            do = do_ring.index(s)
            scores = warpgroup_mma(k, x.permute((1, 0)), zeros, use_acc=False, is_async=True)
            grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            if HAS_PRE_SCALE:
                scores = scores * pre_scale
            p = gl.convert_layout(ACTIVATION(scores).to(dtype), p_layout)
            slope = ACTIVATION_DERIVATIVE(scores)
            # Long past, but ptxas moves no arithmetic over it: slopes computed later would hold more registers.
            mbarrier.wait(ready.index(s), (stage // STAGES) & 1)
            dv = warpgroup_mma(p, do, dv, is_async=True)
            grad = warpgroup_mma_wait(1, deps=[grad])
            ds = (slope * grad).to(dtype)
            mbarrier.wait(ds_empty, (stage & 1) ^ 1)
            ds_tile.slice(W * _ROWS, _ROWS, dim=0).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_ready, count=1)
            ds = gl.convert_layout(ds, p_layout)
            dk = warpgroup_mma(ds, x, dk, is_async=True)
            mbarrier.wait(ds_ready, stage & 1)
            dx = warpgroup_mma(ds_tile.permute((1, 0)), k_half, half_zeros, use_acc=False, is_async=True)
            dv, dk, dx, p, ds = warpgroup_mma_wait(0, deps=[dv, dk, dx, p, ds])
            mbarrier.arrive(ds_empty, count=1)
            dx = dx * ds_scale
            if ADD:
                dx += do.slice(W * HALF, HALF, dim=1).load(half_layout).to(gl.float32)
                # Reads of a tile may still be under way at the barrier: without it the copy engine overwrites them.
                fence_async_shared()
            mbarrier.arrive(empty.index(s), count=1)
            store_tile(
                dx_desc, dx_ptr, out_tile, dx.to(dtype), first_q + i * _ROWS, len_q - i * _ROWS, channel + W * HALF,
                stride_dxt, HALF,
            )  # fmt: skip
            stage += 1
        # The values of this consumer are read no more: their place takes the gradients on the way out, one by one.
        rows = len_k - W * _ROWS
        row = first_k + W * _ROWS
        store_tile(dv_desc, dv_ptr, v, (dv * dv_scale).to(dtype), row, rows, channel, stride_dkt, D)
        store_tile(dk_desc, dk_ptr, v, (dk * ds_scale).to(dtype), row, rows, channel, stride_dkt, D)
        tma.store_wait(pendings=0)
        mbarrier.arrive(kv_empty.index(slot), count=1)
        index += 1  # noqa: SIM113
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_works", "num_heads"])
def attend_bwd_kernel(
    x_desc,  # (T_q, H * D), tiles of (64, D): rows after the layer norm
    do_desc,  # (T_q, H * D), tiles of (64, D): gradient of the sum before the RMS norm
    k_desc,  # (T_k, H * D), tiles of (128, D)
    v_desc,
    dx_desc,  # (T_q, H * D), tiles of (64, D / 2)
    dk_desc,  # (T_k, H * D), tiles of (64, D)
    dv_desc,
    dx_ptr,
    dk_ptr,
    dv_ptr,
    stride_dxt,
    stride_dkt,
    chunks_ptr,  # (B, 4) int32
    num_works,  # sequences times heads
    num_heads,
    pre_scale,
    dv_scale,  # of the sums for dv
    ds_scale,  # of those for dx and dk
    ACTIVATION: gl.constexpr,
    ACTIVATION_DERIVATIVE: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr,  # pre_scale is not 1
    ADD: gl.constexpr,  # add do to dx
    STAGES: gl.constexpr,
    KV_STAGES: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], x_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [KV_STAGES, _TILE_ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [KV_STAGES, _TILE_ROWS, D], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE_ROWS, _ROWS], dtype)
    ds_tile = gl.allocate_shared_memory(dtype, [_TILE_ROWS, _ROWS], ds_layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D // 2], dx_desc.layout)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    raw = allocate_barriers(STAGES)
    kv_ready = allocate_barriers(KV_STAGES)
    kv_raw = allocate_barriers(KV_STAGES)
    kv_empty = allocate_barriers(KV_STAGES)
    ds_barriers = allocate_barriers(2)
    ds_ready = ds_barriers.index(0)
    ds_empty = ds_barriers.index(1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(raw.index(i), count=1)
    for i in gl.static_range(KV_STAGES):
        mbarrier.init(kv_ready.index(i), count=1)
        mbarrier.init(kv_raw.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_barriers.index(i), count=2)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    dx_desc, dk_desc, dv_desc, dx_ptr, dk_ptr, dv_ptr, stride_dxt, stride_dkt, chunks_ptr, x_ring,
                    do_ring, k_tiles, v_tiles, ds_tile, out_tiles, ready, empty, kv_ready, kv_empty, ds_ready,
                    ds_empty, num_works, num_heads, pre_scale, dv_scale, ds_scale, ACTIVATION, ACTIVATION_DERIVATIVE,
                    HAS_PRE_SCALE, ADD, 0, STAGES, KV_STAGES, D,
                ),
            ),
            (
                _consume,
                (
                    dx_desc, dk_desc, dv_desc, dx_ptr, dk_ptr, dv_ptr, stride_dxt, stride_dkt, chunks_ptr, x_ring,
                    do_ring, k_tiles, v_tiles, ds_tile, out_tiles, ready, empty, kv_ready, kv_empty, ds_ready,
                    ds_empty, num_works, num_heads, pre_scale, dv_scale, ds_scale, ACTIVATION, ACTIVATION_DERIVATIVE,
                    HAS_PRE_SCALE, ADD, 1, STAGES, KV_STAGES, D,
                ),
            ),
            (
                _produce,
                (
                    x_desc, do_desc, k_desc, v_desc, chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, ready, empty, raw,
                    kv_raw, kv_empty, num_works, num_heads, STAGES, KV_STAGES, D,
                ),
            ),
            (
                _clean,
                (
                    chunks_ptr, x_ring, do_ring, k_tiles, v_tiles, ready, raw, kv_ready, kv_raw, num_works, num_heads,
                    STAGES, KV_STAGES, D,
                ),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
