"""One small ranking problem that the packages solve together, with a batch class that belongs to none of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gem_model import RankingConfig, SequenceTowerConfig
from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

NUM_ITEMS, NUM_USERS, NUM_TAGS, DIM = 60, 25, 12, 16


class History(NamedTuple):
    offsets: Tensor
    max_seqlen: int
    dense: Tensor
    age: Tensor


@dataclass(frozen=True)
class HandBatch:
    """A batch by structure only: it inherits from nothing and gem-train does not know it."""

    num_samples: int
    ids: Mapping[str, tuple[Tensor, Tensor]]
    dense: Tensor
    sequences: Mapping[str, History]
    labels: Mapping[str, Tensor]
    sample_index: Tensor


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))


def _build(lengths: Sequence[int], seed: int = 0) -> HandBatch:
    """A batch with histories of the given lengths; a click depends on the item and on the share of clicks before."""
    generator = torch.Generator().manual_seed(seed)
    num_samples, total = len(lengths), sum(lengths)

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator)

    offsets = _offsets(lengths)
    item, user = draw(NUM_ITEMS, num_samples), draw(NUM_USERS, num_samples)
    event_item, event_click = draw(NUM_ITEMS, total), draw(2, total)
    tag_offsets = _offsets([int(n) for n in draw(4, num_samples)])
    owner = torch.repeat_interleave(torch.arange(num_samples), offsets.diff())
    clicks = torch.zeros(num_samples).index_add_(0, owner, event_click.float())
    many = clicks > 0.5 * offsets.diff()
    click = ((item % 2 == 0) ^ many).float()
    return HandBatch(
        num_samples=num_samples,
        ids={
            "user": (user, torch.arange(num_samples + 1)),
            "item": (item, torch.arange(num_samples + 1)),
            "tags": (draw(NUM_TAGS, int(tag_offsets[-1])), tag_offsets),
            "history.item": (event_item, torch.arange(total + 1)),
            "history.click": (event_click, torch.arange(total + 1)),
        },
        dense=torch.randn(num_samples, 3, generator=generator),
        sequences={
            "history": History(
                offsets,
                max(lengths, default=0),
                torch.randn(total, 1, generator=generator),
                1.0 + 1e5 * torch.rand(total, generator=generator),
            )
        },
        labels={"click": click, "like": (item < NUM_ITEMS // 2).float()},
        sample_index=torch.arange(num_samples),
    )


@pytest.fixture
def make_batch() -> Callable[..., HandBatch]:
    return _build


@pytest.fixture
def config() -> RankingConfig:
    tower = SequenceTowerConfig(
        name="history",
        event_features=("history.item", "history.click"),
        num_event_dense=1,
        dim=32,
        num_heads=2,
        self_attention=("window", "block"),
        window=8,
        block_size=32,
    )
    return RankingConfig(
        context_features=("user", "item", "tags"),
        num_dense=3,
        sequences=(tower,),
        tasks=("click", "like"),
        embedding_dim=DIM,
        dim=32,
    )


@pytest.fixture
def make_tables() -> Callable[..., ShardedEmbeddings]:
    def build(
        *, id_policy: str = "error", learning_rate: float = 0.05, seed: int = 0, device: str = "cpu"
    ) -> ShardedEmbeddings:
        rows = {"user": NUM_USERS, "item": NUM_ITEMS, "tags": NUM_TAGS, "click": 2}
        return ShardedEmbeddings(
            tables=[TableConfig(name=name, num_rows=count, dim=DIM) for name, count in rows.items()],
            features=[
                FeatureConfig(name="user", table="user", pooling="sum"),
                FeatureConfig(name="item", table="item", pooling="sum"),
                FeatureConfig(name="tags", table="tags", pooling="mean"),
                FeatureConfig(name="history.item", table="item", pooling="sum"),
                FeatureConfig(name="history.click", table="click", pooling="sum"),
            ],
            optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=learning_rate, eps=1e-8),
            device=torch.device(device),
            seed=seed,
            id_policy=id_policy,
        )

    return build
