"""Casts between high precision and the MX formats: FP8 elements in blocks of 32 that share a power-of-two scale.

For a block with largest magnitude ``amax``, element format with largest value ``max_elem = 1.75 * 2**emax``:

- ``rceil``: ``scale = 2 ** ceil(log2(amax / max_elem))``. No element saturates.
- ``floor``: ``scale = 2 ** (floor(log2(amax)) - emax)``, the minimum rule of the specification. A block whose amax lies
  above ``1.75 * 2**k`` saturates, by up to an eighth of amax.
- ``qdata = saturate(round_to_nearest_even(x_hp / scale))``; dequantised: ``qdata * scale``.

Both logarithms are taken exactly, on the bits of float32. ``floor(log2(amax)) - emax`` below -127 is taken as -127.

Corner cases, in both modes and all block shapes:

- All-zero block: scale byte 0 (2**-127) and zero elements. Zeros, and values that round to zero, keep their sign.
- Float32 subnormals are ordinary values; the smallest scale is 2**-127, the smallest element times it 2**-136 (E4M3).
- A block with a NaN or an Inf: scale byte 0xFF (NaN) and every element 0x7F (NaN). It dequantises to NaN, so that a
  broken value is seen and never turned into a large finite one.
- Ragged edges: blocks start at row 0 and column 0; the last ones may be smaller.

Sources: OCP Microscaling Formats (MX) v1.0; Mishra et al., Recipes for Pre-training LLMs with MXFP8
(arXiv:2506.08027), for rounding the scale up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.mx.formats import (
    INPUT_DTYPES,
    block_grid,
    check_block_shape,
    check_element,
    check_input,
    check_matrix,
    check_scale_mode,
)
from gem_kernels._src.mx.op import mx_dequantize_op, mx_fake_quantize_op, mx_quantize_op
from gem_kernels._src.validate import DtypeError, check_constant

__all__ = ["MXTensorPair", "mx_dequantize", "mx_fake_quantize", "mx_quantize"]


class MXTensorPair(NamedTuple):
    """A matrix in an MX format."""

    qdata: Tensor
    """(M, K), float8_e4m3fn or float8_e5m2."""
    scale: Tensor
    """(ceil(M / block rows), ceil(K / block columns)), float8_e8m0fnu."""


def mx_quantize(
    x_hp: Tensor,
    *,
    block_shape: tuple[int, int] = (1, 32),
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
) -> MXTensorPair:
    """Quantise a matrix; formulas and corner cases in :mod:`gem_kernels.mx`.

    Args:
        x_hp: (M, K) float32, bfloat16 or float16, any strides, any M and K.
        block_shape: (1, 32) along the columns, (32, 1) along the rows, or (32, 32), whose scales are the same for the
            matrix and its transpose. Blocks lie along the reduction dim of the matmul that reads them.
        elem_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale_mode: "rceil" or "floor".

    Returns:
        ``(qdata, scale)``, contiguous. Not differentiable; see ``mx_fake_quantize``.

    Raises:
        TypeError: if ``x_hp`` is no Tensor or of another dtype.
        ValueError: on another shape, block shape, element format or mode, or a tensor that requires a gradient.
    """
    op = "mx_quantize"
    check_input(op, x_hp)
    check_constant(op, "x_hp", x_hp)
    block_rows, block_cols = check_block_shape(op, block_shape)
    check_element(op, elem_dtype)
    check_scale_mode(op, scale_mode)
    return MXTensorPair(*mx_quantize_op(x_hp, block_rows, block_cols, elem_dtype, scale_mode))


def mx_dequantize(
    qdata: Tensor, scale: Tensor, *, block_shape: tuple[int, int] = (1, 32), dtype: torch.dtype = torch.float32
) -> Tensor:
    """Values of a quantised matrix.

    Args:
        qdata: (M, K), float8_e4m3fn or float8_e5m2.
        scale: float8_e8m0fnu, one entry per block, on the device of ``qdata``.
        block_shape: The one ``qdata`` was quantised with.
        dtype: float32, bfloat16 or float16. The product is formed in float32, where it is exact unless it overflows,
            and then cast.

    Returns:
        (M, K) in ``dtype``, contiguous.

    Raises:
        TypeError: if an argument is no Tensor, or ``dtype`` is another one.
        ValueError: on another shape, element format or block shape, or devices that differ.
    """
    op = "mx_dequantize"
    check_matrix(op, "qdata", qdata)
    check_matrix(op, "scale", scale)
    check_element(op, qdata.dtype)
    block_rows, block_cols = check_block_shape(op, block_shape)
    if scale.dtype != torch.float8_e8m0fnu:
        raise DtypeError(f"{op}: `scale` must be float8_e8m0fnu, got {scale.dtype}; view its bytes as that dtype.")
    grid = block_grid(qdata.shape[0], qdata.shape[1], (block_rows, block_cols))
    if tuple(scale.shape) != grid:
        raise ValueError(
            f"{op}: `scale` must have shape {grid} for `qdata` {tuple(qdata.shape)} in blocks of "
            f"{(block_rows, block_cols)}, got {tuple(scale.shape)}; pass what mx_quantize returned."
        )
    if scale.device != qdata.device:
        raise ValueError(
            f"{op}: `scale` must be on the device of `qdata`, {qdata.device}, got {scale.device}; move it there."
        )
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: `dtype` must be float32, bfloat16 or float16, got {dtype}; choose one of them.")
    return mx_dequantize_op(qdata, scale, block_rows, block_cols, dtype)


def mx_fake_quantize(
    x_hp: Tensor,
    *,
    block_shape: tuple[int, int] = (1, 32),
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
) -> Tensor:
    """``mx_dequantize(*mx_quantize(x_hp))`` in the dtype of ``x_hp``: the same bits, in one pass, without FP8 storage.

    For training in emulated low precision on hardware that cannot multiply MX formats.

    Args:
        x_hp: As in ``mx_quantize``.
        block_shape: As in ``mx_quantize``.
        elem_dtype: As in ``mx_quantize``.
        scale_mode: As in ``mx_quantize``.

    Returns:
        (M, K) in the dtype of ``x_hp``, contiguous. The gradient passes straight through.

    Raises:
        TypeError, ValueError: as ``mx_quantize``.
    """
    op = "mx_fake_quantize"
    check_input(op, x_hp)
    block_rows, block_cols = check_block_shape(op, block_shape)
    check_element(op, elem_dtype)
    check_scale_mode(op, scale_mode)
    return mx_fake_quantize_op(x_hp, block_rows, block_cols, elem_dtype, scale_mode)
