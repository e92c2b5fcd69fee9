"""Hopper backward of GDPA in Gluon for activations in pairs: all gradients by one kernel, every product once.

Scores are computed again; nothing but q, k and v was kept. A unit of work (``attention.hopper.units``) is 128 keys of
one sequence and key head, against all its queries in tiles of 64: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO,
dK += dS^T Q and dQ = dS K. The gradients of keys and values stay in registers, P and dS are left operands in registers.

Parts of dq are handed on from unit to unit (``attention.hopper.parts``, which has the roles that only copy), the first
of two in the memory of dq.

Five roles share a program:

* the producer claims units and copies keys, values and a ring of tiles of q and dO, with zeros behind a sequence's end,
  so that no product needs a mask;
* two consumers own 64 keys each, products transposed, and write their score gradients to shared memory, where each
  takes those of both for one half of the channels of dq. It does so one query tile later, when the other has long
  written its part;
* for each half one warp that moves dq.
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

from gem_kernels._src.attention.hopper.parts import leave_dq, move_dq, num_query_tiles, produce, unit_of
from gem_kernels._src.attention.hopper.tiles import (
    ROWS,
    TILE_ROWS,
    allocate_barriers,
    release,
    thread_barrier,
    view_as,
    write_rows,
)
from gem_kernels._src.attention.hopper.turns import NUM_WORKS, await_work
from gem_kernels._src.gdpa.hopper_activation import times_pairs

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)
_NUM_WORKS = gl.constexpr(NUM_WORKS)


@gluon.jit
def _consume(
    dk_desc, dv_desc, units_ptr, q_ring, do_ring, k_tiles, v_tile, ds_tiles, dq_tiles, q_ready,
    q_empty, do_ready, do_empty, k_ready, v_ready, ds_ready, ds_empty, dq_free, dq_ready, works, work_ready,
    work_empty, num_works, num_heads_kv, pre_scale, out_scale, VALUE_AND_SLOPE: gl.constexpr, W: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
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
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, HALF], dtype)
    stage_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, D], dtype)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    no_dq = gl.zeros([_ROWS, HALF], gl.float32, dq_layout)
    dq_tile = dq_tiles.index(W)
    half_tile = view_as(dq_tile, dtype, [_ROWS, HALF], half_layout)
    out_tile = view_as(dq_tile, dtype, [_ROWS, D], stage_layout)
    grants = 0
    stage = 0  # query tiles so far
    index = 0  # units of work so far
    # Of the tile before: which parts are in its place, and whether its dq is left rounded.
    take = 0
    is_rounded = 1
    work = await_work(works, work_ready, work_empty, 0, 4)
    if work < num_works:
        mbarrier.wait(k_ready.index(0), 0)
        mbarrier.wait(q_ready.index(0), 0)
        first_own = k_tiles.index(0).slice(W * _ROWS, _ROWS, dim=0)
        first = warpgroup_mma(first_own, q_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[first])
        ptr = unit_of(units_ptr, work, num_works, num_heads_kv)
        first_k = gl.load(ptr)
        len_k = gl.load(ptr + 1)
        len_q = gl.load(ptr + 3)
        block = gl.load(ptr + 4)
        is_last = gl.load(ptr + 5)
        in_dq = gl.load(ptr + 7)
        while work < num_works:
            next_work = work
            channel = (work % num_heads_kv) * D
            v = v_tile.index(0).slice(W * _ROWS, _ROWS, dim=0)
            dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
            dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
            mbarrier.wait(v_ready.index(0), index & 1)
            count = GROUP * num_query_tiles(len_q, GROUP)
            rest = len_q  # queries from this tile on
            for i in range(count):
                s = stage % STAGES
                q = q_ring.index(s)
                do = do_ring.index(s)
                mbarrier.wait(do_ready.index(s), (stage // STAGES) & 1)
                grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                value, slope = VALUE_AND_SLOPE(scores, pre_scale)
                p = gl.convert_layout(value, p_layout)
                dv = warpgroup_mma(p, do, dv, is_async=True)
                is_end = i == count - 1
                following = stage + 1
                next_index = index + gl.where(is_end, 1, 0)
                if (i == 0) & (index > 0):
                    # The gradients of the keys and values before have left their place.
                    tma.store_wait(pendings=0)
                    mbarrier.arrive(dq_ready.index(W), count=1)
                grad = warpgroup_mma_wait(1, deps=[grad])
                ds_own = times_pairs(slope, grad)
                # Until both have read what was here.
                mbarrier.wait(ds_empty.index(stage & 1), ((stage >> 1) & 1) ^ 1)
                ds_tiles.index(stage & 1).slice(W * _ROWS, _ROWS, dim=0).store(ds_own)
                fence_async_shared()
                thread_barrier()
                release(ds_ready.index(stage & 1), True)
                ds = gl.convert_layout(ds_own, p_layout)
                # dq of the query tile before, which may be the last of another unit.
                before = stage - 1
                before_index = index - gl.where(i == 0, 1, 0)
                dv, p = warpgroup_mma_wait(0, deps=[dv, p])
                thread_barrier()
                release(do_empty.index(s), True)
                dk = warpgroup_mma(ds, q, dk, is_async=True)
                if is_end:
                    next_work = await_work(works, work_ready, work_empty, next_index, 4)
                if next_work < num_works:
                    mbarrier.wait(k_ready.index(next_index & 1), (next_index >> 1) & 1)
                    mbarrier.wait(q_ready.index(following % STAGES), (following // STAGES) & 1)
                next_k = k_tiles.index(next_index & 1).slice(W * _ROWS, _ROWS, dim=0)
                next_q = q_ring.index(following % STAGES)
                next_scores = warpgroup_mma(next_k, next_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                if stage > 0:
                    mbarrier.wait(ds_ready.index(before & 1), (before >> 1) & 1)
                k_half = k_tiles.index(before_index & 1).slice(W * HALF, HALF, dim=1)
                dq = warpgroup_mma(
                    ds_tiles.index(before & 1).permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True
                )
                dk, ds, scores, dq = warpgroup_mma_wait(0, deps=[dk, ds, next_scores, dq])
                thread_barrier()
                release(q_empty.index(s), True)
                if stage > 0:
                    release(ds_empty.index(before & 1), True)
                    mbarrier.wait(dq_free.index(W), grants & 1)
                    leave_dq(dq, dq_tile, half_tile, take, is_rounded, out_scale, True)
                    thread_barrier()
                    release(dq_ready.index(W), True)
                    grants += 1
                take = gl.where((block > 0) & (is_last != 0) & (rest > 0), 1 + in_dq, 0)
                is_rounded = is_last | in_dq
                rest -= _ROWS
                if GROUP > 1:
                    rest = gl.where(rest <= 0, len_q, rest)
                stage += 1
            rows = len_k - W * _ROWS
            row = first_k + W * _ROWS
            # On their way while the gradients leave.
            ptr = unit_of(units_ptr, next_work, num_works, num_heads_kv)
            first_k = gl.load(ptr)
            len_k = gl.load(ptr + 1)
            len_q = gl.load(ptr + 3)
            block = gl.load(ptr + 4)
            is_last = gl.load(ptr + 5)
            in_dq = gl.load(ptr + 7)
            # The place of dq takes the gradients of keys and values on their way out.
            mbarrier.wait(dq_free.index(W), grants & 1)
            grants += 1
            write_rows(dk_desc, out_tile, (dk * out_scale).to(dtype), row, rows, channel)
            tma.store_wait(pendings=0)
            write_rows(dv_desc, out_tile, (dv * out_scale).to(dtype), row, rows, channel)
            index += 1
            work = next_work
        tma.store_wait(pendings=0)
        mbarrier.arrive(dq_ready.index(W), count=1)
        before = stage - 1
        mbarrier.wait(ds_ready.index(before & 1), (before >> 1) & 1)
        k_half = k_tiles.index((index - 1) & 1).slice(W * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds_tiles.index(before & 1).permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.wait(dq_free.index(W), grants & 1)
        leave_dq(dq, dq_tile, half_tile, take, is_rounded, out_scale, True)
        mbarrier.arrive(dq_ready.index(W), count=1)


@gluon.jit(do_not_specialize=["num_heads_kv"])
def _gdpa_hopper_bwd_pairs_kernel(
    q_desc,  # (T_q, H * D), of sequences, in tiles of (64, D)
    do_desc,  # (T_q, H * D)
    k_desc,  # (T_k, H_kv * D), of sequences, in tiles of (128, D)
    v_desc,
    dq_desc,  # (T_q, H * D), of sequences, in tiles of (64, D / 2)
    dk_desc,  # (T_k, H_kv * D), of sequences, in tiles of (64, D)
    dv_desc,
    sums_desc,  # (query tiles * H * 2 * 64, D / 2) float32, in tiles of (64, D / 2)
    turns_ptr,  # (query tiles * H * 2,) int32, zeros
    claims_ptr,  # (1,) int32, zero
    units_ptr,  # (N, 8) int32
    num_units_ptr,  # (1,) int32
    num_heads_kv,
    pre_scale,
    out_scale,  # of all sums
    VALUE_AND_SLOPE: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per key head
    STAGES: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, D], dtype)
    key_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE_ROWS, D], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE_ROWS, _ROWS], dtype)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], tile_layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], tile_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], key_layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, _TILE_ROWS, D], key_layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, _ROWS], ds_layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, _ROWS, D // 2], sums_desc.layout)
    q_ready = allocate_barriers(STAGES)
    q_empty = allocate_barriers(STAGES)
    do_ready = allocate_barriers(STAGES)
    do_empty = allocate_barriers(STAGES)
    k_ready = allocate_barriers(2)
    v_ready = allocate_barriers(1)
    ds_ready = allocate_barriers(2)
    ds_empty = allocate_barriers(2)
    dq_free = allocate_barriers(2)
    dq_ready = allocate_barriers(2)
    works = gl.allocate_shared_memory(gl.int32, [_NUM_WORKS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_ready = allocate_barriers(_NUM_WORKS)
    work_empty = allocate_barriers(_NUM_WORKS)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_ready.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(ds_ready.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
        mbarrier.init(dq_free.index(i), count=1)
        mbarrier.init(dq_ready.index(i), count=1)
    mbarrier.init(v_ready.index(0), count=1)
    for i in gl.static_range(_NUM_WORKS):
        mbarrier.init(work_ready.index(i), count=1)
        # Consumers, and what moves dq.
        mbarrier.init(work_empty.index(i), count=4)
    num_works = gl.load(num_units_ptr) * num_heads_kv
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    dk_desc, dv_desc, units_ptr, q_ring, do_ring, k_tiles, v_tile, ds_tiles, dq_tiles,
                    q_ready, q_empty, do_ready, do_empty, k_ready, v_ready, ds_ready, ds_empty, dq_free, dq_ready,
                    works, work_ready, work_empty, num_works, num_heads_kv, pre_scale, out_scale, VALUE_AND_SLOPE,
                    0, GROUP, STAGES, D,
                ),
            ),
            (
                _consume,
                (
                    dk_desc, dv_desc, units_ptr, q_ring, do_ring, k_tiles, v_tile, ds_tiles, dq_tiles,
                    q_ready, q_empty, do_ready, do_empty, k_ready, v_ready, ds_ready, ds_empty, dq_free, dq_ready,
                    works, work_ready, work_empty, num_works, num_heads_kv, pre_scale, out_scale, VALUE_AND_SLOPE,
                    1, GROUP, STAGES, D,
                ),
            ),
            (
                produce,
                (
                    q_desc, do_desc, k_desc, v_desc, units_ptr, q_ring, do_ring, k_tiles, v_tile, q_ready, q_empty,
                    do_ready, do_empty, k_ready, v_ready, works, work_ready, work_empty, claims_ptr, num_works,
                    num_heads_kv, GROUP, STAGES, D,
                ),
            ),
            (
                move_dq,
                (
                    dq_desc, sums_desc, units_ptr, turns_ptr, dq_tiles, dq_free, dq_ready, works, work_ready,
                    work_empty, num_works, num_heads_kv, 0, GROUP, D, True,
                ),
            ),
            (
                move_dq,
                (
                    dq_desc, sums_desc, units_ptr, turns_ptr, dq_tiles, dq_free, dq_ready, works, work_ready,
                    work_empty, num_works, num_heads_kv, 1, GROUP, D, True,
                ),
            ),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
