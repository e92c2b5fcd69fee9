"""Tables whose optimizer or weights fbgemm does not have: the same update in PyTorch.

On the CPU that is Adam, and row-wise AdaGrad with weight decay, which fbgemm's pooled CPU kernel ignores; everywhere it
is bfloat16 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_parallel._src.embeddings.config import SparseOptimizerConfig
from gem_parallel._src.embeddings.engine import state_names
from gem_parallel._src.embeddings.hashing import round_to_bfloat16
from gem_parallel._src.embeddings.initial import chunk_seed
from gem_parallel._src.embeddings.segments import sum_segments

__all__ = ["TorchEngine", "needs_torch_engine"]


def needs_torch_engine(optimizer: SparseOptimizerConfig, weight_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether fbgemm lacks this optimizer or these weights."""
    if weight_dtype == torch.bfloat16:
        return True
    decays = optimizer.kind == "rowwise_adagrad" and optimizer.weight_decay > 0
    return device.type == "cpu" and (optimizer.kind == "adam" or decays)


class _Rows(torch.autograd.Function):
    """Gather, and sum over bags, whose backward updates the rows instead of giving a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, engine: TorchEngine, ids: Tensor, bags: Tensor | None, step: int) -> Tensor:
        ctx.engine, ctx.step, ctx.learning_rate = engine, step, engine.learning_rate
        ctx.save_for_backward(ids, bags)
        return engine.gather(ids, bags)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        ids, bags = ctx.saved_tensors
        if bags is not None:
            lengths = bags.diff()
            numbers = torch.arange(lengths.numel(), device=lengths.device)
            grad = grad.index_select(0, torch.repeat_interleave(numbers, lengths, output_size=ids.numel()))
        ctx.engine.apply(ids, grad, ctx.step, ctx.learning_rate)
        return None, None, None, None, None


class TorchEngine:
    """One table; moments in float32, equal ids summed in batch order.

    Args:
        num_rows: Rows of the one table.
        dim: Columns held here.
        optimizer: The update.
        weight_dtype: bfloat16 weights are rounded stochastically, others to the nearest.
        device: Where the table lives.
        name: Table name, for the random bits.
        seed: The module's seed, likewise.
        first_row: Row of the whole table at which these begin.
        first_column: Column, likewise.
        width: Columns of the whole table; default: dim.
    """

    num_tables = 1
    pools = True

    def __init__(
        self,
        *,
        num_rows: Sequence[int],
        dim: int,
        optimizer: SparseOptimizerConfig,
        weight_dtype: torch.dtype,
        device: torch.device,
        name: str,
        seed: int,
        first_row: int,
        first_column: int = 0,
        width: int | None = None,
    ) -> None:
        (rows,) = num_rows
        self._config = optimizer
        self.learning_rate = optimizer.learning_rate
        self._name, self._seed, self._first_row, self._first_column = name, seed, first_row, first_column
        self._width = dim if width is None else width
        # One scratch row, as in the other engine.
        self._weight = torch.zeros(rows + 1, dim, dtype=weight_dtype, device=device)
        shape = (rows + 1,) if optimizer.kind == "rowwise_adagrad" else (rows + 1, dim)
        self._moments = {name: torch.zeros(shape, device=device) for name in state_names(optimizer.kind)}
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def gather(self, ids: Tensor, bags: Tensor | None) -> Tensor:
        if bags is None:
            return self._weight.index_select(0, ids).float()
        rows = self._weight
        if rows.dtype != torch.float32:
            ids, rows = torch.arange(ids.numel(), device=ids.device), rows.index_select(0, ids).float()
        return F.embedding_bag(ids, rows, bags, mode="sum", include_last_offset=True)

    def lookup(self, ids: Tensor, counts: Sequence[int], bags: Tensor | None, step: int | None) -> Tensor:
        if step is None:
            with torch.no_grad():
                return self.gather(ids, bags)
        rows: Tensor = _Rows.apply(self._anchor, self, ids, bags, step)
        return rows

    def clear_scratch(self) -> None:
        self._weight[-1].zero_()

    def update(self, ids: Tensor, counts: Sequence[int], grad: Tensor, step: int, learning_rate: float) -> None:
        self.apply(ids, grad, step, learning_rate)

    def apply(self, ids: Tensor, grad: Tensor, step: int, learning_rate: float) -> None:
        """One optimizer step; ``grad`` (N, dim) has one row per id."""
        rows, grad = self.total(ids, grad)
        self.step(rows, grad, self.square(grad), step, learning_rate)

    @torch.no_grad()
    def total(self, ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct rows (U,), rising, and the sum of each one's gradients (U, dim), in their order."""
        in_order, order = torch.sort(ids, stable=True)
        rows, repeats = torch.unique_consecutive(in_order, return_counts=True)
        starts = repeats.cumsum(0) - repeats
        # Not index_add_, which has no fixed order on CUDA.
        return rows, sum_segments(order, grad.contiguous(), starts)

    @torch.no_grad()
    def square(self, grad: Tensor) -> Tensor:
        """(U,) this engine's part of each row's sum of squares."""
        return grad.square().sum(1)

    @torch.no_grad()
    def step(self, rows: Tensor, grad: Tensor, square: Tensor, step: int, learning_rate: float) -> None:
        """Move distinct rows; ``square`` (U,) is the sum of squares over all columns of the table."""
        moments = {name: moment.index_select(0, rows) for name, moment in self._moments.items()}
        weight = self._weight.index_select(0, rows).float()
        change = self._change(grad, square, moments, step)
        if self._config.weight_decay:
            change = change + self._config.weight_decay * weight
        weight -= learning_rate * change
        self._weight.index_copy_(0, rows, self._rounded(weight, rows, step))
        for name, moment in moments.items():
            self._moments[name].index_copy_(0, rows, moment)

    def _change(self, grad: Tensor, square: Tensor, moments: dict[str, Tensor], step: int) -> Tensor:
        """Advance the moments of the rows in place; the change of the weights per unit of learning rate."""
        config = self._config
        if config.kind == "sgd":
            return grad
        if config.kind == "adam":
            first = moments["exp_avg"].mul_(config.beta1).add_(grad, alpha=1 - config.beta1)
            second = moments["exp_avg_sq"].mul_(config.beta2).addcmul_(grad, grad, value=1 - config.beta2)
            return (first / (1 - config.beta1**step)) / ((second / (1 - config.beta2**step)).sqrt_() + config.eps)
        if config.kind == "adagrad":
            return grad / (moments["sum"].addcmul_(grad, grad).sqrt() + config.eps)
        total = moments["sum"].add_(square / self._width)
        return grad / (total.sqrt() + config.eps).unsqueeze(1)

    def _rounded(self, weight: Tensor, rows: Tensor, step: int) -> Tensor:
        if self._weight.dtype != torch.bfloat16:
            return weight.to(self._weight.dtype)
        return round_to_bfloat16(
            weight,
            rows + self._first_row,
            first_column=self._first_column,
            width=self._width,
            key=chunk_seed(self._seed, self._name, -step),
        )

    def weights(self) -> list[Tensor]:
        return [self._weight[:-1]]

    def states(self) -> list[dict[str, Tensor]]:
        return [{name: moment[:-1] for name, moment in self._moments.items()}]

    def set_learning_rate(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
