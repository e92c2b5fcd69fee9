"""A model and a batch as the numbers that gem_parallel.planner asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from gem_model import RankingConfig, RankingModel, SequenceTowerConfig
from gem_model.random_batch import RandomBatch, RandomSequence, random_batch
from gem_parallel.planner import DenseUnit, ModelDescription, SparseTable
from gem_train.data import Batch, EventLog
from gem_train.recipes.build import build_source
from gem_train.recipes.recipe import RunConfig
from gem_train.world import World

__all__ = ["describe_dense", "describe_run", "measure_activations"]

MAX_MEASURED = 5_000_000
"""Parameters of the largest model that is run to see what it saves."""
NUM_MEASURED = 2
"""Samples that it is run with, and with twice as many."""


def describe_run(
    config: RunConfig, log: EventLog, samples_per_rank: int, *, precision: str = "bf16"
) -> ModelDescription:
    """A recipe's run, from its first training batch of as many samples as a rank gets.

    Histories, ids and repeated ids are those of that batch; FLOPs are exact for it.

    Args:
        config: The settings.
        log: The data.
        samples_per_rank: Samples of a step on one rank.
        precision: Name of the gem_precision recipe that the dense layers train in.
    """
    data = replace(config.data, global_batch_size=samples_per_rank, prefetch_batches=0)
    batch: Batch = next(iter(build_source(replace(config, data=data), log, World(), "train")))
    samples = batch.num_samples
    lengths = {name: torch.diff(sequence.offsets).tolist() for name, sequence in batch.sequences.items()}
    dense = describe_dense(config.model, lengths, precision=precision)
    dim = config.model.embedding_dim
    tables = []
    for table in log.tables:
        features = [feature for feature in log.features if feature.table == table.name]
        values = [batch.ids[feature.name][0] for feature in features]
        count = sum(value.numel() for value in values)
        bags = sum(batch.ids[feature.name][1].numel() - 1 for feature in features)
        distinct = torch.cat(values).unique().numel() if count else 0
        pooled = any(feature.multi_valued for feature in features)
        tables.append(
            SparseTable(
                name=table.name,
                num_rows=table.num_rows,
                dim=dim,
                ids_per_sample=count / samples,
                unique_fraction=distinct / count if count else 1.0,
                pooling="mean" if pooled else "none",
                bags_per_sample=bags / samples,
            )
        )
    return ModelDescription(name=log.schema.name, units=dense, tables=tuple(tables))


def describe_dense(
    config: RankingConfig, lengths: Mapping[str, Sequence[int]], *, precision: str = "fp32"
) -> tuple[DenseUnit, ...]:
    """The model's FSDP units in the order they run, with FLOPs and saved bytes per sample.

    Parameters and FLOPs are counted on the meta device. Saved bytes are measured by running the model on the CPU; a
    model above 5 million parameters is run at two small widths and what they save continued linearly, as every saved
    tensor's size is linear in the widths.

    Args:
        config: The model.
        lengths: Sequence name -> events of each sample; all of one number of samples.
        precision: Name of the gem_precision recipe that it trains in, which decides what is saved.
    """
    with torch.device("meta"):
        model = RankingModel(config)
    samples = max((len(each) for each in lengths.values()), default=NUM_MEASURED)
    flops = model.flops(_lengths_only(samples, lengths)).by_module
    units = _units(model)
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in units}
    for name, parameter in model.named_parameters():
        unit = _unit_of(name, units)
        # Experts are alike: a unit of several has the shapes of one.
        if unit not in model.expert_layers or name.startswith(f"{unit}.experts.0."):
            shapes[unit].append(tuple(parameter.shape))
    gemm = dict.fromkeys(units, 0.0)
    attention = dict.fromkeys(units, 0.0)
    for name, count in flops.items():
        gemm[_unit_of(name, units)] += count.gemm / samples
        attention[_unit_of(name, units)] += count.attention / samples
    saved = measure_activations(config, lengths, precision=precision)
    element_bytes = 2 if precision == "bf16_activations" else 4
    head_dims = {tower.name: tower.head_dim for tower in config.sequences}
    found = []
    for name in units:
        largest = max((shape for shape in shapes[name] if len(shape) > 1), key=math.prod, default=(64, 64))
        found.append(
            DenseUnit(
                name=name,
                shapes=tuple(shapes[name]),
                gemm_flops=gemm[name],
                gemm_width=min(largest),
                attention_flops=attention[name],
                attention_width=head_dims.get(name.split(".")[-1], 128),
                activation_bytes=saved.get(name, 0.0),
                reshard_after_forward=bool(name),
                **_expert_options(model, name, element_bytes),
            )
        )
    return tuple(unit for unit in found if unit.name or unit.shapes or unit.gemm_flops or unit.activation_bytes)


def _expert_options(model: RankingModel, name: str, element_bytes: int) -> dict[str, Any]:
    """What a unit that sums experts adds to its description: how many, and what their rows weigh on the wire."""
    config = model.config
    if name not in model.expert_layers:
        return {}
    first = name == model.expert_layers[0]
    num_inputs = (config.num_input_tokens if first else config.num_tokens) + config.num_pooled_tokens
    return {
        "num_experts": config.num_experts,
        "expert_input_bytes": float(element_bytes * num_inputs * config.dim),
        "expert_output_bytes": float(element_bytes * config.num_tokens * config.dim),
    }


def measure_activations(
    config: RankingConfig, lengths: Mapping[str, Sequence[int]], *, precision: str = "fp32"
) -> dict[str, float]:
    """Unit -> bytes per sample that autograd saves in forward, beside embeddings and what every step has once.

    Args:
        config: The model.
        lengths: Sequence name -> events of each sample; their mean is what is run.
        precision: Name of the gem_precision recipe that it is run in, all linear layers, however narrow.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in RankingModel(config).parameters())
    events = {name: round(sum(each) / max(1, len(each))) for name, each in lengths.items()}
    factor = 1
    # Parameters fall with the square of the width.
    while size / factor**2 > MAX_MEASURED / 16 and size > MAX_MEASURED:
        factor *= 2
    if factor == 1:
        return _saved_bytes(config, events, precision)
    once = _saved_bytes(_narrowed(config, factor), events, precision)
    twice = _saved_bytes(_narrowed(config, factor // 2), events, precision)
    return {name: once[name] + (twice[name] - once[name]) * (factor - 1) for name in once}


def _narrowed(config: RankingConfig, factor: int) -> RankingConfig:
    """All widths divided, all numbers of tokens, heads and layers kept."""

    def cut(width: int, unit: int = 1) -> int:
        return max(unit, width // factor // unit * unit)

    def tower(each: SequenceTowerConfig) -> SequenceTowerConfig:
        dim = cut(each.dim, each.num_heads)
        return replace(each, dim=dim, event_hidden=cut(each.event_hidden))

    return replace(
        config,
        sequences=tuple(tower(each) for each in config.sequences),
        embedding_dim=cut(config.embedding_dim, 4),
        dim=cut(config.dim),
        dense_hidden=cut(config.dense_hidden),
        fm_hidden=cut(config.fm_hidden),
        head_hidden=tuple(cut(width) for width in config.head_hidden),
    )


def _saved_bytes(config: RankingConfig, events: Mapping[str, int], precision: str = "fp32") -> dict[str, float]:
    state = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        model = RankingModel(config).train()
    finally:
        torch.set_rng_state(state)
    if precision != "fp32":
        from gem_precision import BF16Recipe, MXFP8Recipe, convert, get_recipe  # not needed in fp32

        recipe = get_recipe(precision)
        assert isinstance(recipe, BF16Recipe | MXFP8Recipe)
        # A narrowed model stands for one whose layers are wide.
        convert(model, replace(recipe, min_features=1))
    once = _saved_by(model, config, events, NUM_MEASURED)
    twice = _saved_by(model, config, events, 2 * NUM_MEASURED)
    # Cast weights are saved once whatever the samples: the difference does not have them.
    return {name: (twice[name] - total) / NUM_MEASURED for name, total in once.items()}


def _saved_by(
    model: RankingModel, config: RankingConfig, events: Mapping[str, int], num_samples: int
) -> dict[str, float]:
    """Unit -> bytes that autograd saves in forward of so many samples."""
    lengths = {name: [count] * num_samples for name, count in events.items()}
    state = torch.get_rng_state()
    try:
        batch, embeddings = random_batch(config, num_samples, lengths=lengths)
    finally:
        torch.set_rng_state(state)
    units = _units(model)
    saved = dict.fromkeys(units, 0.0)
    inside = [""]
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *embeddings.values())}
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            kept.append(storage)  # or another tensor may take its address
            saved[inside[-1]] += storage.nbytes()
        return tensor

    with _tracked(model, units, inside), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(model(batch, embeddings), batch)
    return saved


@contextmanager
def _tracked(model: nn.Module, units: Sequence[str], inside: list[str]) -> Iterator[None]:
    """Keep the name of the unit that runs at the end of ``inside``."""

    def enter(name: str) -> Any:
        return lambda *_: inside.append(name)

    def leave(*_: Any) -> None:
        inside.pop()

    handles = []
    for name in units:
        if name:
            module = model.get_submodule(name)
            handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _units(model: RankingModel) -> tuple[str, ...]:
    """Names of the units in the order they run, the root first."""
    names = [name for name, _ in model.named_modules() if name]
    matched = [name for pattern in model.shard_units for name in names if fnmatch(name, pattern)]
    return ("", *dict.fromkeys(matched))


def _unit_of(name: str, units: Sequence[str]) -> str:
    """Innermost unit that holds a parameter or module."""
    holders = [unit for unit in units if not unit or name == unit or name.startswith(f"{unit}.")]
    return max(holders, key=len)


def _lengths_only(samples: int, lengths: Mapping[str, Sequence[int]]) -> RandomBatch:
    """A batch with the offsets that FLOPs are counted from."""
    sequences = {}
    for name, events in lengths.items():
        offsets = torch.tensor([0, *events], dtype=torch.int64).cumsum(0)
        empty = torch.empty(0)
        sequences[name] = RandomSequence(offsets, max(events, default=0), empty, empty)
    return RandomBatch(num_samples=samples, dense=torch.empty(0), sequences=sequences, labels={})
