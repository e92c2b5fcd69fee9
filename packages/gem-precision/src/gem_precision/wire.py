"""What parameters become between ranks: MXFP8, for ``gem_parallel.ParallelPlan(param_wire=...)``.

Master weights, gradients and optimizer states stay as they are; only the all-gather of FSDP carries FP8. A matrix of M
rows and K columns, in the dtype of compute, travels as M rows of K elements and ceil(K / 32) scales, one byte each:

    sent = quantise(master.to(dtype of compute)), received = dequantise(sent) in the dtype of compute

Every row brings its own scales, so a border between shards may lie between any two rows. Blocks start at each row's
first column, and with square blocks at each 32nd row of the whole matrix.

Quantising the shard before the all-gather is what Meta's post on GEM training of 2026-08-03 describes; formats and
rounding are those of :mod:`gem_kernels.mx`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gem_kernels.mx import mx_dequantize, mx_fake_quantize, mx_quantize
from gem_precision.recipe import ScaleMode

__all__ = ["MXFP8Wire", "get_wire", "wire_names"]

_BLOCK = 32
_BLOCK_SHAPES = ((1, _BLOCK), (_BLOCK, _BLOCK))


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8Wire:
    """E4M3 elements in blocks of 32 with a power-of-two scale, for parameters of two or more dims.

    A parameter of more dims is a matrix of its last dim's rows. Vectors, such as biases and weights of norms, and small
    matrices travel as they are.
    """

    name: ClassVar[str] = "mxfp8"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    """Of parameters, and of compute, that it takes."""

    block_shape: tuple[int, int] = (1, 32)
    """(1, 32): along the columns, the reduction dim of x Wᵀ. (32, 32): the blocks of ``MXFP8Recipe``'s weights, which
    its layers then find quantised as they would themselves: the same bits as without this wire."""
    scale_mode: ScaleMode = ScaleMode.RCEIL
    """Rounding of the scales."""
    min_features: int = 32
    """Matrices with fewer rows or columns travel as they are; so does, with it, a prediction layer."""

    def __post_init__(self) -> None:
        if self.block_shape not in _BLOCK_SHAPES:
            raise ValueError(
                f"MXFP8Wire: `block_shape` must be (1, 32) or (32, 32), got {self.block_shape!r}; other blocks reach "
                "over rows that lie on other ranks."
            )
        modes = [mode.value for mode in ScaleMode]
        if self.scale_mode not in modes:
            raise ValueError(
                f"MXFP8Wire: `scale_mode` must be one of {modes}, got {self.scale_mode!r}; choose one of them."
            )
        object.__setattr__(self, "scale_mode", ScaleMode(self.scale_mode))
        if isinstance(self.min_features, bool) or not isinstance(self.min_features, int):
            raise TypeError(
                f"MXFP8Wire: `min_features` must be an int, got {type(self.min_features).__name__}; pass int(x)."
            )
        if self.min_features < 1:
            raise ValueError(
                f"MXFP8Wire: `min_features` must be >= 1, got {self.min_features}; 1 takes matrices of any size."
            )

    @property
    def rows_per_block(self) -> int:
        """Rows that share scales."""
        return self.block_shape[0]

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape travels in MXFP8."""
        return len(shape) > 1 and min(math.prod(shape[:-1]), shape[-1]) >= self.min_features

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of one row on the wire: its elements and its scales."""
        return num_columns + -(-num_columns // _BLOCK)

    def encode(self, x: Tensor) -> Tensor:
        """Rows as they travel.

        Args:
            x: (M, K) in the dtype of compute; with square blocks row 0 begins a block.

        Returns:
            (M, row_bytes(K)) uint8, contiguous: K elements, then ceil(K / 32) scales.

        Raises:
            TypeError, ValueError: as ``mx_quantize``.
        """
        pair = mx_quantize(x, block_shape=self.block_shape, scale_mode=self.scale_mode.value)
        (num_rows, num_columns), scale = x.shape, pair.scale.view(torch.uint8)
        if self.rows_per_block > 1:
            # Each row brings the scales of its blocks: a row's bytes then mean the same in any shard.
            scale = scale.repeat_interleave(self.rows_per_block, dim=0)[:num_rows]
        rows = torch.empty((num_rows, self.row_bytes(num_columns)), dtype=torch.uint8, device=x.device)
        rows[:, :num_columns] = pair.qdata.view(torch.uint8)
        rows[:, num_columns:] = scale
        return rows

    def decode(self, rows: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """Values of rows.

        Args:
            rows: (M, row_bytes(K)) uint8.
            num_columns: K.
            dtype: That of compute.

        Returns:
            (M, K), contiguous.

        Raises:
            TypeError, ValueError: as ``mx_dequantize``.
        """
        qdata = rows[:, :num_columns].view(torch.float8_e4m3fn)
        return mx_dequantize(qdata, rows[:, num_columns:].view(torch.float8_e8m0fnu), dtype=dtype)

    def round(self, x: Tensor) -> Tensor:
        """(M, K): ``decode(encode(x))`` in the dtype of x, for a matrix that had to travel as it was."""
        return mx_fake_quantize(x, block_shape=self.block_shape, scale_mode=self.scale_mode.value)


_WIRES = {"mxfp8": MXFP8Wire()}


def wire_names() -> tuple[str, ...]:
    """The names that ``get_wire`` knows."""
    return tuple(_WIRES)


def get_wire(name: str) -> MXFP8Wire:
    """The wire format of a name.

    Args:
        name: "mxfp8", with its defaults.

    Raises:
        ValueError: on another name.
    """
    if name not in _WIRES:
        raise ValueError(
            f"get_wire: `name` must be one of {', '.join(_WIRES)}, got {name!r}; parameters travel in the dtype of "
            "compute without one."
        )
    return _WIRES[name]
