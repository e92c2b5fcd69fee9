"""The hooks of a ``ParamWire`` inside FSDP2.

FSDP2 asks a shard that has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` what to send and what to make of what
came. Those hooks usually sit on a tensor subclass that the parameter then is. Here they sit on FSDP's own view of the
padded shard: parameters, optimizer states and checkpoints stay plain DTensors, and nothing that replaces a parameter's
data can lose the hooks without a word.

FSDP2 asks each parameter by itself, and a cast of a small matrix is the host's time and not the device's. So parameters
of a unit that have equally long rows are cast together: the first that is asked does it for those behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from gem_parallel._src.param_wire import ParamWire, travels_encoded

__all__ = ["wire_parameters"]

MAX_TOGETHER = 2**25
"""Elements of whole parameters that are cast together, beyond a first one: what they take in memory for a moment."""


class _Together:
    """Parameters of a unit whose rows are encoded, and decoded, in one call.

    Args:
        members: Of one number of columns and dtype, in FSDP's order; borders between them cut no block of rows.
    """

    def __init__(self, members: Sequence[_WiredParam]) -> None:
        self._members = list(members)
        self._sent: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def encode(self, member: _WiredParam) -> Tensor:
        """A member's shard as it travels."""
        if member is self._members[0]:
            shards = [each.shard() for each in self._members]
            rows = member.encode(torch.cat(shards).to(member.param_dtype or member.orig_dtype))
            parts = rows.split([each.shape[0] for each in shards])
            self._sent = {id(each): part for each, part in zip(self._members, parts, strict=True)}
        return self._sent.pop(id(member))

    def decode(self, member: _WiredParam, dtype: torch.dtype) -> Tensor:
        """A member's values, of what came."""
        if member is self._members[0]:
            rows = [each.received() for each in self._members]
            columns = member.num_columns
            values = member.wire.decode(torch.cat(rows), columns, dtype).split([each.shape[0] for each in rows])
            self._values = {id(each): part for each, part in zip(self._members, values, strict=True)}
        return self._values.pop(id(member))


class _WiredParam(FSDPParam):
    """FSDP's keeper of one parameter, with the hooks of a wire on the padded shard that is gathered."""

    wire: ParamWire
    together: _Together | None = None

    @property
    def num_columns(self) -> int:
        return int(self._orig_size[-1])

    @property
    def _sharded_local_tensor(self) -> Tensor:
        shard: Any = self._sharded_param_data.view(self.padded_sharded_param_size)
        shard.fsdp_pre_all_gather = self._before
        shard.fsdp_post_all_gather = self._after
        return shard  # type: ignore[no-any-return]

    def encoded(self) -> bool:
        """Whether it travels in the wire's form."""
        return travels_encoded(self.wire, tuple(self._orig_size), self.shard_mesh.size())

    def shard(self) -> Tensor:
        """The padded shard's rows."""
        return self._sharded_param_data.view(-1, self.num_columns)

    def received(self) -> Tensor:
        """The rows that came, without the padding of the last shards."""
        (gathered,) = self.all_gather_outputs
        return gathered.view(-1, self.wire.row_bytes(self.num_columns))[: math.prod(self._orig_size[:-1])]

    def encode(self, values: Tensor) -> Tensor:
        """Rows as they travel.

        Raises:
            ValueError: the wire gives other rows than it says.
        """
        rows = self.wire.encode(values)
        expected = (values.shape[0], self.wire.row_bytes(self.num_columns))
        if rows.dtype != torch.uint8 or tuple(rows.shape) != expected or not rows.is_contiguous():
            raise ValueError(
                f"fully_shard: `encode` of `plan.param_wire` must return contiguous uint8 of shape {expected} for "
                f"{tuple(values.shape)}, got {rows.dtype} {tuple(rows.shape)}; its row_bytes says so"
            )
        return rows

    @torch.no_grad()
    def _before(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        if self.together is not None:
            return (self.together.encode(self),), None
        values = self.shard().to(self.param_dtype or self.orig_dtype)
        return (self.encode(values) if self.encoded() else values,), None

    @torch.no_grad()
    def _after(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (gathered,) = outputs
        if self.together is not None:
            values = self.together.decode(self, param_dtype)
            # What FSDP keeps has memory of its own.
            values = values.clone() if out is None else values
        else:
            # The last shards are padded.
            rows = gathered[: math.prod(self._orig_size[:-1])]
            values = self.wire.decode(rows, self.num_columns, param_dtype) if self.encoded() else self.wire.round(rows)
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


def _castable(parameter: _WiredParam) -> bool:
    """Whether its shards and the whole are whole blocks of rows."""
    rows = math.prod(parameter._orig_size[:-1]), math.prod(parameter.padded_sharded_param_size[:-1])
    return parameter.encoded() and all(number % parameter.wire.rows_per_block == 0 for number in rows)


def _cast_together(parameters: Sequence[_WiredParam]) -> None:
    """Set ``together`` of those parameters of a unit that can be."""
    alike: dict[tuple[int, torch.dtype], list[list[_WiredParam]]] = {}
    for each in filter(_castable, parameters):
        batches = alike.setdefault((each.num_columns, each.sharded_param.dtype), [[]])
        if batches[-1] and sum(other._orig_size.numel() for other in [*batches[-1], each]) > MAX_TOGETHER:
            batches.append([])
        batches[-1].append(each)
    for members in (members for batches in alike.values() for members in batches if len(members) > 1):
        together = _Together(members)
        for each in members:
            each.together = together


def wire_parameters(module: nn.Module, wire: ParamWire) -> None:
    """Let the parameters of a sharded module travel in a form of their own.

    Args:
        module: Its units are sharded by ``fully_shard`` and have not run yet.
        wire: The form.
    """
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        group = unit._get_fsdp_state()._fsdp_param_group
        wired: list[_WiredParam] = []
        for parameter in group.fsdp_params if group is not None else ():
            if parameter.sharded_param.is_floating_point() and wire.covers(tuple(parameter._orig_size)):
                parameter.__class__ = _WiredParam
                assert isinstance(parameter, _WiredParam)
                parameter.wire = wire
                parameter._init_extensions()
                wired.append(parameter)
        _cast_together(wired)
