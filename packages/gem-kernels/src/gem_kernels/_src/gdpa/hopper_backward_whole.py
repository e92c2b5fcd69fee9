"""Hopper backward of GDPA in one pass: a program owns a sequence and key head, and computes all three gradients.

Five products per pair of tiles where two kernels take seven, since scores and their gradients are computed once. The
program meets the keys in blocks of 128. Gradients of a block's keys and values stay in registers while its queries
pass; the gradient of a query tile is a sum over key blocks, kept between them in scratch memory of the program's own,
little enough for the L2 cache. Nothing else adds to it, so the result is the same on every run.

Roles are those of the other kernels, with a producer each for queries and keys: a cleaner that zeroes rows behind a
sequence's end, and two consumers. A consumer owns 64 keys of the block. It hands its score gradients to the other one
through shared memory, and computes half of the channels of the queries' gradient from those of both. It issues the
scores of the next query tile, be it of the next block, with the last products of this one.
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

from gem_kernels._src.gdpa.hopper_forward import (
    _ROWS,
    _TILE_ROWS,
    _load_chunk,
    _num_key_tiles,
    _store_tile,
    _tma_load,
    _zero_rows,
)


@gluon.jit
def _num_rounds(num_works):
    """Units of work of this program."""
    step = gl.num_programs(0)
    full = num_works // step
    place = _place(full)
    return full + gl.where(place < num_works - full * step, 1, 0)


@gluon.jit
def _place(index):
    """Units come longest first and are dealt in rounds, every other one backwards, so that sums come out even."""
    pid = gl.program_id(0)
    return gl.where((index & 1) == 0, pid, gl.num_programs(0) - 1 - pid)


@gluon.jit
def _unit(index):
    return index * gl.num_programs(0) + _place(index)


@gluon.jit
def _produce_queries(
    q_desc, do_desc, chunks_ptr, q_ring, do_ring, ready, empty, raw, num_works, num_heads_kv, GROUP: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0  # query tiles so far
    pass_index = 0  # passes over a sequence's queries so far
    for index in range(_num_rounds(num_works)):
        work = _unit(index)
        first_q, len_q, _first_k, len_k = _load_chunk(chunks_ptr, work, num_heads_kv)
        head_kv = work % num_heads_kv
        num_tiles = _num_key_tiles(len_q, _ROWS)
        for _j in range(_num_key_tiles(len_k, _TILE_ROWS)):
            for g in range(GROUP):
                channel = (head_kv * GROUP + g) * D
                for i in range(num_tiles):
                    s = stage % STAGES
                    mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
                    if i == num_tiles - 1:
                        r = pass_index % STAGES
                        mbarrier.expect(raw.index(r), 2 * _ROWS * D * 2)
                        _tma_load(q_desc, [first_q + i * _ROWS, channel], raw.index(r), q_ring.index(s))
                        _tma_load(do_desc, [first_q + i * _ROWS, channel], raw.index(r), do_ring.index(s))
                    else:
                        mbarrier.expect(ready.index(s), 2 * _ROWS * D * 2)
                        _tma_load(q_desc, [first_q + i * _ROWS, channel], ready.index(s), q_ring.index(s))
                        _tma_load(do_desc, [first_q + i * _ROWS, channel], ready.index(s), do_ring.index(s))
                    stage += 1
                pass_index += 1


@gluon.jit
def _produce_keys(
    k_desc, v_desc, chunks_ptr, k_tiles, v_tiles, kv_ready, kv_empty, kv_raw, num_works, num_heads_kv, D: gl.constexpr,
):  # fmt: skip
    block = 0  # key blocks so far
    for index in range(_num_rounds(num_works)):
        work = _unit(index)
        _first_q, _len_q, first_k, len_k = _load_chunk(chunks_ptr, work, num_heads_kv)
        channel = (work % num_heads_kv) * D
        num_blocks = _num_key_tiles(len_k, _TILE_ROWS)
        for j in range(num_blocks):
            slot = block & 1
            mbarrier.wait(kv_empty.index(slot), ((block >> 1) & 1) ^ 1)
            row = first_k + j * _TILE_ROWS
            if j == num_blocks - 1:
                mbarrier.expect(kv_raw.index(index & 1), 2 * _TILE_ROWS * D * 2)
                _tma_load(k_desc, [row, channel], kv_raw.index(index & 1), k_tiles.index(slot))
                _tma_load(v_desc, [row, channel], kv_raw.index(index & 1), v_tiles.index(slot))
            else:
                mbarrier.expect(kv_ready.index(slot), 2 * _TILE_ROWS * D * 2)
                _tma_load(k_desc, [row, channel], kv_ready.index(slot), k_tiles.index(slot))
                _tma_load(v_desc, [row, channel], kv_ready.index(slot), v_tiles.index(slot))
            block += 1


@gluon.jit
def _clean(
    chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, raw, kv_ready, kv_raw, num_works, num_heads_kv,
    GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    pass_index = 0
    block = 0
    for index in range(_num_rounds(num_works)):
        _first_q, len_q, _first_k, len_k = _load_chunk(chunks_ptr, _unit(index), num_heads_kv)
        num_tiles = _num_key_tiles(len_q, _ROWS)
        num_blocks = _num_key_tiles(len_k, _TILE_ROWS)
        rest = len_q - (num_tiles - 1) * _ROWS
        rest_k = len_k - (num_blocks - 1) * _TILE_ROWS
        for j in range(num_blocks):
            if j == num_blocks - 1:
                slot = block & 1
                mbarrier.wait(kv_raw.index(index & 1), (index >> 1) & 1)
                if rest_k < _TILE_ROWS:
                    _zero_rows(k_tiles.index(slot), rest_k, _TILE_ROWS, D)
                    _zero_rows(v_tiles.index(slot), rest_k, _TILE_ROWS, D)
                    fence_async_shared()
                mbarrier.arrive(kv_ready.index(slot), count=1)
            block += 1
            for _g in range(GROUP):
                s = (stage + num_tiles - 1) % STAGES
                mbarrier.wait(raw.index(pass_index % STAGES), (pass_index // STAGES) & 1)
                if rest < _ROWS:
                    _zero_rows(q_ring.index(s), rest, _ROWS, D)
                    _zero_rows(do_ring.index(s), rest, _ROWS, D)
                    fence_async_shared()
                mbarrier.arrive(ready.index(s), count=1)
                stage += num_tiles
                pass_index += 1


@gluon.jit
def _consume(
    dq_desc, dq_ptr, dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dqt, stride_dt, scratch_ptr, scratch_rows, chunks_ptr,
    q_ring, do_ring, k_tiles, v_tiles, ds_tiles, ready, empty, kv_ready, kv_empty, ds_ready, k_read, num_works,
    num_heads_kv, pre_scale, dv_scale, ds_scale, ACTIVATION: gl.constexpr, ACTIVATION_DERIVATIVE: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
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
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    no_dq = gl.zeros([_ROWS, HALF], gl.float32, dq_layout)
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, dq_layout))
    channels = W * HALF + gl.arange(0, HALF, gl.SliceLayout(0, dq_layout))
    scratch = scratch_ptr + gl.program_id(0).to(gl.int64) * scratch_rows * D + (rows[:, None] * D + channels[None, :])
    stage = 0  # query tiles so far
    block = 0  # key blocks so far
    num_rounds = _num_rounds(num_works)
    if num_rounds > 0:
        mbarrier.wait(kv_ready.index(0), 0)
        mbarrier.wait(ready.index(0), 0)
        first_own = k_tiles.index(0).slice(W * _ROWS, _ROWS, dim=0)
        scores = warpgroup_mma(first_own, q_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for index in range(num_rounds):
            work = _unit(index)
            first_q, len_q, first_k, len_k = _load_chunk(chunks_ptr, work, num_heads_kv)
            head_kv = work % num_heads_kv
            num_tiles = _num_key_tiles(len_q, _ROWS)
            num_blocks = _num_key_tiles(len_k, _TILE_ROWS)
            for j in range(num_blocks):
                is_first = j == 0
                is_last = j == num_blocks - 1
                has_next = (is_last & (index == num_rounds - 1)) == 0
                dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
                dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
                turn = block
                last_stage = stage + GROUP * num_tiles - 1
                for i in range(GROUP * num_tiles):
                    s = stage % STAGES
                    q = q_ring.index(s)
                    do = do_ring.index(s)
                    # Adds nothing, but keeps ptxas from computing a dozen addresses ahead of the loop, for which there
                    # are no registers.
                    turn = turn ^ (stage >> 31)
                    v = v_tiles.index(turn & 1).slice(W * _ROWS, _ROWS, dim=0)
                    k_half = k_tiles.index(turn & 1).slice(W * HALF, HALF, dim=1)
                    ds_tile = ds_tiles.index(stage & 1)
                    grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    if HAS_PRE_SCALE:
                        scores = scores * pre_scale
                    p = gl.convert_layout(ACTIVATION(scores).to(dtype), p_layout)
                    slope = ACTIVATION_DERIVATIVE(scores)
                    dv = warpgroup_mma(p, do, dv, is_async=True)
                    grad = warpgroup_mma_wait(1, deps=[grad])
                    ds_own = (slope * grad).to(dtype)
                    # Two buffers: when both consumers have filled this one, both have read the other. This half of the
                    # tile has held the query gradient of the tile before.
                    tma.store_wait(pendings=0)
                    ds_tile.slice(W * _ROWS, _ROWS, dim=0).store(ds_own)
                    fence_async_shared()
                    mbarrier.arrive(ds_ready.index(stage & 1), count=1)
                    # The gradients of the block before have left its keys and values.
                    mbarrier.arrive(kv_empty.index((turn & 1) ^ 1), count=1, pred=(i == 0) & (block > 0))
                    ds = gl.convert_layout(ds_own, p_layout)
                    dv, p = warpgroup_mma_wait(0, deps=[dv, p])
                    dk = warpgroup_mma(ds, q, dk, is_async=True)
                    mbarrier.wait(ds_ready.index(stage & 1), (stage >> 1) & 1)
                    dq = warpgroup_mma(ds_tile.permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
                    is_end = stage == last_stage
                    following = stage + 1
                    next_block = turn + gl.where(is_end, 1, 0)
                    if (is_end == 0) | has_next:
                        mbarrier.wait(kv_ready.index(next_block & 1), (next_block >> 1) & 1)
                        mbarrier.wait(ready.index(following % STAGES), (following // STAGES) & 1)
                    next_q = q_ring.index(following % STAGES)
                    next_k = k_tiles.index(next_block & 1).slice(W * _ROWS, _ROWS, dim=0)
                    next_scores = warpgroup_mma(next_k, next_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    dk, dq, ds, scores = warpgroup_mma_wait(0, deps=[dk, dq, ds, next_scores])
                    mbarrier.arrive(empty.index(s), count=1)
                    place = scratch + gl.minimum(i * _ROWS, scratch_rows - _ROWS) * D
                    if is_first == 0:
                        dq += gl.load(place)
                    if is_last:
                        g = 0
                        if GROUP > 1:
                            g = i // num_tiles
                        row = (i - g * num_tiles) * _ROWS
                        _store_tile(
                            dq_desc, dq_ptr, ds_tiles.index((stage + 1) & 1).slice(W * _ROWS, _ROWS, dim=0),
                            (dq * ds_scale).to(dtype), first_q + row, len_q - row,
                            (head_kv * GROUP + g) * D + W * HALF, stride_dqt, HALF,
                        )  # fmt: skip
                    else:
                        gl.store(place, dq)
                    stage += 1
                # Keys and values are read no more: their place takes the gradients on the way out.
                row_k = first_k + j * _TILE_ROWS + W * _ROWS
                rest = len_k - j * _TILE_ROWS - W * _ROWS
                mbarrier.arrive(k_read.index(0), count=1)
                _store_tile(
                    dv_desc, dv_ptr, v_tiles.index(block & 1).slice(W * _ROWS, _ROWS, dim=0),
                    (dv * dv_scale).to(dtype), row_k, rest, head_kv * D, stride_dt, D,
                )  # fmt: skip
                mbarrier.wait(k_read.index(0), block & 1)
                _store_tile(
                    dk_desc, dk_ptr, k_tiles.index(block & 1).slice(W * _ROWS, _ROWS, dim=0),
                    (dk * ds_scale).to(dtype), row_k, rest, head_kv * D, stride_dt, D,
                )  # fmt: skip
                block += 1
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads_kv", "scratch_rows"])
def _gdpa_hopper_bwd_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (128, D)
    v_desc,
    dq_desc,  # (T_q, H * D), tiles of (64, D / 2)
    dk_desc,  # (T_k, H_kv * D), tiles of (64, D)
    dv_desc,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    stride_dqt,
    stride_dt,
    scratch_ptr,  # (programs, scratch_rows, D) float32
    scratch_rows,
    chunks_ptr,  # (B, 4) int32, whole sequences
    num_chunks_ptr,
    num_heads_kv,
    pre_scale,
    dv_scale,  # of the sums for dv
    ds_scale,  # of those for dq and dk
    ACTIVATION: gl.constexpr,
    ACTIVATION_DERIVATIVE: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE_ROWS, _ROWS], dtype)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], v_desc.layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, _ROWS], ds_layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    raw = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    kv_raw = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    ds_ready = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    k_read = gl.allocate_shared_memory(gl.int64, [1, 1], barrier_layout)
    mbarrier.init(k_read.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(raw.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_ready.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
        mbarrier.init(kv_raw.index(i), count=1)
        mbarrier.init(ds_ready.index(i), count=2)
    num_works = gl.load(num_chunks_ptr) * num_heads_kv
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    dq_desc, dq_ptr, dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dqt, stride_dt, scratch_ptr, scratch_rows,
                    chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ds_tiles, ready, empty, kv_ready, kv_empty, ds_ready,
                    k_read, num_works, num_heads_kv, pre_scale, dv_scale, ds_scale, ACTIVATION, ACTIVATION_DERIVATIVE,
                    HAS_PRE_SCALE, 0, GROUP, STAGES, D,
                ),
            ),
            (
                _consume,
                (
                    dq_desc, dq_ptr, dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dqt, stride_dt, scratch_ptr, scratch_rows,
                    chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ds_tiles, ready, empty, kv_ready, kv_empty, ds_ready,
                    k_read, num_works, num_heads_kv, pre_scale, dv_scale, ds_scale, ACTIVATION, ACTIVATION_DERIVATIVE,
                    HAS_PRE_SCALE, 1, GROUP, STAGES, D,
                ),
            ),
            (
                _produce_queries,
                (
                    q_desc, do_desc, chunks_ptr, q_ring, do_ring, ready, empty, raw, num_works, num_heads_kv, GROUP,
                    STAGES, D,
                ),
            ),
            (
                _produce_keys,
                (
                    k_desc, v_desc, chunks_ptr, k_tiles, v_tiles, kv_ready, kv_empty, kv_raw, num_works, num_heads_kv,
                    D,
                ),
            ),
            (
                _clean,
                (
                    chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, raw, kv_ready, kv_raw, num_works,
                    num_heads_kv, GROUP, STAGES, D,
                ),
            ),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
