"""`gem train`."""

import argparse
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gem_train.checkpoint import Checkpointer
from gem_train.cli.output import complain, say
from gem_train.cli.table import compare_runs, print_scores
from gem_train.doctor import versions
from gem_train.errors import ConfigError
from gem_train.launch import is_worker, join, leave, run_workers
from gem_train.mfu import device_peak
from gem_train.overrides import parse_assignments
from gem_train.progress import SilentProgress, make_progress
from gem_train.report import write_report
from gem_train.run_dir import CHANGEABLE, RunDirectory, RunRecord
from gem_train.run_log import RunLog
from gem_train.trainer import Trainer, TrainResult
from gem_train.world import World

if TYPE_CHECKING:
    from gem_train.recipes import Parts, Recipe, RunConfig

__all__ = ["run"]

INTERRUPTED = 130


def run(args: argparse.Namespace) -> int:
    """Trains a recipe in this process, or in several.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    from gem_train import recipes

    recipe = recipes.get(args.recipe)
    given = _assignments(args)
    directory = RunDirectory(args.out or _default_out(recipe.name, args.precision))
    if not is_worker():
        directory.check(resume=args.resume, overwrite=args.overwrite)
        recipe.directory(args.data)
        if args.nproc != 1:
            error = run_workers([sys.executable, "-m", "gem_train.cli", *args.argv], args.nproc)
            if error is None:
                return 0
            if error.exit_code != INTERRUPTED:
                complain(f"gem: error: {error.message}")
            return error.exit_code
    world = join(args.device)
    code = _train(args, recipe, given, directory, world)
    leave()
    return code


def _train(
    args: argparse.Namespace, recipe: "Recipe", given: dict[str, str], directory: RunDirectory, world: World
) -> int:
    from gem_train.recipes import RunConfig, build

    resume, record = _prepare(args, directory, world)
    assignments = given if record is None else record.assignments | given
    precision = args.precision or (record.precision if record else "fp32")
    data = recipe.directory(args.data or (record.data if record else None))
    log = recipe.load(data)
    config = RunConfig.resolve(recipe, log, assignments)
    if record is not None:
        directory.compare(config.to_dict(), changeable=CHANGEABLE)
        if precision != record.precision:
            raise ConfigError(
                f"--precision: {directory.path} was trained in {record.precision}, got {precision}; leave it out"
            )
    parts = build(config, log, world, precision=precision)
    checkpointer = Checkpointer(directory.checkpoints, world=world, keep_last=config.trainer.keep_last)
    start = checkpointer.latest() if resume else None
    if world.is_first:
        new = RunRecord(
            recipe=recipe.name,
            precision=precision,
            data=None if data is None else str(data),
            assignments=assignments,
            settings=config.to_dict(),
            versions=versions(),
        )
        directory.write(new)
    world.barrier()
    run_log = RunLog(directory.path, resume_step=start if resume else None) if world.is_first else None
    total = min(parts.train_source.num_batches, config.trainer.max_steps or parts.train_source.num_batches)
    progress = make_progress(total, start or 0) if world.is_first else SilentProgress()
    with _stop_on_signal(progress.say) as stopped:
        trainer = Trainer(
            config.trainer,
            model=parts.model,
            embeddings=parts.embeddings,
            sparse_learning_rate=config.sparse.learning_rate,
            train_source=parts.train_source,
            total_steps=parts.train_source.num_batches,
            tasks=log.tasks,
            eval_sources=parts.eval_sources,
            world=world,
            clip=parts.clip,
            checkpointer=checkpointer,
            log=run_log,
            progress=progress,
            should_stop=lambda: bool(stopped),
            device_name=_device_name(world.device),
        )
        if start is not None:
            trainer.resume(start)
            progress.say(f"resumed at step {start}")
        elif resume:
            progress.say(f"{directory.path} has no checkpoint yet; beginning at step 0")
        if run_log is not None:
            run_log.write(
                "config", _config_record(args, recipe, config, parts, world, directory, precision, start or 0)
            )
        result = trainer.run()
    if run_log is not None:
        run_log.close()
        _conclude(args, recipe, directory, precision, result)
    return INTERRUPTED if result.reason == "interrupted" else 0


def _prepare(args: argparse.Namespace, directory: RunDirectory, world: World) -> tuple[bool, RunRecord | None]:
    """Checks and clears the directory on the first rank, for all ranks."""

    def prepare() -> None:
        directory.check(resume=args.resume, overwrite=args.overwrite)
        if args.overwrite:
            directory.clear()

    world.on_first(prepare)
    return args.resume, directory.read() if args.resume else None


def _assignments(args: argparse.Namespace) -> dict[str, str]:
    assignments = parse_assignments(args.assignments)
    for flag, name, value in (("--steps", "trainer.max_steps", args.steps), ("--seed", "trainer.seed", args.seed)):
        if value is not None:
            if name in assignments:
                raise ConfigError(f"{flag}: {name} is given with --set too; give it once")
            assignments[name] = str(value)
    return assignments


def _default_out(recipe: str, precision: str | None) -> Path:
    return Path("runs") / (recipe if precision in (None, "fp32") else f"{recipe}-{precision}")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def _config_record(
    args: argparse.Namespace,
    recipe: "Recipe",
    config: "RunConfig",
    parts: "Parts",
    world: World,
    directory: RunDirectory,
    precision: str,
    start: int,
) -> dict[str, Any]:
    """The record `config` of metrics.jsonl."""
    name = _device_name(world.device)
    peak = device_peak(name) if world.device.type == "cuda" else None
    sparse = sum(t.numel() for key, t in parts.embeddings.state_dict().items() if key.endswith(".weight"))
    return {
        "run": directory.path.name,
        "recipe": recipe.name,
        "precision": precision,
        "dataset": recipe.name,
        "world_size": world.size,
        "parameters": {"dense": sum(p.numel() for p in parts.model.parameters()), "sparse": sparse},
        "parallel": {"dp_shard": world.size, "sparse_shard": world.size},
        "device": name,
        "device_peak_flops": None if peak is None else peak.flops_per_second,
        "mfu_reason": None if peak else f"the bf16 peak of {name!r} is not in the table of gem_train.mfu",
        "num_devices": world.size,
        "seed": config.trainer.seed,
        "reference": [score._asdict() for score in recipe.reference],
        "reference_task": recipe.reference_task,
        "layers": list(parts.layers),
        "versions": versions(),
        "start_step": start,
    }


def _conclude(
    args: argparse.Namespace, recipe: "Recipe", directory: RunDirectory, precision: str, result: TrainResult
) -> None:
    if result.reason == "interrupted":
        complain(f"interrupted at step {result.step}; continue with --out {directory.path} --resume")
        return
    if result.reason == "max_seconds":
        complain(f"stopped by trainer.max_seconds at step {result.step}")
    report = write_report(directory.path)
    print_scores(result.evaluations, recipe.reference, recipe.reference_task)
    other = Path(args.compare) if args.compare else _default_out(recipe.name, None)
    if args.compare or (precision != "fp32" and other != directory.path and RunDirectory(other).is_run()):
        compare_runs(directory.path, other)
    say(f"report: {report}")


@contextmanager
def _stop_on_signal(tell: Callable[[str], None]) -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM: the run ends after a step with a checkpoint; a second SIGINT ends it at once."""
    received: list[int] = []

    def handle(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        tell("stopping after this step; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
