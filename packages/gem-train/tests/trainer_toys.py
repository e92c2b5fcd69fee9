"""A small model, plain tables and a trainer of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gem_train.config import TrainerConfig
from gem_train.data import EventLog, EventSource
from gem_train.trainer import Trainer

DIM = 8


class ToyTables:
    """Plain SGD tables; the update runs inside backward, as in a fused sparse optimizer."""

    def __init__(self, rows: Mapping[str, int], features: Mapping[str, str], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = {name: 0.1 * torch.randn(count, DIM, generator=generator) for name, count in rows.items()}
        self.features = features
        self.learning_rate = 0.0

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
        return ids

    def start_lookup(self, pending: Any) -> None:
        """Rows are at hand: nothing to start."""

    def lookup(self, pending: Any) -> dict[str, Tensor]:
        return {name: self._pooled(name, *pending[name]) for name in self.features}

    def _pooled(self, feature: str, values: Tensor, offsets: Tensor) -> Tensor:
        weight = self.weights[self.features[feature]]
        rows = weight[values].requires_grad_(torch.is_grad_enabled())
        if rows.requires_grad:

            def update(gradient: Tensor) -> None:
                weight.index_add_(0, values, gradient, alpha=-self.learning_rate)

            rows.register_hook(update)
        lengths = offsets.diff()
        bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return torch.zeros(len(lengths), DIM).index_add(0, bag, rows)

    def set_learning_rate(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def state_dict(self) -> dict[str, Tensor]:
        return {f"tables.{name}.weight": weight for name, weight in self.weights.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state[f"tables.{name}.weight"])


class Loss(NamedTuple):
    sum: dict[str, Tensor]
    count: int
    total: Tensor


class Part(NamedTuple):
    forward: float


class Flops(NamedTuple):
    forward: float
    total: float
    by_module: dict[str, Part]


class ToyModel(nn.Module):
    def __init__(self, num_dense: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3 * DIM + num_dense, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, batch: Any, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        offsets = batch.sequences["history"].offsets
        sample = torch.repeat_interleave(torch.arange(batch.num_samples), offsets.diff())
        liked = embeddings["history.topics"] * (2.0 * (batch.ids["history.click"][0] == 2).float() - 1.0)[:, None]
        history = torch.zeros(batch.num_samples, DIM).index_add(0, sample, liked)
        history = history / offsets.diff().clamp(min=1)[:, None]
        x = torch.cat((embeddings["topics"], history, embeddings["topics"] * history, batch.dense), dim=1)
        return {"click": self.mlp(x)[:, 0]}

    def loss(self, outputs: Mapping[str, Tensor], batch: Any) -> Loss:
        value = nn.functional.binary_cross_entropy_with_logits(outputs["click"], batch.labels["click"], reduction="sum")
        return Loss({"click": value}, batch.num_samples, value)

    def flops(self, batch: Any) -> Flops:
        forward = 2.0 * batch.num_samples * sum(p.numel() for p in self.mlp.parameters() if p.ndim == 2)
        return Flops(forward, 3.0 * forward, {"mlp": Part(forward)})


CONFIG = TrainerConfig(learning_rate=2e-2, warmup_steps=4, log_interval=4, decay="linear", seed=3)


def make_trainer(events: EventLog, config: TrainerConfig = CONFIG, **arguments: Any) -> Trainer:
    torch.manual_seed(config.seed)
    rows = {table.name: table.num_rows for table in events.tables}
    source = EventSource(events, "train", global_batch_size=64, seed=1, epochs=2)
    return Trainer(
        config,
        model=arguments.pop("model", ToyModel)(events.num_dense),
        embeddings=ToyTables(rows, {"topics": "topics", "history.topics": "topics"}),
        sparse_learning_rate=20.0,
        train_source=arguments.pop("train_source", source),
        total_steps=source.num_batches,
        tasks=arguments.pop("tasks", ("click",)),
        eval_sources={
            split: lambda split=split: EventSource(events, split, global_batch_size=100)
            for split in ("validation", "test")
        },
        **arguments,
    )


def weights(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {f"model.{k}": v.clone() for k, v in trainer.model.state_dict().items()}
    return tensors | {f"tables.{k}": v.clone() for k, v in trainer.embeddings.state_dict().items()}


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
