"""Collectives of this package in fully_shard, through its own hooks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gem_parallel._src.collectives.base import Collectives, Waitable

__all__ = ["set_fully_shard_collectives"]


class _AllGather:
    """What ``FSDPModule.set_custom_all_gather`` takes."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._collectives.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = self._collectives.all_gather(output_tensor, input_tensor, group, async_op=async_op)
        if work is None or isinstance(work, dist.Work):
            return work
        # fully_shard waits for a torch Work only.
        work.wait()
        return None


class _ReduceScatter:
    """What ``FSDPModule.set_custom_reduce_scatter`` takes."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        async_op: bool = False,
    ) -> Waitable | None:
        return self._collectives.reduce_scatter(output_tensor, input_tensor, group, op=op)


def set_fully_shard_collectives(module: nn.Module, collectives: Collectives) -> int:
    """Let every FSDP unit in a module gather and reduce through an engine.

    Returns:
        Number of units.

    Raises:
        TypeError: ``module`` is no module, or ``collectives`` no engine.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"set_fully_shard_collectives: `module` must be an nn.Module, got {type(module).__name__}; pass the model"
        )
    if not isinstance(collectives, Collectives):
        raise TypeError(
            f"set_fully_shard_collectives: `collectives` must be an engine, got {type(collectives).__name__} "
            f"{collectives!r}; pass choose_collectives(group, name)"
        )
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.set_custom_all_gather(_AllGather(collectives))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_ReduceScatter(collectives))  # type: ignore[arg-type]
    return len(units)
