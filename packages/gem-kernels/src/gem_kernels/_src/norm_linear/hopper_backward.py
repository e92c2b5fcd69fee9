"""Hopper's backward of a linear layer after an RMS norm, in Gluon: no normalised rows in memory, nor their gradient.

With r the factors of the norm and x^ = r x the normalised rows, h = dout W is the gradient of x^, and

* dW = doutᵀ x^ = (r dout)ᵀ x: the factors go into the left operand, which is in registers anyway;
* dx = r (h - x^ mean(h x^)) = r h - r³ x mean(h x): the mean over a row needs all of its columns, so a program holds 64
  rows with all features of the input, half of them in each of two consumers, which exchange their parts of the mean.
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

from gem_kernels._src.attention.hopper.tiles import ROWS, allocate_barriers, tma_load, tma_store
from gem_kernels._src.norm_linear.hopper_matmul import _before

_ROWS = gl.constexpr(ROWS)

# ---------------------------------------------------------------- weight


@gluon.jit
def _produce_dweight(
    dout_desc, x_desc, dout_ring, x_ring, ready, empty, first, last, n, k, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s = 0
    phase = 1
    for block in range(first, last):
        mbarrier.wait(empty.index(s), phase)
        mbarrier.expect(ready.index(s), _ROWS * (BLOCK_N + BLOCK_K) * 2)
        tma_load(dout_desc, [block * _ROWS, n], ready.index(s), dout_ring.index(s))
        tma_load(x_desc, [block * _ROWS, k], ready.index(s), x_ring.index(s))
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1


@gluon.jit
def _consume_dweight(
    sums_ptr, rrms_ptr, dout_ring, x_ring, ready, empty, first, last, n, k, num_rows, W: gl.constexpr,
    K: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    dout_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    dtype: gl.constexpr = dout_ring.dtype
    acc = gl.zeros([_ROWS, BLOCK_K], gl.float32, layout)
    s = 0
    phase = 0
    rows = first * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(0, dout_layout))
    factors = gl.load(rrms_ptr + rows, mask=rows < num_rows, other=0.0)
    for _block in range(first, last):
        mbarrier.wait(ready.index(s), phase)
        dout = dout_ring.index(s).slice(W * _ROWS, _ROWS, dim=1).permute((1, 0)).load(dout_layout)
        dout = (dout.to(gl.float32) * factors[None, :]).to(dtype)
        acc = warpgroup_mma(dout, x_ring.index(s), acc, is_async=True)
        rows += _ROWS
        factors = gl.load(rrms_ptr + rows, mask=rows < num_rows, other=0.0)
        acc, dout = warpgroup_mma_wait(0, deps=[acc, dout])
        mbarrier.arrive(empty.index(s), count=1)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1
    at_n = n + W * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    at_k = k + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    gl.store(sums_ptr + at_n[:, None] * K + at_k[None, :], acc)


@gluon.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def _dweight_hopper_kernel(
    dout_desc,  # (M, N), tiles of (64, BLOCK_N)
    x_desc,  # (M, K), tiles of (64, BLOCK_K)
    sums_ptr,  # (splits, N, K) float32: of so many blocks of 64 rows each
    rrms_ptr,  # (M,) float32
    num_rows,
    blocks_per_split,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,  # 64 for each consumer
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    # Programs of one split read the same rows at about the same time.
    TILES: gl.constexpr = (N // BLOCK_N) * (K // BLOCK_K)
    split = gl.program_id(0) // TILES
    tile = gl.program_id(0) % TILES
    n = (tile // (K // BLOCK_K)) * BLOCK_N
    k = (tile % (K // BLOCK_K)) * BLOCK_K
    first = split * blocks_per_split
    last = gl.minimum(first + blocks_per_split, (num_rows + _ROWS - 1) // _ROWS)
    dout_ring = gl.allocate_shared_memory(dout_desc.dtype, [STAGES, _ROWS, BLOCK_N], dout_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, _ROWS, BLOCK_K], x_desc.layout)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    sums_ptr += split.to(gl.int64) * (N * K)
    gl.warp_specialize(
        [
            (
                _consume_dweight,
                (
                    sums_ptr, rrms_ptr, dout_ring, x_ring, ready, empty, first, last, n, k, num_rows, 0, K, BLOCK_K,
                    STAGES,
                ),
            ),
            (
                _consume_dweight,
                (
                    sums_ptr, rrms_ptr, dout_ring, x_ring, ready, empty, first, last, n, k, num_rows, 1, K, BLOCK_K,
                    STAGES,
                ),
            ),
            (
                _produce_dweight,
                (dout_desc, x_desc, dout_ring, x_ring, ready, empty, first, last, n, k, BLOCK_N, BLOCK_K, STAGES),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


# ---------------------------------------------------------------- input


@gluon.jit
def _produce_dx(
    dout_desc, w_desc, x_desc, dout_ring, w_ring, x_tiles, ready, empty, x_ready, x_empty, num_blocks,
    N: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s = 0
    phase = 1
    x_phase = 1
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        for n in range(N // BLOCK_N):
            mbarrier.wait(empty.index(s), phase)
            mbarrier.expect(ready.index(s), (_ROWS + 2 * HALF) * BLOCK_N * 2)
            tma_load(dout_desc, [block * _ROWS, n * BLOCK_N], ready.index(s), dout_ring.index(s))
            for w in gl.static_range(2):
                tma_load(w_desc, [n * BLOCK_N, w * HALF], ready.index(s), w_ring.index(s * 2 + w))
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1
            if n == 1:
                # Needed only behind the product: the tiles still hold what the block before writes.
                for w in gl.static_range(2):
                    mbarrier.wait(x_empty.index(w), x_phase)
                    mbarrier.expect(x_ready.index(w), _ROWS * HALF * 2)
                    tma_load(x_desc, [block * _ROWS, w * HALF], x_ready.index(w), x_tiles.index(w))
                x_phase ^= 1


@gluon.jit
def _consume_dx(
    dx_desc, rrms_ptr, dout_ring, w_ring, x_tiles, parts, ready, empty, x_ready, x_empty, parts_ready, parts_empty,
    num_rows, num_blocks, W: gl.constexpr, N: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    tile = x_tiles.index(W)
    s = 0
    phase = 0
    turn = 0
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        acc = gl.zeros([_ROWS, HALF], gl.float32, layout)
        mbarrier.wait(ready.index(s), phase)
        acc = warpgroup_mma(dout_ring.index(s), w_ring.index(s * 2 + W), acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1
        # Under the first product: what the block before wrote has left the tile.
        tma.store_wait(pendings=0)
        mbarrier.arrive(x_empty.index(W), count=1, pred=block != gl.program_id(0))
        rows = block * _ROWS + gl.arange(0, _ROWS, rows_layout)
        rrms = gl.load(rrms_ptr + rows, mask=rows < num_rows, other=0.0)
        for _n in range(1, N // BLOCK_N):
            mbarrier.wait(ready.index(s), phase)
            acc = warpgroup_mma(dout_ring.index(s), w_ring.index(s * 2 + W), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(_before(s, STAGES)), count=1)
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(_before(s, STAGES)), count=1)
        mbarrier.wait(x_ready.index(W), turn)
        part = gl.sum(acc * tile.load(layout).to(gl.float32), 1)
        mbarrier.wait(parts_empty, turn ^ 1)
        parts.index(W).store(part)
        mbarrier.arrive(parts_ready, count=1)
        mbarrier.wait(parts_ready, turn)
        # In one order in both consumers.
        total = parts.index(0).load(rows_layout) + parts.index(1).load(rows_layout)
        mbarrier.arrive(parts_empty, count=1)
        factor = rrms * rrms * rrms * total * (0.5 / HALF)
        dx = acc * rrms[:, None] - tile.load(layout).to(gl.float32) * factor[:, None]
        tile.store(dx.to(tile.dtype))
        fence_async_shared()
        tma_store(dx_desc, [block * _ROWS, W * HALF], tile)
        turn ^= 1
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["num_rows"])
def _dx_hopper_kernel(
    dout_desc,  # (M, N), tiles of (64, BLOCK_N)
    w_desc,  # (N, K), the norm's weight folded in, tiles of (BLOCK_N, HALF)
    x_desc,  # (M, K), tiles of (64, HALF)
    dx_desc,  # (M, K), tiles of (64, HALF)
    rrms_ptr,  # (M,) float32
    num_rows,
    N: gl.constexpr,
    HALF: gl.constexpr,  # K / 2
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    dout_ring = gl.allocate_shared_memory(dout_desc.dtype, [STAGES, _ROWS, BLOCK_N], dout_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, BLOCK_N, HALF], w_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [2, _ROWS, HALF], x_desc.layout)
    parts = gl.allocate_shared_memory(gl.float32, [2, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    x_ready = allocate_barriers(2)
    x_empty = allocate_barriers(2)
    part = allocate_barriers(2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=1)
        mbarrier.init(part.index(i), count=2)
    num_blocks = (num_rows + _ROWS - 1) // _ROWS
    gl.warp_specialize(
        [
            (
                _consume_dx,
                (
                    dx_desc, rrms_ptr, dout_ring, w_ring, x_tiles, parts, ready, empty, x_ready, x_empty,
                    part.index(0), part.index(1), num_rows, num_blocks, 0, N, HALF, BLOCK_N, STAGES,
                ),
            ),
            (
                _consume_dx,
                (
                    dx_desc, rrms_ptr, dout_ring, w_ring, x_tiles, parts, ready, empty, x_ready, x_empty,
                    part.index(0), part.index(1), num_rows, num_blocks, 1, N, HALF, BLOCK_N, STAGES,
                ),
            ),
            (
                _produce_dx,
                (
                    dout_desc, w_desc, x_desc, dout_ring, w_ring, x_tiles, ready, empty, x_ready, x_empty, num_blocks,
                    N, HALF, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
