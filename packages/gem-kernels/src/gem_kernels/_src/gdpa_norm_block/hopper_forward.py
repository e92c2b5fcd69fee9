"""Hopper's attention of the block in Gluon: gdpa's forward, with the layer norm before it and its residual inside.

Roles and work are those of ``gdpa/hopper_forward.py``, but that a query tile comes as it is in memory, and a third
warpgroup replaces it by the rows after the layer norm before the consumers see it. They add it to their output, so rows
after the layer norm are in shared memory only. A warp reads the statistics of rows ahead: waiting for them between the
copy and the norm would take as long as the products.

Where the backward runs it again, the third warpgroup also multiplies each output row with its row of dout: the sum over
all heads is what the RMS norm's backward asks of whole rows.
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
)
from gem_kernels._src.gdpa.hopper_forward import _activate, _await_scores, _produce, _produce_queries
from gem_kernels._src.gdpa_norm_block.hopper_tiles import allocate_factors, load_norm_factors, normalize_rows

_TILE_ROWS = gl.constexpr(TILE_ROWS)
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def _read_statistics(mean_ptr, rstd_ptr, chunks_ptr, factors, q_raw, q_empty, num_works, num_heads):
    tile = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, _len_k = load_chunk(chunks_ptr, work, num_heads)
        for t in range((len_q + _TILE_ROWS - 1) // _TILE_ROWS):
            for w in gl.static_range(2):
                place = w * 2 + (tile & 1)
                ahead = t * _TILE_ROWS + w * _ROWS
                mbarrier.wait(q_empty.index(place), ((tile >> 1) & 1) ^ 1)
                load_norm_factors(mean_ptr, rstd_ptr, factors, 2 * place, first_q + ahead, len_q - ahead)
                mbarrier.arrive(q_raw.index(place), count=1)
            tile += 1


@gluon.jit
def _consume(
    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty, k_ready, k_empty,
    v_ready, v_empty, out_ready, out_empty, num_works, num_heads, pre_scale, post_scale, ACTIVATION: gl.constexpr,
    IN_PAIRS: gl.constexpr, HAS_PRE_SCALE: gl.constexpr, PRODUCTS: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr,
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
        first_q, len_q, _first_k, len_k = load_chunk(chunks_ptr, work, num_heads)
        mbarrier.wait(q_ready.index(W * 2), 0)
        mbarrier.wait(k_ready.index(0), 0)
        k_first = k_ring.index(0).slice(0, HALF, dim=0)
        scores = warpgroup_mma(q_tiles.index(W * 2), k_first.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        tile = 0  # query tiles so far
        base = 0  # key tiles of earlier chunks
        for work in range(gl.program_id(0), num_works, step):
            following = gl.minimum(work + step, num_works - 1)
            next_q, next_len_q, _next_first_k, next_len_k = load_chunk(chunks_ptr, following, num_heads)
            is_final_work = work + step >= num_works
            num_tiles = (len_q + _TILE_ROWS - 1) // _TILE_ROWS
            num_keys = num_key_tiles(len_k, BLOCK_N)
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
                    p = _activate(scores, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, dtype, p_layout)
                    mbarrier.wait(v_ready.index(s), phase)
                    acc = warpgroup_mma(p, v_ring.index(s).slice(0, HALF, dim=0), acc, use_acc=(j > 0), is_async=True)
                    other_scores = warpgroup_mma_wait(1, deps=[other_scores])
                    # A key tile leaves the ring with the last query tile of its chunk.
                    mbarrier.arrive(k_empty.index(s), count=1, pred=is_last_tile)
                    if has_next:
                        _await_scores(q_ready, k_ready, next_tile, next_stage, W, STAGES)
                    k_next = k_ring.index(next_stage % STAGES).slice(0, HALF, dim=0)
                    scores = warpgroup_mma(next_q_tile, k_next.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    other_p = _activate(other_scores, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, dtype, p_layout)
                    acc = warpgroup_mma(other_p, v_ring.index(s).slice(HALF, HALF, dim=0), acc, is_async=True)
                    scores, acc, p, other_p = warpgroup_mma_wait(0, deps=[scores, acc, p, other_p])
                    mbarrier.arrive(v_empty.index(s), count=1, pred=is_last_tile)
                row = first_q + t * _TILE_ROWS + W * _ROWS
                out = (acc * post_scale + q.load(out_layout).to(gl.float32)).to(dtype)
                # Reads may still be under way at the barrier: without the fence the copy engine overwrites them.
                fence_async_shared()
                mbarrier.arrive(q_empty.index(W * 2 + (tile & 1)), count=1)
                if PRODUCTS:
                    mbarrier.wait(out_empty.index(W), (tile & 1) ^ 1)
                store_tile(
                    out_desc, out_ptr, out_tile, out, row, len_q - t * _TILE_ROWS - W * _ROWS,
                    (work % num_heads) * D, stride_ot, D,
                )  # fmt: skip
                if PRODUCTS:
                    mbarrier.arrive(out_ready.index(W), count=1)
                tile += 1
            base += num_keys
            first_q = next_q
            len_q = next_len_q
            len_k = next_len_k
    tma.store_wait(pendings=0)


@gluon.jit
def _multiply(
    out_tile, dout_ptr, stride_dot, products_ptr, ready, empty, phase, row, num_rows, channel, D: gl.constexpr
):  # fmt: skip
    """Write the product of each of 64 output rows, in shared memory, with its row of dout."""
    PART: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, PART, gl.SliceLayout(1, layout))
    channels = gl.arange(0, D, gl.SliceLayout(0, layout))
    ptr = dout_ptr + row.to(gl.int64) * stride_dot + channel + (rows[:, None] * stride_dot + channels[None, :])
    everywhere = (channels < D)[None, :]
    # All on their way before the first is needed.
    dout_0 = gl.load(ptr, mask=(rows < num_rows)[:, None] & everywhere, other=0.0)
    dout_1 = gl.load(ptr + PART * stride_dot, mask=(rows + PART < num_rows)[:, None] & everywhere, other=0.0)
    dout_2 = gl.load(ptr + 2 * PART * stride_dot, mask=(rows + 2 * PART < num_rows)[:, None] & everywhere, other=0.0)
    dout_3 = gl.load(ptr + 3 * PART * stride_dot, mask=(rows + 3 * PART < num_rows)[:, None] & everywhere, other=0.0)
    mbarrier.wait(ready, phase)
    for r in gl.static_range(4):
        if r == 0:
            dout = dout_0
        elif r == 1:
            dout = dout_1
        elif r == 2:
            dout = dout_2
        else:
            dout = dout_3
        out = out_tile.slice(r * PART, PART, dim=0).load(layout).to(gl.float32)
        product = gl.sum(out * dout.to(gl.float32), 1)
        gl.store(products_ptr + row + r * PART + rows, product, mask=rows + r * PART < num_rows)
    mbarrier.arrive(empty, count=1)


@gluon.jit
def _process_rows(
    dout_ptr, stride_dot, products_ptr, num_rows, weight_ptr, bias_ptr, chunks_ptr, q_tiles, out_tiles, factors, q_raw,
    q_ready, out_ready, out_empty, num_works, num_heads, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    PRODUCTS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Normalise query tiles; a tile behind, multiply the output with dout."""
    tile = 0
    row = 0
    length = 0
    head = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, _len_k = load_chunk(chunks_ptr, work, num_heads)
        channel = (work % num_heads) * D
        for t in range((len_q + _TILE_ROWS - 1) // _TILE_ROWS):
            for w in gl.static_range(2):
                place = w * 2 + (tile & 1)
                mbarrier.wait(q_raw.index(place), (tile >> 1) & 1)
                normalize_rows(
                    q_tiles.index(place), factors, 2 * place, weight_ptr, bias_ptr, channel, HAS_WEIGHT, HAS_BIAS, D
                )
                fence_async_shared()
                mbarrier.arrive(q_ready.index(place), count=1)
            if PRODUCTS:
                if tile > 0:
                    for w in gl.static_range(2):
                        _multiply(
                            out_tiles.index(w), dout_ptr, stride_dot, products_ptr + num_rows.to(gl.int64) * head,
                            out_ready.index(w), out_empty.index(w), (tile - 1) & 1, row + w * _ROWS,
                            length - w * _ROWS, head * D, D,
                        )  # fmt: skip
                row = first_q + t * _TILE_ROWS
                length = len_q - t * _TILE_ROWS
                head = work % num_heads
            tile += 1
    if PRODUCTS:  # noqa: SIM102
        if tile > 0:
            for w in gl.static_range(2):
                _multiply(
                    out_tiles.index(w), dout_ptr, stride_dot, products_ptr + num_rows.to(gl.int64) * head,
                    out_ready.index(w), out_empty.index(w), (tile - 1) & 1, row + w * _ROWS, length - w * _ROWS,
                    head * D, D,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "num_heads"])
def attend_kernel(
    q_desc,  # (T_q, H * D), tiles of (64, D)
    k_desc,  # (T_k, H_kv * D), tiles of (BLOCK_N, D) that end with a sequence
    v_desc,
    out_desc,  # (T_q, H * D), tiles of (64, D): the attention of the rows after the layer norm, plus these
    out_ptr,
    stride_ot,
    dout_ptr,  # (T_q, H * D), read only if PRODUCTS
    stride_dot,  # a multiple of 16
    products_ptr,  # (H, T_q) float32: of output and dout, written only if PRODUCTS
    num_rows,  # T_q
    mean_ptr,  # (T_q,) float32
    rstd_ptr,  # (T_q,) float32
    weight_ptr,  # (H * D,), read only if HAS_WEIGHT
    bias_ptr,  # (H * D,), read only if HAS_BIAS
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,  # (1,) int32
    num_heads,
    pre_scale,
    post_scale,
    ACTIVATION: gl.constexpr,
    IN_PAIRS: gl.constexpr,  # ACTIVATION takes scores and pre_scale, and makes bfloat16
    HAS_PRE_SCALE: gl.constexpr,  # pre_scale is not 1; not asked in pairs
    HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PRODUCTS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per key head
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, D], q_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, _ROWS, D], out_desc.layout)
    ring_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], ring_layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], ring_layout)
    factors = allocate_factors(8)
    # Where the copy of a query tile and its statistics report, before it is normalised.
    q_raw = allocate_barriers(4)
    q_ready = allocate_barriers(4)
    q_empty = allocate_barriers(4)
    k_ready = allocate_barriers(STAGES)
    k_empty = allocate_barriers(STAGES)
    v_ready = allocate_barriers(STAGES)
    v_empty = allocate_barriers(STAGES)
    out_ready = allocate_barriers(2)
    out_empty = allocate_barriers(2)
    for i in gl.static_range(2):
        mbarrier.init(out_ready.index(i), count=1)
        mbarrier.init(out_empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(q_raw.index(i), count=2)
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    num_works = gl.load(num_chunks_ptr) * num_heads
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty,
                    k_ready, k_empty, v_ready, v_empty, out_ready, out_empty, num_works, num_heads, pre_scale,
                    post_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, PRODUCTS, 0, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _consume,
                (
                    out_desc, out_ptr, stride_ot, chunks_ptr, q_tiles, k_ring, v_ring, out_tiles, q_ready, q_empty,
                    k_ready, k_empty, v_ready, v_empty, out_ready, out_empty, num_works, num_heads, pre_scale,
                    post_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, PRODUCTS, 1, STAGES, BLOCK_N, D,
                ),
            ),
            (
                _process_rows,
                (
                    dout_ptr, stride_dot, products_ptr, num_rows, weight_ptr, bias_ptr, chunks_ptr, q_tiles, out_tiles,
                    factors, q_raw, q_ready, out_ready, out_empty, num_works, num_heads, HAS_WEIGHT, HAS_BIAS,
                    PRODUCTS, D,
                ),
            ),
            (
                _produce,
                (
                    k_desc, v_desc, chunks_ptr, k_ring, v_ring, k_ready, k_empty, v_ready, v_empty, num_works,
                    num_heads, GROUP, STAGES, BLOCK_N, D,
                ),
            ),
            (_produce_queries, (q_desc, chunks_ptr, q_tiles, q_raw, q_empty, num_works, num_heads, D)),
            (
                _read_statistics,
                (mean_ptr, rstd_ptr, chunks_ptr, factors, q_raw, q_empty, num_works, num_heads),
            ),
        ],
        [4, 4, 1, 1, 1],
        [208, 72, 24, 24, 24],
    )  # fmt: skip
