"""Hopper backward of jagged attention in Gluon: one kernel for the gradients of keys and values, one for the queries'.

Scores are computed again from q, k and the log-sum-exp; ``hopper_stats`` has laid out what both kernels need of a row.
Both are persistent, with a producer and two consumers of 64 rows each. Rows past the end of a sequence come as zeros.
No program adds to what another writes, so the result is the same on every run.

* Keys and values: a unit of work is 128 keys of one sequence and key head, against all queries that may meet them.
  Products are taken transposed, keys by queries, so that probabilities and score gradients are left operands in
  registers. A further role brings the log-sum-exp and delta of a tile's queries.
* Queries: a unit of work is 128 queries of one sequence and head, against all keys that they may meet.

Sequences are short, so what stands between two units counts as much as their products. A consumer issues the scores of
the next tile, be it of the next unit, with the last product of this one; what it needs of the unit after that is read
before gradients are written; and they leave from the place of the rows that they belong to, which the producer gets
back within the next unit. With a window a consumer lets tiles pass that only the other one's rows meet.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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
    num_key_tiles,
    tma_load,
    write_rows,
)
from gem_kernels._src.jagged_attention.hopper_forward import _exp2
from gem_kernels._src.jagged_attention.hopper_windows import in_window, keep_window, load_unit, pass_tile, tiles_met

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def _copy_two(
    a_desc, b_desc, a_end_desc, b_end_desc, first, length, row, channel, ready, a_tile, b_tile, ROWS: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """Copy rows [row, row + ROWS) of a sequence of two tensors, rows past its end as zeros, which is slower."""
    mbarrier.expect(ready, 2 * ROWS * D * 2)
    if row + ROWS <= length:
        tma_load(a_desc, [first + row, channel], ready, a_tile)
        tma_load(b_desc, [first + row, channel], ready, b_tile)
    else:
        copy_rows(a_end_desc, first, length, row, channel, ready, a_tile)
        copy_rows(b_end_desc, first, length, row, channel, ready, b_tile)


# ---------------------------------------------------------------- keys and values


@gluon.jit
def _produce_dkdv(
    q_desc, do_desc, q_end_desc, do_end_desc, k_desc, v_desc, chunks_ptr, q_ring, do_ring, k_tiles, v_tiles, ready,
    empty, kv_ready, kv_empty, num_works, num_heads_kv, GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_k, _len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        head_kv = work % num_heads_kv
        slot = index & 1
        mbarrier.wait(kv_empty.index(slot), ((index >> 1) & 1) ^ 1)
        mbarrier.expect(kv_ready.index(slot), 2 * _TILE_ROWS * D * 2)
        for w in gl.static_range(2):
            row = first_k + w * _ROWS
            tma_load(k_desc, [row, head_kv * D], kv_ready.index(slot), k_tiles.index(2 * slot + w))
            tma_load(v_desc, [row, head_kv * D], kv_ready.index(slot), v_tiles.index(2 * slot + w))
        num_tiles = num_key_tiles(len_q, _ROWS)
        for g in range(GROUP):
            channel = (head_kv * GROUP + g) * D
            for i in range(num_tiles):
                s = stage % STAGES
                mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
                _copy_two(
                    q_desc, do_desc, q_end_desc, do_end_desc, first_q, len_q, i * _ROWS, channel, ready.index(s),
                    q_ring.index(s), do_ring.index(s), _ROWS, D,
                )  # fmt: skip
                stage += 1
        index += 1  # noqa: SIM113


@gluon.jit
def _bring_stats(
    stats_ptr, stride_s, chunks_ptr, stats, ready, empty, num_works, num_heads_kv, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    rows = gl.arange(0, _ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    stage = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_k, _len_k, first_q, len_q = load_chunk(chunks_ptr, work, num_heads_kv)
        num_tiles = num_key_tiles(len_q, _ROWS)
        for g in range(GROUP):
            head = (work % num_heads_kv) * GROUP + g
            place = stats_ptr + 2 * head.to(gl.int64) * stride_s + first_q + rows
            rest = len_q  # queries from this tile on
            for _ in range(num_tiles):
                s = stage % STAGES
                # On their way before there is room for them.
                lse = gl.load(place, mask=rows < rest, other=float("inf"))
                delta = gl.load(place + stride_s, mask=rows < rest, other=0.0)
                mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
                stats.index(2 * s).store(lse)
                stats.index(2 * s + 1).store(delta)
                mbarrier.arrive(ready.index(s), count=1)
                place += _ROWS
                rest -= _ROWS
                stage += 1


@gluon.jit
def _consume_dkdv(
    dk_desc, dv_desc, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tiles, ready, empty, kv_ready, kv_empty, num_works,
    num_heads_kv, scale_log2, ds_scale, shifts_ptr, left, right, W: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    column_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    step = gl.num_programs(0)
    work = gl.program_id(0)
    if work < num_works:
        first_k, len_k, len_q, shift = load_unit(chunks_ptr, shifts_ptr, work, num_heads_kv, num_works, HAS_WINDOW)
        stage = 0
        next_len_q = len_q
        next_shift = shift
        if HAS_WINDOW:
            _fk, _lk, next_len_q, next_shift = load_unit(
                chunks_ptr, shifts_ptr, work + step, num_heads_kv, num_works, HAS_WINDOW
            )
            stage, _end = tiles_met(len_q, shift, left, right, W, _ROWS)
            if stage > 0:
                pass_tile(ready, empty, 0, STAGES)
        mbarrier.wait(kv_ready.index(0), 0)
        mbarrier.wait(ready.index(stage), 0)
        scores = warpgroup_mma(
            k_tiles.index(W), q_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        index = 0
        for work in range(gl.program_id(0), num_works, step):
            is_final = work + step >= num_works
            slot = index & 1
            k = k_tiles.index(2 * slot + W)
            v = v_tiles.index(2 * slot + W)
            dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
            dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
            num_tiles = num_key_tiles(len_q, _ROWS)
            if HAS_WINDOW:
                begin, end = tiles_met(len_q, shift, left, right, W, _ROWS)
                next_begin, _end = tiles_met(next_len_q, next_shift, left, right, W, _ROWS)
                # Tiles that pass, at most one between two of this consumer's.
                passed = num_tiles - end + begin
                passed_at_end = gl.where(is_final, 0, num_tiles - end + next_begin)
                low = shift - left - (begin - W) * _ROWS
                high = shift + right - (begin - W) * _ROWS
                num_tiles = end - begin
            count = GROUP * num_tiles
            for i in range(count):
                s = stage % STAGES
                q = q_ring.index(s)
                do = do_ring.index(s)
                grad = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                lse = stats.index(2 * s).load(column_layout)
                if HAS_WINDOW:
                    # Without a branch, which would cost registers while products are under way.
                    offset = (i if GROUP == 1 else i % num_tiles) * _ROWS
                    is_valid = in_window(low - offset, high - offset, scores_layout, _ROWS)
                    scores = gl.where(is_valid, scores, float("-inf"))
                p = _exp2(scores * scale_log2 - lse[None, :])
                p_half = gl.convert_layout(p.to(dtype), p_layout)
                dv = warpgroup_mma(p_half, do, dv, is_async=True)
                delta = stats.index(2 * s + 1).load(column_layout)
                grad = warpgroup_mma_wait(1, deps=[grad])
                ds = gl.convert_layout((p * (grad - delta[None, :])).to(dtype), p_layout)
                dk = warpgroup_mma(ds, q, dk, is_async=True)
                # The gradients of the unit before have left by now, and the next unit may need their place.
                tma.store_wait(pendings=0)
                mbarrier.arrive(kv_empty.index(slot ^ 1), count=1, pred=(i == 0) & (index > 0))
                is_end = i == count - 1
                following = stage + 1
                next_index = index + gl.where(is_end, 1, 0)
                if HAS_WINDOW:
                    if GROUP == 1:
                        passes = is_end & (passed_at_end > 0)
                    else:
                        passes = ((i + 1) % num_tiles == 0) & (gl.where(is_end, passed_at_end, passed) > 0)
                    if passes:
                        pass_tile(ready, empty, following, STAGES)
                        following += 1
                if (is_end & is_final) == 0:
                    mbarrier.wait(kv_ready.index(next_index & 1), (next_index >> 1) & 1)
                    mbarrier.wait(ready.index(following % STAGES), (following // STAGES) & 1)
                next_k = k_tiles.index(2 * (next_index & 1) + W)
                next_q = q_ring.index(following % STAGES)
                next_scores = warpgroup_mma(next_k, next_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                dv, dk, p_half, ds, scores = warpgroup_mma_wait(0, deps=[dv, dk, p_half, ds, next_scores])
                mbarrier.arrive(empty.index(s), count=1)
                stage = following
            channel = (work % num_heads_kv) * D
            rows = len_k - W * _ROWS
            row = first_k + W * _ROWS
            # Under way while gradients are written.
            first_k, len_k, len_q, shift = load_unit(
                chunks_ptr, shifts_ptr, work + step, num_heads_kv, num_works, HAS_WINDOW
            )
            if HAS_WINDOW:
                _fk, _lk, next_len_q, next_shift = load_unit(
                    chunks_ptr, shifts_ptr, work + 2 * step, num_heads_kv, num_works, HAS_WINDOW
                )
            write_rows(dk_desc, k, (dk * ds_scale).to(dtype), row, rows, channel)
            write_rows(dv_desc, v, dv.to(dtype), row, rows, channel)
            index += 1  # noqa: SIM113
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads_kv", "left", "right"])
def _jagged_attention_hopper_dkdv_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,
    q_end_desc,  # (T_q, H * D), tiles of (64, D) that end with a sequence
    do_end_desc,
    k_desc,  # (T_k, H_kv * D), tiles of (64, D)
    v_desc,
    dk_desc,  # (T_k, H_kv * D), tiles of (64, D) that end with a sequence
    dv_desc,
    stats_ptr,  # (2 * H, stride_s) float32
    stride_s,
    chunks_ptr,  # (N, 4) int32, with the parts of queries and keys exchanged
    num_chunks_ptr,
    num_heads_kv,
    scale_log2,
    ds_scale,
    shifts_ptr,  # (N,) int32, read only if HAS_WINDOW
    left,  # queries before the key's place that see it
    right,  # and behind
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], do_desc.layout)
    stats = gl.allocate_shared_memory(gl.float32, [2 * STAGES, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], v_desc.layout)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    kv_ready = allocate_barriers(2)
    kv_empty = allocate_barriers(2)
    for i in gl.static_range(STAGES):
        # The copies and the statistics.
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(kv_ready.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    num_works = gl.load(num_chunks_ptr) * num_heads_kv
    gl.warp_specialize(
        [
            (
                _consume_dkdv,
                (
                    dk_desc, dv_desc, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tiles, ready, empty, kv_ready,
                    kv_empty, num_works, num_heads_kv, scale_log2, ds_scale, shifts_ptr, left, right, 0, GROUP, STAGES,
                    D, HAS_WINDOW,
                ),
            ),
            (
                _consume_dkdv,
                (
                    dk_desc, dv_desc, chunks_ptr, q_ring, do_ring, stats, k_tiles, v_tiles, ready, empty, kv_ready,
                    kv_empty, num_works, num_heads_kv, scale_log2, ds_scale, shifts_ptr, left, right, 1, GROUP, STAGES,
                    D, HAS_WINDOW,
                ),
            ),
            (
                _produce_dkdv,
                (
                    q_desc, do_desc, q_end_desc, do_end_desc, k_desc, v_desc, chunks_ptr, q_ring, do_ring, k_tiles,
                    v_tiles, ready, empty, kv_ready, kv_empty, num_works, num_heads_kv, GROUP, STAGES, D,
                ),
            ),
            (
                _bring_stats,
                (stats_ptr, stride_s, chunks_ptr, stats, ready, empty, num_works, num_heads_kv, GROUP, STAGES),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


# ---------------------------------------------------------------- queries


@gluon.jit
def _produce_dq(
    q_desc, do_desc, k_desc, v_desc, k_end_desc, v_end_desc, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, q_ready,
    q_empty, ready, empty, num_works, num_heads, GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, _len_q, first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        head = work % num_heads
        channel_k = (head // GROUP) * D
        for w in gl.static_range(2):
            slot = 2 * w + (index & 1)
            mbarrier.wait(q_empty.index(slot), ((index >> 1) & 1) ^ 1)
            mbarrier.expect(q_ready.index(slot), 2 * _ROWS * D * 2)
            tma_load(q_desc, [first_q + w * _ROWS, head * D], q_ready.index(slot), q_tiles.index(slot))
            tma_load(do_desc, [first_q + w * _ROWS, head * D], q_ready.index(slot), do_tiles.index(slot))
        for j in range(num_key_tiles(len_k, BLOCK_N)):
            s = stage % STAGES
            mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
            _copy_two(
                k_desc, v_desc, k_end_desc, v_end_desc, first_k, len_k, j * BLOCK_N, channel_k, ready.index(s),
                k_ring.index(s), v_ring.index(s), BLOCK_N, D,
            )  # fmt: skip
            stage += 1
        index += 1  # noqa: SIM113


@gluon.jit
def _load_stats(stats_ptr, stride_s, head, row, num_rows, layout: gl.constexpr):
    """The log-sum-exp and delta of 64 query rows."""
    rows = gl.arange(0, _ROWS, layout)
    place = stats_ptr + 2 * head.to(gl.int64) * stride_s + row + rows
    lse = gl.load(place, mask=rows < num_rows, other=float("inf"))
    return lse, gl.load(place + stride_s, mask=rows < num_rows, other=0.0)


@gluon.jit
def _consume_dq(
    dq_desc, stats_ptr, stride_s, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, q_ready, q_empty, ready, empty,
    num_works, num_heads, scale_log2, ds_scale, shifts_ptr, left, right, W: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, scores_layout)
    step = gl.num_programs(0)
    work = gl.program_id(0)
    if work < num_works:
        first_q, len_q, len_k, shift = load_unit(chunks_ptr, shifts_ptr, work, num_heads, num_works, HAS_WINDOW)
        next_q, next_len_q, next_len_k, next_shift = load_unit(
            chunks_ptr, shifts_ptr, work + step, num_heads, num_works, HAS_WINDOW
        )
        lse, delta = _load_stats(
            stats_ptr, stride_s, work % num_heads, first_q + W * _ROWS, len_q - W * _ROWS, row_layout
        )
        stage = 0
        if HAS_WINDOW:
            stage, _end = tiles_met(len_k, shift, left, right, W, BLOCK_N)
            if stage > 0:
                pass_tile(ready, empty, 0, STAGES)
        mbarrier.wait(q_ready.index(2 * W), 0)
        mbarrier.wait(ready.index(stage), 0)
        scores = warpgroup_mma(
            q_tiles.index(2 * W), k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        index = 0
        for work in range(gl.program_id(0), num_works, step):
            is_final = work + step >= num_works
            slot = 2 * W + (index & 1)
            do = do_tiles.index(slot)
            begin = 0
            end = num_key_tiles(len_k, BLOCK_N)
            if HAS_WINDOW:
                num_keys = end
                begin, end = tiles_met(len_k, shift, left, right, W, BLOCK_N)
                next_begin, _end = tiles_met(next_len_k, next_shift, left, right, W, BLOCK_N)
                # Tiles that pass, at most one.
                passed = gl.where(is_final, 0, num_keys - end + next_begin)
            dq = gl.zeros([_ROWS, D], gl.float32, out_layout)
            for j in range(begin, end):
                s = stage % STAGES
                grad = warpgroup_mma(do, v_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                is_end = j == end - 1
                # The place of the unit before, whose gradient is on its way: at once where the next unit waits for it.
                returns = (j == begin) & (index > 0)
                if is_end & returns:
                    tma.store_wait(pendings=0)
                    mbarrier.arrive(q_empty.index(slot ^ 1), count=1)
                following = stage + 1
                next_index = index + gl.where(is_end, 1, 0)
                next_slot = 2 * W + (next_index & 1)
                if HAS_WINDOW:  # noqa: SIM102
                    if is_end & (passed > 0):
                        pass_tile(ready, empty, following, STAGES)
                        following += 1
                if (is_end & is_final) == 0:
                    mbarrier.wait(q_ready.index(next_slot), (next_index >> 1) & 1)
                    mbarrier.wait(ready.index(following % STAGES), (following // STAGES) & 1)
                if len_k - j * BLOCK_N < BLOCK_N:
                    # Against rows of zeros: the probability may be infinite, and infinity times 0 is not 0.
                    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
                    scores = gl.where((columns < len_k - j * BLOCK_N)[None, :], scores, float("-inf"))
                if HAS_WINDOW:
                    offset = j * BLOCK_N - W * _ROWS
                    scores = keep_window(scores, shift - left - offset, shift + right - offset, scores_layout, BLOCK_N)
                p = _exp2(scores * scale_log2 - lse[:, None])
                k_next = k_ring.index(following % STAGES).permute((1, 0))
                next_scores = warpgroup_mma(q_tiles.index(next_slot), k_next, zeros, use_acc=False, is_async=True)
                grad = warpgroup_mma_wait(1, deps=[grad])
                ds = gl.convert_layout((p * (grad - delta[:, None])).to(dtype), p_layout)
                dq = warpgroup_mma(ds, k_ring.index(s), dq, is_async=True)
                tma.store_wait(pendings=0)
                mbarrier.arrive(q_empty.index(slot ^ 1), count=1, pred=returns & (is_end == 0))
                dq, ds, scores = warpgroup_mma_wait(0, deps=[dq, ds, next_scores])
                mbarrier.arrive(empty.index(s), count=1)
                stage = following
            row = first_q + W * _ROWS
            num_rows = len_q - W * _ROWS
            first_q, len_q, len_k, shift = next_q, next_len_q, next_len_k, next_shift
            # Under way while the gradient is written.
            lse, delta = _load_stats(
                stats_ptr, stride_s, (work + step) % num_heads, first_q + W * _ROWS, len_q - W * _ROWS, row_layout
            )
            next_q, next_len_q, next_len_k, next_shift = load_unit(
                chunks_ptr, shifts_ptr, work + 2 * step, num_heads, num_works, HAS_WINDOW
            )
            write_rows(dq_desc, q_tiles.index(slot), (dq * ds_scale).to(dtype), row, num_rows, (work % num_heads) * D)
            index += 1  # noqa: SIM113
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads", "left", "right"])
def _jagged_attention_hopper_dq_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    do_desc,
    k_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D)
    v_desc,
    k_end_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D) that end with a sequence
    v_end_desc,
    dq_desc,  # (T_q, H * D), tiles of (64, D) that end with a sequence
    stats_ptr,  # (2 * H, stride_s) float32
    stride_s,
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,
    num_heads,
    scale_log2,
    ds_scale,
    shifts_ptr,  # (N,) int32, read only if HAS_WINDOW
    left,
    right,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], do_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    q_ready = allocate_barriers(4)
    q_empty = allocate_barriers(4)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    for i in gl.static_range(4):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    num_works = gl.load(num_chunks_ptr) * num_heads
    gl.warp_specialize(
        [
            (
                _consume_dq,
                (
                    dq_desc, stats_ptr, stride_s, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, q_ready, q_empty,
                    ready, empty, num_works, num_heads, scale_log2, ds_scale, shifts_ptr, left, right, 0, STAGES,
                    BLOCK_N, D, HAS_WINDOW,
                ),
            ),
            (
                _consume_dq,
                (
                    dq_desc, stats_ptr, stride_s, chunks_ptr, q_tiles, do_tiles, k_ring, v_ring, q_ready, q_empty,
                    ready, empty, num_works, num_heads, scale_log2, ds_scale, shifts_ptr, left, right, 1, STAGES,
                    BLOCK_N, D, HAS_WINDOW,
                ),
            ),
            (
                _produce_dq,
                (
                    q_desc, do_desc, k_desc, v_desc, k_end_desc, v_end_desc, chunks_ptr, q_tiles, do_tiles, k_ring,
                    v_ring, q_ready, q_empty, ready, empty, num_works, num_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
