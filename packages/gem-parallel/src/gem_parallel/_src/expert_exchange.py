"""Rows of a group's ranks brought together and taken apart again, with mirrored backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_parallel._src.collectives.base import Collectives
from gem_parallel._src.embeddings.wire import bytes_per_row, pack_rows, unpack_rows

__all__ = ["Exchange", "gather_rows", "scatter_rows"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What both directions of one layer call share."""

    group: dist.ProcessGroup
    collectives: Collectives
    counts: tuple[tuple[int, ...], ...]
    """Per input, the rows of every rank."""
    reduce_dtype: torch.dtype | None
    gather_dtype: torch.dtype | None = None

    def gather(self, tensor: Tensor, counts: tuple[int, ...]) -> Tensor:
        """(rows of this rank, ...) -> (rows of all ranks, ...)."""
        if tensor.dtype == torch.bool:
            return self.gather(tensor.view(torch.uint8), counts).view(torch.bool)
        if self.gather_dtype is not None and tensor.is_floating_point():
            width = tensor.shape[1:].numel()
            # Of narrow rows the scale would weigh more than what is saved.
            if 0 < bytes_per_row(width, self.gather_dtype) < width * tensor.element_size():
                packed = self.gather(pack_rows(tensor.reshape(-1, width).float(), self.gather_dtype), counts)
                rows = torch.empty((len(packed), width), device=tensor.device)
                unpack_rows(packed, self.gather_dtype, rows)
                return rows.to(tensor.dtype).view(-1, *tensor.shape[1:])
        longest, total = max(counts), sum(counts)
        rest = tensor.shape[1:]
        if total == 0 or rest.numel() == 0:
            # Nothing to send; every rank sees the same counts.
            return tensor.new_empty((total, *rest))
        size = (len(counts) * longest, *rest)
        output = self.collectives.allocate(size, dtype=tensor.dtype, device=tensor.device)
        if len(tensor) == longest:
            part = tensor.contiguous()
        else:
            part = tensor.new_empty((longest, *rest))
            # What stands in the padding is dropped on arrival.
            part[: len(tensor)] = tensor
        self.collectives.all_gather(output, part, self.group)
        if longest * len(counts) == total:
            return output
        return torch.cat([piece[:count] for piece, count in zip(output.split(longest), counts, strict=True)])

    def scatter(self, tensor: Tensor, counts: tuple[int, ...]) -> Tensor:
        """(rows of all ranks, ...) -> sum over ranks of (rows of this rank, ...)."""
        longest, total = max(counts), sum(counts)
        mine = counts[dist.get_rank(self.group)]
        rest = tensor.shape[1:]
        if total == 0 or rest.numel() == 0:
            return tensor.new_empty((mine, *rest))
        dtype = self.reduce_dtype or tensor.dtype
        if longest * len(counts) == total:
            padded = tensor.to(dtype).contiguous()
        else:
            padded = tensor.new_empty((len(counts) * longest, *rest), dtype=dtype)
            for piece, part in zip(padded.split(longest), tensor.split(counts), strict=True):
                piece[: len(part)] = part
        output = tensor.new_empty((longest, *rest), dtype=dtype)
        self.collectives.reduce_scatter(output, padded, self.group)
        # No view: it would keep the padding alive, and fully_shard warns of what is done to views in place.
        return (output if mine == longest else output[:mine].clone()).to(tensor.dtype)


class _Gather(torch.autograd.Function):
    """One function for all inputs: its backward starts when all their gradients are there, in the same order on every
    rank, whatever the rank's experts do.
    """

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        outputs = tuple(exchange.gather(x, counts) for x, counts in zip(inputs, exchange.counts, strict=True))
        ctx.mark_non_differentiable(*[output for output in outputs if not output.is_floating_point()])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        needed = ctx.needs_input_grad[1:]
        return (
            None,
            *[
                exchange.scatter(grad, counts) if need else None
                for grad, counts, need in zip(grads, exchange.counts, needed, strict=True)
            ],
        )


class _Scatter(torch.autograd.Function):
    """``gathered`` is not read: as inputs they make sure that backward reaches the gather, whatever experts read."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, partial: Tensor, *gathered: Tensor) -> Tensor:
        ctx.exchange = exchange
        ctx.num_gathered = len(gathered)
        return exchange.scatter(partial, exchange.counts[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        return (None, exchange.gather(grad, exchange.counts[0]), *[None] * ctx.num_gathered)


# torch.compile stops here and goes on with the experts: numbers of rows differ from call to call.
@torch.compiler.disable
def gather_rows(exchange: Exchange, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All ranks' rows of each input, in rank order."""
    return _Gather.apply(exchange, *inputs)


@torch.compiler.disable
def scatter_rows(exchange: Exchange, partial: Tensor, gathered: Sequence[Tensor]) -> Tensor:
    """This rank's rows of the sum of all ranks' ``partial``, whose rows are those of the first input."""
    return _Scatter.apply(exchange, partial, *gathered)
