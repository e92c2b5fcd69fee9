"""Task heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gem_model._src.blocks import MLP, activation_module
from gem_model.config import RankingConfig
from gem_model.flops import BatchSizes, ModuleFlops, linear_flops, nest


class TaskHead(nn.Module):
    """An MLP to one logit, whose last layer runs in the precision of its weights and answers in float32."""

    def __init__(self, config: RankingConfig, width: int, prior: float) -> None:
        super().__init__()
        widths = (width, *config.head_hidden)
        self.hidden = nn.Sequential()
        if config.head_hidden:
            self.hidden = nn.Sequential(
                MLP(widths, config.activation, config.dropout),
                activation_module(config.activation),
                nn.Dropout(config.dropout),
            )
        self.logit = nn.Linear(widths[-1], 1)
        # Small, so that the first predictions are close to the prior.
        nn.init.normal_(self.logit.weight, std=0.1 / math.sqrt(widths[-1]))
        nn.init.constant_(self.logit.bias, math.log(prior / (1.0 - prior)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> float32 logits (B,)."""
        x = self.hidden(x)
        with torch.autocast(x.device.type, enabled=False):
            logits = self.logit(x.to(self.logit.weight.dtype))
        # A copy: what a sharded module returns must not be a view.
        return logits[:, 0].to(torch.float32, copy=True)

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        rows = sizes.num_samples
        children = {"logit": {"": ModuleFlops(gemm=linear_flops(self.logit, rows))}}
        if len(self.hidden):
            mlp = self.hidden[0]
            assert isinstance(mlp, MLP)
            children["hidden.0"] = mlp.flops(rows)
        return nest(children)


class Heads(nn.Module):
    """One head per task over the same representation."""

    def __init__(self, config: RankingConfig, width: int) -> None:
        super().__init__()
        priors = config.priors or (0.5,) * len(config.tasks)
        self.tasks = nn.ModuleDict(
            {task: TaskHead(config, width, prior) for task, prior in zip(config.tasks, priors, strict=True)}
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(B, width) -> task -> logits (B,)."""
        return {task: head(x) for task, head in self.tasks.items()}

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        counts = {}
        for task, head in self.tasks.items():
            assert isinstance(head, TaskHead)
            counts[f"tasks.{task}"] = head.flops(sizes)
        return nest(counts)
