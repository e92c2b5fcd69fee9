"""CPU tables whose optimizer fbgemm does not have there: the same update in PyTorch.

That is Adam, and row-wise AdaGrad with weight decay, which fbgemm's pooled CPU kernel ignores.
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

__all__ = ["TorchEngine", "needs_torch_engine"]


def needs_torch_engine(optimizer: SparseOptimizerConfig) -> bool:
    """Whether fbgemm lacks this optimizer on the CPU."""
    return optimizer.kind == "adam" or (optimizer.kind == "rowwise_adagrad" and optimizer.weight_decay > 0)


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
            grad = grad.index_select(0, torch.repeat_interleave(torch.arange(lengths.numel()), lengths))
        ctx.engine.update(ids, grad, ctx.step, ctx.learning_rate)
        return None, None, None, None, None


class TorchEngine:
    """One table; moments in float32, equal ids summed in batch order."""

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
    ) -> None:
        (rows,) = num_rows
        assert needs_torch_engine(optimizer)
        self._config = optimizer
        self.learning_rate = optimizer.learning_rate
        # One scratch row, as in the other engine.
        self._weight = torch.zeros(rows + 1, dim, dtype=weight_dtype, device=device)
        shape = (rows + 1, dim) if optimizer.kind == "adam" else (rows + 1,)
        self._moments = {name: torch.zeros(shape, device=device) for name in state_names(optimizer.kind)}
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def gather(self, ids: Tensor, bags: Tensor | None) -> Tensor:
        if bags is None:
            return self._weight.index_select(0, ids).float()
        rows = self._weight
        if rows.dtype != torch.float32:
            ids, rows = torch.arange(ids.numel()), rows.index_select(0, ids).float()
        return F.embedding_bag(ids, rows, bags, mode="sum", include_last_offset=True)

    def lookup(self, ids: Tensor, counts: Sequence[int], bags: Tensor | None, step: int | None) -> Tensor:
        if step is None:
            with torch.no_grad():
                return self.gather(ids, bags)
        rows: Tensor = _Rows.apply(self._anchor, self, ids, bags, step)
        return rows

    def clear_scratch(self) -> None:
        self._weight[-1].zero_()

    @torch.no_grad()
    def update(self, ids: Tensor, grad: Tensor, step: int, learning_rate: float) -> None:
        rows, inverse = torch.unique(ids, return_inverse=True)
        grad = torch.zeros(rows.numel(), grad.shape[1], device=grad.device).index_add_(0, inverse, grad)
        moments = {name: moment.index_select(0, rows) for name, moment in self._moments.items()}
        weight = self._weight.index_select(0, rows).float()
        rule = self._adam if self._config.kind == "adam" else self._rowwise_adagrad
        weight -= learning_rate * (rule(grad, moments, step) + self._config.weight_decay * weight)
        self._weight.index_copy_(0, rows, weight.to(self._weight.dtype))
        for name, moment in moments.items():
            self._moments[name].index_copy_(0, rows, moment)

    def _adam(self, grad: Tensor, moments: dict[str, Tensor], step: int) -> Tensor:
        """Advance the moments of the rows in place; the change of the weights per unit of learning rate."""
        beta1, beta2 = self._config.beta1, self._config.beta2
        first = moments["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        second = moments["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        return (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt_() + self._config.eps)

    def _rowwise_adagrad(self, grad: Tensor, moments: dict[str, Tensor], step: int) -> Tensor:
        total = moments["sum"].add_(grad.square().mean(1))
        return grad / (total.sqrt() + self._config.eps).unsqueeze(1)

    def weights(self) -> list[Tensor]:
        return [self._weight[:-1]]

    def states(self) -> list[dict[str, Tensor]]:
        return [{name: moment[:-1] for name, moment in self._moments.items()}]

    def set_learning_rate(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
