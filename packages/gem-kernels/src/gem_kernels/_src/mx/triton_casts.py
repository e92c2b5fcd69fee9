"""Triton kernels of the MX casts: integer arithmetic on float32 bits, the same on every GPU and in the interpreter.

One program casts a tile of 32 rows and ``TILE_COLS`` columns, which holds whole blocks of every block shape. FP8 codes
are written as bytes, so that GPUs without FP8 conversion instructions run the same kernels.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.mx.formats import ElementFormat, block_grid, element_format

TILE_ROWS = 32
TILE_COLS = 128
NUM_WARPS = 4


@triton.jit
def _power_of_two(exponent):
    """2 ** (exponent - 127) in float32 for exponents 0 to 254; at 0 the result is subnormal."""
    return tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _load_float32(ptrs, mask):
    """Values as float32. bfloat16 is widened as bits: Triton's interpreter gets its subnormals wrong."""
    x = tl.load(ptrs, mask=mask, other=0.0)
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _store_float32(ptrs, value, mask):
    """Store float32 values to nearest even; bfloat16 is rounded as bits, for the same reason."""
    if ptrs.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # Rounding carries a NaN with a full mantissa, such as the one a GPU returns, over into a zero.
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        tl.store(ptrs, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _encode(x, inverse_scale, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr):
    """FP8 codes (int32) of float32 ``x * inverse_scale``: to nearest even, saturating, sign kept."""
    bits = (x * inverse_scale).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    # Normal elements: round the mantissa in place, the carry runs into the exponent, then move to the narrow bias.
    HALF: tl.constexpr = (1 << (SHIFT - 1)) - 1
    normal = ((magnitude + HALF + ((magnitude >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA_BITS)
    # Subnormal ones: in the sum with 2**(24 - bias - mantissa bits) one unit in the last place is one code.
    ANCHOR: tl.constexpr = (127 + 24 - BIAS - MANTISSA_BITS) << 23
    anchor = tl.full(magnitude.shape, ANCHOR, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - ANCHOR
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    return tl.minimum(code, MAX_CODE) | ((bits >> 24) & 0x80)


@triton.jit
def _decode(code, scale, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, MAX_CODE: tl.constexpr):
    """Float32 element times scale from FP8 codes (int32)."""
    magnitude = code & 0x7F
    normal = ((magnitude << (23 - MANTISSA_BITS)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    smallest = tl.full(code.shape, (127 + 1 - BIAS - MANTISSA_BITS) << 23, tl.int32).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < (1 << MANTISSA_BITS), magnitude.to(tl.float32) * smallest, normal)
    # E5M2 has an infinity right above its largest value; everything else there is NaN.
    beyond = tl.where((MANTISSA_BITS == 2) & (magnitude == MAX_CODE + 1), float("inf"), float("nan"))
    value = tl.where(magnitude > MAX_CODE, beyond, value)
    signed = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return signed.to(tl.float32, bitcast=True) * scale


@triton.jit
def _tile_offsets(K, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Row and column indices (int64) of this program's tile and of its blocks."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_per_row = tl.cdiv(K, COLS)
    pid_m = pid // tiles_per_row
    pid_k = pid % tiles_per_row
    offs_m = pid_m * ROWS + tl.arange(0, ROWS)
    offs_k = pid_k * COLS + tl.arange(0, COLS)
    offs_i = pid_m * (ROWS // BLOCK_ROWS) + tl.arange(0, ROWS // BLOCK_ROWS)
    offs_j = pid_k * (COLS // BLOCK_COLS) + tl.arange(0, COLS // BLOCK_COLS)
    return offs_m, offs_k, offs_i, offs_j


@triton.jit
def _spread(blocks, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A value per block -> a value per element of the tile."""
    wide = tl.broadcast_to(blocks[:, None, :, None], (ROWS // BLOCK_ROWS, BLOCK_ROWS, COLS // BLOCK_COLS, BLOCK_COLS))
    return tl.reshape(wide, (ROWS, COLS))


# The number of rows is the number of tokens of a batch: it must not select a compiled variant.
@triton.jit(do_not_specialize=["M"])
def _mx_quantize_kernel(
    x_ptr,  # (M, K)
    out_ptr,  # (M, K) codes as bytes, or dequantised values if FAKE
    scale_ptr,  # (blocks along M, blocks along K) bytes, None if FAKE
    stride_xm,
    M,
    K,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    EMAX: tl.constexpr,
    MAX_CODE: tl.constexpr,
    RCEIL: tl.constexpr,
    FAKE: tl.constexpr,
):
    offs_m, offs_k, offs_i, offs_j = _tile_offsets(K, BLOCK_ROWS, BLOCK_COLS, ROWS, COLS)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x = _load_float32(x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :], mask)

    # Integers order the bits of magnitudes like their values, NaN above all of them.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.reshape(magnitude, (ROWS // BLOCK_ROWS, BLOCK_ROWS, COLS // BLOCK_COLS, BLOCK_COLS))
    amax = tl.max(tl.max(amax, axis=3), axis=1)
    # The carry reaches the exponent exactly when the mantissa is above 1.75, that of the largest element.
    rounded = amax + 0x1FFFFF if RCEIL else amax
    scale_byte = tl.maximum((rounded >> 23) - EMAX, 0)
    is_nan = amax >= 0x7F800000
    scale_byte = tl.where(is_nan, 127, scale_byte)

    inverse = _spread(_power_of_two(254 - scale_byte), BLOCK_ROWS, BLOCK_COLS, ROWS, COLS)
    code = _encode(x, inverse, MANTISSA_BITS, BIAS, MAX_CODE)
    code = tl.where(_spread(is_nan, BLOCK_ROWS, BLOCK_COLS, ROWS, COLS), 0x7F, code)
    out_ptrs = out_ptr + offs_m[:, None] * K + offs_k[None, :]
    if FAKE:
        scale = _spread(_power_of_two(scale_byte), BLOCK_ROWS, BLOCK_COLS, ROWS, COLS)
        value = _decode(code, scale, MANTISSA_BITS, BIAS, MAX_CODE)
        _store_float32(out_ptrs, value, mask)
    else:
        tl.store(out_ptrs, code.to(tl.uint8), mask=mask)
        blocks_m = tl.cdiv(M, BLOCK_ROWS)
        blocks_k = tl.cdiv(K, BLOCK_COLS)
        scale_mask = (offs_i < blocks_m)[:, None] & (offs_j < blocks_k)[None, :]
        scale_ptrs = scale_ptr + offs_i[:, None] * blocks_k + offs_j[None, :]
        tl.store(scale_ptrs, tl.where(is_nan, 255, scale_byte).to(tl.uint8), mask=scale_mask)


@triton.jit(do_not_specialize=["M"])
def _mx_dequantize_kernel(
    qdata_ptr,  # (M, K) codes as bytes
    scale_ptr,  # (blocks along M, blocks along K) bytes
    out_ptr,  # (M, K), contiguous
    stride_qm,
    stride_si,
    M,
    K,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
):
    offs_m, offs_k, offs_i, offs_j = _tile_offsets(K, BLOCK_ROWS, BLOCK_COLS, ROWS, COLS)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    code = tl.load(qdata_ptr + offs_m[:, None] * stride_qm + offs_k[None, :], mask=mask, other=0).to(tl.int32)
    blocks_m = tl.cdiv(M, BLOCK_ROWS)
    blocks_k = tl.cdiv(K, BLOCK_COLS)
    scale_mask = (offs_i < blocks_m)[:, None] & (offs_j < blocks_k)[None, :]
    scale_ptrs = scale_ptr + offs_i[:, None] * stride_si + offs_j[None, :]
    scale_byte = tl.load(scale_ptrs, mask=scale_mask, other=0).to(tl.int32)
    scale = tl.where(scale_byte == 255, float("nan"), _power_of_two(scale_byte))
    value = _decode(code, _spread(scale, BLOCK_ROWS, BLOCK_COLS, ROWS, COLS), MANTISSA_BITS, BIAS, MAX_CODE)
    _store_float32(out_ptr + offs_m[:, None] * K + offs_k[None, :], value, mask)


def _constexprs(fmt: ElementFormat, block_shape: tuple[int, int]) -> dict[str, Any]:
    """Constants that both kernels take."""
    return {
        "BLOCK_ROWS": block_shape[0],
        "BLOCK_COLS": block_shape[1],
        "ROWS": TILE_ROWS,
        "COLS": TILE_COLS,
        "MANTISSA_BITS": fmt.mantissa_bits,
        "BIAS": fmt.bias,
        "MAX_CODE": fmt.max_code,
    }


def _grid(rows: int, cols: int) -> tuple[int]:
    return (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(cols, TILE_COLS),)


def _device_guard(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def _launch(
    x: Tensor, out: Tensor, scale: Tensor | None, block_shape: tuple[int, int], fmt: ElementFormat, scale_mode: str
) -> None:
    if x.numel() == 0:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    with _device_guard(x):
        _mx_quantize_kernel[_grid(*x.shape)](
            x,
            out,
            scale,
            x.stride(0),
            x.shape[0],
            x.shape[1],
            **_constexprs(fmt, block_shape),
            EMAX=fmt.emax,
            RCEIL=scale_mode == "rceil",
            FAKE=scale is None,
            num_warps=NUM_WARPS,
        )


def launch_quantize(
    x: Tensor, block_shape: tuple[int, int], elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    """Codes in ``elem_dtype`` (M, K) and E8M0 scales, one per block."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(block_grid(x.shape[0], x.shape[1], block_shape), dtype=torch.uint8, device=x.device)
    _launch(x, codes, scale, block_shape, element_format(elem_dtype), scale_mode)
    return codes.view(elem_dtype), scale.view(torch.float8_e8m0fnu)


def launch_fake_quantize(x: Tensor, block_shape: tuple[int, int], elem_dtype: torch.dtype, scale_mode: str) -> Tensor:
    """Quantised and dequantised values in the dtype of x, contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, out, None, block_shape, element_format(elem_dtype), scale_mode)
    return out


def launch_dequantize(qdata: Tensor, scale: Tensor, block_shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Elements times scales in ``dtype``, contiguous."""
    out = torch.empty(qdata.shape, dtype=dtype, device=qdata.device)
    if out.numel() == 0:
        return out
    # Rows may lie apart, as in a matrix that holds elements and scales.
    qdata, scale = (each if each.stride(1) == 1 else each.contiguous() for each in (qdata, scale))
    with _device_guard(out):
        _mx_dequantize_kernel[_grid(*out.shape)](
            qdata.view(torch.uint8),
            scale.view(torch.uint8),
            out,
            qdata.stride(0),
            scale.stride(0),
            out.shape[0],
            out.shape[1],
            **_constexprs(element_format(qdata.dtype), block_shape),
            num_warps=NUM_WARPS,
        )
    return out
