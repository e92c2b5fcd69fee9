"""Element formats, block shapes and the argument checks of the MX casts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_kernels._src.validate import DtypeError, check_tensor

BLOCK_SHAPES = ((1, 32), (32, 1), (32, 32))
SCALE_MODES = ("rceil", "floor")
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE_NAN = 255
"""E8M0 byte of NaN."""
ELEMENT_NAN = 0x7F
"""Code written for every element of a NaN block, in both element formats."""
FLOAT32_INF = 0x7F800000
"""Bits of float32 infinity; larger magnitudes are NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementFormat:
    """An FP8 element format; its largest finite value is 1.75 * 2**emax."""

    dtype: torch.dtype
    mantissa_bits: int
    bias: int
    """The smallest normal value is 2 ** (1 - bias)."""
    emax: int
    """Exponent of the largest finite value."""
    max_code: int
    """Bits of the largest finite value."""

    @property
    def max_value(self) -> float:
        """Largest finite value."""
        return 1.75 * 2.0**self.emax

    @property
    def min_normal(self) -> float:
        """Smallest normal value."""
        return 2.0 ** (1 - self.bias)


E4M3 = ElementFormat(dtype=torch.float8_e4m3fn, mantissa_bits=3, bias=7, emax=8, max_code=0x7E)
E5M2 = ElementFormat(dtype=torch.float8_e5m2, mantissa_bits=2, bias=15, emax=15, max_code=0x7B)
_FORMATS = {fmt.dtype: fmt for fmt in (E4M3, E5M2)}


def element_format(dtype: torch.dtype) -> ElementFormat:
    """The format of a dtype that ``check_element`` accepted."""
    return _FORMATS[dtype]


def block_grid(rows: int, cols: int, block_shape: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks along each dim, the partial ones at the edges included."""
    block_rows, block_cols = block_shape
    return (rows + block_rows - 1) // block_rows, (cols + block_cols - 1) // block_cols


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """Raise unless ``x`` is a two-dimensional tensor."""
    check_tensor(op, name, x)
    if x.dim() != 2:
        raise ValueError(
            f"{op}: `{name}` must have shape (M, K), got {tuple(x.shape)}; reshape it so that the blocks lie where "
            "they are meant to."
        )


def check_input(op: str, x: Tensor) -> None:
    """Raise unless ``x`` is a matrix of a dtype that the casts read."""
    check_matrix(op, "x_hp", x)
    if x.dtype not in INPUT_DTYPES:
        raise DtypeError(
            f"{op}: `x_hp` must be float32, bfloat16 or float16, got {x.dtype}; cast it first, "
            "which is then a second rounding."
        )


def check_block_shape(op: str, block_shape: tuple[int, int]) -> tuple[int, int]:
    """Raise unless ``block_shape`` is one of ``BLOCK_SHAPES``; returns it as a tuple."""
    if not isinstance(block_shape, (tuple, list)):
        raise TypeError(
            f"{op}: `block_shape` must be a pair of ints, got {type(block_shape).__name__}; for example (1, 32)."
        )
    shape = tuple(block_shape)
    if shape not in BLOCK_SHAPES:
        raise ValueError(
            f"{op}: `block_shape` must be one of (1, 32), (32, 1) and (32, 32), got {shape}; choose one of them."
        )
    return BLOCK_SHAPES[BLOCK_SHAPES.index(shape)]


def check_element(op: str, elem_dtype: torch.dtype) -> None:
    """Raise unless ``elem_dtype`` is a supported element format."""
    if elem_dtype not in _FORMATS:
        raise ValueError(
            f"{op}: `elem_dtype` must be torch.float8_e4m3fn or torch.float8_e5m2, got {elem_dtype}; "
            "E4M3 is the usual choice for weights, activations and gradients."
        )


def check_scale_mode(op: str, scale_mode: str) -> None:
    """Raise unless ``scale_mode`` names a rounding of the scale."""
    if scale_mode not in SCALE_MODES:
        raise ValueError(f"{op}: `scale_mode` must be 'rceil' or 'floor', got {scale_mode!r}; choose one of them.")
