"""Hopper backward of GDPA in Gluon: one kernel for the gradients of keys and values, one for that of the queries.

Scores are computed again; nothing but q, k and v was kept. Both kernels are persistent, with the roles of the forward:
a producer, a cleaner that zeroes the rows behind a sequence in its last tile, and two consumers of 64 rows each. No
program adds to what another writes, so the result is the same on every run.

* Keys and values: a unit of work is 128 keys of one sequence and key head, against all its queries. Products are taken
  transposed, keys by queries, so that probabilities and score gradients are left operands in registers.
* Queries: a unit of work is a chunk of query rows, as in the forward, against its keys.
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
    store_tile,
    tma_load,
    zero_rows,
)

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)

# ---------------------------------------------------------------- keys and values


@gluon.jit
def _produce_dkdv(
    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, empty, raw, kv_ready,
    kv_empty, num_works, num_heads_kv, GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of a unit of work, and a ring of tiles of q and dO of all its query heads."""
    stage = 0
    pass_index = 0  # passes over a sequence's queries so far
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_k, _len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        head_kv = work % num_heads_kv
        slot = index & 1
        mbarrier.wait(kv_empty.index(slot), ((index >> 1) & 1) ^ 1)
        mbarrier.expect(kv_ready.index(slot), 2 * _TILE_ROWS * D * 2)
        tma_load(k_desc, [first_k, head_kv * D], kv_ready.index(slot), k_tiles.index(slot))
        tma_load(v_desc, [first_k, head_kv * D], kv_ready.index(slot), v_tiles.index(slot))
        num_tiles = num_key_tiles(len_q, _ROWS)
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
        index += 1  # noqa: SIM113


@gluon.jit
def _clean_dkdv(
    chunks_ptr, q_ring, do_ring, ready, raw, num_works, num_heads_kv, GROUP: gl.constexpr, STAGES: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    stage = 0
    pass_index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_k, _len_k, _first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        num_tiles = num_key_tiles(len_q, _ROWS)
        rest = len_q - (num_tiles - 1) * _ROWS
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


@gluon.jit
def _consume_dkdv(
    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, empty, kv_ready,
    kv_empty, num_works, num_heads_kv, pre_scale, dv_scale, ds_scale, ACTIVATION: gl.constexpr,
    ACTIVATION_DERIVATIVE: gl.constexpr, HAS_PRE_SCALE: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_k, len_k, _first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        slot = index & 1
        k = k_tiles.index(slot).slice(W * _ROWS, _ROWS, dim=0)
        v = v_tiles.index(slot).slice(W * _ROWS, _ROWS, dim=0)
        dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
        dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
        mbarrier.wait(kv_ready.index(slot), (index >> 1) & 1)
        for _i in range(GROUP * num_key_tiles(len_q, _ROWS)):
            s = stage % STAGES
            mbarrier.wait(ready.index(s), (stage // STAGES) & 1)
            q = q_ring.index(s)
            do = do_ring.index(s)
            scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            if HAS_PRE_SCALE:
                scores = scores * pre_scale
            p = gl.convert_layout(ACTIVATION(scores).to(dtype), p_layout)
            slope = ACTIVATION_DERIVATIVE(scores)
            if D == 128:
                # Long past, but ptxas moves no arithmetic over it: slopes computed later would hold more registers.
                mbarrier.wait(ready.index(s), (stage // STAGES) & 1)
            dv = warpgroup_mma(p, do, dv, is_async=True)
            grad = warpgroup_mma_wait(1, deps=[grad])
            ds = gl.convert_layout((slope * grad).to(dtype), p_layout)
            dk = warpgroup_mma(ds, q, dk, is_async=True)
            dv, dk, p, ds = warpgroup_mma_wait(0, deps=[dv, dk, p, ds])
            mbarrier.arrive(empty.index(s), count=1)
            stage += 1
        # The keys and values of this consumer are read no more: their place takes the gradients on the way out.
        channel = (work % num_heads_kv) * D
        rows = len_k - W * _ROWS
        store_tile(
            dk_desc, dk_ptr, k, (dk * ds_scale).to(dtype), first_k + W * _ROWS, rows, channel,
            stride_dt, D,
        )  # fmt: skip
        store_tile(dv_desc, dv_ptr, v, (dv * dv_scale).to(dtype), first_k + W * _ROWS, rows, channel, stride_dt, D)
        tma.store_wait(pendings=0)
        mbarrier.arrive(kv_empty.index(slot), count=1)
        index += 1  # noqa: SIM113


@gluon.jit(do_not_specialize=["num_heads_kv"])
def _gdpa_hopper_dkdv_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (128, D)
    v_desc,
    dk_desc,  # (T_k, H_kv * D), tiles of (64, D)
    dv_desc,
    dk_ptr,
    dv_ptr,
    stride_dt,
    chunks_ptr,  # (N, 4) int32, with the parts of queries and keys exchanged
    num_chunks_ptr,
    num_heads_kv,
    pre_scale,
    dv_scale,  # of the sums for dv
    ds_scale,  # of those for dk
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
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    raw = allocate_barriers(STAGES)
    kv_ready = allocate_barriers(2)
    kv_empty = allocate_barriers(2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(raw.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(kv_ready.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    num_works = gl.load(num_chunks_ptr) * num_heads_kv
    gl.warp_specialize(
        [
            (
                _consume_dkdv,
                (
                    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready,
                    empty, kv_ready, kv_empty, num_works, num_heads_kv, pre_scale, dv_scale, ds_scale, ACTIVATION,
                    ACTIVATION_DERIVATIVE, HAS_PRE_SCALE, 0, GROUP, STAGES, D,
                ),
            ),
            (
                _consume_dkdv,
                (
                    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready,
                    empty, kv_ready, kv_empty, num_works, num_heads_kv, pre_scale, dv_scale, ds_scale, ACTIVATION,
                    ACTIVATION_DERIVATIVE, HAS_PRE_SCALE, 1, GROUP, STAGES, D,
                ),
            ),
            (
                _produce_dkdv,
                (
                    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, empty, raw,
                    kv_ready, kv_empty, num_works, num_heads_kv, GROUP, STAGES, D,
                ),
            ),
            (
                _clean_dkdv,
                (chunks_ptr, q_ring, do_ring, ready, raw, num_works, num_heads_kv, GROUP, STAGES, D),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


# ---------------------------------------------------------------- queries


@gluon.jit
def _produce_dq(
    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, q_ready, q_empty, ready, empty, raw,
    num_works, num_heads, GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Copy a unit's query tiles of q and dO, and its keys and values into a ring, where they stay for all of them."""
    tile = 0
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        head = work % num_heads
        channel_q = head * D
        channel_k = (head // GROUP) * D
        num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
        num_keys = num_key_tiles(len_k, BLOCK_N)
        for t in range(num_tiles):
            for w in gl.static_range(2):
                mbarrier.wait(q_empty.index(w), (tile & 1) ^ 1)
                mbarrier.expect(q_ready.index(w), 2 * _ROWS * D * 2)
                row = first_q + t * _TILE_ROWS + w * _ROWS
                tma_load(q_desc, [row, channel_q], q_ready.index(w), q_tiles.index(w))
                tma_load(do_desc, [row, channel_q], q_ready.index(w), do_tiles.index(w))
            tile += 1
            if t == 0:
                for j in range(num_keys):
                    s = stage % STAGES
                    mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
                    row_k = first_k + j * BLOCK_N
                    if j == num_keys - 1:
                        r = index % STAGES
                        mbarrier.expect(raw.index(r), 2 * BLOCK_N * D * 2)
                        tma_load(k_desc, [row_k, channel_k], raw.index(r), k_ring.index(s))
                        tma_load(v_desc, [row_k, channel_k], raw.index(r), v_ring.index(s))
                    else:
                        mbarrier.expect(ready.index(s), 2 * BLOCK_N * D * 2)
                        tma_load(k_desc, [row_k, channel_k], ready.index(s), k_ring.index(s))
                        tma_load(v_desc, [row_k, channel_k], ready.index(s), v_ring.index(s))
                    stage += 1
        index += 1  # noqa: SIM113


@gluon.jit
def _clean_dq(
    chunks_ptr, k_ring, v_ring, ready, raw, num_works, num_heads, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Zero the rows behind a sequence in its last tile of keys and values."""
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_q, _len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        num_keys = num_key_tiles(len_k, BLOCK_N)
        s = (stage + num_keys - 1) % STAGES
        rest = len_k - (num_keys - 1) * BLOCK_N
        mbarrier.wait(raw.index(index % STAGES), (index // STAGES) & 1)
        if rest < BLOCK_N:
            zero_rows(k_ring.index(s), rest, BLOCK_N, D)
            zero_rows(v_ring.index(s), rest, BLOCK_N, D)
            fence_async_shared()
        mbarrier.arrive(ready.index(s), count=1)
        stage += num_keys
        index += 1  # noqa: SIM113


@gluon.jit
def _consume_dq(
    dq_desc, dq_ptr, stride_dt, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, ready,
    empty, num_works, num_heads, pre_scale, ds_scale, ACTIVATION_DERIVATIVE: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, scores_layout)
    q = q_tiles.index(W)
    do = do_tiles.index(W)
    tile = 0
    base = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
        num_keys = num_key_tiles(len_k, BLOCK_N)
        for t in range(num_tiles):
            is_last_tile = t == num_tiles - 1
            dq = gl.zeros([_ROWS, D], gl.float32, out_layout)
            mbarrier.wait(q_ready.index(W), tile & 1)
            for j in range(num_keys):
                s = (base + j) % STAGES
                mbarrier.wait(ready.index(s), ((base + j) // STAGES) & 1)
                scores = warpgroup_mma(q, k_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                grad = warpgroup_mma(do, v_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                if HAS_PRE_SCALE:
                    scores = scores * pre_scale
                slope = ACTIVATION_DERIVATIVE(scores)
                if D == 128:
                    # As above: else it waits for this product ahead of the slopes.
                    mbarrier.wait(ready.index(s), ((base + j) // STAGES) & 1)
                grad = warpgroup_mma_wait(0, deps=[grad])
                ds = gl.convert_layout((slope * grad).to(dtype), p_layout)
                dq = warpgroup_mma(ds, k_ring.index(s), dq, is_async=True)
                dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
                mbarrier.arrive(empty.index(s), count=1, pred=is_last_tile)
            mbarrier.arrive(q_empty.index(W), count=1)
            store_tile(
                dq_desc, dq_ptr, out_tiles.index(W), (dq * ds_scale).to(dtype),
                first_q + t * _TILE_ROWS + W * _ROWS, len_q - t * _TILE_ROWS - W * _ROWS, (work % num_heads) * D,
                stride_dt, D,
            )  # fmt: skip
            tile += 1
        base += num_keys
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads"])
def _gdpa_hopper_dq_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D)
    v_desc,
    dq_desc,  # (T_q, H * D), tiles of (64, D)
    dq_ptr,
    stride_dt,
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,
    num_heads,
    pre_scale,
    ds_scale,
    ACTIVATION_DERIVATIVE: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], do_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], dq_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    q_ready = allocate_barriers(2)
    q_empty = allocate_barriers(2)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    raw = allocate_barriers(STAGES)
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(raw.index(i), count=1)
    num_works = gl.load(num_chunks_ptr) * num_heads
    gl.warp_specialize(
        [
            (
                _consume_dq,
                (
                    dq_desc, dq_ptr, stride_dt, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, out_tiles, q_ready,
                    q_empty, ready, empty, num_works, num_heads, pre_scale, ds_scale, ACTIVATION_DERIVATIVE,
                    HAS_PRE_SCALE, 0, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _consume_dq,
                (
                    dq_desc, dq_ptr, stride_dt, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, out_tiles, q_ready,
                    q_empty, ready, empty, num_works, num_heads, pre_scale, ds_scale, ACTIVATION_DERIVATIVE,
                    HAS_PRE_SCALE, 1, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _produce_dq,
                (
                    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, q_ready, q_empty,
                    ready, empty, raw, num_works, num_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _clean_dq,
                (chunks_ptr, k_ring, v_ring, ready, raw, num_works, num_heads, STAGES, BLOCK_N, D),
            ),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
