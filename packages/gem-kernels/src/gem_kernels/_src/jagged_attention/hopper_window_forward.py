"""Hopper forward of jagged attention with a window, in Gluon: the roles and the pipeline of ``hopper_forward``.

A unit of work is one tile of 128 queries, whose window begins where that of no other tile does, so that keys do not
stay for a second one. Keys come in tiles of 64, and a consumer lets those pass that only the other one's rows meet.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels._src.attention.hopper.tiles import (
    ROWS,
    allocate_barriers,
    num_key_tiles,
    release,
    thread_barrier,
    write_rows,
)
from gem_kernels._src.jagged_attention.hopper_forward import (
    _exp2,
    _log2,
    _mask,
    _produce,
    _reciprocal,
    _shift,
)
from gem_kernels._src.jagged_attention.hopper_windows import keep_window, load_unit, pass_tile, tiles_met

_ROWS = gl.constexpr(ROWS)
_LN2 = gl.constexpr(math.log(2.0))


@gluon.jit
def _consume(
    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready, k_empty,
    v_ready, v_empty, passed, num_works, num_heads, scale_log2, shifts_ptr, left, right, W: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, scores_layout)
    acc = gl.zeros([_ROWS, D], gl.float32, out_layout)
    rows = gl.arange(0, _ROWS, row_layout)
    step = gl.num_programs(0)
    work = gl.program_id(0)
    if work < num_works:
        first_q, len_q, len_k, shift = load_unit(chunks_ptr, shifts_ptr, work, num_heads, num_works, True)
        begin, end = tiles_met(len_k, shift, left, right, W, BLOCK_N)
        if begin > 0:
            pass_tile(k_ready, k_empty, 0, STAGES)
        mbarrier.wait(q_ready.index(W * 2), 0)
        mbarrier.wait(k_ready.index(begin), 0)
        scores = warpgroup_mma(
            q_tiles.index(W * 2), k_ring.index(begin).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        thread_barrier()
        release(k_empty.index(begin), True)
        offset = begin * BLOCK_N - W * _ROWS
        scores = keep_window(scores, shift - left - offset, shift + right - offset, scores_layout, BLOCK_N)
        scores = _mask(scores, len_k - begin * BLOCK_N, scores_layout, BLOCK_N)
        row_max = gl.max(scores, 1)
        e = _exp2(scores * scale_log2 - _shift(row_max, scale_log2)[:, None])
        row_sum = gl.sum(e, 1)
        p = gl.convert_layout(e.to(dtype), p_layout)
        index = 0  # units so far
        base = 0  # key tiles of earlier units
        for work in range(gl.program_id(0), num_works, step):
            is_final = work + step >= num_works
            next_q, next_len_q, next_len_k, next_shift = load_unit(
                chunks_ptr, shifts_ptr, work + step, num_heads, num_works, True
            )
            next_begin, next_end = tiles_met(next_len_k, next_shift, left, right, W, BLOCK_N)
            num_keys = num_key_tiles(len_k, BLOCK_N)
            slot = W * 2 + (index & 1)
            q = q_tiles.index(slot)
            if begin > 0:
                pass_tile(v_ready, v_empty, base, STAGES)
            for j in range(begin + 1, end):
                s = (base + j) % STAGES
                s_v = (base + j - 1) % STAGES
                mbarrier.wait(k_ready.index(s), ((base + j) // STAGES) & 1)
                scores = warpgroup_mma(q, k_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(s_v), ((base + j - 1) // STAGES) & 1)
                acc = warpgroup_mma(p, v_ring.index(s_v), acc, use_acc=(j > begin + 1), is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                offset = j * BLOCK_N - W * _ROWS
                scores = keep_window(scores, shift - left - offset, shift + right - offset, scores_layout, BLOCK_N)
                scores = _mask(scores, len_k - j * BLOCK_N, scores_layout, BLOCK_N)
                new_max = gl.maximum(row_max, gl.max(scores, 1))
                exponent = _shift(new_max, scale_log2)
                factor = _exp2(row_max * scale_log2 - exponent)
                # Ends at once, and keeps the next wait behind the maxima.
                mbarrier.wait(passed.index(0), 1)
                acc, p, scores = warpgroup_mma_wait(0, deps=[acc, p, scores])
                thread_barrier()
                release(k_empty.index(s), True)
                release(v_empty.index(s_v), True)
                acc = acc * gl.convert_layout(factor, out_row_layout)[:, None]
                e = _exp2(scores * scale_log2 - exponent[:, None])
                row_sum = row_sum * factor + gl.sum(e, 1)
                row_max = new_max
                p = gl.convert_layout(e.to(dtype), p_layout)
            # The last values, beside the first scores of the next unit.
            next_stage = base + num_keys
            if end < num_keys:
                pass_tile(k_ready, k_empty, base + end, STAGES)
            if (next_begin > 0) & (is_final == 0):
                pass_tile(k_ready, k_empty, next_stage, STAGES)
            next_stage += next_begin
            s = next_stage % STAGES
            s_v = (base + end - 1) % STAGES
            next_slot = W * 2 + ((index + 1) & 1)
            if is_final == 0:
                mbarrier.wait(q_ready.index(next_slot), ((index + 1) >> 1) & 1)
                mbarrier.wait(k_ready.index(s), (next_stage // STAGES) & 1)
            scores = warpgroup_mma(
                q_tiles.index(next_slot), k_ring.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            mbarrier.wait(v_ready.index(s_v), ((base + end - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_ring.index(s_v), acc, use_acc=(end - begin > 1), is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            offset = next_begin * BLOCK_N - W * _ROWS
            scores = keep_window(
                scores, next_shift - left - offset, next_shift + right - offset, scores_layout, BLOCK_N
            )
            scores = _mask(scores, next_len_k - next_begin * BLOCK_N, scores_layout, BLOCK_N)
            next_max = gl.max(scores, 1)
            exponent = _shift(next_max, scale_log2)
            mbarrier.wait(passed.index(0), 1)
            acc, p, scores = warpgroup_mma_wait(0, deps=[acc, p, scores])
            tma.store_wait(pendings=0)
            release(q_empty.index(slot), True)
            release(k_empty.index(s), is_final == 0)
            release(v_empty.index(s_v), True)
            if end < num_keys:
                pass_tile(v_ready, v_empty, base + end, STAGES)
            is_empty = row_sum == 0.0
            total = gl.where(is_empty, 1.0, row_sum)
            row = first_q + W * _ROWS
            num_rows = len_q - W * _ROWS
            head = work % num_heads
            out = (acc * gl.convert_layout(_reciprocal(total), out_row_layout)[:, None]).to(dtype)
            write_rows(out_desc, out_tiles.index(W), out, row, num_rows, head * D)
            lse = gl.where(is_empty, float("-inf"), (row_max * scale_log2 + _log2(total)) * _LN2)
            gl.store(lse_ptr + row.to(gl.int64) * num_heads + head + rows * num_heads, lse, mask=rows < num_rows)
            e = _exp2(scores * scale_log2 - exponent[:, None])
            row_sum = gl.sum(e, 1)
            row_max = next_max
            p = gl.convert_layout(e.to(dtype), p_layout)
            index += 1  # noqa: SIM113
            base += num_keys
            first_q, len_q, len_k, shift = next_q, next_len_q, next_len_k, next_shift
            begin, end = next_begin, next_end
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads", "left", "right"])
def _jagged_attention_hopper_window_fwd_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D) that end with a sequence
    v_desc,
    out_desc,  # (T_q, H * D), tiles of (64, D) that end with a sequence
    lse_ptr,  # (T_q, H) float32, natural logarithm
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,  # (1,) int32
    num_heads,
    scale_log2,  # scale * log2(e), positive
    shifts_ptr,  # (N,) int32
    left,
    right,
    GROUP: gl.constexpr,  # query heads per key head
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    ring_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], q_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], ring_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], ring_layout)
    q_ready = allocate_barriers(4)
    q_empty = allocate_barriers(4)
    k_ready = allocate_barriers(STAGES)
    k_empty = allocate_barriers(STAGES)
    v_ready = allocate_barriers(STAGES)
    v_empty = allocate_barriers(STAGES)
    passed = allocate_barriers(1)  # nobody arrives, and a wait for the phase before its first ends at once
    mbarrier.init(passed.index(0), count=1)
    for i in gl.static_range(4):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    num_works = gl.load(num_chunks_ptr) * num_heads
    step_chunks = gl.num_programs(0) // num_heads
    step_heads = gl.num_programs(0) % num_heads
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready,
                    k_empty, v_ready, v_empty, passed, num_works, num_heads, scale_log2, shifts_ptr, left, right, 0,
                    STAGES, BLOCK_N, D,
                ),
            ),
            (
                _consume,
                (
                    out_desc, lse_ptr, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready,
                    k_empty, v_ready, v_empty, passed, num_works, num_heads, scale_log2, shifts_ptr, left, right, 1,
                    STAGES, BLOCK_N, D,
                ),
            ),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, chunks_ptr, q_tiles, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty,
                    v_ready, v_empty, num_works, num_heads, step_chunks, step_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
