"""MovieLens ml-latest-small on a laptop: 100,836 ratings, histories of up to 2,698 events."""

from pathlib import Path

from gem_model import RankingConfig, presets
from gem_parallel import SparseOptimizerConfig
from gem_train.config import TrainerConfig
from gem_train.data import MOVIELENS, SCOREBOARD, DatasetSchema, EventLog, load_movielens
from gem_train.recipes.models import for_log
from gem_train.recipes.recipe import DataConfig, Recipe

__all__ = ["RECIPE"]


def _load(directory: Path | None) -> EventLog:
    assert directory is not None
    return load_movielens(directory)


def _model(log: EventLog | DatasetSchema) -> RankingConfig:
    return for_log(presets.tiny, log, embedding_dim=32, dropout=0.1)


RECIPE = Recipe(
    name="ml-latest-small",
    summary="MovieLens ml-latest-small, like (rating >= 4) and favourite (rating = 5); minutes on two CPU cores",
    schema=MOVIELENS,
    load=_load,
    data_dir="data/ml-latest-small",
    files=("events.parquet", "items.parquet"),
    model=_model,
    trainer=TrainerConfig(
        learning_rate=1e-3,
        weight_decay=0.01,
        warmup_steps=50,
        final_learning_rate_ratio=0.02,
        log_interval=20,
        checkpoint_interval=100,
    ),
    data=DataConfig(global_batch_size=256, epochs=2, max_history=64),
    sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05),
    reference_task="like",
    reference=SCOREBOARD["ml-latest-small"],
)
