"""The block where every sequence has few keys: one kernel forward, two backward, no row in memory between them.

A program holds rows with all their heads and reads them head by head, later passes from the cache; all keys lie in one
tile. In the backward what stands between the norms is computed again, since products with few keys cost less than
reading a row does.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.launch import device_guard, make_grid
from gem_kernels._src.gdpa_norm_block.arguments import Gradients, Options, Statistics
from gem_kernels._src.gdpa_norm_block.few_keys_backward import dkdv_kernel, dq_kernel
from gem_kernels._src.gdpa_norm_block.few_keys_tiles import attend, normalize
from gem_kernels._src.norm_linear.rows import row_major
from gem_kernels._src.tiles.activation import activation_pair
from gem_kernels._src.tiles.index import locate_tile
from gem_kernels._src.tiles.memory import load_rows, sequence_bounds, store_rows

ROWS = 64
"""Of a tile: with four warps one warpgroup of Hopper's matrix instructions."""
DKDV_STAGES = 3
"""Tiles of rows that are loaded ahead by the kernel that sums over them."""
DQ_STAGES = 3
"""Heads whose tiles are loaded ahead by the kernel of the queries' gradient."""

# The sizes of a batch must not select a compiled variant: each new one would stall a training step.
RUNTIME_SIZES = ["num_sequences", "num_tiles", "num_steps"]


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def forward_kernel(
    q_ptr,  # (T_q, N), N = HEADS * D
    k_ptr,  # (T_k, N)
    v_ptr,  # (T_k, N)
    out_ptr,  # (T_q, N)
    mean_ptr,  # (T_q,)
    rstd_ptr,  # (T_q,)
    rrms_ptr,  # (T_q,)
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (B + 1,)
    tile_offsets_ptr,  # (B + 1,), read only if SEARCH
    stride_qt,
    stride_kt,
    stride_vt,
    num_sequences,
    num_tiles,
    num_steps,
    pre_scale,
    post_scale,
    eps,
    ACTIVATION: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_RESIDUAL: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SEARCH: tl.constexpr,
):
    N: tl.constexpr = HEADS * D
    b, _, tile = locate_tile(tl.program_id(0), tile_offsets_ptr, num_sequences, 1, num_tiles, num_steps, SEARCH)
    start_q, len_q = sequence_bounds(offsets_q_ptr, b)
    first = tile * BLOCK_M
    if first >= len_q:
        return
    start_k, len_k = sequence_bounds(offsets_k_ptr, b)
    q_ptr += start_q * stride_qt
    k_ptr += start_k * stride_kt
    v_ptr += start_k * stride_vt
    out_ptr += start_q * N

    mean = tl.zeros([BLOCK_M], dtype=tl.float32)
    for head in tl.static_range(HEADS):
        q = load_rows(q_ptr + head * D, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        mean += tl.sum(q.to(tl.float32), 1)
    mean = mean / N
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for head in tl.static_range(HEADS):
        q = load_rows(q_ptr + head * D, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        x = normalize(q, mean, 0.0 * mean + 1.0, D, BLOCK_D)
        squares += tl.sum(x * x, 1)
    rstd = tl.rsqrt(squares / N + eps)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Kept in registers for all heads: this kernel has them to spare.
    totals = ()
    for head in tl.static_range(HEADS):
        q = load_rows(q_ptr + head * D, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        k = load_rows(k_ptr + head * D, 0, len_k, stride_kt, BLOCK_K, D, BLOCK_D)
        v = load_rows(v_ptr + head * D, 0, len_k, stride_vt, BLOCK_K, D, BLOCK_D)
        unit = normalize(q, mean, rstd, D, BLOCK_D)
        _scores, _activated, total = attend(unit, k, v, pre_scale, post_scale, ACTIVATION, QUERY_RESIDUAL)
        squares += tl.sum(total * total, 1)
        totals = totals + (total,)  # type: ignore[assignment]  # noqa: RUF005
    rrms = tl.rsqrt(squares / N + eps)
    for head in tl.static_range(HEADS):
        out = totals[head] * rrms[:, None]
        if RESIDUAL:
            out += load_rows(q_ptr + head * D, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D).to(tl.float32)
        store_rows(out_ptr + head * D, out, first, len_q, N, BLOCK_M, D, BLOCK_D)
    local = tl.arange(0, BLOCK_M)
    rows = start_q + first + local
    mask = local < len_q - first
    tl.store(mean_ptr + rows, mean, mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=mask)
    tl.store(rrms_ptr + rows, rrms, mask=mask)


def _meta(q: Tensor, options: Options) -> dict[str, Any]:
    return {
        "D": q.shape[2],
        "BLOCK_K": power_of_two(options.max_seqlen_k),
        "BLOCK_D": power_of_two(q.shape[2]),
        "QUERY_RESIDUAL": options.query_residual,
        "num_warps": 4,
    }


def _row_meta(q: Tensor, options: Options) -> dict[str, Any]:
    """Of the kernels whose programs hold whole rows."""
    return {
        **_meta(q, options),
        "HEADS": q.shape[1],
        "BLOCK_M": ROWS,
        "RESIDUAL": options.residual,
    }


def launch_few_keys_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, options: Options
) -> tuple[Tensor, Statistics]:
    """Output (T_q, H, D), contiguous, in the dtype of q."""
    rows, keys, values = (row_major(x.flatten(1)) for x in (q, k, v))
    num_rows = rows.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    statistics = Statistics(*(torch.empty(num_rows, dtype=torch.float32, device=q.device) for _ in range(3)))
    meta = _row_meta(q, options)
    if num_rows > 0:
        with device_guard(q):
            grid = make_grid("gdpa_norm_block", offsets_q, num_rows, options.max_seqlen_q, meta["BLOCK_M"], 1)
            forward_kernel[(grid.size,)](
                rows,
                keys,
                values,
                out,
                *statistics,
                offsets_q,
                offsets_k,
                grid.tile_offsets,
                rows.stride(0),
                keys.stride(0),
                values.stride(0),
                offsets_q.shape[0] - 1,
                grid.num_tiles,
                grid.num_steps,
                options.pre_scale,
                options.post_scale,
                options.eps,
                ACTIVATION=activation_pair(options.activation, hardware=q.is_cuda).value,
                SEARCH=grid.search,
                num_stages=1,
                **meta,
            )
    return out, statistics


def launch_few_keys_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    statistics: Statistics,
    options: Options,
) -> Gradients:
    """All gradients, contiguous, in the dtypes of what they belong to."""
    dout, rows, keys, values = (row_major(x.flatten(1)) for x in (do, q, k, v))
    num_rows, num_sequences = rows.shape[0], offsets_q.shape[0] - 1
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inner = torch.empty(num_rows, dtype=torch.float32, device=q.device)
    strides = tuple(x.stride(0) for x in (dout, rows, keys, values))
    scales = (options.pre_scale, options.post_scale)
    activation = activation_pair(options.activation, hardware=q.is_cuda)
    functions = {"ACTIVATION": activation.value, "DERIVATIVE": activation.derivative}
    meta = _row_meta(q, options)
    with device_guard(q):
        if num_rows > 0:
            grid = make_grid("gdpa_norm_block", offsets_q, num_rows, options.max_seqlen_q, meta["BLOCK_M"], 1)
            dq_kernel[(grid.size,)](
                dout,
                rows,
                keys,
                values,
                dq,
                *statistics,
                inner,
                offsets_q,
                offsets_k,
                grid.tile_offsets,
                *strides,
                num_sequences,
                grid.num_tiles,
                grid.num_steps,
                *scales,
                BLOCK_N=power_of_two(rows.shape[1]),
                SEARCH=grid.search,
                num_stages=DQ_STAGES,
                **functions,
                **meta,
            )
        dkdv_kernel[(num_sequences * q.shape[1],)](
            dout,
            rows,
            keys,
            values,
            dk,
            dv,
            *statistics,
            inner,
            offsets_q,
            offsets_k,
            *strides,
            *scales,
            HEADS=q.shape[1],
            BLOCK_M=ROWS,
            num_stages=DKDV_STAGES,
            **functions,
            **_meta(q, options),
        )
    return Gradients(dq, dk, dv, *(q.new_empty(0) for _ in range(3)))
