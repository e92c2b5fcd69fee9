"""Triton gradients of the bias tables, deterministic: each program sums into registers and writes one partial.

With dS = P * (dP - delta), an entry's gradient is the sum of dS over its pairs. Both kernels compute dS again, tile by
tile, and a fixed number of programs per head walks the query tiles of the batch with a fixed stride; the partials,
at most ``_NUM_PROGRAMS`` rows whatever the batch is, are added in order afterwards. No atomics.

Time buckets: a tile of pairs meets few buckets, for gaps are logarithmic and events lie in order of time, so the
kernel takes the tile's smallest and largest bucket and sums each one in between. Any order of times is right.

Positions: a tile of queries from m and keys from m + c on holds the diagonals j - i around c; shifting
row i by i turns them into columns. A program walks several such tiles of one query tile, so that all but the outermost
give both halves of their diagonals. Distances beyond the table's reach belong to its two end entries, which the first
kernel sums.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import TileConfig, power_of_two
from gem_kernels._src.attention.launch import (
    call_flags,
    capability_of,
    clamp_window,
    device_guard,
    row_strides,
    unit_stride,
)
from gem_kernels._src.jagged_attention.backward import launch_delta
from gem_kernels._src.jagged_attention.backward_dkdv import load_log2_lse
from gem_kernels._src.jagged_attention.bias import Bias, pair_with_bias
from gem_kernels._src.jagged_attention.bias_tiles import add_bias, load_times, time_bucket
from gem_kernels._src.jagged_attention.forward import RUNTIME_SIZES
from gem_kernels._src.tiles.index import key_sequence
from gem_kernels._src.tiles.mask import key_range, pair_mask
from gem_kernels._src.tiles.memory import load_row_scalars, load_rows, sequence_bounds

_LOG2E = tl.constexpr(math.log2(math.e))
_NUM_PROGRAMS = 1024
"""Programs of one launch, over all heads and chunks: enough to fill a GPU, few enough for small partials."""
_SIZES = [*RUNTIME_SIZES, "num_parts", "num_groups", "lowest"]
_CHUNKS = 8
"""Chunks of distances per program of the position kernel: one tile in nine gives only half of its diagonals."""


def select_table(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> TileConfig:
    """Configuration of both kernels, small enough for every GPU; only Hopper has room for two stages.

    ``block_n`` is that of the time kernel; the tiles of the position kernel are square. On Blackwell they have 32 rows:
    tiles of 64 go through tensor memory, for which Triton 3.6 finds no layout in the time kernel.
    """
    rows, num_warps = (16, 4) if dtype == torch.float32 else (64, 8)
    if head_dim > 128 or capability[0] == 10:
        rows = min(rows, 32)
    keys = rows if head_dim <= 64 else min(rows, 32)
    return TileConfig(block_m=rows, block_n=keys, num_warps=num_warps, num_stages=2 if capability[0] == 9 else 1)


@triton.jit
def _load_rows_from(ptr, first, num_rows, stride_t, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """``load_rows`` for a ``first`` that may be negative: rows below 0 read 0 too."""
    rows = first + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_DIM)
    mask = ((rows >= 0) & (rows < num_rows))[:, None] & (offs_d < DIM)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride_t + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def _load_times_from(times_ptr, first, num_rows, ROWS: tl.constexpr, HAS_TIME: tl.constexpr):
    """``load_times`` for a ``first`` that may be negative."""
    rows = first + tl.arange(0, ROWS)
    if HAS_TIME:
        times = tl.load(times_ptr + rows.to(tl.int64), mask=(rows >= 0) & (rows < num_rows), other=0)
        return times.to(tl.int64) if times.dtype == tl.int32 else times
    else:
        return rows


@triton.jit
def _score_gradient(
    q,
    do,
    k,
    v,
    lse,
    delta,
    position_ptr,
    time_ptr,
    offs_m,
    offs_n,
    times_m,
    times_n,
    mask,
    scale_log2,
    radius,
    num_buckets,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    TIME_SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(M, N) float32 dS of one tile of pairs, 0 outside the mask."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    scores = add_bias(
        scores, scale_log2, position_ptr, time_ptr, offs_m[:, None], offs_n[None, :], times_m[:, None],
        times_n[None, :], radius, num_buckets, HAS_POSITION, HAS_TIME, TIME_SHIFT,
    )  # fmt: skip
    return tl.where(mask, tl.exp2(scores - lse[:, None]) * (dp - delta[:, None]), 0.0)


@triton.jit(do_not_specialize=_SIZES)
def _jagged_attention_bwd_time_kernel(
    q_ptr,  # (T_q, H, D), or (S, H, D) if BROADCAST_Q; T_q is B S below
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    lse_ptr,  # (T_q, H) float32
    delta_ptr,  # (T_q, H) float32
    partial_ptr,  # (num_parts, H, BUCKETS) float32, written only if HAS_TIME
    ends_ptr,  # (num_parts, H, 2) float32, written only if HAS_ENDS
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (R + 1,), R = B without request_index
    tile_offsets_ptr,  # (B + 1,) int64, query tiles before each sequence
    tile_sequences_ptr,  # int64, the sequence of each query tile
    request_index_ptr,  # (B,) or None
    position_ptr,  # (H, 2 * radius + 1) float32, read only if HAS_POSITION
    time_ptr,  # (H, num_buckets) float32, read only if HAS_TIME
    times_q_ptr,  # (T_q,), read only if HAS_TIME
    times_k_ptr,  # (T_k,), read only if HAS_TIME
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dot,
    stride_doh,
    num_sequences,
    num_parts,
    left,
    right,
    scale,
    radius,
    num_buckets,
    num_heads,
    GROUP: tl.constexpr,  # query heads per key head
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BUCKETS: tl.constexpr,  # power of two >= num_buckets
    BROADCAST_Q: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    HAS_ENDS: tl.constexpr,  # distances beyond the radius exist
    TIME_SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum dS by time bucket (HAS_TIME) and over the distances below -radius and above radius (HAS_ENDS)."""
    part = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    q_ptr += head * stride_qh
    do_ptr += head * stride_doh
    k_ptr += head // GROUP * stride_kh
    v_ptr += head // GROUP * stride_vh
    if HAS_POSITION:
        position_ptr += head * (2 * radius + 1)
    if HAS_TIME:
        time_ptr += head * num_buckets
    ids = tl.arange(0, BUCKETS)
    sums = tl.zeros([BUCKETS], dtype=tl.float32)
    below = tl.zeros([BLOCK_M], dtype=tl.float32)
    above = tl.zeros([BLOCK_M], dtype=tl.float32)
    num_tiles = tl.load(tile_offsets_ptr + num_sequences).to(tl.int32)
    for tile in range(part, num_tiles, num_parts):
        b = tl.load(tile_sequences_ptr + tile)
        first = (tile - tl.load(tile_offsets_ptr + b)).to(tl.int32) * BLOCK_M
        start_q, len_q = sequence_bounds(offsets_q_ptr, b)
        start_k, len_k = sequence_bounds(offsets_k_ptr, key_sequence(request_index_ptr, b))
        row = start_q * num_heads + head
        first_q = start_q * 0 if BROADCAST_Q else start_q
        q = load_rows(q_ptr + first_q * stride_qt, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
        do = load_rows(do_ptr + start_q * stride_dot, first, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
        lse = load_log2_lse(lse_ptr + row, first, len_q, num_heads, BLOCK_M)
        delta = load_row_scalars(delta_ptr + row, first, len_q, num_heads, BLOCK_M, 0.0)
        offs_m = first + tl.arange(0, BLOCK_M)
        times_m = offs_m
        if HAS_TIME:
            times_m = load_times(times_q_ptr + start_q, first, len_q, BLOCK_M, HAS_TIME)
        low, _split, high = key_range(first, len_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        for n in range(low, high, BLOCK_N):
            # A tile within the radius has nothing for the ends.
            beyond = (n - first - (BLOCK_M - 1) < -radius) | (n + BLOCK_N - 1 - first > radius)
            if HAS_TIME or beyond:
                offs_n = n + tl.arange(0, BLOCK_N)
                mask = pair_mask(offs_m[:, None], offs_n[None, :], len_k, left, right, HAS_LEFT, HAS_RIGHT)
                mask = mask & (offs_m < len_q)[:, None]
                k = load_rows(k_ptr + start_k * stride_kt, n, len_k, stride_kt, BLOCK_N, D, BLOCK_D)
                v = load_rows(v_ptr + start_k * stride_vt, n, len_k, stride_vt, BLOCK_N, D_V, BLOCK_DV)
                times_n = offs_n
                if HAS_TIME:
                    times_n = load_times(times_k_ptr + start_k, n, len_k, BLOCK_N, HAS_TIME)
                ds = _score_gradient(
                    q, do, k, v, lse, delta, position_ptr, time_ptr, offs_m, offs_n, times_m, times_n, mask,
                    scale * _LOG2E, radius, num_buckets, HAS_POSITION, HAS_TIME, TIME_SHIFT, PRECISION,
                )  # fmt: skip
                if HAS_ENDS:
                    distance = offs_n[None, :] - offs_m[:, None]
                    below += tl.sum(tl.where(distance < -radius, ds, 0.0), 1)
                    above += tl.sum(tl.where(distance > radius, ds, 0.0), 1)
                if HAS_TIME:
                    bucket = time_bucket(times_m[:, None], times_n[None, :], num_buckets, TIME_SHIFT)
                    smallest = tl.min(tl.min(tl.where(mask, bucket, num_buckets), 1), 0)
                    largest = tl.max(tl.max(tl.where(mask, bucket, -1), 1), 0)
                    for c in range(smallest, largest + 1):
                        entry = tl.sum(tl.sum(tl.where(bucket == c, ds, 0.0), 1), 0)
                        sums += tl.where(ids == c, entry, 0.0)
    slot = part.to(tl.int64) * num_heads + head
    if HAS_TIME:
        tl.store(partial_ptr + slot * BUCKETS + ids, sums)
    if HAS_ENDS:
        tl.store(ends_ptr + slot * 2, tl.sum(below, 0))
        tl.store(ends_ptr + slot * 2 + 1, tl.sum(above, 0))


@triton.jit(do_not_specialize=_SIZES)
def _jagged_attention_bwd_position_kernel(
    q_ptr,  # (T_q, H, D), or (S, H, D) if BROADCAST_Q; T_q is B S below
    k_ptr,  # (T_k, H_kv, D)
    v_ptr,  # (T_k, H_kv, D_v)
    do_ptr,  # (T_q, H, D_v)
    lse_ptr,  # (T_q, H) float32
    delta_ptr,  # (T_q, H) float32
    partial_ptr,  # (num_parts, H, num_groups, CHUNKS, BLOCK_M) float32
    offsets_q_ptr,  # (B + 1,)
    offsets_k_ptr,  # (R + 1,), R = B without request_index
    tile_offsets_ptr,  # (B + 1,) int64, query tiles before each sequence
    tile_sequences_ptr,  # int64, the sequence of each query tile
    request_index_ptr,  # (B,) or None
    position_ptr,  # (H, 2 * radius + 1) float32
    time_ptr,  # (H, num_buckets) float32, read only if HAS_TIME
    times_q_ptr,  # (T_q,), read only if HAS_TIME
    times_k_ptr,  # (T_k,), read only if HAS_TIME
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_dot,
    stride_doh,
    num_sequences,
    num_parts,
    num_groups,
    lowest,  # distance j - i of the first column
    left,
    right,
    scale,
    radius,
    num_buckets,
    num_heads,
    GROUP: tl.constexpr,  # query heads per key head
    D: tl.constexpr,
    D_V: tl.constexpr,
    CHUNKS: tl.constexpr,  # power of two
    BLOCK_M: tl.constexpr,  # queries and keys of a tile, distances of a chunk
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BROADCAST_Q: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_POSITION: tl.constexpr,
    HAS_TIME: tl.constexpr,
    TIME_SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum dS by distance j - i, from lowest + group * CHUNKS * BLOCK_M on, over this program's query tiles."""
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    group = tl.program_id(0) // num_heads % num_groups
    part = tl.program_id(0) // num_heads // num_groups
    q_ptr += head * stride_qh
    do_ptr += head * stride_doh
    k_ptr += head // GROUP * stride_kh
    v_ptr += head // GROUP * stride_vh
    position_ptr += head * (2 * radius + 1)
    if HAS_TIME:
        time_ptr += head * num_buckets
    distance = lowest + group * (CHUNKS * BLOCK_M)
    local = tl.arange(0, BLOCK_M)
    # Row i has diagonal c of a tile at key i + c, and, wrapped around, that of the chunk before at i + c - BLOCK_M.
    key = local[:, None] + local[None, :]
    chunks = tl.arange(0, CHUNKS)[:, None]
    sums = tl.zeros([CHUNKS, BLOCK_M], dtype=tl.float32)
    num_tiles = tl.load(tile_offsets_ptr + num_sequences).to(tl.int32)
    for tile in range(part, num_tiles, num_parts):
        b = tl.load(tile_sequences_ptr + tile)
        first = (tile - tl.load(tile_offsets_ptr + b)).to(tl.int32) * BLOCK_M
        start_q, len_q = sequence_bounds(offsets_q_ptr, b)
        start_k, len_k = sequence_bounds(offsets_k_ptr, key_sequence(request_index_ptr, b))
        first_n = first + distance
        start = tl.maximum(-first_n, 0) // BLOCK_M
        stop = tl.minimum(tl.maximum(len_k - first_n + BLOCK_M - 1, 0) // BLOCK_M, CHUNKS + 1)
        if start < stop:
            row = start_q * num_heads + head
            first_q = start_q * 0 if BROADCAST_Q else start_q
            q = load_rows(q_ptr + first_q * stride_qt, first, len_q, stride_qt, BLOCK_M, D, BLOCK_D)
            do = load_rows(do_ptr + start_q * stride_dot, first, len_q, stride_dot, BLOCK_M, D_V, BLOCK_DV)
            lse = load_log2_lse(lse_ptr + row, first, len_q, num_heads, BLOCK_M)
            delta = load_row_scalars(delta_ptr + row, first, len_q, num_heads, BLOCK_M, 0.0)
            offs_m = first + local
            times_m = offs_m
            if HAS_TIME:
                times_m = load_times(times_q_ptr + start_q, first, len_q, BLOCK_M, HAS_TIME)
            for chunk in range(start, stop):
                n = first_n + chunk * BLOCK_M
                k = _load_rows_from(k_ptr + start_k * stride_kt, n, len_k, stride_kt, BLOCK_M, D, BLOCK_D)
                v = _load_rows_from(v_ptr + start_k * stride_vt, n, len_k, stride_vt, BLOCK_M, D_V, BLOCK_DV)
                offs_n = n + local
                times_n = offs_n
                if HAS_TIME:
                    times_n = _load_times_from(times_k_ptr + start_k, n, len_k, BLOCK_M, HAS_TIME)
                mask = pair_mask(offs_m[:, None], offs_n[None, :], len_k, left, right, HAS_LEFT, HAS_RIGHT)
                mask = mask & (offs_n >= 0)[None, :] & (offs_m < len_q)[:, None]
                ds = _score_gradient(
                    q, do, k, v, lse, delta, position_ptr, time_ptr, offs_m, offs_n, times_m, times_n, mask,
                    scale * _LOG2E, radius, num_buckets, HAS_POSITION, HAS_TIME, TIME_SHIFT, PRECISION,
                )  # fmt: skip
                columns = tl.gather(ds, key % BLOCK_M, 1)
                own = tl.sum(tl.where(key < BLOCK_M, columns, 0.0), 0)
                before = tl.sum(tl.where(key < BLOCK_M, 0.0, columns), 0)
                sums += tl.where(chunks == chunk, own[None, :], 0.0)
                sums += tl.where(chunks == chunk - 1, before[None, :], 0.0)
    slot = ((part.to(tl.int64) * num_heads + head) * num_groups + group) * CHUNKS
    tl.store(partial_ptr + (slot + chunks) * BLOCK_M + local[None, :], sums)


def launch_table_gradients(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    bias: Bias,
    request_index: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients (H, 2 P + 1) of the position table and (H, num_buckets) of the time table, float32.

    Memory on top: partials of at most ``_NUM_PROGRAMS`` times 512 distances or the buckets, in float32 (2 MiB; 256 KiB
    for 64 buckets), or, where a table needs more programs than that, one copy of the table.
    """
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    out, lse = out.contiguous(), lse.contiguous()
    bias = bias.tables(torch.float32)
    num_heads, dim, total_k, dim_v = q.shape[1], q.shape[2], v.shape[0], v.shape[2]
    total_q = out.shape[0]
    dposition = None if bias.position is None else torch.zeros_like(bias.position)
    dtime = None if bias.time is None else torch.zeros_like(bias.time)
    if total_q == 0 or total_k == 0:
        return dposition, dtime
    left, right = clamp_window(left, right)
    pairing = pair_with_bias(q, offsets_q, offsets_k, request_index, max_seqlen_q, left, right, bias)
    num_sequences = pairing.num_queries
    config = select_table(max(dim, dim_v), q.dtype, capability_of(q))
    rows = config.block_m
    # As a searched grid: the tiles before each sequence, known on the device only; the host knows a bound.
    tiles = (torch.diff(pairing.offsets_q.to(torch.int64)) + (rows - 1)) // rows
    tile_offsets = torch.nn.functional.pad(torch.cumsum(tiles, 0), (1, 0))
    bound = total_q // rows + num_sequences
    tile_sequences = torch.searchsorted(tile_offsets[1:].contiguous(), torch.arange(bound, device=q.device), right=True)
    inputs = (pairing.offsets_q, pairing.offsets_k, tile_offsets, tile_sequences, pairing.request_index, *bias[:4])
    strides = row_strides(q, k, v, do)
    shared = {
        "BLOCK_M": rows,
        "BROADCAST_Q": pairing.broadcast_q,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **call_flags(q, k, v, left, right),
        **bias.flags(),
    }
    # Distances that can occur, and of them those with an entry of their own.
    least = max(-(pairing.max_seqlen_q - 1), -left if left >= 0 else -pairing.max_seqlen_q)
    most = min(max_seqlen_k - 1, right if right >= 0 else max_seqlen_k)
    has_ends = dposition is not None and (least < -bias.radius or most > bias.radius)
    lowest, highest = max(least, -bias.radius), min(most, bias.radius)
    with device_guard(q):
        delta = launch_delta(out, do, dlse)
        if dtime is not None or has_ends:
            num_parts = max(1, min(bound, _NUM_PROGRAMS // num_heads))
            buckets = power_of_two(max(bias.num_buckets, 1))
            partial = torch.empty(num_parts, num_heads, buckets, dtype=torch.float32, device=q.device)
            ends = torch.empty(num_parts, num_heads, 2, dtype=torch.float32, device=q.device)
            _jagged_attention_bwd_time_kernel[(num_parts * num_heads,)](
                q,
                k,
                v,
                do,
                lse,
                delta,
                partial,
                ends,
                *inputs,
                *strides,
                num_sequences,
                num_parts,
                left,
                right,
                scale,
                bias.radius,
                bias.num_buckets,
                num_heads,
                BLOCK_N=config.block_n,
                BUCKETS=buckets,
                HAS_ENDS=has_ends,
                **shared,
            )
            if dtime is not None:
                dtime = partial.sum(0)[:, : bias.num_buckets].contiguous()
            if dposition is not None and has_ends:
                dposition[:, :: max(2 * bias.radius, 1)] += ends.sum(0) if bias.radius else ends.sum((0, 2))[:, None]
        if dposition is not None and lowest <= highest:
            width = highest - lowest + 1
            num_groups = -(-width // (_CHUNKS * rows))
            num_parts = max(1, min(bound, _NUM_PROGRAMS // (num_heads * num_groups)))
            partial = torch.empty(
                num_parts, num_heads, num_groups * _CHUNKS * rows, dtype=torch.float32, device=q.device
            )
            _jagged_attention_bwd_position_kernel[(num_parts * num_groups * num_heads,)](
                q,
                k,
                v,
                do,
                lse,
                delta,
                partial,
                *inputs,
                *strides,
                num_sequences,
                num_parts,
                num_groups,
                lowest,
                left,
                right,
                scale,
                bias.radius,
                bias.num_buckets,
                num_heads,
                CHUNKS=_CHUNKS,
                **shared,
            )
            dposition[:, lowest + bias.radius : highest + bias.radius + 1] += partial.sum(0)[:, :width]
    return dposition, dtime
