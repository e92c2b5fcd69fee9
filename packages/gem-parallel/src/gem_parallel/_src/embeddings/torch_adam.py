"""Adam for tables on the CPU, where fbgemm has no such kernel: the same update in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_parallel._src.embeddings.config import SparseOptimizerConfig

__all__ = ["TorchAdamEngine"]


class _Rows(torch.autograd.Function):
    """Gather whose backward updates the rows instead of giving a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, engine: TorchAdamEngine, ids: Tensor, step: int) -> Tensor:
        ctx.engine, ctx.step, ctx.learning_rate = engine, step, engine.learning_rate
        ctx.save_for_backward(ids)
        return engine.gather(ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.engine.update(ids, grad, ctx.step, ctx.learning_rate)
        return None, None, None, None


class TorchAdamEngine:
    """One table with Adam on the rows of the batch; moments in float32."""

    num_tables = 1

    def __init__(
        self,
        *,
        num_rows: Sequence[int],
        dim: int,
        optimizer: SparseOptimizerConfig,
        weight_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        (rows,) = num_rows
        self._config = optimizer
        self.learning_rate = optimizer.learning_rate
        # One scratch row, as in the other engine.
        self._weight = torch.zeros(rows + 1, dim, dtype=weight_dtype, device=device)
        self._exp_avg = torch.zeros(rows + 1, dim, device=device)
        self._exp_avg_sq = torch.zeros(rows + 1, dim, device=device)
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def gather(self, ids: Tensor) -> Tensor:
        return self._weight.index_select(0, ids).float()

    def lookup(self, ids: Tensor, counts: Sequence[int], step: int | None) -> Tensor:
        if step is None:
            with torch.no_grad():
                return self.gather(ids)
        rows: Tensor = _Rows.apply(self._anchor, self, ids, step)
        return rows

    @torch.no_grad()
    def update(self, ids: Tensor, grad: Tensor, step: int, learning_rate: float) -> None:
        config = self._config
        rows, inverse = torch.unique(ids, return_inverse=True)
        grad = torch.zeros(rows.numel(), grad.shape[1], device=grad.device).index_add_(0, inverse, grad)
        first = self._exp_avg.index_select(0, rows).mul_(config.beta1).add_(grad, alpha=1 - config.beta1)
        second = self._exp_avg_sq.index_select(0, rows).mul_(config.beta2).addcmul_(grad, grad, value=1 - config.beta2)
        weight = self._weight.index_select(0, rows).float()
        step_of = (first / (1 - config.beta1**step)) / ((second / (1 - config.beta2**step)).sqrt_() + config.eps)
        weight -= learning_rate * (step_of + config.weight_decay * weight)
        self._exp_avg.index_copy_(0, rows, first)
        self._exp_avg_sq.index_copy_(0, rows, second)
        self._weight.index_copy_(0, rows, weight.to(self._weight.dtype))

    def weights(self) -> list[Tensor]:
        return [self._weight[:-1]]

    def states(self) -> list[dict[str, Tensor]]:
        return [{"exp_avg": self._exp_avg[:-1], "exp_avg_sq": self._exp_avg_sq[:-1]}]

    def set_learning_rate(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
