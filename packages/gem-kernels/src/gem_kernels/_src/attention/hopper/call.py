"""Calls of Hopper's kernels that cost the host little: these kernels end in tenths of a millisecond.

Triton looks at every argument of every call to find the variant that was compiled for its kind, and a tile descriptor
checks itself. Here the caller names the variant, and ``serves`` has done the checks.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

SEQUENCE_END = 2**30
"""Coordinate, in a ``sequence_descriptor``, at which a sequence ends."""
_WRAPS = 2**34
_EXTENT = 2**31 - 2**16
_compiled: dict[Hashable, Any] = {}


def call(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: Mapping[str, Any], device: torch.device
) -> None:
    """Launch ``kernel`` on ``programs`` programs; the current device is ``device``.

    Args:
        kernel: A jit function whose other arguments are ``constants``, in this order, after ``arguments``.
        programs: Size of the grid.
        arguments: Tile descriptors, tensors, numbers and None. Equal constants and equal dtypes, tile shapes and
            alignments of the arguments must mean the same variant: no number may be one that Triton specialises on.
        constants: Compile-time values, hashable.
        device: A CUDA device.
    """
    key = (kernel, device.index, tuple(map(_kind, arguments)), tuple(constants.values()))
    compiled = _compiled.get(key)
    if compiled is None:
        assert tuple(kernel.arg_names[len(arguments) :]) == tuple(constants)
        # None in the interpreter, which compiles nothing.
        _compiled[key] = kernel[(programs,)](*arguments, **constants)
    else:
        compiled[(programs, 1, 1)](*arguments, *constants.values())


def _kind(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int | float):
        return type(argument).__name__
    return None if argument is None else (argument.base.dtype, *argument.block_shape)


def descriptor(x: Tensor, rows: int) -> Any:
    """What the copy engine needs to know of x (T, H, D), read as a matrix (T, H * D) in tiles (rows, D)."""
    total, num_heads, dim = x.shape
    made = object.__new__(_descriptor_type())
    made.base = x
    made.shape = [total, num_heads * dim]
    made.strides = [x.stride(0), 1]
    made.block_shape = [rows, dim]
    made.layout = _shared_layout((rows, dim), x.dtype)
    made.padding = "zero"
    return made


def sequence_descriptor(x: Tensor, rows: int) -> Any:
    """As ``descriptor``, of tiles that end with a sequence: rows past its end are read as zeros and not written.

    The copy engine knows one size of a dimension, and sequences have many. So the row is coordinate 2, which ends at
    E = ``SEQUENCE_END``, and row r of a sequence of n rows from ``first`` on is (E, first + n, E - n + r). The strides
    are W - s, s and s for rows of s elements and W = 2**34: E W elements of two bytes are 2**65 bytes, nothing in an
    address of 64 bits, so that this is the place of row ``first`` + r. Source: ``triton.tools.ragged_tma``.
    """
    num_heads, dim = x.shape[1:]
    made = object.__new__(_descriptor_type())
    made.base = x
    stride = x.stride(0)
    made.shape = [_EXTENT, _EXTENT, SEQUENCE_END, num_heads * dim]
    made.strides = [_WRAPS - stride, stride, stride, 1]
    made.block_shape = [1, 1, rows, dim]
    made.layout = _shared_layout((1, 1, rows, dim), x.dtype)
    made.padding = "zero"
    return made


def sums_descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    """As ``descriptor``, of a contiguous float32 matrix in tiles (rows, columns)."""
    layout = _shared_layout((rows, columns), matrix.dtype)
    return _descriptor_type()(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


@functools.cache
def _descriptor_type() -> Any:
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor


@functools.cache
def _shared_layout(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(shape), element)
