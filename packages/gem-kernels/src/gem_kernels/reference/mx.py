"""MX casts as a plain loop over blocks and elements, in Python numbers: the oracle of ``gem_kernels.mx``.

Nothing is shared with the implementations: the scale comes from exact fractions, and each element is looked up among
all values of its format.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from itertools import product

import torch
from torch import Tensor

_EMAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_MAX = {torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344}


def element_values(elem_dtype: torch.dtype) -> list[Fraction]:
    """The non-negative finite values of an element format; the index is the code."""
    mantissa_bits = _MANTISSA_BITS[elem_dtype]
    bias = 2 ** (6 - mantissa_bits) - 1
    values = []
    for code in range(128):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = Fraction(mantissa, 2**mantissa_bits) + (exponent > 0)
        values.append(fraction * Fraction(2) ** (max(exponent, 1) - bias))
    return [value for value in values if value <= _MAX[elem_dtype]]


def scale_exponent(amax: Fraction, elem_dtype: torch.dtype, scale_mode: str) -> int:
    """Exponent of the scale for a finite block maximum, within E8M0's range."""
    if amax == 0:
        return -127
    # floor(log2(x)) of a fraction, exactly.
    floor_log2 = amax.numerator.bit_length() - amax.denominator.bit_length()
    floor_log2 -= amax < Fraction(2) ** floor_log2
    if scale_mode == "floor":
        return max(floor_log2 - _EMAX[elem_dtype], -127)
    exponent = floor_log2 - _EMAX[elem_dtype]
    while amax > _MAX[elem_dtype] * Fraction(2) ** exponent:
        exponent += 1
    return max(exponent, -127)


def _nearest_code(magnitude: Fraction, values: list[Fraction]) -> int:
    """Code of the value nearest to ``magnitude``; of two equally near ones the even code; saturating."""
    above = bisect.bisect_left(values, magnitude)
    neighbours = [code for code in (above - 1, above) if 0 <= code < len(values)]
    return min(neighbours, key=lambda code: (abs(values[code] - magnitude), code % 2))


def mx_quantize(
    x_hp: Tensor,
    *,
    block_shape: tuple[int, int] = (1, 32),
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
) -> tuple[Tensor, Tensor]:
    """Codes in ``elem_dtype`` (M, K) and E8M0 scales; arguments as in ``gem_kernels.mx``."""
    values = element_values(elem_dtype)
    num_rows, num_cols = x_hp.shape
    block_rows, block_cols = block_shape
    grid = math.ceil(num_rows / block_rows), math.ceil(num_cols / block_cols)
    x = x_hp.double().tolist()
    codes = [[0] * num_cols for _ in range(num_rows)]
    scales = [[0] * grid[1] for _ in range(grid[0])]
    for i, j in product(range(grid[0]), range(grid[1])):
        rows = range(i * block_rows, min((i + 1) * block_rows, num_rows))
        cols = range(j * block_cols, min((j + 1) * block_cols, num_cols))
        block = [(r, c) for r in rows for c in cols]
        if not all(math.isfinite(x[r][c]) for r, c in block):
            scales[i][j] = 255
            for r, c in block:
                codes[r][c] = 0x7F
            continue
        exponent = scale_exponent(max(Fraction(abs(x[r][c])) for r, c in block), elem_dtype, scale_mode)
        scales[i][j] = exponent + 127
        for r, c in block:
            code = _nearest_code(Fraction(abs(x[r][c])) / Fraction(2) ** exponent, values)
            codes[r][c] = code | (0x80 if math.copysign(1.0, x[r][c]) < 0 else 0)
    qdata = torch.tensor(codes, dtype=torch.uint8).view(num_rows, num_cols).view(elem_dtype)
    scale = torch.tensor(scales, dtype=torch.uint8).view(grid).view(torch.float8_e8m0fnu)
    return qdata, scale


def mx_dequantize(
    qdata: Tensor, scale: Tensor, *, block_shape: tuple[int, int] = (1, 32), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Elements times scales; arguments as in ``gem_kernels.mx``."""
    values = element_values(qdata.dtype)
    codes = qdata.view(torch.uint8).tolist()
    scales = scale.view(torch.uint8).tolist()
    out = torch.zeros(qdata.shape, dtype=torch.float64)
    for r, c in product(range(qdata.shape[0]), range(qdata.shape[1])):
        code, scale_byte = codes[r][c], scales[r // block_shape[0]][c // block_shape[1]]
        sign = -1.0 if code & 0x80 else 1.0
        magnitude = code & 0x7F
        if scale_byte == 255:
            out[r, c] = math.nan
        elif magnitude < len(values):
            out[r, c] = sign * math.ldexp(float(values[magnitude]), scale_byte - 127)
        else:
            is_inf = qdata.dtype == torch.float8_e5m2 and magnitude == 0x7C
            out[r, c] = sign * (math.inf if is_inf else math.nan)
    return out.to(torch.float32).to(dtype)
