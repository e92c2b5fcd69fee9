"""Hopper backward of jagged attention in Gluon: one kernel for the gradients of keys and values, one for the queries'.

Scores are computed again from q, k and the log-sum-exp; ``hopper_stats`` has laid out what both kernels need of a row.
Both are persistent, with the roles of the forward: a producer, a cleaner that zeroes the rows behind a sequence in its
last tile, and two consumers of 64 rows each. No program adds to what another writes, so the result is the same on
every run.

* Keys and values: a unit of work is 128 keys of one sequence and key head, against all its queries. Products are taken
  transposed, keys by queries, so that probabilities and score gradients are left operands in registers. The cleaner
  also brings the log-sum-exp and delta of a tile's queries. A consumer issues the scores of the next tile, be it of
  the next unit, with the last product of this one.
* Queries: a unit of work is a chunk of query rows, as in the forward, against its keys. Scores of the next key tile are
  issued before the gradient of this one's is waited for.
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

from gem_kernels._src.attention.hopper.backward_roles import clean_dq, produce_dkdv, produce_dq
from gem_kernels._src.attention.hopper.tiles import (
    ROWS,
    TILE_ROWS,
    allocate_barriers,
    load_chunk,
    num_key_tiles,
    store_tile,
    zero_rows,
)
from gem_kernels._src.jagged_attention.hopper_forward import _exp2

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)


# ---------------------------------------------------------------- keys and values


@gluon.jit
def _clean_dkdv(
    stats_ptr, stride_s, chunks_ptr, q_ring, do_ring, stats, ready, empty, raw, num_works, num_heads_kv,
    GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    rows = gl.arange(0, _ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    stage = 0
    pass_index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_k, _len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        num_tiles = num_key_tiles(len_q, _ROWS)
        for g in range(GROUP):
            head = (work % num_heads_kv) * GROUP + g
            place = stats_ptr + 2 * head.to(gl.int64) * stride_s + first_q + rows
            rest = len_q  # queries from this tile on
            for i in range(num_tiles):
                s = stage % STAGES
                # On their way before there is room for them.
                lse = gl.load(place, mask=rows < rest, other=float("inf"))
                delta = gl.load(place + stride_s, mask=rows < rest, other=0.0)
                mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
                stats.index(2 * s).store(lse)
                stats.index(2 * s + 1).store(delta)
                if i < num_tiles - 1:
                    mbarrier.arrive(ready.index(s), count=1)
                else:
                    mbarrier.wait(raw.index(pass_index % STAGES), (pass_index // STAGES) & 1)
                    if rest < _ROWS:
                        zero_rows(q_ring.index(s), rest, _ROWS, D)
                        zero_rows(do_ring.index(s), rest, _ROWS, D)
                        fence_async_shared()
                    # For the copies, too.
                    mbarrier.arrive(ready.index(s), count=2)
                place += _ROWS
                rest -= _ROWS
                stage += 1
            pass_index += 1


@gluon.jit
def _consume_dkdv(
    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tiles, ready, empty,
    kv_ready, kv_empty, num_works, num_heads_kv, scale_log2, ds_scale, W: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    column_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    stage = 0
    index = 0
    scores = zeros
    if gl.program_id(0) < num_works:
        mbarrier.wait(kv_ready.index(0), 0)
        mbarrier.wait(ready.index(0), 0)
        first_own = k_tiles.index(0).slice(W * _ROWS, _ROWS, dim=0)
        first = warpgroup_mma(first_own, q_ring.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[first])
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_k, len_k, _first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        is_final = work + gl.num_programs(0) >= num_works
        slot = index & 1
        k = k_tiles.index(slot).slice(W * _ROWS, _ROWS, dim=0)
        v = v_tiles.index(slot).slice(W * _ROWS, _ROWS, dim=0)
        dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
        dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
        mbarrier.wait(kv_ready.index(slot), (index >> 1) & 1)
        count = GROUP * num_key_tiles(len_q, _ROWS)
        for i in range(count):
            s = stage % STAGES
            q = q_ring.index(s)
            do = do_ring.index(s)
            grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            lse = stats.index(2 * s).load(column_layout)
            p = _exp2(scores * scale_log2 - lse[None, :])
            p_half = gl.convert_layout(p.to(dtype), p_layout)
            dv = warpgroup_mma(p_half, do, dv, is_async=True)
            delta = stats.index(2 * s + 1).load(column_layout)
            grad = warpgroup_mma_wait(1, deps=[grad])
            ds = gl.convert_layout((p * (grad - delta[None, :])).to(dtype), p_layout)
            dk = warpgroup_mma(ds, q, dk, is_async=True)
            is_end = i == count - 1
            following = stage + 1
            next_index = index + gl.where(is_end, 1, 0)
            if (is_end & is_final) == 0:
                mbarrier.wait(kv_ready.index(next_index & 1), (next_index >> 1) & 1)
                mbarrier.wait(ready.index(following % STAGES), (following // STAGES) & 1)
            next_k = k_tiles.index(next_index & 1).slice(W * _ROWS, _ROWS, dim=0)
            next_q = q_ring.index(following % STAGES)
            next_scores = warpgroup_mma(next_k, next_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dv, dk, p_half, ds, scores = warpgroup_mma_wait(0, deps=[dv, dk, p_half, ds, next_scores])
            mbarrier.arrive(empty.index(s), count=1)
            stage += 1
        # The keys and values of this consumer are read no more: their place takes the gradients on the way out.
        channel = (work % num_heads_kv) * D
        rows = len_k - W * _ROWS
        row = first_k + W * _ROWS
        store_tile(dk_desc, dk_ptr, k, (dk * ds_scale).to(dtype), row, rows, channel, stride_dt, D)
        store_tile(dv_desc, dv_ptr, v, dv.to(dtype), row, rows, channel, stride_dt, D)
        tma.store_wait(pendings=0)
        mbarrier.arrive(kv_empty.index(slot), count=1)
        index += 1  # noqa: SIM113


@gluon.jit(do_not_specialize=["num_heads_kv"])
def _jagged_attention_hopper_dkdv_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (128, D)
    v_desc,
    dk_desc,  # (T_k, H_kv * D), tiles of (64, D)
    dv_desc,
    dk_ptr,
    dv_ptr,
    stride_dt,
    stats_ptr,  # (2 * H, stride_s) float32
    stride_s,
    chunks_ptr,  # (N, 4) int32, with the parts of queries and keys exchanged
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
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], do_desc.layout)
    stats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, _TILE_ROWS, D], v_desc.layout)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    raw = allocate_barriers(STAGES)
    kv_ready = allocate_barriers(2)
    kv_empty = allocate_barriers(2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=2)
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
                    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tiles,
                    ready, empty, kv_ready, kv_empty, num_works, num_heads_kv, scale_log2, ds_scale, 0, GROUP, STAGES,
                    D,
                ),
            ),
            (
                _consume_dkdv,
                (
                    dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dt, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tiles,
                    ready, empty, kv_ready, kv_empty, num_works, num_heads_kv, scale_log2, ds_scale, 1, GROUP, STAGES,
                    D,
                ),
            ),
            (
                produce_dkdv,
                (
                    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready, empty, raw,
                    kv_ready, kv_empty, num_works, num_heads_kv, GROUP, STAGES, D,
                ),
            ),
            (
                _clean_dkdv,
                (
                    stats_ptr, stride_s, chunks_ptr, q_ring, do_ring, stats, ready, empty, raw, num_works,
                    num_heads_kv, GROUP, STAGES, D,
                ),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


# ---------------------------------------------------------------- queries


@gluon.jit
def _consume_dq(
    dq_desc, dq_ptr, stride_dt, stats_ptr, stride_s, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, out_tiles, q_ready,
    q_empty, ready, empty, num_works, num_heads, scale_log2, ds_scale, W: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, scores_layout)
    rows = gl.arange(0, _ROWS, gl.SliceLayout(1, scores_layout))
    q = q_tiles.index(W)
    do = do_tiles.index(W)
    tile = 0
    base = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        head = work % num_heads
        num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
        num_keys = num_key_tiles(len_k, BLOCK_N)
        for t in range(num_tiles):
            is_last_tile = t == num_tiles - 1
            dq = gl.zeros([_ROWS, D], gl.float32, out_layout)
            row = first_q + t * _TILE_ROWS + W * _ROWS
            num_rows = len_q - t * _TILE_ROWS - W * _ROWS
            place = stats_ptr + 2 * head.to(gl.int64) * stride_s + row + rows
            lse = gl.load(place, mask=rows < num_rows, other=float("inf"))
            delta = gl.load(place + stride_s, mask=rows < num_rows, other=0.0)
            mbarrier.wait(q_ready.index(W), tile & 1)
            s = base % STAGES
            mbarrier.wait(ready.index(s), (base // STAGES) & 1)
            first = warpgroup_mma(q, k_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[first])
            for j in range(num_keys):
                s = (base + j) % STAGES
                following = base + j + 1
                s_next = following % STAGES
                has_next = j < num_keys - 1
                grad = warpgroup_mma(do, v_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                if has_next:
                    mbarrier.wait(ready.index(s_next), (following // STAGES) & 1)
                else:
                    # Against rows of zeros: the probability may be infinite, and infinity times 0 is not 0.
                    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
                    valid = (columns < len_k - j * BLOCK_N)[None, :]
                    scores = gl.where(valid, scores, float("-inf"))
                p = _exp2(scores * scale_log2 - lse[:, None])
                k_next = k_ring.index(s_next).permute((1, 0))
                next_scores = warpgroup_mma(q, k_next, zeros, use_acc=False, is_async=True)
                grad = warpgroup_mma_wait(1, deps=[grad])
                ds = gl.convert_layout((p * (grad - delta[:, None])).to(dtype), p_layout)
                dq = warpgroup_mma(ds, k_ring.index(s), dq, is_async=True)
                dq, ds, scores = warpgroup_mma_wait(0, deps=[dq, ds, next_scores])
                mbarrier.arrive(empty.index(s), count=1, pred=is_last_tile)
                mbarrier.arrive(q_empty.index(W), count=1, pred=has_next == 0)
            store_tile(
                dq_desc, dq_ptr, out_tiles.index(W), (dq * ds_scale).to(dtype), row, num_rows, head * D, stride_dt, D
            )
            tile += 1
        base += num_keys
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads"])
def _jagged_attention_hopper_dq_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D)
    v_desc,
    dq_desc,  # (T_q, H * D), tiles of (64, D)
    dq_ptr,
    stride_dt,
    stats_ptr,  # (2 * H, stride_s) float32
    stride_s,
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,
    num_heads,
    scale_log2,
    ds_scale,
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
                    dq_desc, dq_ptr, stride_dt, stats_ptr, stride_s, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring,
                    out_tiles, q_ready, q_empty, ready, empty, num_works, num_heads, scale_log2, ds_scale, 0, STAGES,
                    BLOCK_N, D,
                ),
            ),
            (
                _consume_dq,
                (
                    dq_desc, dq_ptr, stride_dt, stats_ptr, stride_s, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring,
                    out_tiles, q_ready, q_empty, ready, empty, num_works, num_heads, scale_log2, ds_scale, 1, STAGES,
                    BLOCK_N, D,
                ),
            ),
            (
                produce_dq,
                (
                    q_desc, do_desc, k_desc, v_desc, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, q_ready, q_empty,
                    ready, empty, raw, num_works, num_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
            (
                clean_dq,
                (chunks_ptr, k_ring, v_ring, ready, raw, num_works, num_heads, STAGES, BLOCK_N, D),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
