"""Hopper backward of GDPA in Gluon for activations in pairs: all gradients by one kernel.

Scores are computed again; nothing but q, k and v was kept. A unit of work (``attention/hopper/units.py``) owns 128 rows
of one side of a sequence and meets the other side in tiles of 64 rows, which come through a ring:

* where it owns keys, S^T = K Q^T, dP^T = V dO^T, dV += P^T dO and dK += dS^T Q;
* where it owns queries, S = Q K^T, dP = dO V^T and dQ += dS K.

Both are the same loop but for one product: with a and b the rows that a unit owns of K and V, or of Q and dO, and c and
d those of the other side, it sums dS c, with dS from a c^T and b d^T, and P d where it owns keys. P and dS are left
operands in registers. No unit adds to what another writes, so the result is the same on every run, at the price of S
and dP computed twice.

The kernel is persistent: a producer, whose copies end where a sequence ends, with zeros behind it, so that no product
needs a mask, and two consumers of 64 own rows each. A consumer issues the scores of the next tile, be it of the next
unit, before it waits for the gradients of this one.

For one query head per key head: with two, the gradient of the keys was wrong, which is not explained.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels._src.attention.hopper.tiles import ROWS, allocate_barriers, copy_rows, num_key_tiles, write_rows
from gem_kernels._src.attention.hopper.units import ROW_BITS
from gem_kernels._src.gdpa.hopper_activation import times_pairs

_ROWS = gl.constexpr(ROWS)
_ROW_BITS = gl.constexpr(ROW_BITS)
# Places in shared memory, of 64 rows each: a and b of two units and both consumers, then the ring of c, then that of d.
_A = gl.constexpr(0)
_B = gl.constexpr(4)
_RING = gl.constexpr(8)


@gluon.jit
def _work_of(turn):
    """The ``turn``-th work of this program. Forth and back, so that none always gets units of one kind."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return turn * programs + gl.where((turn & 1) == 1, programs - 1 - program, program)


@gluon.jit
def _load_unit(units_ptr, work, num_heads_kv):
    """(first own row, own rows, kind, first row of the other side, its rows) of a work."""
    ptr = units_ptr + (work // num_heads_kv) * 4
    rows = gl.load(ptr + 1)
    return gl.load(ptr), rows & ((1 << _ROW_BITS) - 1), rows >> _ROW_BITS, gl.load(ptr + 2), gl.load(ptr + 3)


@gluon.jit
def _load_own(a_desc, b_desc, first, length, channel, barrier, tiles, slot):
    for w in gl.static_range(2):
        copy_rows(a_desc, first, length, w * _ROWS, channel, barrier, tiles.index(_A + slot * 2 + w))
        copy_rows(b_desc, first, length, w * _ROWS, channel, barrier, tiles.index(_B + slot * 2 + w))


@gluon.jit
def _load_other(
    c_desc, d_desc, first, length, channel, tiles, ready, empty, stage, STAGES: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Copy a sequence's rows into the ring; the stage behind them."""
    for i in range(num_key_tiles(length, _ROWS)):
        s = stage % STAGES
        mbarrier.wait(empty.index(s), ((stage // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(s), 2 * _ROWS * D * 2)
        copy_rows(c_desc, first, length, i * _ROWS, channel, ready.index(s), tiles.index(_RING + s))
        copy_rows(d_desc, first, length, i * _ROWS, channel, ready.index(s), tiles.index(_RING + STAGES + s))
        stage += 1
    return stage


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, units_ptr, tiles, ready, empty, own_ready, own_empty, num_turns, num_heads_kv,
    GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    for turn in range(num_turns):
        work = _work_of(turn)
        first_own, len_own, kind, first, length = _load_unit(units_ptr, work, num_heads_kv)
        head_kv = work % num_heads_kv
        slot = turn & 1
        own = own_ready.index(slot)
        mbarrier.wait(own_empty.index(slot), ((turn >> 1) & 1) ^ 1)
        mbarrier.expect(own, 4 * _ROWS * D * 2)
        if kind == 0:
            _load_own(k_desc, v_desc, first_own, len_own, head_kv * D, own, tiles, slot)
            for g in range(GROUP):
                channel = (head_kv * GROUP + g) * D
                stage = _load_other(q_desc, do_desc, first, length, channel, tiles, ready, empty, stage, STAGES, D)
        else:
            _load_own(q_desc, do_desc, first_own, len_own, (head_kv * GROUP + kind - 1) * D, own, tiles, slot)
            stage = _load_other(k_desc, v_desc, first, length, head_kv * D, tiles, ready, empty, stage, STAGES, D)


@gluon.jit
def _step(
    scores, ds_c, p_d, zeros, tiles, ready, empty, own_ready, stage, turn, is_end, is_final, pre_scale,
    VALUE_AND_SLOPE: gl.constexpr, SLOPE: gl.constexpr, OWNS_KEYS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
    p_layout: gl.constexpr,
):  # fmt: skip
    """Add a tile of the other side: (scores of the next tile, sum of dS c, sum of P d)."""
    s = stage % STAGES
    c = tiles.index(_RING + s)
    d = tiles.index(_RING + STAGES + s)
    b = tiles.index(_B + (turn & 1) * 2 + W)
    next_stage = stage + 1
    next_turn = turn + gl.where(is_end, 1, 0)
    next_a = tiles.index(_A + (next_turn & 1) * 2 + W)
    next_c = tiles.index(_RING + next_stage % STAGES)
    has_next = (is_end & is_final) == 0
    grad = warpgroup_mma(b, d.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if OWNS_KEYS:
        value, slope = VALUE_AND_SLOPE(scores, pre_scale)
        p = gl.convert_layout(value, p_layout)
        p_d = warpgroup_mma(p, d, p_d, is_async=True)
    else:
        slope = SLOPE(scores, pre_scale)
    if has_next:
        mbarrier.wait(own_ready.index(next_turn & 1), (next_turn >> 1) & 1)
        mbarrier.wait(ready.index(next_stage % STAGES), (next_stage // STAGES) & 1)
    next_scores = warpgroup_mma(next_a, next_c.permute((1, 0)), zeros, use_acc=False, is_async=True)
    grad = warpgroup_mma_wait(2 if OWNS_KEYS else 1, deps=[grad])
    ds = gl.convert_layout(times_pairs(slope, grad), p_layout)
    ds_c = warpgroup_mma(ds, c, ds_c, is_async=True)
    # Nothing may be in flight over the end of an iteration, where registers are moved.
    if OWNS_KEYS:
        p_d, ds_c, p, ds, scores = warpgroup_mma_wait(0, deps=[p_d, ds_c, p, ds, next_scores])
    else:
        ds_c, ds, scores = warpgroup_mma_wait(0, deps=[ds_c, ds, next_scores])
    mbarrier.arrive(empty.index(s), count=1)
    return scores, ds_c, p_d


@gluon.jit
def _consume(
    dq_desc, dk_desc, dv_desc, units_ptr, tiles, ready, empty, own_ready, own_empty, num_turns, num_heads_kv, pre_scale,
    out_scale, VALUE_AND_SLOPE: gl.constexpr, SLOPE: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    if num_turns > 0:
        work = _work_of(0)
        first_own, len_own, kind, _first, length = _load_unit(units_ptr, work, num_heads_kv)
        mbarrier.wait(own_ready.index(0), 0)
        mbarrier.wait(ready.index(0), 0)
        c = tiles.index(_RING)
        first_scores = warpgroup_mma(tiles.index(_A + W), c.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[first_scores])
        stage = 0
        for turn in range(num_turns):
            is_final = turn == num_turns - 1
            # On its way while this unit is computed.
            next_work = gl.where(is_final, work, _work_of(turn + 1))
            next_own, next_len, next_kind, _next_first, next_length = _load_unit(units_ptr, next_work, num_heads_kv)
            slot = turn & 1
            # No longer read at the end of the unit: their place takes the gradients on the way out.
            a = tiles.index(_A + slot * 2 + W)
            b = tiles.index(_B + slot * 2 + W)
            head_kv = work % num_heads_kv
            row = first_own + W * _ROWS
            rows = len_own - W * _ROWS
            num_tiles = num_key_tiles(length, _ROWS)
            if kind == 0:
                dk = gl.zeros([_ROWS, D], gl.float32, out_layout)
                dv = gl.zeros([_ROWS, D], gl.float32, out_layout)
                count = GROUP * num_tiles
                for i in range(count):
                    scores, dk, dv = _step(
                        scores, dk, dv, zeros, tiles, ready, empty, own_ready, stage, turn, i == count - 1, is_final,
                        pre_scale, VALUE_AND_SLOPE, SLOPE, True, W, STAGES, p_layout,
                    )  # fmt: skip
                    stage += 1
                channel = head_kv * D
                write_rows(dk_desc, a, (dk * out_scale).to(dtype), row, rows, channel)
                write_rows(dv_desc, b, (dv * out_scale).to(dtype), row, rows, channel)
            else:
                dq = gl.zeros([_ROWS, D], gl.float32, out_layout)
                for i in range(num_tiles):
                    scores, dq, _none = _step(
                        scores, dq, dq, zeros, tiles, ready, empty, own_ready, stage, turn, i == num_tiles - 1,
                        is_final, pre_scale, VALUE_AND_SLOPE, SLOPE, False, W, STAGES, p_layout,
                    )  # fmt: skip
                    stage += 1
                channel = (head_kv * GROUP + kind - 1) * D
                write_rows(dq_desc, b, (dq * out_scale).to(dtype), row, rows, channel)
            tma.store_wait(pendings=0)
            mbarrier.arrive(own_empty.index(slot), count=1)
            work = next_work
            first_own = next_own
            len_own = next_len
            kind = next_kind
            length = next_length


@gluon.jit(do_not_specialize=["num_heads_kv"])
def _gdpa_hopper_bwd_pairs_kernel(
    q_desc,  # (T_q, H * D), of sequences, in tiles of (64, D), as all others
    do_desc,  # (T_q, H * D)
    k_desc,  # (T_k, H_kv * D)
    v_desc,
    dq_desc,  # (T_q, H * D)
    dk_desc,  # (T_k, H_kv * D)
    dv_desc,
    units_ptr,  # (N, 4) int32
    num_units_ptr,  # (1,) int32
    num_heads_kv,
    pre_scale,
    out_scale,  # of all sums
    VALUE_AND_SLOPE: gl.constexpr,
    SLOPE: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per key head
    STAGES: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, D], q_desc.dtype)
    tiles = gl.allocate_shared_memory(q_desc.dtype, [_RING + 2 * STAGES, _ROWS, D], layout)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    own_ready = allocate_barriers(2)
    own_empty = allocate_barriers(2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(own_ready.index(i), count=1)
        mbarrier.init(own_empty.index(i), count=2)
    num_works = gl.load(num_units_ptr) * num_heads_kv
    whole = num_works // gl.num_programs(0)
    num_turns = whole + gl.where(_work_of(whole) < num_works, 1, 0)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    dq_desc, dk_desc, dv_desc, units_ptr, tiles, ready, empty, own_ready, own_empty, num_turns,
                    num_heads_kv, pre_scale, out_scale, VALUE_AND_SLOPE, SLOPE, 0, GROUP, STAGES, D,
                ),
            ),
            (
                _consume,
                (
                    dq_desc, dk_desc, dv_desc, units_ptr, tiles, ready, empty, own_ready, own_empty, num_turns,
                    num_heads_kv, pre_scale, out_scale, VALUE_AND_SLOPE, SLOPE, 1, GROUP, STAGES, D,
                ),
            ),
            (
                _produce,
                (
                    q_desc, do_desc, k_desc, v_desc, units_ptr, tiles, ready, empty, own_ready, own_empty, num_turns,
                    num_heads_kv, GROUP, STAGES, D,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
