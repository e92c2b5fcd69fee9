"""Signal-to-quantisation-noise ratio, MX casts that go through the stored format, and rows that tell blocks apart."""

import math

import torch
from torch import Tensor

from gem_kernels.mx import mx_dequantize, mx_quantize
from gem_precision import MXFP8Recipe

MXFP8 = MXFP8Recipe()


def sqnr_db(actual: Tensor, exact: Tensor) -> float:
    """10 log10(signal / noise) in decibels; infinite when equal."""
    exact = exact.detach().double().cpu()
    noise = (actual.detach().double().cpu() - exact).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(exact.square().sum().item() / noise)


def stored(x: Tensor, block_shape: tuple[int, int], recipe: MXFP8Recipe = MXFP8) -> Tensor:
    """(M, K) through FP8 codes and scales, in float64."""
    pair = mx_quantize(x, block_shape=block_shape, elem_dtype=recipe.elem_dtype, scale_mode=recipe.scale_mode.value)
    return mx_dequantize(*pair, block_shape=block_shape).double()


def uneven(x: Tensor) -> Tensor:
    """(T, ...) with rows of sizes 1 to 2**-10, falling and rising: the scale of a block tells which rows are in it."""
    rows = torch.arange(x.shape[0], device=x.device)
    return x * torch.exp2(-((rows % 80) - 40).abs() / 4).to(x.dtype)[:, None, None]
