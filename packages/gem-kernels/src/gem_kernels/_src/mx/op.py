"""Registrations of the MX casts: torch operations on every device, Triton kernels on CUDA, fakes, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_kernels._src.mx import vectorized
from gem_kernels._src.mx.formats import block_grid


@torch.library.custom_op("gem_kernels::mx_quantize", mutates_args=())
def mx_quantize_op(
    x_hp: Tensor, block_rows: int, block_cols: int, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    """Codes (M, K) in ``elem_dtype`` and scales in float8_e8m0fnu."""
    return vectorized.quantize(x_hp, (block_rows, block_cols), elem_dtype, scale_mode)


@mx_quantize_op.register_kernel("cuda")
def _quantize_cuda(
    x_hp: Tensor, block_rows: int, block_cols: int, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.mx.triton_casts import launch_quantize

    return launch_quantize(x_hp, (block_rows, block_cols), elem_dtype, scale_mode)


@mx_quantize_op.register_fake
def _quantize_fake(
    x_hp: Tensor, block_rows: int, block_cols: int, elem_dtype: torch.dtype, scale_mode: str
) -> tuple[Tensor, Tensor]:
    grid = block_grid(x_hp.shape[0], x_hp.shape[1], (block_rows, block_cols))
    return x_hp.new_empty(x_hp.shape, dtype=elem_dtype), x_hp.new_empty(grid, dtype=torch.float8_e8m0fnu)


@torch.library.custom_op("gem_kernels::mx_dequantize", mutates_args=())
def mx_dequantize_op(qdata: Tensor, scale: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype) -> Tensor:
    """Values (M, K) in ``dtype``."""
    return vectorized.dequantize(qdata, scale, (block_rows, block_cols), dtype)


@mx_dequantize_op.register_kernel("cuda")
def _dequantize_cuda(qdata: Tensor, scale: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype) -> Tensor:
    from gem_kernels._src.mx.triton_casts import launch_dequantize

    return launch_dequantize(qdata, scale, (block_rows, block_cols), dtype)


@mx_dequantize_op.register_fake
def _dequantize_fake(qdata: Tensor, scale: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype) -> Tensor:
    return qdata.new_empty(qdata.shape, dtype=dtype)


@torch.library.custom_op("gem_kernels::mx_fake_quantize", mutates_args=())
def mx_fake_quantize_op(
    x_hp: Tensor, block_rows: int, block_cols: int, elem_dtype: torch.dtype, scale_mode: str
) -> Tensor:
    """Quantised and dequantised values (M, K) in the dtype of ``x_hp``."""
    return vectorized.fake_quantize(x_hp, (block_rows, block_cols), elem_dtype, scale_mode)


@mx_fake_quantize_op.register_kernel("cuda")
def _fake_quantize_cuda(
    x_hp: Tensor, block_rows: int, block_cols: int, elem_dtype: torch.dtype, scale_mode: str
) -> Tensor:
    from gem_kernels._src.mx.triton_casts import launch_fake_quantize

    return launch_fake_quantize(x_hp, (block_rows, block_cols), elem_dtype, scale_mode)


@mx_fake_quantize_op.register_fake
def _fake_quantize_fake(x_hp: Tensor, *_: Any) -> Tensor:
    return x_hp.new_empty(x_hp.shape)


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, None, None, None, None


mx_fake_quantize_op.register_autograd(_straight_through)
