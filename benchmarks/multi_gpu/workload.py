"""Models, tables and random jagged batches that the parts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gem_model import RankingConfig, RankingModel, presets
from gem_model.random_batch import RandomBatch, RandomSequence, random_batch
from gem_parallel import ExpertParallel, FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

__all__ = ["ExpertRanker", "Ids", "Rows", "Samples", "draw_samples", "make_config", "make_tables", "take"]

Ids = dict[str, tuple[Tensor, Tensor]]
OTHER_ROWS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """A batch and its ids."""

    batch: RandomBatch
    ids: Ids

    def to(self, device: torch.device) -> Samples:
        """The same on another device."""
        ids = {name: (values.to(device), offsets.to(device)) for name, (values, offsets) in self.ids.items()}
        return Samples(batch=self.batch.to(device), ids=ids)

    @property
    def lengths(self) -> Tensor:
        """(B,) events of each sample."""
        return torch.diff(self.batch.sequences["history"].offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Size of the item table; the others are small."""

    item: int

    def of(self, feature: str) -> int:
        """Rows of the table that a feature reads."""
        return self.item if feature.endswith("item") else min(OTHER_ROWS, self.item)


def make_config(preset: str, num_experts: int = 1) -> RankingConfig:
    """A preset that reads a candidate, its category, and a history of items, categories and ratings."""
    build = {"tiny": presets.tiny, "small": presets.small, "large": presets.large}[preset]
    config = build(
        context_features=("item", "category"),
        num_dense=6,
        event_features=("history.item", "history.category", "history.rating"),
        num_event_dense=1,
        tasks=("like", "favourite"),
    )
    return replace(config, num_experts=num_experts)


def feature_names(config: RankingConfig) -> tuple[str, ...]:
    """All features, those of events last."""
    return (*config.context_features, *config.sequences[0].event_features)


def make_tables(
    config: RankingConfig, rows: Rows, device: torch.device, mesh: DeviceMesh | None, **options: Any
) -> ShardedEmbeddings:
    """An item table by rows, and two small ones. ``options`` are those of ``ShardedEmbeddings``."""
    tables = [
        TableConfig(name=name, num_rows=rows.of(name), dim=config.embedding_dim, placement="row_wise")
        for name in ("item", "category", "rating")
    ]
    features = [FeatureConfig(name=name, table=name.split(".")[-1], pooling="none") for name in feature_names(config)]
    optimizer = SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.02)
    return ShardedEmbeddings(tables, features, optimizer=optimizer, mesh=mesh, device=device, **options)


def draw_samples(config: RankingConfig, rows: Rows, num_samples: int, max_length: int, seed: int) -> Samples:
    """Lengths uniform from 1 to ``max_length``: half of a padded batch would be padding. Ids favour few rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_length + 1, (num_samples,), generator=generator).tolist()
    # Embeddings come from the tables: those that are drawn with the batch may be narrow.
    narrow = replace(config, embedding_dim=1)
    batch, _ = random_batch(narrow, num_samples, lengths={"history": lengths}, seed=seed)
    ids: Ids = {}
    for name in feature_names(config):
        count = sum(lengths) if "." in name else num_samples
        drawn = torch.rand(count, generator=generator, dtype=torch.float64).pow(4.0)
        values = (rows.of(name) * drawn).long().clamp_max(rows.of(name) - 1)
        ids[name] = (values, torch.arange(count + 1))
    return Samples(batch=batch, ids=ids)


def take(samples: Samples, chosen: Sequence[int]) -> Samples:
    """Some samples, in the order given."""
    history = samples.batch.sequences["history"]
    index = torch.tensor(list(chosen), dtype=torch.int64)
    starts, lengths = history.offsets[:-1][index], samples.lengths[index]
    ends = lengths.cumsum(0)
    events = torch.repeat_interleave(starts - ends + lengths, lengths) + torch.arange(int(lengths.sum()))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    sequence = RandomSequence(offsets, int(lengths.max()), history.dense[events], history.age[events])
    batch = RandomBatch(
        num_samples=len(index),
        dense=samples.batch.dense[index],
        sequences={"history": sequence},
        labels={name: label[index] for name, label in samples.batch.labels.items()},
    )
    ids = {}
    for name, (values, _) in samples.ids.items():
        kept = values[events if "." in name else index]
        ids[name] = (kept, torch.arange(len(kept) + 1))
    return Samples(batch=batch, ids=ids)


class ExpertRanker(nn.Module):
    """A ranking model behind a layer of experts, so that one model has something on every axis.

    Args:
        config: Of the ranking model.
        group: Ranks that hold the experts, or None.
        num_experts: The same on any number of ranks.
    """

    def __init__(self, config: RankingConfig, group: Any, num_experts: int = 8) -> None:
        super().__init__()
        width = config.num_dense
        experts = [
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        ]
        self.input = nn.Linear(width, width)
        self.experts = ExpertParallel(experts, group)
        self.ranker = RankingModel(config)

    @property
    def shard_units(self) -> tuple[str, ...]:
        """Patterns for ``ParallelPlan``."""
        return tuple(f"ranker.{pattern}" for pattern in self.ranker.shard_units)

    def forward(self, batch: RandomBatch, embeddings: dict[str, Tensor]) -> dict[str, Tensor]:
        """Task -> logits (B,)."""
        dense = batch.dense + self.experts(self.input(batch.dense))
        return self.ranker(replace(batch, dense=dense), embeddings)

    def loss(self, outputs: dict[str, Tensor], batch: RandomBatch) -> Any:
        """As the ranking model's."""
        return self.ranker.loss(outputs, batch)
