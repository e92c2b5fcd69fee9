"""Hopper backward of GDPA in one kernel: a program computes all gradients of a sequence and key head, in two passes.

Five products for seven of the two kernels, since scores and their gradients are computed once. Roles are those of the
other kernels: a producer, a cleaner that zeroes rows behind a sequence's end, and two consumers.

* First pass: keys and values in blocks of 128, 64 of a consumer, each block against all queries. Products are taken
  transposed, keys by queries, so that probabilities and score gradients are left operands in registers. Score gradients
  are also written to scratch memory of the program's own, rounded as the products read them: 16 KiB a step, where sums
  for the queries would be 32 each way.
* Second pass, one unit of work later, when they have long arrived: the gradient of a tile of queries is the product of
  its score gradients and the keys. Nothing else adds to it, so the result is the same on every run.
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
    num_key_tiles,
    store_rows,
    store_tile,
    tma_load,
    tma_store,
    zero_rows,
)

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def _num_rounds(num_works):
    """Units of work of this program."""
    step = gl.num_programs(0)
    full = num_works // step
    return full + gl.where(_place(full) < num_works - full * step, 1, 0)


@gluon.jit
def _place(index):
    """Units come longest first and are dealt in rounds, every other one backwards, so that sums come out even."""
    pid = gl.program_id(0)
    return gl.where((index & 1) == 0, pid, gl.num_programs(0) - 1 - pid)


@gluon.jit
def _unit(index):
    return index * gl.num_programs(0) + _place(index)


@gluon.jit
def _scratch_row(index, num_tiles, tile):
    """First row of a scratch tile: two units have a place of ``num_tiles`` each."""
    return ((gl.program_id(0) * 2 + (index & 1)) * num_tiles + gl.minimum(tile, num_tiles - 1)) * _TILE_ROWS


@gluon.jit
def _num_parts(num_tiles):
    """Parts of up to four query tiles, two of a consumer, that the second pass takes at a time."""
    return (num_tiles + 3) // 4


@gluon.jit
def _finish_copies():
    """Wait until everything this thread copies to global memory lies there, for other copies to read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _follow_copies():
    """What other threads' copies have written, and a barrier has told of, is read by copies from here on."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


# ---------------------------------------------------------------- producer and cleaner


@gluon.jit
def _load_keys(
    desc, other_desc, tiles, other_tiles, row, channel, block, lasts, is_last, kv_ready, kv_empty, kv_raw,
    NUM: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copy a block of keys, and its values if ``NUM`` is 2. The last of a sequence reports to the cleaner."""
    slot = block & 1
    mbarrier.wait(kv_empty.index(slot), ((block >> 1) & 1) ^ 1)
    if is_last:
        barrier = kv_raw.index(lasts & 1)
        mbarrier.expect(barrier, NUM * _TILE_ROWS * D * 2)
        tma_load(desc, [row, channel], barrier, tiles.index(slot))
        if NUM == 2:
            tma_load(other_desc, [row, channel], barrier, other_tiles.index(slot))
    else:
        barrier = kv_ready.index(slot)
        mbarrier.expect(barrier, NUM * _TILE_ROWS * D * 2)
        tma_load(desc, [row, channel], barrier, tiles.index(slot))
        if NUM == 2:
            tma_load(other_desc, [row, channel], barrier, other_tiles.index(slot))


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, ds_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, empty, raw,
    kv_ready, kv_empty, kv_raw, ds_written, num_works, num_heads_kv, scratch_tiles, GROUP: gl.constexpr, STAGES: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    stage = 0  # tiles in the ring so far
    pass_index = 0  # passes over a sequence's queries so far
    block = 0  # key blocks so far
    lasts = 0  # last blocks so far
    num_rounds = _num_rounds(num_works)
    for index in range(num_rounds + 1):
        if index < num_rounds:
            work = _unit(index)
            first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads_kv)
            head_kv = work % num_heads_kv
            num_tiles = num_key_tiles(len_q, _ROWS)
            num_blocks = num_key_tiles(len_k, _TILE_ROWS)
            for j in range(num_blocks):
                is_last = j == num_blocks - 1
                _load_keys(
                    k_desc, v_desc, k_tiles, v_tiles, first_k + j * _TILE_ROWS, head_kv * D, block, lasts, is_last,
                    kv_ready, kv_empty, kv_raw, 2, D,
                )  # fmt: skip
                block += 1
                lasts += gl.where(is_last, 1, 0)
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
        if index > 0:
            before = index - 1
            work = _unit(before)
            _first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads_kv)
            num_tiles = num_key_tiles(len_q, _ROWS)
            num_blocks = num_key_tiles(len_k, _TILE_ROWS)
            mbarrier.wait(ds_written.index(0), before & 1)
            _follow_copies()
            for g in range(GROUP):
                for part in range(_num_parts(num_tiles)):
                    num_pairs = gl.minimum((num_tiles - part * 4 + 1) // 2, 2)
                    for j in range(num_blocks):
                        is_last = j == num_blocks - 1
                        _load_keys(
                            k_desc, v_desc, k_tiles, v_tiles, first_k + j * _TILE_ROWS, (work % num_heads_kv) * D,
                            block, lasts, is_last, kv_ready, kv_empty, kv_raw, 1, D,
                        )  # fmt: skip
                        block += 1
                        lasts += gl.where(is_last, 1, 0)
                        for i in range(num_pairs):
                            s = stage % STAGES
                            mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
                            mbarrier.expect(ready.index(s), 2 * _ROWS * D * 2)
                            # An odd last tile stands in for its neighbour, whose product nobody writes.
                            first = part * 4 + i * 2
                            tile = (j * GROUP + g) * num_tiles + first
                            other = tile + gl.where(first + 1 < num_tiles, 1, 0)
                            tma_load(
                                ds_desc, [_scratch_row(before, scratch_tiles, tile), 0], ready.index(s),
                                q_ring.index(s)._reinterpret(dtype, [_TILE_ROWS, _ROWS], ds_desc.layout),
                            )  # fmt: skip
                            tma_load(
                                ds_desc, [_scratch_row(before, scratch_tiles, other), 0], ready.index(s),
                                do_ring.index(s)._reinterpret(dtype, [_TILE_ROWS, _ROWS], ds_desc.layout),
                            )  # fmt: skip
                            stage += 1


@gluon.jit
def _clean(
    chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, raw, kv_ready, kv_raw, num_works, num_heads_kv,
    GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    pass_index = 0
    block = 0
    lasts = 0
    num_rounds = _num_rounds(num_works)
    for index in range(num_rounds + 1):
        if index < num_rounds:
            _first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, _unit(index), num_heads_kv)
            num_tiles = num_key_tiles(len_q, _ROWS)
            num_blocks = num_key_tiles(len_k, _TILE_ROWS)
            rest = len_q - (num_tiles - 1) * _ROWS
            rest_k = len_k - (num_blocks - 1) * _TILE_ROWS
            for j in range(num_blocks):
                if j == num_blocks - 1:
                    slot = block & 1
                    mbarrier.wait(kv_raw.index(lasts & 1), (lasts >> 1) & 1)
                    if rest_k < _TILE_ROWS:
                        zero_rows(k_tiles.index(slot), rest_k, _TILE_ROWS, D)
                        zero_rows(v_tiles.index(slot), rest_k, _TILE_ROWS, D)
                        fence_async_shared()
                    mbarrier.arrive(kv_ready.index(slot), count=1)
                    lasts += 1
                block += 1
                for _g in range(GROUP):
                    s = (stage + num_tiles - 1) % STAGES
                    mbarrier.wait(raw.index(pass_index % STAGES), (pass_index // STAGES) & 1)
                    if rest < _ROWS:
                        zero_rows(q_ring.index(s), rest, _ROWS, D)
                        zero_rows(do_ring.index(s), rest, _ROWS, D)
                        fence_async_shared()
                    mbarrier.arrive(ready.index(s), count=1)
                    stage += num_tiles
                    pass_index += 1
        if index > 0:
            _first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, _unit(index - 1), num_heads_kv)
            num_tiles = num_key_tiles(len_q, _ROWS)
            num_blocks = num_key_tiles(len_k, _TILE_ROWS)
            rest_k = len_k - (num_blocks - 1) * _TILE_ROWS
            for _part in range(GROUP * _num_parts(num_tiles)):
                block += num_blocks
                slot = (block - 1) & 1
                mbarrier.wait(kv_raw.index(lasts & 1), (lasts >> 1) & 1)
                if rest_k < _TILE_ROWS:
                    zero_rows(k_tiles.index(slot), rest_k, _TILE_ROWS, D)
                    fence_async_shared()
                mbarrier.arrive(kv_ready.index(slot), count=1)
                lasts += 1
            stage += GROUP * num_blocks * ((num_tiles + 1) // 2)


# ---------------------------------------------------------------- consumers


@gluon.jit
def _begin_block(kv_empty, ds_written, block, held, is_unit, is_first_unit):
    """At a block's first step: what was on its way out of shared memory is gone."""
    if is_unit:
        # The score gradients of the unit before, too.
        _finish_copies()
        mbarrier.arrive(ds_written.index(0), count=1, pred=is_first_unit == 0)
    tma.store_wait(pendings=0)
    mbarrier.arrive(kv_empty.index((block & 1) ^ 1), count=1, pred=held)


@gluon.jit
def _keep(ds_store_desc, ds_tile, ds, row):
    """Write a step's score gradients to scratch memory; there are two places, so that one may still be read."""
    tma.store_wait(pendings=1)
    ds_tile.store(ds)
    fence_async_shared()
    tma_store(ds_store_desc, [row, 0], ds_tile)


@gluon.jit
def _add_products(
    scores, grad, dk, dv, q, do, barrier, phase, pre_scale, ACTIVATION: gl.constexpr,
    ACTIVATION_DERIVATIVE: gl.constexpr, HAS_PRE_SCALE: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """From scores and output gradients of probabilities, both under way, to the products for dv and dk, under way."""
    scores = warpgroup_mma_wait(1, deps=[scores])
    if HAS_PRE_SCALE:
        scores = scores * pre_scale
    p = gl.convert_layout(ACTIVATION(scores).to(q.dtype), p_layout)
    slope = ACTIVATION_DERIVATIVE(scores)
    # Long past, but ptxas moves no arithmetic over it: else slopes are computed later, from twice the registers.
    mbarrier.wait(barrier, phase)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    grad = warpgroup_mma_wait(1, deps=[grad])
    ds = (slope * grad).to(q.dtype)
    ds_operand = gl.convert_layout(ds, p_layout)
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    return p, ds, ds_operand, dk, dv


@gluon.jit
def _add_dq(dq, q_ring, do_ring, k_tile, ready, empty, stage, W: gl.constexpr, STAGES: gl.constexpr):
    """Add the product of a tile of score gradients, which comes in the place of a tile of the first pass."""
    s = stage % STAGES
    dtype: gl.constexpr = q_ring.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_TILE_ROWS, _ROWS], dtype)
    if W == 0:
        tile = q_ring.index(s)._reinterpret(dtype, [_TILE_ROWS, _ROWS], layout)
    else:
        tile = do_ring.index(s)._reinterpret(dtype, [_TILE_ROWS, _ROWS], layout)
    mbarrier.wait(ready.index(s), (stage // STAGES) & 1)
    dq = warpgroup_mma(tile.permute((1, 0)), k_tile, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(empty.index(s), count=1)
    return dq


@gluon.jit
def _consume(
    dq_desc, dk_desc, dv_desc, ds_store_desc, dq_ptr, dk_ptr, dv_ptr, stride_dqt, stride_dt, chunks_ptr, q_ring,
    do_ring, k_tiles, v_tiles, out_tiles, ds_tiles, ready, empty, kv_ready, kv_empty, ds_written, num_works, num_heads_kv,
    scratch_tiles, pre_scale, dv_scale, ds_scale, ACTIVATION: gl.constexpr, ACTIVATION_DERIVATIVE: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    stage = 0
    block = 0
    held = 0  # whether gradients may still be in the place of the keys and values of the block before
    num_rounds = _num_rounds(num_works)
    for index in range(num_rounds + 1):
        if index < num_rounds:
            work = _unit(index)
            _first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads_kv)
            num_steps = GROUP * num_key_tiles(len_q, _ROWS)
            for j in range(num_key_tiles(len_k, _TILE_ROWS)):
                slot = block & 1
                k = k_tiles.index(slot).slice(W * _ROWS, _ROWS, dim=0)
                v = v_tiles.index(slot).slice(W * _ROWS, _ROWS, dim=0)
                dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
                dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
                row = _scratch_row(index, scratch_tiles, j * num_steps) + W * _ROWS
                mbarrier.wait(kv_ready.index(slot), (block >> 1) & 1)
                for i in range(num_steps):
                    s = stage % STAGES
                    q = q_ring.index(s)
                    do = do_ring.index(s)
                    phase = (stage // STAGES) & 1
                    mbarrier.wait(ready.index(s), phase)
                    scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    p, ds, ds_operand, dk, dv = _add_products(
                        scores, grad, dk, dv, q, do, ready.index(s), phase, pre_scale, ACTIVATION,
                        ACTIVATION_DERIVATIVE, HAS_PRE_SCALE, p_layout,
                    )  # fmt: skip
                    if i == 0:
                        _begin_block(kv_empty, ds_written, block, held != 0, j == 0, index == 0)
                        held = 0
                    _keep(ds_store_desc, ds_tiles.index(W * 2 + (stage & 1)), ds, row)
                    row += _TILE_ROWS
                    dk, dv, p, ds_operand = warpgroup_mma_wait(0, deps=[dk, dv, p, ds_operand])
                    mbarrier.arrive(empty.index(s), count=1)
                    stage += 1
                # Keys and values are read no more: their place takes the gradients on the way out.
                channel = (work % num_heads_kv) * D
                row_k = first_k + j * _TILE_ROWS + W * _ROWS
                rest = len_k - j * _TILE_ROWS - W * _ROWS
                store_rows(dk_desc, dk_ptr, k, (dk * ds_scale).to(dtype), row_k, rest, channel, stride_dt, D)
                store_rows(dv_desc, dv_ptr, v, (dv * dv_scale).to(dtype), row_k, rest, channel, stride_dt, D)
                held = 1
                block += 1
        if index > 0:
            work = _unit(index - 1)
            first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads_kv)
            num_tiles = num_key_tiles(len_q, _ROWS)
            if index == num_rounds:
                _finish_copies()
                mbarrier.arrive(ds_written.index(0), count=1)
            for g in range(GROUP):
                channel = ((work % num_heads_kv) * GROUP + g) * D
                for part in range(_num_parts(num_tiles)):
                    row_q = part * 2 * _TILE_ROWS + W * _ROWS
                    # A branch around the second product would be compiled to something else: a loop of no or one turn.
                    has_second = gl.where(num_tiles - part * 4 > 2, 1, 0)
                    dq = gl.zeros([_ROWS, D], gl.float32, out_layout)
                    dq_second = gl.zeros([_ROWS, D], gl.float32, out_layout)
                    for _j in range(num_key_tiles(len_k, _TILE_ROWS)):
                        slot = block & 1
                        k_tile = k_tiles.index(slot)
                        mbarrier.wait(kv_ready.index(slot), (block >> 1) & 1)
                        dq = _add_dq(dq, q_ring, do_ring, k_tile, ready, empty, stage, W, STAGES)
                        stage += 1
                        if held != 0:
                            tma.store_wait(pendings=0)
                            mbarrier.arrive(kv_empty.index(slot ^ 1), count=1)
                            held = 0
                        for _ in range(has_second):
                            dq_second = _add_dq(dq_second, q_ring, do_ring, k_tile, ready, empty, stage, W, STAGES)
                            stage += 1
                        mbarrier.arrive(kv_empty.index(slot), count=1)
                        block += 1
                    store_tile(
                        dq_desc, dq_ptr, out_tiles.index(W), (dq * ds_scale).to(dtype), first_q + row_q, len_q - row_q,
                        channel, stride_dqt, D,
                    )  # fmt: skip
                    for _ in range(has_second):
                        store_tile(
                            dq_desc, dq_ptr, out_tiles.index(W), (dq_second * ds_scale).to(dtype),
                            first_q + row_q + _TILE_ROWS, len_q - row_q - _TILE_ROWS, channel, stride_dqt, D,
                        )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads_kv", "scratch_tiles"])
def _gdpa_hopper_bwd_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (128, D)
    v_desc,
    dq_desc,  # (T_q, H * D), tiles of (64, D)
    dk_desc,  # (T_k, H_kv * D), tiles of (64, D)
    dv_desc,
    ds_desc,  # (programs * 2 * scratch_tiles * 128, 64), tiles of (128, 64)
    ds_store_desc,  # the same in tiles of (64, 64)
    dq_ptr,
    dk_ptr,
    dv_ptr,
    stride_dqt,
    stride_dt,
    chunks_ptr,  # (B, 4) int32, whole sequences
    num_chunks_ptr,
    num_heads_kv,
    scratch_tiles,  # of one unit of work: 64 queries by 128 keys each
    pre_scale,
    dv_scale,  # of the sums for dv
    ds_scale,  # of those for dq and dk
    ACTIVATION: gl.constexpr,
    ACTIVATION_DERIVATIVE: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr,  # pre_scale is not 1
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], v_desc.layout)
    # On the way out: two tiles of score gradients of each consumer, or one of the queries' gradient.
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], dq_desc.layout)
    ds_tiles = out_tiles._reinterpret(dtype, [4, _ROWS, _ROWS], ds_store_desc.layout)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    raw = allocate_barriers(STAGES)
    kv_ready = allocate_barriers(2)
    kv_empty = allocate_barriers(2)
    kv_raw = allocate_barriers(2)
    ds_written = allocate_barriers(1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(raw.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_ready.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
        mbarrier.init(kv_raw.index(i), count=1)
    mbarrier.init(ds_written.index(0), count=2)
    num_works = gl.load(num_chunks_ptr) * num_heads_kv
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    dq_desc, dk_desc, dv_desc, ds_store_desc, dq_ptr, dk_ptr, dv_ptr, stride_dqt, stride_dt, chunks_ptr,
                    q_ring, do_ring, k_tiles, v_tiles, out_tiles, ds_tiles, ready, empty, kv_ready, kv_empty,
                    ds_written, num_works, num_heads_kv, scratch_tiles, pre_scale, dv_scale, ds_scale, ACTIVATION,
                    ACTIVATION_DERIVATIVE, HAS_PRE_SCALE, 0, GROUP, STAGES, D,
                ),
            ),
            (
                _consume,
                (
                    dq_desc, dk_desc, dv_desc, ds_store_desc, dq_ptr, dk_ptr, dv_ptr, stride_dqt, stride_dt, chunks_ptr,
                    q_ring, do_ring, k_tiles, v_tiles, out_tiles, ds_tiles, ready, empty, kv_ready, kv_empty,
                    ds_written, num_works, num_heads_kv, scratch_tiles, pre_scale, dv_scale, ds_scale, ACTIVATION,
                    ACTIVATION_DERIVATIVE, HAS_PRE_SCALE, 1, GROUP, STAGES, D,
                ),
            ),
            (
                _produce,
                (
                    q_desc, do_desc, k_desc, v_desc, ds_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready,
                    empty, raw, kv_ready, kv_empty, kv_raw, ds_written, num_works, num_heads_kv, scratch_tiles, GROUP,
                    STAGES, D,
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
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
