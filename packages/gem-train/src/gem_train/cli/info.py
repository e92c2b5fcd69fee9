"""`gem report`, `gem recipes` and `gem doctor`."""

import argparse
import os
import textwrap
from pathlib import Path

from gem_train.cli.output import say
from gem_train.cli.table import format_table
from gem_train.errors import ConfigError
from gem_train.run_dir import RunDirectory

__all__ = ["run_doctor", "run_recipes", "run_report"]


def run_report(args: argparse.Namespace) -> int:
    """Writes the report of a run.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    from gem_train.report import write_report

    directory = RunDirectory(args.run_dir)
    for path in (directory.path, *map(Path, args.compare)):
        if not (path / "metrics.jsonl").is_file():
            raise ConfigError(f"{path} holds no metrics.jsonl; name the directory of a run")
    if not os.access(directory.path, os.W_OK):
        raise ConfigError(
            f"{directory.path} must be a directory to write report.html in; change its permissions, or copy the run"
        )
    say(str(write_report(directory.path, compare=args.compare)))
    return 0


def run_recipes(args: argparse.Namespace) -> int:
    """Lists the recipes, or the fields of one with their values and meanings.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    from gem_train import recipes
    from gem_train.overrides import as_text, list_fields

    if args.recipe is None:
        if args.data is not None:
            raise ConfigError(
                f"--data: must come with the RECIPE whose data it holds, got {args.data!r}; name one of the recipes"
            )
        rows = [(r.name, r.data_dir or "(generated)", r.summary) for r in map(recipes.get, recipes.names())]
        plans = [plan for plan in map(recipes.get_plan, recipes.plan_names()) if plan is not None]
        rows += [(plan.name, "(numbers)", plan.summary) for plan in plans]
        say(format_table(("recipe", "data", "what"), rows))
        return 0
    recipe = recipes.get(args.recipe)
    log = recipe.load(recipe.directory(args.data))
    config = recipes.RunConfig.resolve(recipe, log, {})
    say(f"{recipe.name}: {recipe.summary}\n")
    for field in list_fields(config):
        say(f"{field.path}={as_text(field.value)}  ({field.takes})")
        if field.meaning:
            say(textwrap.fill(field.meaning, 110, initial_indent="    ", subsequent_indent="    "))
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what works here.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code: 0 if a run on the CPU works.
    """
    from gem_train.doctor import examine, format_diagnosis

    diagnosis = examine()
    say(format_diagnosis(diagnosis))
    return 0 if diagnosis.works else 1
