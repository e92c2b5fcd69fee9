"""From settings to the parts of a trainer: mesh, tables, model, sources."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gem_model import RankingModel, random_batch
from gem_parallel import FeatureConfig, LengthCost, ParallelDims, ShardedEmbeddings, TableConfig, clip_grad_norm_
from gem_parallel.mesh import ParallelMesh
from gem_parallel.watch import HANG_EXIT_CODE, HangReport, RankWatch
from gem_train import rng
from gem_train.balance import SampleBalancer
from gem_train.data import EventLog, EventSource
from gem_train.data.log import Split
from gem_train.launch import end_process, join_alone
from gem_train.recipes.capture import SegmentCapture, check_capture, make_capture
from gem_train.recipes.parallel import describe_wire, spread
from gem_train.recipes.recipe import RunConfig
from gem_train.step import ClipGradients
from gem_train.world import World

__all__ = ["Parts", "build", "build_embeddings", "build_model", "build_source"]


class Parts(NamedTuple):
    """What a trainer is made of."""

    model: nn.Module
    """Converted to the precision and spread over the mesh."""
    embeddings: ShardedEmbeddings
    """All tables of the log."""
    train_source: EventSource
    """Training batches of this rank."""
    layers: tuple[dict[str, Any], ...]
    """What gem_precision says about each converted layer: fqn, kind, precision, backend, reason; none in fp32."""
    eval_sources: dict[str, Callable[[], EventSource]]
    """Split -> function that makes its source."""
    clip: ClipGradients
    """Global gradient norm over the mesh."""
    dims: ParallelDims
    """The axes over the ranks."""
    balancer: SampleBalancer | None
    """Spreads the samples of a step over the ranks; None with one."""
    watch: Callable[[], RankWatch] | None
    """Begins what ends a run whose step does not end; None with one rank or without a limit."""
    num_parameters: dict[str, int]
    """Of the whole "dense" model and of all "sparse" tables, whatever a rank holds."""
    dense_wire: str
    """Which dense parameters travel in what, in one phrase; empty if all do in the dtype of compute."""
    capture: SegmentCapture | None
    """What puts parts of the model into CUDA graphs; None where no part can be or shall be."""
    capture_note: str
    """Whether steps use CUDA graphs, or why not, in one phrase."""


def build(config: RunConfig, log: EventLog, world: World, *, precision: str = "fp32") -> Parts:
    """Makes the parts of a run. All ranks call it.

    Args:
        config: The settings.
        log: The data.
        world: The ranks.
        precision: Name of a gem_precision recipe.

    Returns:
        The parts, the same for the same seed on any number of ranks.

    Raises:
        ConfigError: if the layout does not fit the ranks, or `trainer.capture` is on and no CUDA graph can be.
    """
    check_capture(config, world.device, world.size)
    dims = config.parallel.dims(world.size, num_experts=config.model.num_experts)
    wire = config.parallel.param_wire(precision)
    if wire is not None and world.size == 1:
        # What compute reads must not depend on the number of processes.
        join_alone(world.device)
    mesh = dims.build_mesh(world.device.type) if world.size > 1 or wire is not None else None
    embeddings = build_embeddings(config, log, world, mesh.sparse if mesh and world.size > 1 else None)
    model: nn.Module = build_model(config, world.device, precision)
    layers = describe_layers(model, precision)
    num_parameters = {
        "dense": sum(parameter.numel() for parameter in model.parameters()),
        "sparse": sum(table.num_rows * table.dim for table in embeddings.tables),
    }
    dense_wire = "" if wire is None else describe_wire(model, wire)
    if mesh is not None:
        model = spread(model, config.parallel, mesh, wire=wire)
    rng.seed_all(config.trainer.seed + world.rank)  # dropout differs between ranks, weights do not

    train_source = build_source(config, log, world, "train")
    full_step = min(config.data.global_batch_size, train_source.num_samples)
    capture, capture_note = make_capture(config, model, world.device, world.size, full_step)

    def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        return clip_grad_norm_(parameters, max_norm, mesh)

    def source(split: Split) -> Callable[[], EventSource]:
        return lambda: build_source(config, log, world, split)

    return Parts(
        model,
        embeddings,
        train_source,
        layers,
        {"validation": source("validation"), "test": source("test")},
        clip,
        dims,
        build_balancer(config, log, world) if world.size > 1 else None,
        build_watch(config, world, mesh, embeddings) if mesh is not None and world.size > 1 else None,
        num_parameters,
        dense_wire,
        capture,
        capture_note,
    )


def build_model(config: RunConfig, device: torch.device, precision: str) -> nn.Module:
    """The dense model of one rank, before it is spread over a mesh; its weights follow from the seed.

    Args:
        config: The settings.
        device: Where it is placed.
        precision: Name of a gem_precision recipe.
    """
    rng.seed_all(config.trainer.seed)
    model = RankingModel(config.model).to(device)
    if precision == "fp32":
        return model
    from gem_precision import convert, get_recipe  # not needed, and so not required, in fp32

    return convert(model, get_recipe(precision))


def build_balancer(config: RunConfig, log: EventLog, world: World) -> SampleBalancer:
    """What spreads the samples of a step, by the model's own FLOPs as a function of their lengths.

    Args:
        config: The settings.
        log: The data.
        world: The ranks.
    """
    multi_valued = [feature.name for feature in log.features if feature.multi_valued]
    return SampleBalancer(_cost(config, log), world, mode=config.data.balance, multi_valued=multi_valued)


def build_watch(
    config: RunConfig, world: World, mesh: ParallelMesh, embeddings: ShardedEmbeddings
) -> Callable[[], RankWatch] | None:
    """What names the ranks that keep a step from ending, and ends the run; None if the settings set no limit.

    Args:
        config: The settings.
        world: The ranks, more than one.
        mesh: Their axes.
        embeddings: The tables of this rank.
    """
    limit = config.trainer.step_timeout_s
    if limit == 0:
        return None
    assert world.control is not None
    groups = {"control": world.control, **embeddings.process_groups}
    return lambda: RankWatch(limit, mesh=mesh, groups=groups, on_hang=_end_run)


def _end_run(report: HangReport) -> None:
    """Ends this rank with one line, or, where no rank is to blame, with what its main thread does."""
    message = f"{report.text}; the limit is trainer.step_timeout_s"
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if not report.missing and frame is not None:
        message += f"\nstack of the main thread of rank {report.rank}:\n{''.join(traceback.format_stack(frame))}"
    end_process(message, HANG_EXIT_CODE)


def _cost(config: RunConfig, log: EventLog) -> LengthCost:
    """FLOPs of a sample from the lengths of its histories."""
    names = [tower.name for tower in config.model.sequences]
    if not names:
        return LengthCost(constant=1.0)
    with torch.device("meta"):
        model = RankingModel(config.model)
    # One history at a time, the others empty.
    longest = min(config.data.max_history, int((log.history_end - log.history_start).max(initial=0)))
    points = [max(longest, 8) * step // 8 for step in range(9)]
    probes = [{name: length if name == varied else 0 for name in names} for varied in names for length in points]
    flops = [
        float(model.flops(random_batch(config.model, 1, lengths={n: [k] for n, k in probe.items()})[0]).total)
        for probe in probes
    ]
    lengths = {name: torch.tensor([probe[name] for probe in probes]) for name in names}
    return LengthCost.fit(lengths, torch.tensor(flops, dtype=torch.float64))


def describe_layers(model: nn.Module, precision: str) -> tuple[dict[str, Any], ...]:
    """The precision report of a model as JSON values; empty in fp32, where nothing is converted.

    Args:
        model: From `build_model`, not yet spread over a mesh.
        precision: Name of its gem_precision recipe.
    """
    if precision == "fp32":
        return ()
    from gem_precision import describe

    names = ("fqn", "kind", "precision", "backend", "reason")
    return tuple({name: str(getattr(layer, name)) for name in names} for layer in describe(model))


def build_embeddings(config: RunConfig, log: EventLog, world: World, mesh: DeviceMesh | None) -> ShardedEmbeddings:
    """The tables of a log.

    Args:
        config: The settings.
        log: Tables and features are its own.
        world: The ranks.
        mesh: The sparse mesh, or None for one process.
    """
    dim = config.model.embedding_dim
    tables = tuple(TableConfig(name=table.name, num_rows=table.num_rows, dim=dim) for table in log.tables)
    # One id per bag needs no pooling: its row is the bag's vector.
    features = tuple(
        FeatureConfig(name=f.name, table=f.table, pooling="mean" if f.multi_valued else "none") for f in log.features
    )
    return ShardedEmbeddings(
        tables,
        features,
        optimizer=config.sparse,
        mesh=mesh,
        device=world.device,
        seed=config.trainer.seed,
        **config.parallel.table_options(),
    )


def build_source(config: RunConfig, log: EventLog, world: World, split: Split) -> EventSource:
    """The batches of one split for one rank.

    Args:
        config: The settings.
        log: The data.
        world: The ranks.
        split: Which samples.
    """
    training = split == "train"
    return EventSource(
        log,
        split,
        global_batch_size=config.data.global_batch_size if training else config.data.eval_batch_size,
        rank=world.rank,
        world_size=world.size,
        seed=config.trainer.seed,
        max_history=config.data.max_history,
        epochs=config.data.epochs if training else 1,
        balance_lengths=config.data.balance == "reader",
        prefetch_batches=config.data.prefetch_batches,
        # What is exchanged arrives in other memory.
        pin_memory=world.device.type == "cuda" and (world.size == 1 or config.data.balance != "exchange"),
    )
