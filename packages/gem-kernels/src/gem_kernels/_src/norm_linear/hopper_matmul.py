"""Hopper matmuls with a norm inside, in Gluon: persistent, loads by TMA, two warpgroups of 64 rows each.

A unit of work is 128 rows of x with all their columns of the output, a tile of columns at a time. One warp copies tiles
of x and of the weight into a ring of stages. Each of two consumers owns 64 of the rows and all columns of the tile, so
that what a norm needs of a row never leaves a warpgroup.
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

from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS, allocate_barriers, tma_load, tma_store

_ROWS = gl.constexpr(ROWS)
_TILE_ROWS = gl.constexpr(TILE_ROWS)


@gluon.jit
def _produce(
    x_desc, w_desc, x_ring, w_ring, ready, empty, num_blocks, N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s = 0
    phase = 1
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        for n in range(N // BLOCK_N):
            for k in range((K + BLOCK_K - 1) // BLOCK_K):
                mbarrier.wait(empty.index(s), phase)
                mbarrier.expect(ready.index(s), (_TILE_ROWS + BLOCK_N) * BLOCK_K * 2)
                tma_load(x_desc, [block * _TILE_ROWS, k * BLOCK_K], ready.index(s), x_ring.index(s))
                tma_load(w_desc, [n * BLOCK_N, k * BLOCK_K], ready.index(s), w_ring.index(s))
                s += 1
                if s == STAGES:
                    s = 0
                    phase ^= 1


@gluon.jit
def _before(s, STAGES: gl.constexpr):
    """The stage before ``s``. Kept in a variable that is set to ``s``, the compiler would take it for a constant."""
    return gl.where(s == 0, STAGES - 1, s - 1)


@gluon.jit
def _product(
    x_ring, w_ring, ready, empty, s, phase, W: gl.constexpr, SQUARES: gl.constexpr, K: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
    row_layout: gl.constexpr,
):  # fmt: skip
    """The consumer's (64, BLOCK_N) of x wT, the sums of squares of its rows of x (if SQUARES), and the ring's state."""
    acc = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout)
    squares = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, row_layout))
    for k in range((K + BLOCK_K - 1) // BLOCK_K):
        mbarrier.wait(ready.index(s), phase)
        x = x_ring.index(s).slice(W * _ROWS, _ROWS, dim=0)
        acc = warpgroup_mma(x, w_ring.index(s).permute((1, 0)), acc, use_acc=(k > 0), is_async=True)
        if SQUARES:
            # Under the product, which needs no registers but its sum.
            wide = x.load(row_layout).to(gl.float32)
            squares += gl.sum(wide * wide, 1)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(_before(s, STAGES)), count=1, pred=(k > 0))
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(_before(s, STAGES)), count=1)
    return acc, squares, s, phase


@gluon.jit
def _columns(ptr, first, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """(1, BLOCK_N) float32 of one number per column."""
    return gl.load(ptr + first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))).to(gl.float32)[None, :]


@gluon.jit
def _rmsnorm_linear_consume(
    out_desc, bias_ptr, rrms_ptr, x_ring, w_ring, out_tiles, ready, empty, num_rows, num_blocks, eps,
    W: gl.constexpr, HAS_BIAS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BLOCK_K // 8), BLOCK_K // 8], [4, 1], [1, 0])
    out_tile = out_tiles.index(W)
    s = 0
    phase = 0
    rrms = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, layout))
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        row = block * _TILE_ROWS + W * _ROWS
        for n in gl.static_range(N // BLOCK_N):
            acc, squares, s, phase = _product(
                x_ring, w_ring, ready, empty, s, phase, W, n == 0, K, BLOCK_N, BLOCK_K, STAGES, layout, row_layout
            )
            if n == 0:
                factors = gl.rsqrt(squares / K + eps)
                rows = row + gl.arange(0, _ROWS, gl.SliceLayout(1, row_layout))
                gl.store(rrms_ptr + rows, factors, mask=rows < num_rows)
                rrms = gl.convert_layout(factors, gl.SliceLayout(1, layout))
            out = acc * rrms[:, None]
            if HAS_BIAS:
                out += _columns(bias_ptr, n * BLOCK_N, BLOCK_N, layout)
            tma.store_wait(pendings=0)
            out_tile.store(out.to(out_tile.dtype))
            fence_async_shared()
            tma_store(out_desc, [row, n * BLOCK_N], out_tile)
    tma.store_wait(pendings=0)


@gluon.jit
def _moments(x, COUNT: gl.constexpr, IS_LAYER: gl.constexpr):
    """Mean (0 unless IS_LAYER) of each row and sum of squared distances from it."""
    if IS_LAYER:
        mean = gl.sum(x, 1) / COUNT
        x -= mean[:, None]
        return mean, gl.sum(x * x, 1)
    squares = gl.sum(x * x, 1)
    return squares * 0.0, squares


@gluon.jit
def _store_normalized(
    unit, out_desc, unit_desc, norm_weight_ptr, norm_bias_ptr, tile, row, first, HAS_NORM_WEIGHT: gl.constexpr,
    HAS_NORM_BIAS: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Write a tile of normalised rows after the affine part; with one, the tile before it too."""
    if HAS_NORM_WEIGHT or HAS_NORM_BIAS:
        tile.store(unit.to(tile.dtype))
        fence_async_shared()
        tma_store(unit_desc, [row, first], tile)
        if HAS_NORM_WEIGHT:
            unit *= _columns(norm_weight_ptr, first, BLOCK_N, layout)
        if HAS_NORM_BIAS:
            unit += _columns(norm_bias_ptr, first, BLOCK_N, layout)
        tma.store_wait(pendings=0)
    tile.store(unit.to(tile.dtype))
    fence_async_shared()
    tma_store(out_desc, [row, first], tile)


@gluon.jit
def _linear_norm_consume_whole(
    out_desc, unit_desc, bias_ptr, norm_weight_ptr, norm_bias_ptr, rstd_ptr, x_ring, w_ring, tiles, ready, empty,
    num_rows, num_blocks, eps, W: gl.constexpr, IS_LAYER: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NORM_WEIGHT: gl.constexpr, HAS_NORM_BIAS: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A row in one product."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BLOCK_K // 8), BLOCK_K // 8], [4, 1], [1, 0])
    tile = tiles.index(W)
    s = 0
    phase = 0
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        row = block * _TILE_ROWS + W * _ROWS
        acc, _, s, phase = _product(
            x_ring, w_ring, ready, empty, s, phase, W, False, K, BLOCK_N, BLOCK_K, STAGES, layout, row_layout
        )
        if HAS_BIAS:
            acc += _columns(bias_ptr, 0, BLOCK_N, layout)
        mean, squares = _moments(acc, BLOCK_N, IS_LAYER)
        rstd = gl.rsqrt(squares / N + eps)
        tma.store_wait(pendings=0)
        _store_normalized(
            (acc - mean[:, None]) * rstd[:, None], out_desc, unit_desc, norm_weight_ptr, norm_bias_ptr, tile, row, 0,
            HAS_NORM_WEIGHT, HAS_NORM_BIAS, BLOCK_N, layout,
        )  # fmt: skip
        rows = row + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
        gl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    tma.store_wait(pendings=0)


@gluon.jit
def _pack(x, dtype: gl.constexpr):
    """(R, C) float32 as (R, C / 2) int32 with two neighbours of a row each, rounded to ``dtype``."""
    low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    cast: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(cast, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """Inverse of ``_pack``."""
    cast: gl.constexpr = (
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        if dtype == gl.bfloat16
        else "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    )
    low, high = gl.inline_asm_elementwise(
        cast, "=f,=f,r", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(low, high).reshape([pairs.shape[0], pairs.shape[1] * 2]), layout)


@gluon.jit
def _moments_of_pairs(pairs, COUNT: gl.constexpr, IS_LAYER: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr):
    """``_moments`` of ``_pack``ed rows, pair by pair, which needs few registers."""
    mean = gl.zeros([pairs.shape[0]], gl.float32, gl.SliceLayout(1, pairs.type.layout))
    if dtype == gl.bfloat16:
        if IS_LAYER:
            sums = gl.inline_asm_elementwise(
                """{
                .reg .f32 a, b;
                shl.b32 a, $1, 16;
                and.b32 b, $1, 0xffff0000;
                add.f32 $0, a, b;
                }""",
                "=f,r",
                [pairs],
                dtype=gl.float32,
                is_pure=True,
                pack=1,
            )
            mean = gl.sum(sums, 1) / COUNT
        squares = gl.inline_asm_elementwise(
            """{
            .reg .f32 a, b;
            shl.b32 a, $1, 16;
            and.b32 b, $1, 0xffff0000;
            sub.f32 a, a, $2;
            sub.f32 b, b, $2;
            mul.f32 a, a, a;
            fma.rn.f32 $0, b, b, a;
            }""",
            "=f,r,f",
            [pairs, mean[:, None]],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        if IS_LAYER:
            sums = gl.inline_asm_elementwise(
                """{
                .reg .b16 l, h;
                .reg .f32 a, b;
                mov.b32 {l, h}, $1;
                cvt.f32.f16 a, l;
                cvt.f32.f16 b, h;
                add.f32 $0, a, b;
                }""",
                "=f,r",
                [pairs],
                dtype=gl.float32,
                is_pure=True,
                pack=1,
            )
            mean = gl.sum(sums, 1) / COUNT
        squares = gl.inline_asm_elementwise(
            """{
            .reg .b16 l, h;
            .reg .f32 a, b;
            mov.b32 {l, h}, $1;
            cvt.f32.f16 a, l;
            cvt.f32.f16 b, h;
            sub.f32 a, a, $2;
            sub.f32 b, b, $2;
            mul.f32 a, a, a;
            fma.rn.f32 $0, b, b, a;
            }""",
            "=f,r,f",
            [pairs, mean[:, None]],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    return gl.convert_layout(mean, layout), gl.convert_layout(gl.sum(squares, 1), layout)


@gluon.jit
def _normalize_pairs(pairs, mean, rstd, dtype: gl.constexpr, layout: gl.constexpr):
    """Rows after the norm in ``dtype``, of ``_pack``ed ones: pair by pair, which needs few registers."""
    rows: gl.constexpr = gl.SliceLayout(1, pairs.type.layout)
    mean = gl.convert_layout(mean, rows)[:, None]
    rstd = gl.convert_layout(rstd, rows)[:, None]
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .f32 a, b;
            .reg .b32 q;
            shl.b32 a, $2, 16;
            and.b32 b, $2, 0xffff0000;
            sub.f32 a, a, $3;
            sub.f32 b, b, $3;
            mul.f32 a, a, $4;
            mul.f32 b, b, $4;
            cvt.rn.bf16x2.f32 q, b, a;
            mov.b32 {$0, $1}, q;
            }""",
            "=h,=h,r,f,f",
            [pairs, mean, rstd],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=1,
        )
        unit = gl.join(low, high)
    else:
        low, high = gl.inline_asm_elementwise(
            """{
            .reg .b16 l, h;
            .reg .f32 a, b;
            .reg .b32 q;
            mov.b32 {l, h}, $2;
            cvt.f32.f16 a, l;
            cvt.f32.f16 b, h;
            sub.f32 a, a, $3;
            sub.f32 b, b, $3;
            mul.f32 a, a, $4;
            mul.f32 b, b, $4;
            cvt.rn.f16x2.f32 q, b, a;
            mov.b32 {$0, $1}, q;
            }""",
            "=h,=h,r,f,f",
            [pairs, mean, rstd],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=1,
        )
        unit = gl.join(low, high)
    return gl.convert_layout(unit.reshape([pairs.shape[0], pairs.shape[1] * 2]), layout)


@gluon.jit
def _first_step(
    x_ring, w_ring, ready, s, phase, W: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr
):
    """The first product of a tile, which is still running."""
    acc = gl.zeros([_ROWS, BLOCK_N], gl.float32, layout)
    mbarrier.wait(ready.index(s), phase)
    x = x_ring.index(s).slice(W * _ROWS, _ROWS, dim=0)
    acc = warpgroup_mma(x, w_ring.index(s).permute((1, 0)), acc, use_acc=False, is_async=True)
    s += 1
    if s == STAGES:
        s = 0
        phase ^= 1
    return warpgroup_mma_wait(1, deps=[acc]), s, phase


@gluon.jit
def _other_steps(
    acc, x_ring, w_ring, ready, empty, s, phase, W: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    for _k in range(1, K // BLOCK_K):
        mbarrier.wait(ready.index(s), phase)
        x = x_ring.index(s).slice(W * _ROWS, _ROWS, dim=0)
        acc = warpgroup_mma(x, w_ring.index(s).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(_before(s, STAGES)), count=1)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(_before(s, STAGES)), count=1)
    return acc, s, phase


@gluon.jit
def _store_left(pairs, mean, rstd, out_desc, tile, row, layout: gl.constexpr):
    tma.store_wait(pendings=0)
    tile.store(_normalize_pairs(pairs, mean, rstd, tile.dtype, layout))
    fence_async_shared()
    tma_store(out_desc, [row, 0], tile)


@gluon.jit
def _linear_norm_consume_halves(
    out_desc, unit_desc, bias_ptr, norm_weight_ptr, norm_bias_ptr, rstd_ptr, x_ring, w_ring, tiles, ready, empty,
    num_rows, num_blocks, eps, W: gl.constexpr, IS_LAYER: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NORM_WEIGHT: gl.constexpr, HAS_NORM_BIAS: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A row in two products: the first waits in registers, rounded to the dtype of the output.

    Its moments are taken, of the rounded numbers, under the second product. Without an affine part it is normalised and
    stored under the first product of the next rows.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    IS_AFFINE: gl.constexpr = HAS_NORM_WEIGHT or HAS_NORM_BIAS
    tile = tiles.index(W)
    s = 0
    phase = 0
    mean = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, layout))
    rstd = mean
    left = _pack(gl.zeros([_ROWS, BLOCK_N], gl.float32, layout), tile.dtype)
    row = W * _ROWS
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        acc, s, phase = _first_step(x_ring, w_ring, ready, s, phase, W, BLOCK_N, STAGES, layout)
        if not IS_AFFINE:  # noqa: SIM102
            if block != gl.program_id(0):
                _store_left(left, mean, rstd, out_desc, tile, row, layout)
        acc, s, phase = _other_steps(acc, x_ring, w_ring, ready, empty, s, phase, W, K, BLOCK_K, STAGES)
        row = block * _TILE_ROWS + W * _ROWS
        if HAS_BIAS:
            acc += _columns(bias_ptr, 0, BLOCK_N, layout)
        left = _pack(acc, tile.dtype)
        acc, s, phase = _first_step(x_ring, w_ring, ready, s, phase, W, BLOCK_N, STAGES, layout)
        mean, squares = _moments_of_pairs(left, BLOCK_N, IS_LAYER, tile.dtype, gl.SliceLayout(1, layout))
        acc, s, phase = _other_steps(acc, x_ring, w_ring, ready, empty, s, phase, W, K, BLOCK_K, STAGES)
        if HAS_BIAS:
            acc += _columns(bias_ptr, BLOCK_N, BLOCK_N, layout)
        mean_right, squares_right = _moments(acc, BLOCK_N, IS_LAYER)
        squares += squares_right
        if IS_LAYER:
            distance = mean_right - mean
            mean = (mean + mean_right) * 0.5
            squares += distance * distance * (BLOCK_N * 0.5)
        rstd = gl.rsqrt(squares / N + eps)
        tma.store_wait(pendings=0)
        _store_normalized(
            (acc - mean[:, None]) * rstd[:, None], out_desc, unit_desc, norm_weight_ptr, norm_bias_ptr, tile, row,
            BLOCK_N, HAS_NORM_WEIGHT, HAS_NORM_BIAS, BLOCK_N, layout,
        )  # fmt: skip
        rows = row + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
        gl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
        if IS_AFFINE:
            tma.store_wait(pendings=0)
            _store_normalized(
                (_unpack(left, tile.dtype, layout) - mean[:, None]) * rstd[:, None], out_desc, unit_desc,
                norm_weight_ptr, norm_bias_ptr, tile, row, 0, HAS_NORM_WEIGHT, HAS_NORM_BIAS, BLOCK_N, layout,
            )  # fmt: skip
    if not IS_AFFINE:  # noqa: SIM102
        if gl.program_id(0) < num_blocks:
            _store_left(left, mean, rstd, out_desc, tile, row, layout)
    tma.store_wait(pendings=0)


@gluon.jit
def _linear_norm_consume(
    out_desc, unit_desc, bias_ptr, norm_weight_ptr, norm_bias_ptr, rstd_ptr, x_ring, w_ring, tiles, ready, empty,
    num_rows, num_blocks, eps, W: gl.constexpr, IS_LAYER: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NORM_WEIGHT: gl.constexpr, HAS_NORM_BIAS: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    if BLOCK_N == N:
        _linear_norm_consume_whole(
            out_desc, unit_desc, bias_ptr, norm_weight_ptr, norm_bias_ptr, rstd_ptr, x_ring, w_ring, tiles, ready,
            empty, num_rows, num_blocks, eps, W, IS_LAYER, HAS_BIAS, HAS_NORM_WEIGHT, HAS_NORM_BIAS, N, K, BLOCK_N,
            BLOCK_K, STAGES,
        )  # fmt: skip
    else:
        _linear_norm_consume_halves(
            out_desc, unit_desc, bias_ptr, norm_weight_ptr, norm_bias_ptr, rstd_ptr, x_ring, w_ring, tiles, ready,
            empty, num_rows, num_blocks, eps, W, IS_LAYER, HAS_BIAS, HAS_NORM_WEIGHT, HAS_NORM_BIAS, N, K, BLOCK_N,
            BLOCK_K, STAGES,
        )  # fmt: skip


@gluon.jit
def _allocate(x_desc, w_desc, out_desc, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """Rings of tiles of x and of the weight, a tile of the output for each consumer, and the rings' barriers."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, _TILE_ROWS, BLOCK_K], x_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    tiles = gl.allocate_shared_memory(out_desc.dtype, [2, _ROWS, BLOCK_N], out_desc.layout)
    ready = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return x_ring, w_ring, tiles, ready, empty


@gluon.jit(do_not_specialize=["num_rows"])
def _rmsnorm_linear_hopper_kernel(
    x_desc,  # (M, K), tiles of (128, BLOCK_K)
    w_desc,  # (N, K), the norm's weight folded in, tiles of (BLOCK_N, BLOCK_K)
    out_desc,  # (M, N), tiles of (64, BLOCK_N)
    bias_ptr,  # (N,), read only if HAS_BIAS
    rrms_ptr,  # (M,) float32
    num_rows,
    eps,
    HAS_BIAS: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    x_ring, w_ring, tiles, ready, empty = _allocate(x_desc, w_desc, out_desc, BLOCK_N, BLOCK_K, STAGES)
    num_blocks = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
    gl.warp_specialize(
        [
            (
                _rmsnorm_linear_consume,
                (
                    out_desc, bias_ptr, rrms_ptr, x_ring, w_ring, tiles, ready, empty, num_rows, num_blocks, eps, 0,
                    HAS_BIAS, N, K, BLOCK_N, BLOCK_K, STAGES,
                ),
            ),
            (
                _rmsnorm_linear_consume,
                (
                    out_desc, bias_ptr, rrms_ptr, x_ring, w_ring, tiles, ready, empty, num_rows, num_blocks, eps, 1,
                    HAS_BIAS, N, K, BLOCK_N, BLOCK_K, STAGES,
                ),
            ),
            (_produce, (x_desc, w_desc, x_ring, w_ring, ready, empty, num_blocks, N, K, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def _linear_norm_hopper_kernel(
    x_desc,  # (M, K), tiles of (128, BLOCK_K)
    w_desc,  # (N, K), tiles of (BLOCK_N, BLOCK_K)
    out_desc,  # (M, N), tiles of (64, BLOCK_N)
    unit_desc,  # (M, N), written only with a norm weight or bias
    bias_ptr,  # (N,), read only if HAS_BIAS
    norm_weight_ptr,  # (N,), read only if HAS_NORM_WEIGHT
    norm_bias_ptr,  # (N,), read only if HAS_NORM_BIAS
    rstd_ptr,  # (M,) float32
    num_rows,
    eps,
    IS_LAYER: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_NORM_WEIGHT: gl.constexpr,
    HAS_NORM_BIAS: gl.constexpr,
    N: gl.constexpr,  # BLOCK_N or twice that
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    x_ring, w_ring, tiles, ready, empty = _allocate(x_desc, w_desc, out_desc, BLOCK_N, BLOCK_K, STAGES)
    num_blocks = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
    gl.warp_specialize(
        [
            (
                _linear_norm_consume,
                (
                    out_desc, unit_desc, bias_ptr, norm_weight_ptr, norm_bias_ptr, rstd_ptr, x_ring, w_ring, tiles,
                    ready, empty, num_rows, num_blocks, eps, 0, IS_LAYER, HAS_BIAS, HAS_NORM_WEIGHT, HAS_NORM_BIAS, N,
                    K, BLOCK_N, BLOCK_K, STAGES,
                ),
            ),
            (
                _linear_norm_consume,
                (
                    out_desc, unit_desc, bias_ptr, norm_weight_ptr, norm_bias_ptr, rstd_ptr, x_ring, w_ring, tiles,
                    ready, empty, num_rows, num_blocks, eps, 1, IS_LAYER, HAS_BIAS, HAS_NORM_WEIGHT, HAS_NORM_BIAS, N,
                    K, BLOCK_N, BLOCK_K, STAGES,
                ),
            ),
            (_produce, (x_desc, w_desc, x_ring, w_ring, ready, empty, num_blocks, N, K, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
