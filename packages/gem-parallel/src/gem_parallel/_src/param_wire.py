"""Parameters of low precision on the wire: what FSDP2's all-gather carries instead of the dtype of compute.

FSDP2 asks a shard that has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` what to send and what to make of what
came. Those hooks usually sit on a tensor subclass that the parameter then is. Here they sit on FSDP's own view of the
padded shard: parameters, optimizer states and checkpoints stay plain DTensors, and nothing that replaces a parameter's
data can lose the hooks without a word.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

__all__ = ["ParamWire", "check_parameters", "check_wire", "set_param_wire", "travels_encoded"]


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


def travels_encoded(wire: ParamWire, shape: tuple[int, ...], num_shards: int) -> bool:
    """Whether no border between shards cuts a block of rows."""
    held = -(-shape[0] // num_shards)
    return held >= shape[0] or held * math.prod(shape[1:-1]) % wire.rows_per_block == 0


class _WiredParam(FSDPParam):
    """FSDP's keeper of one parameter, with the hooks of a wire on the padded shard that is gathered."""

    wire: ParamWire

    @property
    def _sharded_local_tensor(self) -> Tensor:
        shard: Any = self._sharded_param_data.view(self.padded_sharded_param_size)
        shard.fsdp_pre_all_gather = self._before
        shard.fsdp_post_all_gather = self._after
        return shard  # type: ignore[no-any-return]

    def _encoded(self) -> bool:
        num_shards = self.shard_mesh.size()
        return travels_encoded(self.wire, tuple(self._orig_size), num_shards)

    @torch.no_grad()
    def _before(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        columns = outer_size[-1]
        values = self._sharded_param_data.view(-1, columns).to(self.param_dtype or self.orig_dtype)
        if not self._encoded():
            return (values,), None
        rows = self.wire.encode(values)
        expected = (values.shape[0], self.wire.row_bytes(columns))
        if rows.dtype != torch.uint8 or tuple(rows.shape) != expected or not rows.is_contiguous():
            raise ValueError(
                f"fully_shard: `encode` of `plan.param_wire` must return contiguous uint8 of shape {expected} for "
                f"{tuple(values.shape)}, got {rows.dtype} {tuple(rows.shape)}; its row_bytes says so"
            )
        return (rows,), None

    @torch.no_grad()
    def _after(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (gathered,) = outputs
        columns = self._orig_size[-1]
        # The last shards are padded.
        rows = gathered[: math.prod(self._orig_size[:-1])]
        values = self.wire.decode(rows, columns, param_dtype) if self._encoded() else self.wire.round(rows)
        # FSDP would keep what came beside what it became.
        gathered.untyped_storage().resize_(0)
        if out is None:
            return values.view(self._orig_size), (values,)
        if out.is_inference():
            out.copy_(values.view(self._orig_size))
        else:
            # Autograd has saved this parameter in forward; its values are the same again.
            with torch.autograd._unsafe_preserve_version_counter(out):  # type: ignore[attr-defined]
                out.copy_(values.view(self._orig_size))
        return None


def set_param_wire(module: nn.Module, wire: ParamWire) -> int:
    """Let the parameters of a sharded module travel in a form of their own.

    Args:
        module: Its units are sharded by ``fully_shard`` and have not run yet.
        wire: The form.

    Returns:
        Number of parameters that it covers.
    """
    count = 0
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        group = unit._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            if parameter.sharded_param.is_floating_point() and wire.covers(tuple(parameter._orig_size)):
                parameter.__class__ = _WiredParam
                parameter.wire = wire  # type: ignore[attr-defined]
                parameter._init_extensions()
                count += 1
    return count
