"""MovieLens with 2,149 users: 206,584 ratings."""

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
    name="ml-latest-2149u",
    summary="MovieLens, 2,149 users, like (rating >= 4) and favourite (rating = 5); the user brings the data",
    schema=MOVIELENS,
    load=_load,
    data_dir="data/ml-latest-2149u",
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
    data=DataConfig(global_batch_size=256, epochs=2, max_history=100),
    sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05),
    reference_task="like",
    reference=SCOREBOARD["ml-latest-2149u"],
)
