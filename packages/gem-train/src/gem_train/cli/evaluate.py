"""`gem eval`."""

import argparse
import dataclasses
import json
from typing import Any

from gem_train.checkpoint import Checkpointer
from gem_train.cli.output import complain, say
from gem_train.cli.processes import layout_assignments, num_processes, start
from gem_train.cli.table import format_table, undefined_scores
from gem_train.description import OF_TRAINING, compare_descriptions, describe
from gem_train.errors import ConfigError
from gem_train.evaluation import evaluate
from gem_train.launch import is_worker, join, leave
from gem_train.overrides import apply_overrides
from gem_train.run_dir import RunDirectory

__all__ = ["run"]

_WEIGHTS = ("model.", "embeddings.")


def run(args: argparse.Namespace) -> int:
    """Scores a checkpoint of a run with its own recipe and settings.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    from gem_train import recipes

    directory = RunDirectory(args.run_dir)
    record = directory.read()
    checkpointer = Checkpointer(directory.checkpoints)
    step = args.step if args.step is not None else checkpointer.latest()
    if step is None:
        raise ConfigError(f"{directory.path} has no checkpoint; train it first")
    if step not in checkpointer.steps():
        raise ConfigError(
            f"--step: must be the step of a checkpoint in {directory.path}, got {step}; there are "
            f"{', '.join(map(str, checkpointer.steps()))}"
        )
    recipe = recipes.get(record.recipe)
    # Weights do not depend on how they were spread, so that the layout is this command's and not the run's.
    layout = {name.removeprefix("parallel."): text for name, text in layout_assignments(args).items()}
    flags = {name: f"--{name.replace('_', '-')}" for name in layout}
    planned = recipes.RunConfig.resolve(recipe, recipe.schema, record.assignments)
    parallel = apply_overrides(planned.parallel.without_degrees(), layout, flags=flags)
    parallel.dims(num_processes(args), num_experts=planned.model.num_experts, trained=True)
    data = recipe.directory(args.data or record.data)
    if args.nproc != 1 and not is_worker():
        return start(args)
    log = recipe.load(data)
    note = directory.compare_encodings(record, log.encodings, None if data is None else str(data))
    config = recipes.RunConfig.resolve(recipe, log, record.assignments)
    directory.compare(config.to_dict())
    config = dataclasses.replace(config, parallel=parallel)
    world = join(args.device)
    if note is not None and world.is_first:
        complain(note)
    checkpointer = Checkpointer(directory.checkpoints, world=world)
    parts = recipes.build(config, log, world, precision=record.precision)
    tensors = {f"model.{name}": tensor for name, tensor in parts.model.state_dict().items()}
    tables = parts.embeddings.state_dict()
    tensors |= {f"embeddings.{name}": tensor for name, tensor in tables.items()}
    ours = describe(parts.model, parts.embeddings, config.model.tasks)

    def check(state: dict[str, Any]) -> None:
        compare_descriptions(checkpointer.path(step), state.get("description"), ours, leave_out=OF_TRAINING)

    checkpointer.load(step, tensors, only=_WEIGHTS, check=check)
    parts.embeddings.load_state_dict(tables)
    result = evaluate(parts.model, parts.embeddings, parts.eval_sources[args.split](), world, curve_points=0)
    leave()
    if not world.is_first:
        return 0
    if args.json:
        values: dict[str, Any] = {"step": step, "split": args.split, "loss": result.loss, "tasks": result.tasks}
        say(json.dumps(values))
        return 0
    rows = [(t, v["ne"], v["auc"], v["calibration"], f"{v['count']:,}") for t, v in result.tasks.items()]
    say(f"{args.split} of {directory.path} at step {step}")
    say(format_table(("task", "NE", "AUC", "calibration", "samples"), rows))
    for task, values in result.tasks.items():
        if values["ne"] is None:
            say(f"{task}: {undefined_scores(values)}")
    return 0
