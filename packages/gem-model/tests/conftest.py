"""Configs and batches that the tests share."""

import dataclasses

import pytest
import torch

from gem_model import RankingConfig, SequenceTowerConfig, presets


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def tiny() -> RankingConfig:
    return presets.tiny(
        context_features=("item", "genres", "year"),
        num_dense=4,
        event_features=("history.item", "history.genres", "history.rating"),
        num_event_dense=2,
        tasks=("like", "favourite"),
        priors=(0.48, 0.13),
    )


@pytest.fixture
def two_towers() -> RankingConfig:
    """Towers of differing width, attention and schema; one without dense, one without embeddings."""
    clicks = SequenceTowerConfig(
        name="clicks",
        event_features=("clicks.item", "clicks.topic"),
        dim=32,
        num_heads=2,
        self_attention=("window", "block"),
        window=5,
        block_size=32,
        num_context_tokens=3,
        num_seeds=6,
        num_seed_tokens=2,
        kron_rank=3,
        num_recent=2,
        event_hidden=24,
    )
    visits = dataclasses.replace(
        clicks,
        name="visits",
        event_features=(),
        num_event_dense=3,
        dim=16,
        num_heads=1,
        self_attention=("none", "window"),
        window=0,
        num_seeds=0,
        num_recent=0,
        project_pooling=False,
        pffn_activation="silu",
    )
    return RankingConfig(
        context_features=("item", "user"),
        num_dense=0,
        sequences=(clicks, visits),
        tasks=("click", "buy"),
        embedding_dim=8,
        dim=24,
        num_fm_tokens=3,
        num_linear_tokens=4,
        fm_rank=4,
        fm_compressed_tokens=2,
        fm_hidden=16,
        head_hidden=(),
        activation="gelu",
        task_weights=(1.0, 0.25),
    )


@pytest.fixture
def experts(two_towers) -> RankingConfig:
    """Three Wukong experts in each layer."""
    return dataclasses.replace(two_towers, num_experts=3)


@pytest.fixture
def no_sequences() -> RankingConfig:
    return RankingConfig(
        context_features=(), num_dense=5, sequences=(), tasks=("click",), embedding_dim=4, dim=16, num_layers=3
    )
