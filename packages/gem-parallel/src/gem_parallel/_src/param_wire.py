"""Parameters of low precision on the wire: what FSDP2's all-gather carries instead of the dtype of compute."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = ["ParamWire", "check_parameters", "check_wire", "comparable_wire", "travels_encoded"]


@runtime_checkable
class ParamWire(Protocol):
    """Form in which parameters travel, such as ``gem_precision.MXFP8Wire()``.

    A parameter is a matrix of its last dim's rows, ``(M, K)``. Sent is ``encode(master.to(compute dtype))``, computed
    with ``decode`` of it, on every number of ranks. The same object or an equal one on all ranks.
    """

    @property
    def name(self) -> str:
        """For reports."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of parameters, and of compute, that it takes."""

    @property
    def rows_per_block(self) -> int:
        """Rows that are encoded together.

        Where a border between shards would cut such a block, the parameter travels in the dtype of compute, and is
        rounded after the all-gather.
        """

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape travels in this form; others travel in the dtype of compute."""

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of a row of so many columns."""

    def encode(self, x: Tensor) -> Tensor:
        """(M, K) in the dtype of compute -> (M, row_bytes(K)) uint8."""

    def decode(self, rows: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
        """(M, row_bytes(K)) uint8 -> (M, K) in ``dtype``, in memory of its own."""

    def round(self, x: Tensor) -> Tensor:
        """(M, K) -> ``decode(encode(x))`` in the dtype of x, in memory of its own."""


_MEMBERS = ("name", "dtypes", "rows_per_block", "covers", "row_bytes", "encode", "decode", "round")


def check_wire(owner: str, wire: object) -> None:
    """Refuse what is no ``ParamWire``.

    Raises:
        TypeError: names what is missing.
    """
    if isinstance(wire, type):
        raise TypeError(
            f"{owner}: `param_wire` must be an object, got the class {wire.__name__}; pass {wire.__name__}()"
        )
    missing = [name for name in _MEMBERS if not hasattr(wire, name)]
    if missing:
        raise TypeError(
            f"{owner}: `param_wire` must have {', '.join(_MEMBERS)}, got {type(wire).__name__} without "
            f"{', '.join(missing)}; pass gem_precision.MXFP8Wire() or an object like it"
        )


def check_parameters(owner: str, module: nn.Module, wire: ParamWire, param_dtype: torch.dtype | None) -> None:
    """Refuse parameters that a wire covers and cannot take, and a wire that covers none.

    Raises:
        ValueError: names the parameter.
    """
    taken = ", ".join(str(dtype).removeprefix("torch.") for dtype in wire.dtypes)
    covered = [(name, each) for name, each in module.named_parameters() if _covered(wire, each)]
    if not covered:
        raise ValueError(
            f"{owner}: `plan.param_wire` ({wire.name}) must cover a parameter, got a module of "
            f"{sum(1 for _ in module.parameters())} that all travel as they are; leave it out"
        )
    for name, parameter in covered:
        for what, dtype in (("`module`'s parameters", parameter.dtype), ("`plan.param_dtype`", param_dtype)):
            if dtype is not None and dtype not in wire.dtypes:
                raise ValueError(
                    f"{owner}: {what} must be {taken} to travel as {wire.name}, got {dtype} for {name!r}; cast them, "
                    "or leave `plan.param_wire` out"
                )


def _covered(wire: ParamWire, parameter: Tensor) -> bool:
    return parameter.is_floating_point() and wire.covers(tuple(parameter.shape))


def comparable_wire(wire: ParamWire | None) -> object:
    """What has the same ``repr`` on every rank: the wire, or of one that has none of its own its type and name."""
    if wire is None or type(wire).__repr__ is not object.__repr__:
        return wire
    return type(wire).__qualname__, wire.name


def travels_encoded(wire: ParamWire, shape: tuple[int, ...], num_shards: int) -> bool:
    """Whether no border between shards cuts a block of rows."""
    held = -(-shape[0] // num_shards)
    return held >= shape[0] or held * math.prod(shape[1:-1]) % wire.rows_per_block == 0
