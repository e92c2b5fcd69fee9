"""Model configurations from what a log offers."""

from collections.abc import Callable
from dataclasses import replace

from gem_model import RankingConfig
from gem_train.data import DatasetSchema, EventLog

__all__ = ["for_log"]


def for_log(
    preset: Callable[..., RankingConfig],
    log: EventLog | DatasetSchema,
    *,
    embedding_dim: int,
    dropout: float = 0.0,
) -> RankingConfig:
    """A preset that reads all features of a log and predicts all its tasks.

    Args:
        preset: One of `gem_model.presets`.
        log: The data, whose base rates in the training split become the priors; or its schema, with priors of 0.5.
        embedding_dim: Width of every embedding.
        dropout: Of the sequence layers, the interactions and the heads.

    Returns:
        The configuration.
    """
    schema = log if isinstance(log, DatasetSchema) else log.schema
    priors = [0.5] * len(schema.tasks)
    if isinstance(log, EventLog):
        train = log.samples("train")
        priors = [min(max(float(log.labels[task][train].mean()), 1e-4), 1 - 1e-4) for task in schema.tasks]
    config = preset(
        context_features=schema.context_features,
        num_dense=schema.num_dense,
        event_features=schema.event_features,
        num_event_dense=schema.num_event_dense,
        tasks=schema.tasks,
        embedding_dim=embedding_dim,
        sequence=schema.history,
        priors=tuple(priors),
    )
    towers = tuple(replace(tower, dropout=dropout) for tower in config.sequences)
    return replace(config, sequences=towers, dropout=dropout)
