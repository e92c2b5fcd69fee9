"""What the model asks of a batch, its embeddings, its logits and its labels, and what it says where they do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gem_model._src.tokens import ContextTokens
from gem_model.config import RankingConfig
from gem_model.protocols import RankingBatch

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_BATCH = ("num_samples", "dense", "sequences", "labels")
_SEQUENCE = ("offsets", "max_seqlen", "dense", "age")


def check_batch(batch: Any, config: RankingConfig) -> None:
    """Raise unless ``batch`` has what a batch has, and the sequences of the config."""
    _check_attributes("batch", batch, _BATCH, "forward takes (batch, embeddings), loss takes (outputs, batch)")
    for tower in config.sequences:
        if tower.name not in batch.sequences:
            raise ValueError(
                f"RankingModel: `batch.sequences` must hold {tower.name!r}, got {sorted(batch.sequences)}; "
                "add the sequence or drop its tower from the config."
            )
        where = f"batch.sequences[{tower.name!r}]"
        _check_attributes(where, batch.sequences[tower.name], _SEQUENCE, "see gem_model.protocols.SequenceView")


def _check_attributes(name: str, value: Any, attributes: tuple[str, ...], remedy: str) -> None:
    missing = [attribute for attribute in attributes if not hasattr(value, attribute)]
    if missing:
        raise TypeError(
            f"RankingModel: `{name}` must have {', '.join(attributes)}, got {type(value).__name__} without "
            f"{missing[0]}; {remedy}."
        )


def check_inputs(
    batch: RankingBatch, embeddings: Any, config: RankingConfig, context: ContextTokens, events: nn.ModuleDict
) -> None:
    """Raise unless batch and embeddings hold what the config names, in the shapes and dtypes that the layers read."""
    check_batch(batch, config)
    if not isinstance(embeddings, Mapping):
        raise TypeError(
            f"RankingModel: `embeddings` must map features to tensors, got {type(embeddings).__name__}; pass a dict."
        )
    num_samples = batch.num_samples
    shapes: list[tuple[str, Any, tuple[int, ...]]] = [("batch.dense", batch.dense, (num_samples, config.num_dense))]
    rows = dict.fromkeys(config.context_features, num_samples)
    for tower in config.sequences:
        sequence, where = batch.sequences[tower.name], f"batch.sequences[{tower.name!r}]"
        _check_tensor(f"{where}.age", sequence.age)
        num_events = sequence.age.shape[0]
        shapes.append((f"{where}.offsets", sequence.offsets, (num_samples + 1,)))
        shapes.append((f"{where}.dense", sequence.dense, (num_events, tower.num_event_dense)))
        rows |= dict.fromkeys(tower.event_features, num_events)
    for name, count in rows.items():
        if name not in embeddings:
            raise ValueError(
                f"RankingModel: `embeddings[{name!r}]` must be given, got {sorted(embeddings)}; look it up."
            )
        shapes.append((f"embeddings[{name!r}]", embeddings[name], (count, config.embedding_dim)))
    for where, tensor, shape in shapes:
        _check_tensor(where, tensor)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"RankingModel: `{where}` must have shape {shape}, got {tuple(tensor.shape)}; "
                "make batch and config agree."
            )
    for name in rows:
        if not embeddings[name].dtype.is_floating_point:
            raise TypeError(
                f"RankingModel: `embeddings[{name!r}]` must be floating point, got {embeddings[name].dtype}; look the "
                "ids up first."
            )
    for tower in config.sequences:
        first = events[tower.name].hidden
        assert isinstance(first, nn.Module)
        for name in tower.event_features:
            _check_dtype(f"embeddings[{name!r}]", embeddings[name], first, beside_float32=True)
    for name, layer in zip(config.context_features, context.features, strict=True):
        _check_dtype(f"embeddings[{name!r}]", embeddings[name], layer)
    if config.num_dense:
        _check_dtype("batch.dense", batch.dense, context.dense[0])


def _check_tensor(where: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"RankingModel: `{where}` must be a Tensor, got {type(x).__name__}; convert it with torch.as_tensor."
        )


def _check_dtype(where: str, x: Tensor, layer: nn.Module, *, beside_float32: bool = False) -> None:
    """Raise on a dtype that a plain linear layer, outside of autocast, would refuse without naming the tensor.

    ``beside_float32``: x is joined with columns of float32, which widen it.
    """
    # The parameter of a sharded layer is of a class of its own: what reads x is gathered later, and may cast.
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
        return
    taken, device_type = [layer.weight.dtype], x.device.type
    if device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type):
        taken.append(torch.get_autocast_dtype(device_type))
    elif beside_float32:
        taken = [dtype for dtype in _FLOATS if torch.promote_types(dtype, torch.float32) == layer.weight.dtype]
        if not taken:
            raise TypeError(
                f"RankingModel: the parameters must be float32 where there are sequences, got {layer.weight.dtype}: "
                "ages are float32; keep them in float32 and run the model under torch.autocast."
            )
    if x.dtype not in taken:
        raise TypeError(
            f"RankingModel: `{where}` must be {taken[0]} like the layer that reads it, got {x.dtype}; cast it, or "
            "run the model under torch.autocast."
        )


def check_outputs(outputs: Any, config: RankingConfig) -> None:
    """Raise unless ``outputs`` are the logits of every task."""
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"RankingModel.loss: `outputs` must map tasks to logits, got {type(outputs).__name__}; "
            "pass the result of forward, then the batch."
        )
    for task in config.tasks:
        if task not in outputs:
            raise ValueError(
                f"RankingModel.loss: `outputs` must hold every task of the config, got none for {task!r}; "
                "pass the result of forward."
            )
        _check_tensor(f"outputs[{task!r}]", outputs[task])


def check_label(task: str, labels: Mapping[str, Tensor], logits: Tensor, *, read_values: bool) -> None:
    """Raise unless there is a label between 0 and 1 for each of the task's logits; reads them if ``read_values``."""
    if task not in labels:
        raise ValueError(
            f"RankingModel.loss: `batch.labels` must hold every task of the config, got none for {task!r}; add it."
        )
    label = labels[task]
    _check_tensor(f"batch.labels[{task!r}]", label)
    if label.shape != logits.shape:
        raise ValueError(
            f"RankingModel.loss: `batch.labels[{task!r}]` must have shape {tuple(logits.shape)} like "
            f"its logits, got {tuple(label.shape)}; give one label per sample."
        )
    if label.dtype.is_complex:
        raise TypeError(f"RankingModel.loss: `batch.labels[{task!r}]` must be real, got {label.dtype}; cast it first.")
    if not read_values or label.numel() == 0:
        return
    # A NaN is neither.
    is_label = (label >= 0) & (label <= 1)
    if not bool(is_label.all()):
        sample = int((~is_label).nonzero()[0])
        raise ValueError(
            f"RankingModel.loss: `batch.labels[{task!r}]` must be 0 or 1, or a probability between, got "
            f"{label[sample].item()} at sample {sample}; encode missing labels and ratings before."
        )
