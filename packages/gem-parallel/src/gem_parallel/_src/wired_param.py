"""The hooks of a ``ParamWire`` inside FSDP2.

FSDP2 asks a shard that has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` what to send and what to make of what
came. Those hooks usually sit on a tensor subclass that the parameter then is. Here they sit on FSDP's own view of the
padded shard: parameters, optimizer states and checkpoints stay plain DTensors, and nothing that replaces a parameter's
data can lose the hooks without a word.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from gem_parallel._src.param_wire import ParamWire, travels_encoded

__all__ = ["wire_parameters"]


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
        for parameter in group.fsdp_params if group is not None else ():
            if parameter.sharded_param.is_floating_point() and wire.covers(tuple(parameter._orig_size)):
                parameter.__class__ = _WiredParam
                parameter.wire = wire  # type: ignore[attr-defined]
                parameter._init_extensions()
