"""Hopper's forward of the block in Gluon: one persistent kernel from q to the output.

A unit of work is 128 query rows of one sequence with all their heads, in shared memory head by head. Each of two
consumers owns 64 of the rows, so that what a norm needs of a row never leaves a warpgroup. It takes

1. the moments of its rows;
2. head by head, the rows after the layer norm in the place of those before, the attention, and their sum before the RMS
   norm in the same place, while its squares are summed;
3. head by head, the output: the sum after the RMS norm plus q, which comes once more, from the L2 cache.

A warp for each consumer copies its rows as soon as a head's place is free. Another fills a ring of tiles of 64 rows:
keys and values of a head at a time, which all units of a sequence read from the L2 cache, then the query rows again,
whose place the output takes on its way out.

Bytes bind: nothing is gained by the scores of a head issued under the end of the one before.

For the backward the kernel writes the rows after the layer norm and before the RMS norm, beside the output or alone.
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
    allocate_barriers,
    copy_rows,
    load_chunk,
    send_rows,
    write_rows,
)
from gem_kernels._src.gdpa.hopper_forward import _activate

CONSUMERS = 2
_CONSUMERS = gl.constexpr(CONSUMERS)
_ROWS = gl.constexpr(ROWS)


@gluon.jit
def _produce_rows(
    q_desc, chunks_ptr, q_tiles, q_ready, q_empty, num_works, W: gl.constexpr, H: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, _len_k = load_chunk(chunks_ptr, work, 1)
        for h in range(H):
            place = W * H + h
            mbarrier.wait(q_empty.index(place), (index & 1) ^ 1)
            mbarrier.expect(q_ready.index(place), _ROWS * D * 2)
            copy_rows(q_desc, first_q, len_q, W * _ROWS, h * D, q_ready.index(place), q_tiles.index(place))
        index += 1  # noqa: SIM113


@gluon.jit
def _copy_item(desc, first, length, row, channel, ring, ready, empty, item, STAGES: gl.constexpr, D: gl.constexpr):
    s = item % STAGES
    mbarrier.wait(empty.index(s), ((item // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(s), _ROWS * D * 2)
    copy_rows(desc, first, length, row, channel, ready.index(s), ring.index(s))


@gluon.jit
def _produce_ring(
    q_desc, k_desc, v_desc, chunks_ptr, ring, ready, empty, num_works, HAS_OUT: gl.constexpr, GROUP: gl.constexpr,
    KEY_TILES: gl.constexpr, STAGES: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    item = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, first_k, len_k = load_chunk(chunks_ptr, work, 1)
        for h in range(H):
            channel = (h // GROUP) * D
            for t in gl.static_range(KEY_TILES):
                _copy_item(k_desc, first_k, len_k, t * _ROWS, channel, ring, ready, empty, item + t, STAGES, D)
            item += KEY_TILES
            for t in gl.static_range(KEY_TILES):
                _copy_item(v_desc, first_k, len_k, t * _ROWS, channel, ring, ready, empty, item + t, STAGES, D)
            item += KEY_TILES
        if HAS_OUT:
            for h in range(H):
                for w in gl.static_range(_CONSUMERS):
                    _copy_item(q_desc, first_q, len_q, w * _ROWS, h * D, ring, ready, empty, item + w, STAGES, D)
                item += _CONSUMERS


@gluon.jit
def _await_item(ready, item, STAGES: gl.constexpr):
    mbarrier.wait(ready.index(item % STAGES), (item // STAGES) & 1)


@gluon.jit
def _moments(q_tiles, q_ready, index, W: gl.constexpr, H: gl.constexpr, D: gl.constexpr, layout: gl.constexpr):
    """Mean of each row over all heads, and sum of squared distances from it."""
    mean = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, layout))
    squares = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, layout))
    for h in range(H):
        mbarrier.wait(q_ready.index(W * H + h), index & 1)
        x = q_tiles.index(W * H + h).load(layout).to(gl.float32)
        part = gl.sum(x, 1) / D
        x -= part[:, None]
        # Two sets with means of their own as one: Chan, Golub and LeVeque.
        heads = h * 1.0
        apart = part - mean
        mean += apart / (heads + 1.0)
        squares += gl.sum(x * x, 1) + apart * apart * (D * heads / (heads + 1.0))
    return mean, squares


@gluon.jit
def _columns(ptr, first, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """(1, BLOCK_N) float32 of one number per column."""
    return gl.load(ptr + first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))).to(gl.float32)[None, :]


@gluon.jit
def _normalize(
    box, rstd, shift, weight_ptr, bias_ptr, channel, HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr,
    D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Replace rows of a head by those after the layer norm."""
    x = box.load(layout).to(gl.float32) * rstd[:, None] + shift[:, None]
    if HAS_WEIGHT:
        x *= _columns(weight_ptr, channel, D, layout)
    if HAS_BIAS:
        x += _columns(bias_ptr, channel, D, layout)
    box.store(x.to(box.dtype))
    fence_async_shared()


@gluon.jit
def _attend(
    left, ring, ready, empty, item, pre_scale, ACTIVATION: gl.constexpr, IN_PAIRS: gl.constexpr,
    HAS_PRE_SCALE: gl.constexpr, KEY_TILES: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Activated scores times values of one head, (64, D); a second tile's scores run under the first's activation."""
    dtype: gl.constexpr = ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    zeros = gl.zeros([_ROWS, _ROWS], gl.float32, scores_layout)
    acc = gl.zeros([_ROWS, D], gl.float32, layout)
    _await_item(ready, item, STAGES)
    keys = ring.index(item % STAGES).permute((1, 0))
    scores = warpgroup_mma(left, keys, zeros, use_acc=False, is_async=True)
    if KEY_TILES == 2:
        _await_item(ready, item + 1, STAGES)
        keys = ring.index((item + 1) % STAGES).permute((1, 0))
        other = warpgroup_mma(left, keys, zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        p = _activate(scores, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, dtype, p_layout)
        _await_item(ready, item + 2, STAGES)
        acc = warpgroup_mma(p, ring.index((item + 2) % STAGES), acc, use_acc=False, is_async=True)
        other = warpgroup_mma_wait(1, deps=[other])
        mbarrier.arrive(empty.index(item % STAGES), count=1)
        mbarrier.arrive(empty.index((item + 1) % STAGES), count=1)
        other_p = _activate(other, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, dtype, p_layout)
        _await_item(ready, item + 3, STAGES)
        acc = warpgroup_mma(other_p, ring.index((item + 3) % STAGES), acc, is_async=True)
        acc, p, other_p = warpgroup_mma_wait(0, deps=[acc, p, other_p])
        mbarrier.arrive(empty.index((item + 2) % STAGES), count=1)
        mbarrier.arrive(empty.index((item + 3) % STAGES), count=1)
    else:
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index(item % STAGES), count=1)
        p = _activate(scores, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, dtype, p_layout)
        _await_item(ready, item + 1, STAGES)
        acc = warpgroup_mma(p, ring.index((item + 1) % STAGES), acc, use_acc=False, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(empty.index((item + 1) % STAGES), count=1)
    return acc


@gluon.jit
def _consume(
    out_desc, normed_desc, total_desc, norm_weight_ptr, norm_bias_ptr, rms_weight_ptr, mean_ptr, rstd_ptr, rrms_ptr,
    chunks_ptr, q_tiles, ring, q_ready, q_empty, ready, empty, num_works, eps, pre_scale, post_scale,
    ACTIVATION: gl.constexpr, IN_PAIRS: gl.constexpr, HAS_PRE_SCALE: gl.constexpr, HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RMS_WEIGHT: gl.constexpr, HAS_OUT: gl.constexpr, KEEP: gl.constexpr,
    KEY_TILES: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = H * D
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    item = 0  # of the ring
    index = 0
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        first_q, len_q, _first_k, _len_k = load_chunk(chunks_ptr, work, 1)
        row = first_q + W * _ROWS
        num_rows = len_q - W * _ROWS
        mean, squares = _moments(q_tiles, q_ready, index, W, H, D, layout)
        if HAS_OUT:
            # The last output of the unit before has left the ring.
            tma.store_wait(pendings=0)
            before = (item + (STAGES - _CONSUMERS + W)) % STAGES
            mbarrier.arrive(empty.index(before), count=_CONSUMERS, pred=index > 0)
        rstd = gl.rsqrt(squares / N + eps)
        shift = -mean * rstd
        squares = gl.zeros([_ROWS], gl.float32, row_layout)
        for h in range(H):
            box = q_tiles.index(W * H + h)
            _normalize(box, rstd, shift, norm_weight_ptr, norm_bias_ptr, h * D, HAS_WEIGHT, HAS_BIAS, D, layout)
            if KEEP:
                send_rows(normed_desc, box, row, num_rows, h * D)
            acc = _attend(
                box, ring, ready, empty, item, pre_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, KEY_TILES, STAGES, D,
                layout,
            )  # fmt: skip
            item += 2 * KEY_TILES
            total = acc * post_scale + box.load(layout).to(gl.float32)
            squares += gl.sum(total * total, 1)
            if KEEP:
                # The rows after the layer norm have left their place, and so have the sums of the head before.
                tma.store_wait(pendings=0)
                if not HAS_OUT:
                    mbarrier.arrive(q_empty.index(W * H + gl.maximum(h - 1, 0)), count=1, pred=h > 0)
                write_rows(total_desc, box, total.to(box.dtype), row, num_rows, h * D)
            else:
                box.store(total.to(box.dtype))
        if HAS_OUT:
            rrms = gl.rsqrt(squares / N + eps)
            rows = gl.arange(0, _ROWS, row_layout)
            gl.store(mean_ptr + row + rows, mean, mask=rows < num_rows)
            gl.store(rstd_ptr + row + rows, rstd, mask=rows < num_rows)
            gl.store(rrms_ptr + row + rows, rrms, mask=rows < num_rows)
            if KEEP:
                # All but the last head's sums have left; these have when an output is on its way.
                tma.store_wait(pendings=1)
            for h in range(H):
                box = q_tiles.index(W * H + h)
                own = item + W
                place = ring.index(own % STAGES)
                x = box.load(layout).to(gl.float32) * rrms[:, None]
                if HAS_RMS_WEIGHT:
                    x *= _columns(rms_weight_ptr, h * D, D, layout)
                _await_item(ready, own, STAGES)
                x += place.load(layout).to(gl.float32)
                # Reads may still be under way at the barrier: without the fence the copy engine overwrites them.
                fence_async_shared()
                mbarrier.arrive(q_empty.index(W * H + h), count=1)
                write_rows(out_desc, place, x.to(place.dtype), row, num_rows, h * D)
                # The output of the head before has left its place, which was this consumer's alone.
                tma.store_wait(pendings=1)
                before = (own + (STAGES - _CONSUMERS)) % STAGES
                mbarrier.arrive(empty.index(before), count=_CONSUMERS, pred=h > 0)
                item += _CONSUMERS
        else:
            tma.store_wait(pendings=0)
            mbarrier.arrive(q_empty.index(W * H + H - 1), count=1)
        index += 1  # noqa: SIM113
    tma.store_wait(pendings=0)


@gluon.jit
def block_fwd_kernel(
    q_desc,  # (T_q, H * D), of sequences, in tiles of (64, D), as all others
    k_desc,  # (T_k, H_kv * D)
    v_desc,
    out_desc,  # (T_q, H * D), written only if HAS_OUT
    normed_desc,  # (T_q, H * D), after the layer norm; written only if KEEP, as is what follows
    total_desc,  # (T_q, H * D), before the RMS norm
    norm_weight_ptr,  # (H * D,), read only if HAS_WEIGHT
    norm_bias_ptr,  # (H * D,), read only if HAS_BIAS
    rms_weight_ptr,  # (H * D,), read only if HAS_RMS_WEIGHT
    mean_ptr,  # (T_q,), written only if HAS_OUT, as are the other two
    rstd_ptr,  # (T_q,)
    rrms_ptr,  # (T_q,)
    chunks_ptr,  # (N, 4) int32
    num_chunks_ptr,  # () int32
    eps,
    pre_scale,
    post_scale,
    ACTIVATION: gl.constexpr,
    IN_PAIRS: gl.constexpr,  # ACTIVATION takes scores and pre_scale, and makes bfloat16
    HAS_PRE_SCALE: gl.constexpr,  # pre_scale is not 1; not asked in pairs
    HAS_WEIGHT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RMS_WEIGHT: gl.constexpr,
    HAS_OUT: gl.constexpr,
    KEEP: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per key head
    KEY_TILES: gl.constexpr,  # tiles of 64 keys: 1 or 2
    STAGES: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, D], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [_CONSUMERS * H, _ROWS, D], layout)
    ring = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, D], layout)
    q_ready = allocate_barriers(_CONSUMERS * H)
    q_empty = allocate_barriers(_CONSUMERS * H)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    for i in gl.static_range(_CONSUMERS * H):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=_CONSUMERS)
    num_works = gl.load(num_chunks_ptr)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc, normed_desc, total_desc, norm_weight_ptr, norm_bias_ptr, rms_weight_ptr, mean_ptr,
                    rstd_ptr, rrms_ptr, chunks_ptr, q_tiles, ring, q_ready, q_empty, ready, empty, num_works, eps,
                    pre_scale, post_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, HAS_WEIGHT, HAS_BIAS, HAS_RMS_WEIGHT,
                    HAS_OUT, KEEP, KEY_TILES, 0, STAGES, H, D,
                ),
            ),
            (
                _consume,
                (
                    out_desc, normed_desc, total_desc, norm_weight_ptr, norm_bias_ptr, rms_weight_ptr, mean_ptr,
                    rstd_ptr, rrms_ptr, chunks_ptr, q_tiles, ring, q_ready, q_empty, ready, empty, num_works, eps,
                    pre_scale, post_scale, ACTIVATION, IN_PAIRS, HAS_PRE_SCALE, HAS_WEIGHT, HAS_BIAS, HAS_RMS_WEIGHT,
                    HAS_OUT, KEEP, KEY_TILES, 1, STAGES, H, D,
                ),
            ),
            (_produce_rows, (q_desc, chunks_ptr, q_tiles, q_ready, q_empty, num_works, 0, H, D)),
            (_produce_rows, (q_desc, chunks_ptr, q_tiles, q_ready, q_empty, num_works, 1, H, D)),
            (
                _produce_ring,
                (
                    q_desc, k_desc, v_desc, chunks_ptr, ring, ready, empty, num_works, HAS_OUT, GROUP, KEY_TILES,
                    STAGES, H, D,
                ),
            ),
        ],
        [4, 1, 1, 1],
        [232, 40, 40, 40],
    )  # fmt: skip
