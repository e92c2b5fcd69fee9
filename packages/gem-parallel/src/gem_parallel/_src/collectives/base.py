"""All-gather and reduce-scatter behind one interface, and the engine that works everywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Collectives", "DefaultCollectives", "Waitable", "all_gather_single", "reduce_scatter_single"]

# torch 2.13 renamed the two functions and warns on the names that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Waitable(Protocol):
    """Result of an operation that was started: torch's ``Work``, or an engine's own."""

    def wait(self) -> Any:
        """The caller's stream waits for the result."""


class Collectives(ABC):
    """How a group of ranks gathers and reduces; engines differ in what does the copying, never in the result's meaning.

    Without ``async_op`` a result is valid for what the caller's stream runs next; the host does not wait on CUDA.
    """

    name: str
    sm_free: tuple[str, ...] = ()
    """Which of "all_gather", "reduce_scatter" move their data without a kernel on the GPU's SMs."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised buffer for the output of ``all_gather``; one from here saves a copy, any other is right."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    @abstractmethod
    def all_gather(
        self, output: Tensor, tensor: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
    ) -> Waitable | None:
        """``output`` becomes the ``tensor`` of rank 0, then of rank 1 and so on, along dim 0.

        Args:
            output: (ranks * n, ...), contiguous.
            tensor: (n, ...), contiguous, of equal shape on every rank; may be this rank's part of ``output``.
            group: The ranks.
            async_op: Return at once; ``output`` is valid after ``wait()`` of the result.

        Returns:
            None, or with ``async_op`` an object with ``wait()``.
        """

    @abstractmethod
    def reduce_scatter(
        self,
        output: Tensor,
        tensor: Tensor,
        group: dist.ProcessGroup,
        *,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Waitable | None:
        """``output`` becomes this rank's part of the sum of every rank's ``tensor``.

        Args:
            output: (n, ...), contiguous.
            tensor: (ranks * n, ...), contiguous, of equal shape on every rank.
            group: The ranks.
            op: SUM or AVG.
            async_op: As for ``all_gather``.

        Returns:
            As for ``all_gather``.
        """


class DefaultCollectives(Collectives):
    """What the process group's backend does by itself: NCCL's kernels on the SMs, or gloo on the CPU."""

    name = "default"

    def all_gather(
        self, output: Tensor, tensor: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
    ) -> Waitable | None:
        """See ``Collectives``."""
        return all_gather_single(output, tensor, group=group, async_op=async_op)

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
        return reduce_scatter_single(output, tensor, op=op, group=group, async_op=async_op)
