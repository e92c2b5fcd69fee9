"""MX casts in plain torch operations, for any device; the fused quantise-dequantise is what CPU training runs on.

A matrix is cut into tiles that hold only whole blocks: the bulk, and along ragged edges tiles whose blocks are smaller.
Tiles are also small enough for the intermediate results to stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.mx.formats import ELEMENT_NAN, FLOAT32_INF, SCALE_NAN, ElementFormat, block_grid, element_format

_TILE_ELEMENTS = 1 << 17
# Tensors, because a Python number would be cast to int32 anew in every operation; on the CPU, where every device takes
# scalars from.
_ABS_MASK = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device="cpu")
_EXPONENT_MASK = torch.tensor(0x7F800000, dtype=torch.int32, device="cpu")
_SIGN_BIT = torch.tensor(-(1 << 31), dtype=torch.int32, device="cpu")
# Adding it carries into the exponent exactly when the mantissa is above 1.75, the mantissa of the largest element.
_RCEIL_CARRY = 0x1FFFFF
# Block maxima between 2**-80 and 2**100, or 0, take the fused form. Above, its rounding constant could overflow, and
# NaN and Inf lie there too; far below, elements are float32 subnormals, whose exponent field does not tell their size.
_FUSED_MIN = (127 - 80) << 23
_FUSED_MAX = (127 + 100) << 23


class _Tile(NamedTuple):
    rows: slice
    cols: slice
    block_rows: int
    block_cols: int
    grid: tuple[slice, slice]
    """Where the scales of the tile stand."""


def _edges(size: int, block: int) -> list[tuple[int, int, int]]:
    """(start, stop, block size) of the whole blocks and of the partial one."""
    bulk = size // block * block
    parts = [(0, bulk, block), (bulk, size, size - bulk)]
    return [part for part in parts if part[1] > part[0]]


def _tiles(x: Tensor, block_shape: tuple[int, int]) -> Iterator[_Tile]:
    for col, col_stop, block_cols in _edges(x.shape[1], block_shape[1]):
        grid_cols = slice(col // block_shape[1], (col_stop + block_shape[1] - 1) // block_shape[1])
        for row, row_stop, block_rows in _edges(x.shape[0], block_shape[0]):
            step = max(1, _TILE_ELEMENTS // ((col_stop - col) * block_rows)) * block_rows
            for start in range(row, row_stop, step):
                stop = min(start + step, row_stop)
                grid_rows = slice(start // block_shape[0], (stop + block_shape[0] - 1) // block_shape[0])
                yield _Tile(
                    slice(start, stop), slice(col, col_stop), block_rows, block_cols, grid=(grid_rows, grid_cols)
                )


def _fold(x: Tensor, tile: _Tile) -> Tensor:
    """The tile's elements as a view that a tensor from ``_spread`` broadcasts against."""
    if tile.block_rows == 1:
        return x.unflatten(1, (-1, tile.block_cols))
    return x.unflatten(0, (-1, tile.block_rows))


def _spread(blocks: Tensor, tile: _Tile) -> Tensor:
    """Per-block values (rows, cols of blocks) shaped for ``_fold``: (R, C, 1) or (R, 1, columns)."""
    if tile.block_rows == 1:
        return blocks[..., None]
    if tile.block_cols > 1:
        blocks = blocks.repeat_interleave(tile.block_cols, dim=1)
    return blocks[:, None]


def _block_amax(magnitude: Tensor, tile: _Tile) -> Tensor:
    """Largest magnitude of each block from a folded tile of float32 bits; integers order NaN above everything."""
    if tile.block_rows == 1:
        return magnitude.amax(2)
    columns = magnitude.amax(1)
    return columns if tile.block_cols == 1 else columns.unflatten(1, (-1, tile.block_cols)).amax(2)


def _scale_bytes(amax_bits: Tensor, fmt: ElementFormat, scale_mode: str) -> Tensor:
    """E8M0 bytes as int32 from the bits of the block maxima."""
    rounded = amax_bits + _RCEIL_CARRY if scale_mode == "rceil" else amax_bits
    scale = ((rounded >> 23) - fmt.emax).clamp_(min=0)
    return scale.masked_fill_(amax_bits >= FLOAT32_INF, SCALE_NAN)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 ** (exponent - 127) in float32 from int32 exponents >= -22; below 0 the result is subnormal."""
    normal = exponent << 23
    subnormal = torch.ones_like(exponent) << (22 + exponent.clamp(max=0))
    return torch.where(exponent > 0, normal, subnormal).view(torch.float32)


def _quantize_tile(values: Tensor, tile: _Tile, fmt: ElementFormat, scale_mode: str) -> tuple[Tensor, Tensor]:
    """Codes as bytes, folded like the float32 ``values``, and int32 scale bytes per block."""
    scale_byte = _scale_bytes(_block_amax(values.view(torch.int32) & _ABS_MASK, tile), fmt, scale_mode)
    is_nan = scale_byte == SCALE_NAN
    inverse = _power_of_two(254 - scale_byte.masked_fill(is_nan, 127))
    # Exact, except where the product is so far below half the smallest element that it becomes zero either way.
    scaled = (values * _spread(inverse, tile)).clamp_(-fmt.max_value, fmt.max_value)
    codes = scaled.to(fmt.dtype).view(torch.uint8).masked_fill_(_spread(is_nan, tile), ELEMENT_NAN)
    return codes, scale_byte


def _dequantize_tile(elements: Tensor, scale_byte: Tensor, tile: _Tile) -> Tensor:
    """Float32 values from folded FP8 ``elements``."""
    factor = _power_of_two(scale_byte).masked_fill_(scale_byte == SCALE_NAN, float("nan"))
    return elements.to(torch.float32) * _spread(factor, tile)


def _fake_quantize_tile(values: Tensor, out: Tensor, tile: _Tile, fmt: ElementFormat, scale_mode: str) -> None:
    """Write dequantised values to ``out``, folded like the contiguous float32 ``values``."""
    bits = values.view(torch.int32)
    power = bits & _ABS_MASK
    amax_bits = _block_amax(power, tile)
    lowest, highest = torch.aminmax(amax_bits.masked_fill(amax_bits == 0, _FUSED_MIN))
    if int(lowest) < _FUSED_MIN or int(highest) >= _FUSED_MAX:
        codes, scale_byte = _quantize_tile(values, tile, fmt, scale_mode)
        out.copy_(_dequantize_tile(codes.view(fmt.dtype), scale_byte, tile))
        return
    # The smallest normal element times the scale, in floats, where the smallest of them are subnormal.
    rounded = amax_bits + _RCEIL_CARRY if scale_mode == "rceil" else amax_bits
    min_normal = (rounded & _EXPONENT_MASK).view(torch.float32) * (fmt.min_normal * 2.0**-fmt.emax)
    min_normal.clamp_(min=fmt.min_normal * 2.0**-127)
    # Positive floats order like their bits, so each value's power of two and its lower bound are found in integers.
    torch.maximum(power.bitwise_and_(_EXPONENT_MASK), _spread(min_normal.view(torch.int32), tile), out=power)
    quantum = power.view(torch.float32)
    shift = 1.5 * 2.0 ** (23 - fmt.mantissa_bits)
    result = out if out.dtype == torch.float32 else torch.empty_like(values)
    torch.add(values, quantum, alpha=shift, out=result).sub_(quantum, alpha=shift)
    if scale_mode == "floor":
        limit = _spread(min_normal * (fmt.max_value / fmt.min_normal), tile)
        torch.minimum(result, limit, out=result)
        torch.maximum(result, -limit, out=result)
    # A value that rounds to zero keeps its sign.
    result.view(torch.int32).bitwise_or_(torch.bitwise_and(bits, _SIGN_BIT, out=power))
    if result is not out:
        out.copy_(result)


def quantize(
    x: Tensor, block_shape: tuple[int, int], elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    """Codes in ``elem_dtype`` (M, K) and E8M0 scales, one per block."""
    fmt = element_format(elem_dtype)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(block_grid(x.shape[0], x.shape[1], block_shape), dtype=torch.uint8, device=x.device)
    for tile in _tiles(x, block_shape):
        values = _fold(x[tile.rows, tile.cols].to(torch.float32), tile)
        tile_codes, scale_byte = _quantize_tile(values, tile, fmt, scale_mode)
        _fold(codes[tile.rows, tile.cols], tile).copy_(tile_codes)
        scale[tile.grid].copy_(scale_byte)
    return codes.view(elem_dtype), scale.view(torch.float8_e8m0fnu)


def dequantize(qdata: Tensor, scale: Tensor, block_shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Elements times scales, multiplied in float32."""
    out = torch.empty(qdata.shape, dtype=dtype, device=qdata.device)
    scale_bytes = scale.view(torch.uint8)
    for tile in _tiles(qdata, block_shape):
        elements = _fold(qdata[tile.rows, tile.cols], tile)
        values = _dequantize_tile(elements, scale_bytes[tile.grid].to(torch.int32), tile)
        _fold(out[tile.rows, tile.cols], tile).copy_(values)
    return out


def fake_quantize(x: Tensor, block_shape: tuple[int, int], elem_dtype: torch.dtype, scale_mode: str) -> Tensor:
    """``dequantize(*quantize(x))`` in the dtype of x, the same bits, without FP8 codes in between.

    Adding and taking away 1.5 * 2**(23 - mantissa bits) times a value's own power of two rounds it to that many
    mantissa bits, ties to even; a lower bound on the power of two gives the element format's subnormals.
    """
    fmt = element_format(elem_dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tile in _tiles(x, block_shape):
        # Contiguous, so that the values and their bits have one layout.
        values = _fold(x[tile.rows, tile.cols].to(torch.float32).contiguous(), tile)
        _fake_quantize_tile(values, _fold(out[tile.rows, tile.cols], tile), tile, fmt, scale_mode)
    return out
