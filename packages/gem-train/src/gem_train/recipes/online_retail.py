"""UCI Online Retail: will the customer buy the item again within 60 days? A label that is known 60 days late."""

from pathlib import Path

from gem_model import RankingConfig, presets
from gem_parallel import SparseOptimizerConfig
from gem_train.config import TrainerConfig
from gem_train.data import ONLINE_RETAIL, SCOREBOARD, DatasetSchema, EventLog, load_online_retail
from gem_train.recipes.models import for_log
from gem_train.recipes.recipe import DataConfig, Recipe

__all__ = ["RECIPE"]


def _load(directory: Path | None) -> EventLog:
    assert directory is not None
    return load_online_retail(directory)


def _model(log: EventLog | DatasetSchema) -> RankingConfig:
    return for_log(presets.tiny, log, embedding_dim=32, dropout=0.1)


RECIPE = Recipe(
    name="online-retail",
    summary="UCI Online Retail, the same customer buys the same item again within 60 days; the user brings the data",
    schema=ONLINE_RETAIL,
    load=_load,
    data_dir="data/online-retail",
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
    data=DataConfig(global_batch_size=256, epochs=1, max_history=100),
    sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.005),
    reference_task=ONLINE_RETAIL.labels[0].task,
    reference=SCOREBOARD["online-retail"],
)
