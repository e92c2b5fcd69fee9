"""Copies between GPUs of one host through symmetric memory, by copy engines, on one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gem_parallel._src.collectives.base import Collectives, Waitable
from gem_parallel._src.collectives.memory import StreamWork, use_backend

__all__ = ["LowContentionCollectives"]


class Workspace(Protocol):
    """What is used of a symmetric memory handle: memory of every rank of a group, and a barrier on the stream."""

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """A rank's memory as a tensor, from an offset in elements."""

    def barrier(self, channel: int = 0) -> None:
        """What ranks do after it, they do after what all did before it."""


def pull(workspace: Workspace, tensor: Tensor, output: Tensor, rank: int, ranks: int) -> None:
    """All-gather: every rank shows its part and copies the others'."""
    sent = tensor.view(-1).view(torch.uint8)
    parts = output.view(-1).view(torch.uint8).view(ranks, -1)
    workspace.get_buffer(rank, sent.shape, torch.uint8).copy_(sent)
    if parts[rank].data_ptr() != sent.data_ptr():
        parts[rank].copy_(sent)
    workspace.barrier(channel=0)
    for step in range(1, ranks):
        # Every rank starts at another peer, so that no link serves two at once.
        peer = (rank + step) % ranks
        parts[peer].copy_(workspace.get_buffer(peer, sent.shape, torch.uint8))
    # Nobody overwrites a part that a peer still reads.
    workspace.barrier(channel=0)


def push(workspace: Workspace, tensor: Tensor, output: Tensor, rank: int, ranks: int) -> None:
    """Reduce-scatter by sum: every rank lays each part in its owner's memory, the owner adds."""
    parts = tensor.view(ranks, -1)
    # A peer's sum of the operation before must have read what is now overwritten.
    workspace.barrier(channel=0)
    for step in range(ranks):
        peer = (rank + step) % ranks
        workspace.get_buffer(peer, parts[peer].shape, tensor.dtype, rank * parts.shape[1]).copy_(parts[peer])
    workspace.barrier(channel=0)
    arrived = workspace.get_buffer(rank, parts.shape, tensor.dtype)
    torch.sum(arrived, dim=0, dtype=output.dtype, out=output.view(-1))


class LowContentionCollectives(Collectives):
    """Pull for all-gather, push and one local sum for reduce-scatter, in a workspace that all ranks of a group map.

    The method of torch's low-contention operators, into buffers of the caller. Kernels on the SMs: two barriers of one
    block each, and the sum of a reduce-scatter, which accumulates in float32 whatever the dtype. All operations run on
    one private stream, as symmetric memory asks for; so an all-gather and a reduce-scatter do not overlap each other.
    The workspace of a group is as large as its largest input, rounded up to a power of two.

    Args:
        device: CUDA device of this rank.
    """

    name = "symm_mem_low_contention"
    sm_free = ("all_gather",)

    def __init__(self, device: torch.device) -> None:
        self._memory = use_backend("CUDA")
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._workspaces: dict[str, tuple[Tensor, Any]] = {}

    def _workspace(self, group: dist.ProcessGroup, num_bytes: int) -> Any:
        """Handle of at least so many bytes; ranks call it with equal numbers, so they grow it together."""
        name = group.group_name
        found = self._workspaces.get(name)
        if found is None or found[0].numel() < num_bytes:
            # Peers may still read the old one.
            torch.cuda.synchronize(self._device)
            dist.barrier(group)
            size = max(1 << (num_bytes - 1).bit_length(), 1 << 20)
            buffer = self._memory.empty((size,), dtype=torch.uint8, device=self._device)
            found = (buffer, self._memory.rendezvous(buffer, name))
            self._workspaces[name] = found
        return found[1]

    def all_gather(
        self, output: Tensor, tensor: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
    ) -> Waitable | None:
        """See ``Collectives``."""
        if tensor.numel() == 0:
            return self._finish((), async_op)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        handle = self._workspace(group, tensor.numel() * tensor.element_size())
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pull(handle, tensor, output, rank, ranks)
        return self._finish((output, tensor), async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        tensor: Tensor,
        group: dist.ProcessGroup,
        *,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Waitable | None:
        """See ``Collectives``."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"reduce_scatter: `op` must be SUM or AVG, got {op}; use another engine for it")
        if tensor.numel() == 0:
            return self._finish((), async_op)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        handle = self._workspace(group, tensor.numel() * tensor.element_size())
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            push(handle, tensor, output, rank, ranks)
            if op == dist.ReduceOp.AVG:
                output.div_(ranks)
        return self._finish((output, tensor), async_op)

    def _finish(self, tensors: tuple[Tensor, ...], async_op: bool) -> Waitable | None:
        work = StreamWork(self._stream.record_event(), tensors)
        if async_op:
            return work
        work.wait()
        return None
