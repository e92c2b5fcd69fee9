"""Hopper backward of GDPA in Gluon, keys and values: their gradients, and the score gradients for that of the queries.

A unit of work is 128 keys of one sequence and key head, against all its queries. The kernel is persistent, with the
roles of the forward: a producer, a cleaner that zeroes the rows behind a sequence in its last tile, and two consumers
of 64 keys each. Products are taken transposed, keys by queries, so that probabilities and score gradients are left
operands in registers. Score gradients are kept for the second kernel, rounded as the products read them, where
there is memory for them; else that kernel computes scores again. No program adds to what another writes, so the result
is the same on every run.
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
def _load_rows(
    desc, row, channel, ring, slot, ready, empty, raw, num_raw, is_last, SLOTS: gl.constexpr, D: gl.constexpr
):
    """Copy a tile to the ring. The last of a pass over a sequence's queries reports to the cleaner."""
    s = slot % SLOTS
    mbarrier.wait(empty.index(s), ((slot // SLOTS) & 1) ^ 1)
    if is_last:
        r = num_raw % SLOTS
        mbarrier.expect(raw.index(r), _ROWS * D * 2)
        tma_load(desc, [row, channel], raw.index(r), ring.index(s))
    else:
        mbarrier.expect(ready.index(s), _ROWS * D * 2)
        tma_load(desc, [row, channel], ready.index(s), ring.index(s))


@gluon.jit
def _produce_dkdv(
    q_desc, do_desc, k_desc, v_desc, chunks_ptr, ring, k_tiles, v_tiles, ready, empty, raw, kv_ready, kv_empty, kv_raw,
    num_works, num_heads_kv, GROUP: gl.constexpr, SLOTS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    slot = 0  # tiles so far, of queries and of output gradients
    num_raw = 0  # of them, those for the cleaner
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_k, _len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        head_kv = work % num_heads_kv
        kv = index & 1
        mbarrier.wait(kv_empty.index(kv), ((index >> 1) & 1) ^ 1)
        mbarrier.expect(kv_raw.index(kv), 2 * _TILE_ROWS * D * 2)
        tma_load(k_desc, [first_k, head_kv * D], kv_raw.index(kv), k_tiles.index(kv))
        tma_load(v_desc, [first_k, head_kv * D], kv_raw.index(kv), v_tiles.index(kv))
        num_tiles = num_key_tiles(len_q, _ROWS)
        for g in range(GROUP):
            channel = (head_kv * GROUP + g) * D
            for i in range(num_tiles):
                row = first_q + i * _ROWS
                is_last = i == num_tiles - 1
                _load_rows(do_desc, row, channel, ring, slot, ready, empty, raw, num_raw, is_last, SLOTS, D)
                _load_rows(q_desc, row, channel, ring, slot + 1, ready, empty, raw, num_raw + 1, is_last, SLOTS, D)
                slot += 2
            num_raw += 2
        index += 1  # noqa: SIM113


@gluon.jit
def _clean_dkdv(
    chunks_ptr, ring, k_tiles, v_tiles, ready, raw, kv_ready, kv_raw, num_works, num_heads_kv, GROUP: gl.constexpr,
    SLOTS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    slot = 0
    num_raw = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_k, len_k, _first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        kv = index & 1
        mbarrier.wait(kv_raw.index(kv), (index >> 1) & 1)
        if len_k < _TILE_ROWS:
            zero_rows(k_tiles.index(kv), len_k, _TILE_ROWS, D)
            zero_rows(v_tiles.index(kv), len_k, _TILE_ROWS, D)
            fence_async_shared()
        mbarrier.arrive(kv_ready.index(kv), count=1)
        num_tiles = num_key_tiles(len_q, _ROWS)
        rest = len_q - (num_tiles - 1) * _ROWS
        for _g in range(GROUP):
            slot += 2 * num_tiles
            for c in gl.static_range(2):
                s = (slot - 2 + c) % SLOTS
                mbarrier.wait(raw.index(num_raw % SLOTS), (num_raw // SLOTS) & 1)
                if rest < _ROWS:
                    zero_rows(ring.index(s), rest, _ROWS, D)
                    fence_async_shared()
                mbarrier.arrive(ready.index(s), count=1)
                num_raw += 1
        index += 1  # noqa: SIM113


@gluon.jit
def _keep(ds_desc, ds_tile, ds, row, column):
    """Write a step's score gradients, keys by queries."""
    tma.store_wait(pendings=0)
    ds_tile.store(ds)
    fence_async_shared()
    tma_store(ds_desc, [row, column], ds_tile)


@gluon.jit
def _consume_dkdv(
    dk_desc, dv_desc, ds_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, places_ptr, ring, k_tiles, v_tiles, ds_tiles,
    ready, empty, kv_ready, kv_empty, num_works, num_heads_kv, num_sequences, scratch_keys, pre_scale, dv_scale,
    ds_scale, ACTIVATION: gl.constexpr, ACTIVATION_DERIVATIVE: gl.constexpr, HAS_PRE_SCALE: gl.constexpr,
    W: gl.constexpr, GROUP: gl.constexpr, SLOTS: gl.constexpr, D: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    ds_tile = ds_tiles.index(W)
    slot = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_k, len_k, _first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        head_kv = work % num_heads_kv
        kv = index & 1
        k = k_tiles.index(kv).slice(W * _ROWS, _ROWS, dim=0)
        v = v_tiles.index(kv).slice(W * _ROWS, _ROWS, dim=0)
        dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
        dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
        ds = gl.zeros([_ROWS, _ROWS], dtype, scores_layout)
        num_tiles = num_key_tiles(len_q, _ROWS)
        row = 0
        if KEEP:
            place = places_ptr + (work // num_heads_kv) * 2
            row = (head_kv * GROUP * num_sequences + gl.load(place)) * scratch_keys + gl.load(place + 1) + W * _ROWS
        column = 0
        mbarrier.wait(kv_ready.index(kv), (index >> 1) & 1)
        for i in range(GROUP * num_tiles):
            # Output gradients are released first, and so come first in the ring.
            t = slot % SLOTS
            s = (slot + 1) % SLOTS
            q = ring.index(s)
            do = ring.index(t)
            mbarrier.wait(ready.index(s), ((slot + 1) // SLOTS) & 1)
            scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(ready.index(t), (slot // SLOTS) & 1)
            grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            # While scores are under way: what is due from the step before.
            if i > 0:
                if KEEP:
                    _keep(ds_desc, ds_tile, ds, row, column)
                    column += _ROWS
                    if GROUP > 1:
                        is_next_head = column == num_tiles * _ROWS
                        column = gl.where(is_next_head, 0, column)
                        row += gl.where(is_next_head, num_sequences * scratch_keys, 0)
            else:
                # The gradients of the unit before have left the place of its keys and values.
                tma.store_wait(pendings=0)
                mbarrier.arrive(kv_empty.index(kv ^ 1), count=1, pred=index > 0)
            scores = warpgroup_mma_wait(1, deps=[scores])
            if HAS_PRE_SCALE:
                scores = scores * pre_scale
            p = gl.convert_layout(ACTIVATION(scores).to(dtype), p_layout)
            slope = ACTIVATION_DERIVATIVE(scores)
            # Long past, but ptxas moves no arithmetic over it: slopes computed later would hold twice the registers.
            mbarrier.wait(ready.index(s), ((slot + 1) // SLOTS) & 1)
            dv = warpgroup_mma(p, do, dv, is_async=True)
            grad = warpgroup_mma_wait(1, deps=[grad])
            ds = (slope * grad).to(dtype)
            ds_operand = gl.convert_layout(ds, p_layout)
            dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
            dv, p = warpgroup_mma_wait(1, deps=[dv, p])
            mbarrier.arrive(empty.index(t), count=1)
            dk, ds_operand = warpgroup_mma_wait(0, deps=[dk, ds_operand])
            mbarrier.arrive(empty.index(s), count=1)
            slot += 2
        if KEEP:
            _keep(ds_desc, ds_tile, ds, row, column)
        # Keys and values of this consumer are read no more: their place takes the gradients on the way out.
        channel = head_kv * D
        rest = len_k - W * _ROWS
        store_rows(dk_desc, dk_ptr, k, (dk * ds_scale).to(dtype), first_k + W * _ROWS, rest, channel, stride_dt, D)
        store_rows(dv_desc, dv_ptr, v, (dv * dv_scale).to(dtype), first_k + W * _ROWS, rest, channel, stride_dt, D)
        index += 1  # noqa: SIM113
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads_kv", "num_sequences", "scratch_keys"])
def _gdpa_hopper_dkdv_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (128, D)
    v_desc,
    dk_desc,  # (T_k, H_kv * D), tiles of (64, D)
    dv_desc,
    ds_desc,  # (H * num_sequences * scratch_keys, queries of the longest sequence), tiles of (64, 64); None: not kept
    dk_ptr,
    dv_ptr,
    stride_dt,
    chunks_ptr,  # (N, 4) int32, with the parts of queries and keys exchanged
    num_chunks_ptr,
    places_ptr,  # (N, 2) int32, or None
    num_heads_kv,
    num_sequences,
    scratch_keys,  # of the longest sequence, in whole tiles
    pre_scale,
    dv_scale,  # of the sums for dv
    ds_scale,  # of those for dk
    ACTIVATION: gl.constexpr,
    ACTIVATION_DERIVATIVE: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr,  # pre_scale is not 1
    GROUP: gl.constexpr,
    SLOTS: gl.constexpr,
    D: gl.constexpr,
    KEEP: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    ring = gl.allocate_shared_memory(dtype, [SLOTS, _ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], v_desc.layout)
    ds_tiles = ring
    if KEEP:
        ds_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, _ROWS], ds_desc.layout)
    ready = allocate_barriers(SLOTS)
    empty = allocate_barriers(SLOTS)
    raw = allocate_barriers(SLOTS)
    kv_ready = allocate_barriers(2)
    kv_empty = allocate_barriers(2)
    kv_raw = allocate_barriers(2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(raw.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_ready.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
        mbarrier.init(kv_raw.index(i), count=1)
    num_works = gl.load(num_chunks_ptr) * num_heads_kv
    gl.warp_specialize(
        [
            (
                _consume_dkdv,
                (
                    dk_desc, dv_desc, ds_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, places_ptr, ring, k_tiles,
                    v_tiles, ds_tiles, ready, empty, kv_ready, kv_empty, num_works, num_heads_kv, num_sequences,
                    scratch_keys, pre_scale, dv_scale, ds_scale, ACTIVATION, ACTIVATION_DERIVATIVE, HAS_PRE_SCALE, 0,
                    GROUP, SLOTS, D, KEEP,
                ),
            ),
            (
                _consume_dkdv,
                (
                    dk_desc, dv_desc, ds_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, places_ptr, ring, k_tiles,
                    v_tiles, ds_tiles, ready, empty, kv_ready, kv_empty, num_works, num_heads_kv, num_sequences,
                    scratch_keys, pre_scale, dv_scale, ds_scale, ACTIVATION, ACTIVATION_DERIVATIVE, HAS_PRE_SCALE, 1,
                    GROUP, SLOTS, D, KEEP,
                ),
            ),
            (
                _produce_dkdv,
                (
                    q_desc, do_desc, k_desc, v_desc, chunks_ptr, ring, k_tiles, v_tiles, ready, empty, raw, kv_ready,
                    kv_empty, kv_raw, num_works, num_heads_kv, GROUP, SLOTS, D,
                ),
            ),
            (
                _clean_dkdv,
                (
                    chunks_ptr, ring, k_tiles, v_tiles, ready, raw, kv_ready, kv_raw, num_works, num_heads_kv, GROUP,
                    SLOTS, D,
                ),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


# ---------------------------------------------------------------- queries


@gluon.jit
def _load_kept(ds_desc, k_desc, row, column, last_column, row_k, channel, s, ds_ring, k_ring, barrier, D: gl.constexpr):
    """Copy 128 keys and what is kept of them and four tiles of queries."""
    mbarrier.expect(barrier, _TILE_ROWS * (4 * _ROWS + D) * 2)
    tma_load(k_desc, [row_k, channel], barrier, k_ring.index(s))
    for c in gl.static_range(4):
        # Where the chunk has fewer its last tile comes again, and nobody writes what becomes of it.
        tma_load(ds_desc, [row, gl.minimum(column + c * _ROWS, last_column)], barrier, ds_ring.index(s * 4 + c))


@gluon.jit
def _produce_kept(
    ds_desc, k_desc, chunks_ptr, places_ptr, ds_ring, k_ring, ready, empty, raw, num_works, num_heads, num_sequences,
    scratch_keys, GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        head = work % num_heads
        place = places_ptr + (work // num_heads) * 2
        row = (head * num_sequences + gl.load(place)) * scratch_keys
        column = gl.load(place + 1)
        last_column = column + ((len_q - 1) // _ROWS) * _ROWS
        num_keys = num_key_tiles(len_k, _TILE_ROWS)
        for j in range(num_keys):
            s = stage % STAGES
            mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
            row_k = first_k + j * _TILE_ROWS
            channel = (head // GROUP) * D
            row_ds = row + j * _TILE_ROWS
            if j == num_keys - 1:
                barrier = raw.index(index % STAGES)
                _load_kept(ds_desc, k_desc, row_ds, column, last_column, row_k, channel, s, ds_ring, k_ring, barrier, D)
            else:
                barrier = ready.index(s)
                _load_kept(ds_desc, k_desc, row_ds, column, last_column, row_k, channel, s, ds_ring, k_ring, barrier, D)
            stage += 1
        index += 1  # noqa: SIM113


@gluon.jit
def _clean_kept(
    chunks_ptr, ds_ring, k_ring, ready, raw, num_works, num_heads, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_q, _len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        num_keys = num_key_tiles(len_k, _TILE_ROWS)
        s = (stage + num_keys - 1) % STAGES
        rest = len_k - (num_keys - 1) * _TILE_ROWS
        mbarrier.wait(raw.index(index % STAGES), (index // STAGES) & 1)
        if rest < _TILE_ROWS:
            zero_rows(k_ring.index(s), rest, _TILE_ROWS, D)
            if rest <= 0:
                # No keys at all: nobody wrote score gradients.
                for c in gl.static_range(4):
                    zero_rows(ds_ring.index(s * 4 + c), 0, _TILE_ROWS, _ROWS)
            fence_async_shared()
        mbarrier.arrive(ready.index(s), count=1)
        stage += num_keys
        index += 1  # noqa: SIM113


@gluon.jit
def _consume_kept(
    dq_desc, dq_ptr, stride_dt, chunks_ptr, ds_ring, k_ring, out_tiles, ready, empty, num_works, num_heads, ds_scale,
    W: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_ring.dtype
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    stage = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        first = gl.zeros([_ROWS, D], gl.float32, out_layout)
        second = gl.zeros([_ROWS, D], gl.float32, out_layout)
        for _j in range(num_key_tiles(len_k, _TILE_ROWS)):
            s = stage % STAGES
            mbarrier.wait(ready.index(s), (stage // STAGES) & 1)
            k = k_ring.index(s)
            first = warpgroup_mma(ds_ring.index(s * 4 + W).permute((1, 0)), k, first, is_async=True)
            second = warpgroup_mma(ds_ring.index(s * 4 + 2 + W).permute((1, 0)), k, second, is_async=True)
            first, second = warpgroup_mma_wait(0, deps=[first, second])
            mbarrier.arrive(empty.index(s), count=1)
            stage += 1
        channel = (work % num_heads) * D
        row = W * _ROWS
        store_tile(
            dq_desc, dq_ptr, out_tiles.index(W), (first * ds_scale).to(dtype), first_q + row, len_q - row, channel,
            stride_dt, D,
        )  # fmt: skip
        row += _TILE_ROWS
        store_tile(
            dq_desc, dq_ptr, out_tiles.index(W), (second * ds_scale).to(dtype), first_q + row, len_q - row, channel,
            stride_dt, D,
        )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads", "num_sequences", "scratch_keys"])
def _gdpa_hopper_dq_of_kept_kernel(
    ds_desc,  # (H * num_sequences * scratch_keys, queries of the longest sequence), tiles of (128, 64)
    k_desc,  # (T_k, H_kv * D), tiles of (128, D)
    dq_desc,  # (T_q, H * D), tiles of (64, D)
    dq_ptr,
    stride_dt,
    chunks_ptr,  # (N, 4) int32, of up to 256 queries
    num_chunks_ptr,
    places_ptr,  # (N, 2) int32
    num_heads,
    num_sequences,
    scratch_keys,  # of the longest sequence, in whole tiles
    ds_scale,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = k_desc.dtype
    ds_ring = gl.allocate_shared_memory(dtype, [STAGES * 4, _TILE_ROWS, _ROWS], ds_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, _TILE_ROWS, D], k_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], dq_desc.layout)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    raw = allocate_barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(raw.index(i), count=1)
    num_works = gl.load(num_chunks_ptr) * num_heads
    gl.warp_specialize(
        [
            (
                _consume_kept,
                (
                    dq_desc, dq_ptr, stride_dt, chunks_ptr, ds_ring, k_ring, out_tiles, ready, empty, num_works,
                    num_heads, ds_scale, 0, STAGES, D,
                ),
            ),
            (
                _consume_kept,
                (
                    dq_desc, dq_ptr, stride_dt, chunks_ptr, ds_ring, k_ring, out_tiles, ready, empty, num_works,
                    num_heads, ds_scale, 1, STAGES, D,
                ),
            ),
            (
                _produce_kept,
                (
                    ds_desc, k_desc, chunks_ptr, places_ptr, ds_ring, k_ring, ready, empty, raw, num_works, num_heads,
                    num_sequences, scratch_keys, GROUP, STAGES, D,
                ),
            ),
            (
                _clean_kept,
                (chunks_ptr, ds_ring, k_ring, ready, raw, num_works, num_heads, STAGES, D),
            ),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
