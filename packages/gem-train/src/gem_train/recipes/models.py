"""Model configurations from what a log offers."""

from collections.abc import Callable
from dataclasses import replace

from gem_model import RankingConfig
from gem_train.data import EventLog

__all__ = ["for_log"]


def for_log(
    preset: Callable[..., RankingConfig], log: EventLog, *, embedding_dim: int, dropout: float = 0.0
) -> RankingConfig:
    """A preset that reads all features of a log and predicts all its tasks.

    Args:
        preset: One of `gem_model.presets`.
        log: The data; base rates of its training split become the priors.
        embedding_dim: Width of every embedding.
        dropout: Of the sequence layers, the interactions and the heads.

    Returns:
        The configuration.
    """
    train = log.samples("train")
    config = preset(
        context_features=log.context_features,
        num_dense=log.num_dense,
        event_features=log.event_features,
        num_event_dense=log.num_event_dense,
        tasks=log.tasks,
        embedding_dim=embedding_dim,
        sequence=log.schema.history,
        priors=tuple(min(max(float(log.labels[task][train].mean()), 1e-4), 1 - 1e-4) for task in log.tasks),
    )
    towers = tuple(replace(tower, dropout=dropout) for tower in config.sequences)
    return replace(config, sequences=towers, dropout=dropout)
