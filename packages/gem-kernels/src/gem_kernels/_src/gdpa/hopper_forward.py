"""Hopper forward of GDPA in Gluon: persistent, loads by TMA, two warpgroups that overlap products and activation.

A unit of work is a head and a chunk of query rows of one sequence (``hopper_schedule``). Four roles share a program:

* the producer copies tiles of Q, and of K and V into a ring of stages;
* the cleaner zeroes the rows of a sequence's last K and V tile that belong to the next sequence, so that no product
  needs a mask: a zero value adds nothing, whatever the activation makes of the score of a zero key;
* two consumers own 64 query rows each and take a key tile in two halves. A consumer issues the scores of the next
  half, be it of the next chunk, before it activates the scores it has, so short keys overlap as well as long ones, and
  the first half's values are multiplied while the second half is activated.

A chunk of several query tiles keeps its keys in the ring until its last tile has met them.
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

ROWS = 64
"""Query rows of one consumer, the height of a warpgroup's matrix instruction."""
TILE_ROWS = 2 * ROWS
"""Query rows of the two consumers together."""
# Triton 3.9 has renamed them.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def _load_chunk(chunks_ptr, work, num_heads):
    """(first query row, query rows, first key row, keys) of a unit of work."""
    ptr = chunks_ptr + (work // num_heads) * 4
    return gl.load(ptr), gl.load(ptr + 1), gl.load(ptr + 2), gl.load(ptr + 3)


@gluon.jit
def _num_key_tiles(len_k, BLOCK_N: gl.constexpr):
    """At least one: a sequence without keys meets one tile of zeros, which writes its zero output."""
    return gl.maximum((len_k + BLOCK_N - 1) // BLOCK_N, 1)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, chunks_ptr, q_tiles, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    k_raw, v_raw, num_works, num_heads, GROUP: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    tile = 0  # query tiles so far
    stage = 0  # key tiles so far
    index = 0  # units of work so far
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, first_k, len_k = _load_chunk(chunks_ptr, work, num_heads)
        head = work % num_heads
        channel_q = head * D
        channel_k = (head // GROUP) * D
        num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
        num_keys = _num_key_tiles(len_k, BLOCK_N)
        for j in range(num_keys):
            s = stage % STAGES
            phase = ((stage // STAGES) & 1) ^ 1
            is_last = j == num_keys - 1
            raw = index % STAGES
            mbarrier.wait(k_empty.index(s), phase)
            if is_last:
                mbarrier.expect(k_raw.index(raw), BLOCK_N * D * 2)
                _tma_load(k_desc, [first_k + j * BLOCK_N, channel_k], k_raw.index(raw), k_ring.index(s))
            else:
                mbarrier.expect(k_ready.index(s), BLOCK_N * D * 2)
                _tma_load(k_desc, [first_k + j * BLOCK_N, channel_k], k_ready.index(s), k_ring.index(s))
            if j == 0:
                for w in gl.static_range(2):
                    slot = w * 2 + (tile & 1)
                    mbarrier.wait(q_empty.index(slot), ((tile >> 1) & 1) ^ 1)
                    mbarrier.expect(q_ready.index(slot), _ROWS * D * 2)
                    _tma_load(q_desc, [first_q + w * _ROWS, channel_q], q_ready.index(slot), q_tiles.index(slot))
            mbarrier.wait(v_empty.index(s), phase)
            if is_last:
                mbarrier.expect(v_raw.index(raw), BLOCK_N * D * 2)
                _tma_load(v_desc, [first_k + j * BLOCK_N, channel_k], v_raw.index(raw), v_ring.index(s))
            else:
                mbarrier.expect(v_ready.index(s), BLOCK_N * D * 2)
                _tma_load(v_desc, [first_k + j * BLOCK_N, channel_k], v_ready.index(s), v_ring.index(s))
            stage += 1
        tile += 1
        for t in range(1, num_tiles):
            for w in gl.static_range(2):
                slot = w * 2 + (tile & 1)
                mbarrier.wait(q_empty.index(slot), ((tile >> 1) & 1) ^ 1)
                mbarrier.expect(q_ready.index(slot), _ROWS * D * 2)
                _tma_load(
                    q_desc, [first_q + t * _TILE_ROWS + w * _ROWS, channel_q], q_ready.index(slot), q_tiles.index(slot)
                )
            tile += 1
        index += 1  # noqa: SIM113


@gluon.jit
def _zero_rows(tile, num_rows, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a shared tile from ``num_rows`` on, eight at a time: the cleaner is one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    zeros = gl.zeros([8, D], tile.dtype, layout)
    for r in gl.static_range(BLOCK_N // 8):
        part = tile.slice(r * 8, 8, dim=0)
        if num_rows <= r * 8:
            part.store(zeros)
        else:
            if num_rows < r * 8 + 8:
                keep = (rows < num_rows - r * 8)[:, None] & gl.full([8, D], True, gl.int1, layout)
                part.store(gl.where(keep, part.load(layout), zeros))


@gluon.jit
def _clean(
    chunks_ptr, k_ring, v_ring, k_ready, v_ready, k_raw, v_raw, num_works, num_heads, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    stage = 0
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        _first_q, _len_q, _first_k, len_k = _load_chunk(chunks_ptr, work, num_heads)
        num_keys = _num_key_tiles(len_k, BLOCK_N)
        s = (stage + num_keys - 1) % STAGES
        rest = len_k - (num_keys - 1) * BLOCK_N
        raw = index % STAGES
        phase = (index // STAGES) & 1
        mbarrier.wait(k_raw.index(raw), phase)
        if rest < BLOCK_N:
            _zero_rows(k_ring.index(s), rest, BLOCK_N, D)
            fence_async_shared()
        mbarrier.arrive(k_ready.index(s), count=1)
        mbarrier.wait(v_raw.index(raw), phase)
        if rest < BLOCK_N:
            _zero_rows(v_ring.index(s), rest, BLOCK_N, D)
            fence_async_shared()
        mbarrier.arrive(v_ready.index(s), count=1)
        stage += num_keys
        index += 1  # noqa: SIM113


@gluon.jit
def _store_tile(out_desc, out_ptr, out_tile, out, row, num_rows, channel, stride_ot, D: gl.constexpr):
    """Write 64 output rows: whole tiles by TMA, the last rows of a sequence one by one."""
    tma.store_wait(pendings=0)
    out_tile.store(out)
    if num_rows >= _ROWS:
        fence_async_shared()
        _tma_store(out_desc, [row, channel], out_tile)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
        rows = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
        channels = gl.arange(0, D, gl.SliceLayout(0, layout))
        pointers = out_ptr + row.to(gl.int64) * stride_ot + channel + (rows[:, None] * stride_ot + channels[None, :])
        mask = (rows < num_rows)[:, None] & (channels < D)[None, :]
        gl.store(pointers, out_tile.load(layout), mask=mask)


@gluon.jit
def _activate(
    scores, pre_scale, ACTIVATION: gl.constexpr, HAS_PRE_SCALE: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr
):
    """Activated scores as the left operand of the second product."""
    if HAS_PRE_SCALE:
        scores = scores * pre_scale
    return gl.convert_layout(ACTIVATION(scores).to(dtype), layout)


@gluon.jit
def _await_scores(q_ready, k_ready, tile, stage, W: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the operands of the next scores."""
    mbarrier.wait(q_ready.index(W * 2 + (tile & 1)), (tile >> 1) & 1)
    mbarrier.wait(k_ready.index(stage % STAGES), (stage // STAGES) & 1)


@gluon.jit
def _consume(
    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready, k_empty,
    v_ready, v_empty, num_works, num_heads, pre_scale, post_scale, ACTIVATION: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_tiles.dtype
    HALF: gl.constexpr = BLOCK_N // 2
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    zeros = gl.zeros([_ROWS, HALF], gl.float32, scores_layout)
    acc = gl.zeros([_ROWS, D], gl.float32, out_layout)
    out_tile = out_tiles.index(W)
    step = gl.num_programs(0)
    work = gl.program_id(0)
    if work < num_works:
        first_q, len_q, _first_k, len_k = _load_chunk(chunks_ptr, work, num_heads)
        mbarrier.wait(q_ready.index(W * 2), 0)
        mbarrier.wait(k_ready.index(0), 0)
        k_first = k_ring.index(0).slice(0, HALF, dim=0)
        scores = warpgroup_mma(q_tiles.index(W * 2), k_first.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        tile = 0  # query tiles so far
        base = 0  # key tiles of earlier chunks
        for work in range(gl.program_id(0), num_works, step):
            following = gl.minimum(work + step, num_works - 1)
            next_q, next_len_q, _next_first_k, next_len_k = _load_chunk(chunks_ptr, following, num_heads)
            is_final_work = work + step >= num_works
            num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
            num_keys = _num_key_tiles(len_k, BLOCK_N)
            for t in range(num_tiles):
                is_last_tile = t == num_tiles - 1
                q = q_tiles.index(W * 2 + (tile & 1))
                for j in range(num_keys):
                    s = (base + j) % STAGES
                    phase = ((base + j) // STAGES) & 1
                    is_last_key = j == num_keys - 1
                    has_next = (is_last_key & is_last_tile & is_final_work) == 0
                    # What the next scores are of: the next key tile, else the next query tile's first.
                    next_stage = gl.where(is_last_key, gl.where(is_last_tile, base + num_keys, base), base + j + 1)
                    next_tile = gl.where(is_last_key, tile + 1, tile)
                    next_q_tile = q_tiles.index(W * 2 + (next_tile & 1))
                    k_second = k_ring.index(s).slice(HALF, HALF, dim=0)
                    other_scores = warpgroup_mma(q, k_second.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    p = _activate(scores, pre_scale, ACTIVATION, HAS_PRE_SCALE, dtype, p_layout)
                    mbarrier.wait(v_ready.index(s), phase)
                    acc = warpgroup_mma(p, v_ring.index(s).slice(0, HALF, dim=0), acc, use_acc=(j > 0), is_async=True)
                    other_scores = warpgroup_mma_wait(1, deps=[other_scores])
                    # A key tile leaves the ring with the last query tile of its chunk.
                    mbarrier.arrive(k_empty.index(s), count=1, pred=is_last_tile)
                    mbarrier.arrive(q_empty.index(W * 2 + (tile & 1)), count=1, pred=is_last_key)
                    if has_next:
                        _await_scores(q_ready, k_ready, next_tile, next_stage, W, STAGES)
                    k_next = k_ring.index(next_stage % STAGES).slice(0, HALF, dim=0)
                    scores = warpgroup_mma(next_q_tile, k_next.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    other_p = _activate(other_scores, pre_scale, ACTIVATION, HAS_PRE_SCALE, dtype, p_layout)
                    acc = warpgroup_mma(other_p, v_ring.index(s).slice(HALF, HALF, dim=0), acc, is_async=True)
                    scores, acc, p, other_p = warpgroup_mma_wait(0, deps=[scores, acc, p, other_p])
                    mbarrier.arrive(v_empty.index(s), count=1, pred=is_last_tile)
                row = first_q + t * _TILE_ROWS + W * _ROWS
                _store_tile(
                    out_desc, out_ptr, out_tile, (acc * post_scale).to(dtype), row, len_q - t * _TILE_ROWS - W * _ROWS,
                    (work % num_heads) * D, stride_ot, D,
                )  # fmt: skip
                tile += 1
            base += num_keys
            first_q = next_q
            len_q = next_len_q
            len_k = next_len_k
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_heads"])
def _gdpa_hopper_fwd_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D)
    v_desc,
    out_desc,  # (T_q, H * D), tiles of (64, D)
    out_ptr,
    stride_ot,
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,  # () int32
    num_heads,
    pre_scale,
    post_scale,
    ACTIVATION: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr,  # pre_scale is not 1
    GROUP: gl.constexpr,  # query heads per key head
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], q_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], out_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [4, 1], barrier_layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [4, 1], barrier_layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    # Where the copy of a chunk's last tile reports, before the cleaner passes it on; a chunk has at least one tile, so
    # no slot is taken again before the ring has moved on.
    k_raw = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_raw = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    for i in gl.static_range(4):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
        mbarrier.init(k_raw.index(i), count=1)
        mbarrier.init(v_raw.index(i), count=1)
    num_works = gl.load(num_chunks_ptr) * num_heads
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty,
                    k_ready, k_empty, v_ready, v_empty, num_works, num_heads, pre_scale, post_scale, ACTIVATION,
                    HAS_PRE_SCALE, 0, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _consume,
                (
                    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty,
                    k_ready, k_empty, v_ready, v_empty, num_works, num_heads, pre_scale, post_scale, ACTIVATION,
                    HAS_PRE_SCALE, 1, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _produce,
                (
                    q_desc, k_desc, v_desc, chunks_ptr, q_tiles, k_ring, v_ring, q_ready, q_empty, k_ready, k_empty,
                    v_ready, v_empty, k_raw, v_raw, num_works, num_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _clean,
                (
                    chunks_ptr, k_ring, v_ring, k_ready, v_ready, k_raw, v_raw, num_works, num_heads, STAGES, BLOCK_N,
                    D,
                ),
            ),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
