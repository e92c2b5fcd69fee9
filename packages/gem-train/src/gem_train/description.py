"""What a model is beside its tensors, which another model may have in the same shapes."""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gem_train.checkpoint import refuse_other
from gem_train.protocols import EmbeddingModule
from gem_train.run_dir import differing

__all__ = ["OF_TRAINING", "compare_descriptions", "describe"]

OF_TRAINING = frozenset({"dropout", "priors", "task_weights"})
"""Fields of a model's config that its weights score the same with."""


def describe(model: nn.Module, embeddings: EmbeddingModule, tasks: tuple[str, ...]) -> dict[str, Any]:
    """A model and its tables as JSON values: as much as they tell of themselves.

    Args:
        model: Its `config` is described if it is a dataclass.
        embeddings: Its `features` are described if they are a tuple of dataclasses with a name.
        tasks: Of the trainer.
    """
    config, features = getattr(model, "config", None), getattr(embeddings, "features", None)
    description: dict[str, Any] = {"tasks": list(tasks)}
    if is_dataclass(config):
        description["model"] = _plain(config)
    if isinstance(features, tuple) and all(is_dataclass(each) and hasattr(each, "name") for each in features):
        # By name: their order has no meaning, and a difference is said to be of the feature.
        described = [_plain(feature) for feature in features]
        description["features"] = {str(feature["name"]): feature for feature in described}
    return description


def compare_descriptions(
    path: Path, saved: Mapping[str, Any] | None, ours: Mapping[str, Any], *, leave_out: Collection[str] = ()
) -> None:
    """Refuses a checkpoint of a model that is described otherwise.

    Args:
        path: Of the checkpoint.
        saved: From `describe`, as the checkpoint has it; None in those of versions without.
        ours: From `describe`.
        leave_out: Names of fields that may differ.

    Raises:
        CheckpointError: listing the differences.
    """
    # A part that only one of them describes says nothing.
    parts = (saved or {}).keys() & ours.keys()
    theirs, mine = ({part: values[part] for part in parts} for values in (saved or {}, ours))
    different = [
        f"{name}: checkpoint {value!r}, this run {own!r}"
        for name, value, own in differing(theirs, mine)
        if name.rpartition(".")[2] not in leave_out
    ]
    refuse_other(path, different)


def _plain(value: Any) -> Any:
    """A dataclass as JSON values; of what has none, its type."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value) if isinstance(value, torch.dtype) else type(value).__qualname__
