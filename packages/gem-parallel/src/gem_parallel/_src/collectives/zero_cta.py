"""NCCL collectives by copy engines: no thread block runs for an all-gather."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_parallel._src.collectives.base import DefaultCollectives, Waitable
from gem_parallel._src.collectives.memory import StreamWork, keep_multicast_off, use_backend

__all__ = ["ZeroCtaCollectives", "has_zero_cta_policy", "zero_cta_options"]


def zero_cta_options() -> Any:
    """Options for ``init_process_group(pg_options=...)`` or ``new_group`` under which NCCL uses copy engines if it can.

    The environment variable NCCL_CTA_POLICY=2 does it for all groups. NVLink multicast stays off (NCCL_NVLS_ENABLE=0)
    unless the environment says otherwise.

    Returns:
        ``ProcessGroupNCCL.Options``.
    """
    keep_multicast_off()
    # Not in torch's type stubs.
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    return options


def has_zero_cta_policy(group: dist.ProcessGroup) -> bool:
    """The group was made so, or the environment asks for it."""
    if os.environ.get("NCCL_CTA_POLICY") == "2":
        return True
    backend = group._get_backend(torch.device("cuda"))
    config = getattr(getattr(backend, "options", None), "config", None)
    nccl: Any = dist.ProcessGroupNCCL
    return bool(getattr(config, "cta_policy", None) == nccl.NCCL_CTA_POLICY_ZERO)


class ZeroCtaCollectives(DefaultCollectives):
    """All-gather from and to NCCL's symmetric memory, which copy engines serve; reduce-scatter as NCCL does it, since
    adding needs the SMs.
    """

    name = "nccl_zero_cta"
    sm_free = ("all_gather",)

    def __init__(self) -> None:
        self._memory = use_backend("NCCL")
        # Addresses stay the pool's, so one that was given out once is symmetric for good.
        self._symmetric: set[int] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ``Collectives``."""
        with torch.cuda.use_mem_pool(self._memory.get_mem_pool(device)):
            buffer = torch.empty(tuple(size), dtype=dtype, device=device)
        self._symmetric.add(buffer.data_ptr())
        return buffer

    def all_gather(
        self, output: Tensor, tensor: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
    ) -> Waitable | None:
        """See ``Collectives``."""
        if tensor.numel() == 0:
            return super().all_gather(output, tensor, group, async_op=async_op)
        if output.data_ptr() not in self._symmetric:
            # With async_op the copy is in the caller's stream already.
            staged = self.allocate(output.shape, dtype=output.dtype, device=output.device)
            self.all_gather(staged, tensor, group)
            output.copy_(staged)
            return StreamWork(torch.cuda.current_stream().record_event(), ()) if async_op else None
        mine = output.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        if mine.data_ptr() != tensor.data_ptr():
            mine.copy_(tensor.view(-1))
        self._memory.rendezvous(output, group.group_name)
        # On NCCL's own stream: copy engines do not serve the default stream.
        work = super().all_gather(output.view(-1), mine, group, async_op=True)
        if async_op:
            return work
        assert work is not None
        work.wait()
        return None
