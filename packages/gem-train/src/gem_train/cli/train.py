"""`gem train`."""

import argparse
import platform
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gem_train.checkpoint import Checkpointer
from gem_train.cli.compare import compare_runs, default_out, final_scores, full_precision_run
from gem_train.cli.output import complain, say
from gem_train.cli.processes import LAYOUT, describe_layout, layout_assignments, num_processes, start
from gem_train.cli.table import print_scores
from gem_train.data import EventLog, Scoreboard
from gem_train.data.log import labels_alike
from gem_train.doctor import commit, versions
from gem_train.errors import ConfigError
from gem_train.interrupt import INTERRUPTED
from gem_train.launch import is_worker, join, leave, select_device
from gem_train.mfu import device_peak
from gem_train.overrides import field_values, parse_assignments
from gem_train.progress import SilentProgress, make_progress
from gem_train.report import write_report
from gem_train.run_dir import CHANGEABLE, RunDirectory, RunRecord, differing
from gem_train.run_log import RunLog
from gem_train.trainer import Trainer, TrainResult
from gem_train.world import World

if TYPE_CHECKING:
    from gem_train.recipes import ParallelConfig, Parts, Recipe, RunConfig

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Trains a recipe in this process, or in several.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    from gem_train import recipes

    recipe = recipes.get(args.recipe)
    given, flags = _assignments(args)
    directory = RunDirectory(args.out or default_out(recipe.name, args.precision))
    if not is_worker():
        directory.check(resume=args.resume, overwrite=args.overwrite)
        old = _old_record(directory, recipe) if args.resume else None
        assignments, note = _merged(given, old, num_processes(args))
        config = recipes.RunConfig.resolve(recipe, recipe.schema, assignments, flags=flags)
        _check_layout(config.parallel, num_processes(args), config.model.num_experts, old)
        recipes.check_capture(config, select_device(args.device), num_processes(args))
        if old is not None:
            _check_steps(directory, config.trainer.max_steps)
        _data(args, recipe, old)
        _check_compare(args)
        if note is not None:
            complain(note)
        if args.nproc != 1:
            return start(args)
    world = join(args.device)
    code = _train(args, recipe, given, flags, directory, world)
    leave()
    return code


def _train(
    args: argparse.Namespace,
    recipe: "Recipe",
    given: dict[str, str],
    flags: dict[str, str],
    directory: RunDirectory,
    world: World,
) -> int:
    from gem_train.recipes import RunConfig, build

    world.on_first(lambda: directory.check(resume=args.resume, overwrite=args.overwrite))
    world.on_first(lambda: _check_compare(args))
    old = _old_record(directory, recipe) if args.resume else None
    assignments = _merged(given, old, world.size)[0]
    if is_worker():  # torchrun starts here
        world.on_all(lambda: RunConfig.resolve(recipe, recipe.schema, assignments, flags=flags))
    record = RunRecord(
        recipe=recipe.name,
        precision=args.precision or (old.precision if old else "fp32"),
        data=_data(args, recipe, old),
        assignments=assignments,
        settings={},
        versions=versions(),
    )
    log = world.on_all(lambda: recipe.load(None if record.data is None else Path(record.data)))
    config = world.on_all(lambda: RunConfig.resolve(recipe, log, record.assignments, flags=flags))
    record = replace(record, settings=config.to_dict(), encodings=dict(log.encodings))
    if old is not None:
        world.on_all(lambda: _check_same_run(directory, old, record, tell=world.is_first))
    parts = build(config, log, world, precision=record.precision)
    checkpointer = world.on_all(
        lambda: Checkpointer(directory.checkpoints, world=world, keep_last=config.trainer.keep_last)
    )
    first = checkpointer.latest() if args.resume else None
    total = min(parts.train_source.num_batches, config.trainer.max_steps or parts.train_source.num_batches)
    progress = make_progress(total, first or 0) if world.is_first else SilentProgress()
    if parts.capture is not None:
        parts.capture.say = progress.say
    with ExitStack() as held, _stop_on_signal(progress.say) as stopped:
        trainer = world.on_all(
            lambda: Trainer(
                config.trainer,
                model=parts.model,
                embeddings=parts.embeddings,
                sparse_learning_rate=config.sparse.learning_rate,
                train_source=parts.train_source,
                total_steps=parts.train_source.num_batches,
                tasks=config.model.tasks,
                eval_sources=parts.eval_sources,
                world=world,
                clip=parts.clip,
                checkpointer=checkpointer,
                progress=progress,
                should_stop=lambda: bool(stopped),
                device_name=_device_name(world.device),
                balancer=parts.balancer,
                watch=parts.watch,
                prepare=parts.capture,
            )
        )
        if first is not None:
            trainer.resume(first)
        # Everything that the user can have got wrong has been found by now; from here on the run's files change.
        world.on_first(lambda: _begin(args, directory, record, held))
        if first is not None:
            progress.say(f"resumed at step {first}")
            for name, theirs, ours in differing(old.settings if old else {}, record.settings):
                more = "; the learning rate's schedule ends there" if name == "trainer.max_steps" else ""
                progress.say(f"changed: {name}, {theirs!r} before, {ours!r} from here on{more}")
        elif args.resume:
            progress.say(f"{directory.path} has no checkpoint yet; beginning at step 0")
        for remark in labels_alike(log, config.model.tasks):
            progress.say(f"note: {remark}")
        if world.size > 1:
            progress.say(f"{world.size} processes: {describe_layout(parts.dims)}")
        if parts.dense_wire:
            progress.say(f"dense parameters on the wire: {parts.dense_wire}")
        progress.say(f"CUDA graphs: {parts.capture_note}")
        if parts.layers:
            progress.say(f"precision {record.precision}: {_layer_counts(parts)}")
        with _open_log(directory, world, (first or 0) if args.resume else None) as run_log:
            reference = recipe.reference_for(log) if recipe.reference_task in config.model.tasks else None
            if run_log is not None:
                values = _config_record(recipe, config, parts, world, directory, record, first or 0)
                run_log.write("config", values | _settings_values(recipe, config, log) | _reference_values(reference))
            result = trainer.run(run_log)
    if world.is_first:
        _conclude(args, recipe, directory, result, reference)
    return INTERRUPTED if result.reason == "interrupted" else 0


def _begin(args: argparse.Namespace, directory: RunDirectory, record: RunRecord, held: ExitStack) -> None:
    held.enter_context(directory.hold())
    # Another run may have begun here since this one looked, and ended, too.
    directory.check(resume=args.resume, overwrite=args.overwrite)
    if args.overwrite:
        directory.clear()
    directory.write(record)


def _open_log(
    directory: RunDirectory, world: World, resume_step: int | None
) -> AbstractContextManager[RunLog] | AbstractContextManager[None]:
    return RunLog(directory.path, resume_step=resume_step) if world.is_first else nullcontext()


def _old_record(directory: RunDirectory, recipe: "Recipe") -> RunRecord:
    """What made the run that is to be continued, which must be one of this recipe."""
    old = directory.read()
    if old.recipe != recipe.name:
        raise ConfigError(f"--resume: {directory.path} is a run of {old.recipe}, got {recipe.name}; name that recipe")
    return old


def _check_compare(args: argparse.Namespace) -> None:
    """Refuses a run that is to be set beside this one and has nothing to set there."""
    if args.compare:
        try:
            final_scores(Path(args.compare))
        except ValueError as error:
            raise ConfigError(f"--compare: {error}") from error


def _data(args: argparse.Namespace, recipe: "Recipe", old: RunRecord | None) -> str | None:
    """The data directory, absolute so that the run can be evaluated from anywhere; None for generated data."""
    path = recipe.directory(args.data or (old.data if old else None))
    return None if path is None else str(path.absolute())


def _check_same_run(directory: RunDirectory, old: RunRecord, new: RunRecord, *, tell: bool) -> None:
    note = directory.compare_encodings(old, new.encodings or {}, new.data)
    if note is not None and tell:
        complain(note)
    if new.precision != old.precision:
        raise ConfigError(
            f"--precision: {directory.path} was trained in {old.precision}, got {new.precision}; leave it out"
        )
    directory.compare(new.settings, changeable=CHANGEABLE)


def _layer_counts(parts: "Parts") -> str:
    """How many layers compute in what and by which backend, so that an emulation is never a surprise."""
    counts = Counter(f"{layer['precision']} ({layer['backend']})" for layer in parts.layers)
    return ", ".join(f"{count} layers {kind}" for kind, count in counts.most_common())


def _assignments(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Field -> text of what the user changes, and field -> option of what was not given with --set."""
    assignments = parse_assignments(args.assignments)
    options = {"trainer.max_steps": "steps", "trainer.seed": "seed"}
    given = {name: getattr(args, option) for name, option in options.items()}
    flagged = {name: str(value) for name, value in given.items() if value is not None} | layout_assignments(args)
    flags = {name: f"--{options.get(name, name.split('.')[-1]).replace('_', '-')}" for name in flagged}
    for name, flag in flags.items():
        if name in assignments:
            raise ConfigError(
                f"{flag} {flagged[name]} and --set {name}={assignments[name]} are the same setting; give one of them"
            )
    return assignments | flagged, flags


def _merged(given: dict[str, str], old: RunRecord | None, processes: int) -> tuple[dict[str, str], str | None]:
    """The user's changes to the recipe with those of the run that goes on, and a note about what was left behind.

    The degrees belong to a start: those of the run are taken if no other are given and they fit the processes.
    """
    if old is None:
        return given, None
    degrees = {name for name in old.assignments if name in {f"parallel.{axis}" for axis in LAYOUT}}
    kept = {name: text for name, text in old.assignments.items() if name not in degrees}
    if not degrees or any(name.removeprefix("parallel.") in LAYOUT for name in given):
        return kept | given, None
    from gem_train.overrides import apply_overrides
    from gem_train.recipes import ParallelConfig

    layout = {name.removeprefix("parallel."): old.assignments[name] for name in sorted(degrees)}
    num_experts = int(old.settings.get("model", {}).get("num_experts", processes))
    try:
        _check_layout(apply_overrides(ParallelConfig(), layout), processes, num_experts, old)
    except ConfigError:
        shown = ", ".join(f"{axis} {degree}" for axis, degree in layout.items())
        where = "one process" if processes == 1 else f"{processes} processes"
        return kept | given, f"note: the layout of the run ({shown}) does not fit {where} and is left out"
    return old.assignments | given, None


def _check_steps(directory: RunDirectory, steps: int | None) -> None:
    """Refuses to continue a run that is longer already than it is to become."""
    latest = Checkpointer(directory.checkpoints).latest()
    if latest is not None and steps is not None and steps < latest:
        raise ConfigError(
            f"--steps: must be at least {latest}, the step of the last checkpoint in {directory.path}, got {steps}; "
            f"name a later step, or another directory with --out for a run of {steps} steps"
        )


def _check_layout(parallel: "ParallelConfig", processes: int, num_experts: int, old: RunRecord | None) -> None:
    """Refuses degrees and an engine that do not fit, before anything is read or started."""
    parallel.dims(processes, num_experts=num_experts, trained=old is not None)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def _config_record(
    recipe: "Recipe",
    config: "RunConfig",
    parts: "Parts",
    world: World,
    directory: RunDirectory,
    record: RunRecord,
    start: int,
) -> dict[str, Any]:
    """The record `config` of metrics.jsonl."""
    name = _device_name(world.device)
    peak = device_peak(name) if world.device.type == "cuda" else None
    return {
        "run": directory.path.name,
        "recipe": recipe.name,
        "precision": record.precision,
        "dataset": recipe.name,
        "world_size": world.size,
        "parameters": parts.num_parameters,
        "parallel": {axis: getattr(parts.dims, axis) for axis in LAYOUT},
        "dense_wire": parts.dense_wire,
        "cuda_graphs": parts.capture_note,
        "device": name,
        "device_peak_flops": None if peak is None else peak.flops_per_second,
        "mfu_reason": None if peak else f"the bf16 peak of {name!r} is not in the table of gem_train.mfu",
        "num_devices": world.size,
        "seed": config.trainer.seed,
        "reference_task": recipe.reference_task,
        "layers": list(parts.layers),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": record.versions,
        "start_step": start,
    }


def _settings_values(recipe: "Recipe", config: "RunConfig", log: EventLog) -> dict[str, Any]:
    """What the record `config` says of the settings."""
    settings, plain = field_values(config), field_values(type(config).resolve(recipe, log, {}))
    return {
        "settings": settings,
        "changed": {name: plain.get(name) for name, value in settings.items() if plain.get(name) != value},
    }


def _reference_values(reference: Scoreboard | str | None) -> dict[str, Any]:
    """What the record `config` says of other predictors."""
    known = reference if isinstance(reference, Scoreboard) else None
    return {
        "reference": [score._asdict() for score in known.scores] if known else [],
        "reference_standard_error": known.ne_standard_error if known else None,
        "reference_note": reference if isinstance(reference, str) else None,
    }


def _conclude(
    args: argparse.Namespace,
    recipe: "Recipe",
    directory: RunDirectory,
    result: TrainResult,
    reference: Scoreboard | str | None,
) -> None:
    if result.reason == "interrupted":
        complain(f"interrupted at step {result.step}; continue with --out {directory.path} --resume")
        return
    if result.reason == "max_seconds":
        complain(f"stopped by trainer.max_seconds at step {result.step}")
    other = Path(args.compare) if args.compare else full_precision_run(directory)
    report = write_report(directory.path, compare=[other] if other is not None else [])
    print_scores(result.evaluations, reference, recipe.reference_task)
    if other is not None:
        compare_runs(directory.path, other)
    say(f"report: {report}")


@contextmanager
def _stop_on_signal(tell: Callable[[str], None]) -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM: the run ends after a step with a checkpoint; a second SIGINT ends it at once."""
    received: list[int] = []

    def handle(number: int, _: object) -> None:
        if signal.SIGINT in received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        tell("stopping after this step; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
