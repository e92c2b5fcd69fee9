"""Roles of the backward in one kernel that both attention ops have, in Gluon: what copies, and what hands dq on.

A unit of work is 128 keys of one sequence and key head, against all its queries in tiles of 64 (``units``). The sum
over the keys that dq is passes from one unit of a sequence to the next, in float32 and always in the same order, so
that the result is the same on every run: the first stores its part, those in the middle have the copy engine add
theirs, the last fetches the sum into shared memory, adds its own part, rounds and writes dq. A counter for each query
tile says how many parts it has. Where one unit has all keys, it writes dq at once.

With ``IN_DQ``, where two units have all keys, the first leaves its part where dq will be, rounded as dq is, and the
second adds it to its own: half the bytes, where these are what binds, for one rounding of dq more.

Programs claim units in the order of the list, and a unit waits for units before it alone, which are done or run on a
program that has begun: there is always one that waits for nobody, however many programs run at a time.

Two consumers own 64 keys each. For each half of dq's channels one warp moves what one of them leaves: it grants the
consumer the place for it, with the sum so far in it where the consumer is to add to it. Once a unit the place is
granted for the gradients of keys and values, which the consumer sends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from gem_kernels._src.attention.hopper.call import SEQUENCE_END
from gem_kernels._src.attention.hopper.tiles import (
    ROWS,
    TILE_ROWS,
    _as_tile_of,
    copy_rows,
    tma_add,
    tma_load,
    tma_store,
    view_as,
)
from gem_kernels._src.attention.hopper.turns import announce, await_work, claim, fence_turn, pass_turn, turn_of
from gem_kernels._src.attention.hopper.units import FIELDS

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)
_END = gl.constexpr(SEQUENCE_END)
_FIELDS = gl.constexpr(FIELDS)
# Of a tile of dq (64, 64) in float32: four numbers of a thread side by side, then the threads. No bank is met twice,
# as in the copy engine's swizzle it would be, and nobody but the consumers looks into these tiles.
_BASES = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
_PART_LAYOUT = gl.constexpr(gl.SharedLinearLayout(offset_bases=_BASES, alignment=1024))


@gluon.jit
def num_query_tiles(len_q, GROUP: gl.constexpr):
    """Query tiles of a head, at least one, which writes zero gradients of keys without queries, and two for a unit.

    A unit's keys are read until the first tile of the next one, and its own last tile waits for the next one's keys,
    whose place is that of the unit before: with one tile both would be the same.
    """
    return gl.maximum((len_q + _ROWS - 1) // _ROWS, 2 if GROUP == 1 else 1)


@gluon.jit
def unit_of(units_ptr, work, num_works, num_heads_kv):
    """Where the numbers of a unit of work are, or those of the last one where ``work`` is none."""
    return units_ptr + (gl.minimum(work, num_works - 1) // num_heads_kv) * _FIELDS


@gluon.jit
def produce(
    q_desc, do_desc, k_desc, v_desc, units_ptr, q_ring, do_ring, k_tiles, v_tile, q_ready, q_empty, do_ready,
    do_empty, k_ready, v_ready, works, work_ready, work_empty, claims_ptr, num_works, num_heads_kv,
    GROUP: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Claim units, and copy their keys, values and a ring of tiles of q and dO, with zeros behind a sequence's end."""
    stage = 0  # query tiles so far
    index = 0  # units of work so far
    count = 0  # query tiles of the unit before
    work = claim(claims_ptr)
    announce(works, work_ready, work_empty, 0, work)
    while work < num_works:
        ptr = units_ptr + (work // num_heads_kv) * _FIELDS
        first_k = gl.load(ptr)
        len_k = gl.load(ptr + 1)
        first_q = gl.load(ptr + 2)
        len_q = gl.load(ptr + 3)
        head_kv = work % num_heads_kv
        slot = index & 1
        # Keys are read until the first query tile behind them. The ring has waited for it if there were more than two.
        if count <= STAGES:
            mbarrier.wait(q_empty.index(stage % STAGES), ((stage // STAGES) & 1) ^ 1)
        mbarrier.expect(k_ready.index(slot), _TILE_ROWS * D * 2)
        copy_rows(k_desc, first_k, len_k, 0, head_kv * D, k_ready.index(slot), k_tiles.index(slot))
        num_tiles = num_query_tiles(len_q, GROUP)
        for g in range(GROUP):
            channel = (head_kv * GROUP + g) * D
            for i in range(num_tiles):
                s = stage % STAGES
                mbarrier.wait(do_empty.index(s), ((stage // STAGES) & 1) ^ 1)
                mbarrier.expect(do_ready.index(s), _ROWS * D * 2)
                copy_rows(do_desc, first_q, len_q, i * _ROWS, channel, do_ready.index(s), do_ring.index(s))
                mbarrier.wait(q_empty.index(s), ((stage // STAGES) & 1) ^ 1)
                mbarrier.expect(q_ready.index(s), _ROWS * D * 2)
                copy_rows(q_desc, first_q, len_q, i * _ROWS, channel, q_ready.index(s), q_ring.index(s))
                if (g == 0) & (i == 0):
                    # Values are read as long as dO of the last query tile is.
                    if stage > 0:
                        mbarrier.wait(do_empty.index((stage - 1) % STAGES), ((stage - 1) // STAGES) & 1)
                    mbarrier.expect(v_ready.index(0), _TILE_ROWS * D * 2)
                    copy_rows(v_desc, first_k, len_k, 0, head_kv * D, v_ready.index(0), v_tile.index(0))
                stage += 1
        count = GROUP * num_tiles
        index += 1
        # Not earlier: a unit whose program is still busy with another holds up those that wait for its turns.
        work = claim(claims_ptr)
        announce(works, work_ready, work_empty, index, work)


@gluon.jit
def move_dq(
    dq_desc, sums_desc, units_ptr, turns_ptr, dq_tiles, dq_free, dq_ready, works, work_ready, work_empty, num_works,
    num_heads_kv, W: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, IN_DQ: gl.constexpr,
):  # fmt: skip
    """Grant consumer ``W`` the place for its half of dq, and send what it leaves there."""
    HALF: gl.constexpr = D // 2
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, HALF], dq_desc.dtype)
    dq_tile = dq_tiles.index(W)
    out_tile = view_as(dq_tile, dq_desc.dtype, [_ROWS, HALF], half_layout)
    out_place = _as_tile_of(out_tile, dq_desc)
    grant = 0  # times that the place was granted
    index = 0
    next_tile = 2 * GROUP * num_heads_kv
    work = await_work(works, work_ready, work_empty, 0, 1)
    ptr = unit_of(units_ptr, work, num_works, num_heads_kv)
    first_q = gl.load(ptr + 2)
    len_q = gl.load(ptr + 3)
    block = gl.load(ptr + 4)
    is_last = gl.load(ptr + 5)
    first_place = gl.load(ptr + 6)
    in_dq = gl.load(ptr + 7) if IN_DQ else 0
    while work < num_works:
        head = (work % num_heads_kv) * GROUP
        place = (first_place * (num_heads_kv * GROUP) + head) * 2 + W
        channel = head * D + W * HALF
        num_tiles = num_query_tiles(len_q, GROUP)
        count = GROUP * num_tiles
        i = 0  # tile of its head
        pending = -1  # turn to pass when the place is granted again
        next_work = work
        next_first_q = first_q
        next_len_q = len_q
        next_block = block
        next_is_last = is_last
        next_first_place = first_place
        next_in_dq = in_dq
        for j in range(count + 1):
            # The last tile of a unit comes when the consumer is in the next: before it, keys and values.
            is_gap = j == count - 1
            rest = gl.where(is_gap, 0, len_q - i * _ROWS)
            waits = (block > 0) & (rest > 0)
            turn = block
            if waits & (is_last != 0):
                turn = turn_of(turns_ptr + place)
                while turn < block:
                    turn = turn_of(turns_ptr + place)
                fence_turn(turn)
                if in_dq != 0:
                    mbarrier.expect(dq_free.index(W), _ROWS * HALF * 2)
                    copy_rows(dq_desc, first_q, len_q, i * _ROWS, channel, dq_free.index(W), out_tile)
                else:
                    mbarrier.expect(dq_free.index(W), _ROWS * HALF * 4)
                    tma_load(sums_desc, [place * _ROWS, 0], dq_free.index(W), dq_tile)
            else:
                mbarrier.arrive(dq_free.index(W), count=1)
                if waits:
                    # While the consumer computes.
                    turn = turn_of(turns_ptr + place)
                if pending >= 0:
                    pass_turn(turns_ptr + pending)
            pending = -1
            if j == count:
                # Long announced: the consumer leaves this tile when it has begun with the next unit.
                next_work = await_work(works, work_ready, work_empty, index + 1, 1)
                next_ptr = unit_of(units_ptr, next_work, num_works, num_heads_kv)
                next_first_q = gl.load(next_ptr + 2)
                next_len_q = gl.load(next_ptr + 3)
                next_block = gl.load(next_ptr + 4)
                next_is_last = gl.load(next_ptr + 5)
                next_first_place = gl.load(next_ptr + 6)
                next_in_dq = gl.load(next_ptr + 7) if IN_DQ else 0
            mbarrier.wait(dq_ready.index(W), grant & 1)
            grant += 1
            if rest > 0:
                if (is_last | in_dq if IN_DQ else is_last) != 0:
                    length = gl.minimum(rest, _ROWS)
                    row = first_q + i * _ROWS
                    tma_store(dq_desc, [_END, row + length, _END - length, channel], out_place)
                elif block == 0:
                    tma_store(sums_desc, [place * _ROWS, 0], dq_tile)
                else:
                    while turn < block:
                        turn = turn_of(turns_ptr + place)
                    fence_turn(turn)
                    tma_add(sums_desc, [place * _ROWS, 0], dq_tile)
                tma.store_wait(pendings=0)
                if is_last == 0:
                    if j == count:
                        # Not when the place is granted again, which may wait for units that wait for this turn.
                        pass_turn(turns_ptr + place)
                    else:
                        pending = place
            place += gl.where(is_gap, 0, next_tile)
            i += gl.where(is_gap, 0, 1)
            if GROUP > 1:  # noqa: SIM102
                if i == num_tiles:
                    i = 0
                    place += 2 - num_tiles * next_tile
                    channel += D
        index += 1
        work = next_work
        first_q = next_first_q
        len_q = next_len_q
        block = next_block
        is_last = next_is_last
        first_place = next_first_place
        in_dq = next_in_dq
    tma.store_wait(pendings=0)


@gluon.jit
def leave_dq(dq, dq_tile, half_tile, take, is_rounded, out_scale, IN_DQ: gl.constexpr):
    """Leave a unit's part of dq in its place, or what it is with the parts that are there.

    ``take``: 0 for none, 1 for a sum in float32, with ``IN_DQ`` 2 for a part in the dtype of dq.
    """
    place = view_as(dq_tile, gl.float32, dq.shape, _PART_LAYOUT)
    for _ in range(take & 1 if IN_DQ else take):
        dq = dq + place.load(dq.type.layout)
    if is_rounded != 0:
        out = dq * out_scale
        if IN_DQ:
            for _ in range(take >> 1):
                out = out + half_tile.load(dq.type.layout).to(gl.float32)
        half_tile.store(out.to(half_tile.dtype))
    else:
        place.store(dq)
    fence_async_shared()
