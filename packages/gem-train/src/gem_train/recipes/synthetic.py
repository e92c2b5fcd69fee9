"""Generated clicks with tastes to be read from histories: needs no data, ends in seconds."""

from pathlib import Path

from gem_model import RankingConfig, presets
from gem_parallel import SparseOptimizerConfig
from gem_train.config import TrainerConfig
from gem_train.data import SYNTHETIC, DatasetSchema, EventLog, generate
from gem_train.recipes.models import for_log
from gem_train.recipes.recipe import DataConfig, Recipe

__all__ = ["RECIPE"]


def _load(directory: Path | None) -> EventLog:
    assert directory is None
    return generate()


def _model(log: EventLog | DatasetSchema) -> RankingConfig:
    return for_log(presets.tiny, log, embedding_dim=16)


RECIPE = Recipe(
    name="synthetic",
    summary="generated clicks of 500 users, to try the installation and for tests; no data needed",
    schema=SYNTHETIC,
    load=_load,
    data_dir=None,
    model=_model,
    trainer=TrainerConfig(learning_rate=2e-3, warmup_steps=10, log_interval=10),
    data=DataConfig(global_batch_size=128, epochs=1, max_history=64),
    sparse=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05),
    reference_task="click",
)
