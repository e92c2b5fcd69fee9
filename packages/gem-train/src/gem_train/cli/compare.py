"""A run's test scores beside those of another, and which run that is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gem_train.cli.output import complain, say
from gem_train.cli.table import format_table
from gem_train.errors import ConfigError
from gem_train.metrics_log import read_metrics
from gem_train.run_dir import CHANGEABLE, RunDirectory, RunRecord, Setting, differing

__all__ = ["compare_runs", "default_out", "final_scores", "full_precision_run"]

_SHOWN = 8
"""Settings named before the rest is counted."""


def default_out(recipe: str, precision: str | None) -> Path:
    """Where a run goes that names no directory.

    Args:
        recipe: Name of the recipe.
        precision: Name of the precision recipe; None is fp32.
    """
    return Path("runs") / (recipe if precision in (None, "fp32") else f"{recipe}-{precision}")


def final_scores(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Task -> metrics of a run's last test evaluation.

    Args:
        run_dir: Directory of the run.

    Raises:
        ConfigError: if the run has no test scores.
        ValueError: if its records are missing or damaged.
    """
    return _test_tasks(run_dir, read_metrics(run_dir))


def full_precision_run(directory: RunDirectory) -> Path | None:
    """A finished fp32 run to judge a run of low precision by: equal in everything else that its weights depend on.

    It lies in runs/RECIPE or beside the run. The first of as many steps comes first; another length is said with the
    scores. What is not taken is said where it could have been meant.

    Args:
        directory: The run.
    """
    record = directory.read()
    if record.precision == "fp32":
        return None
    found: list[Path] = []
    others: list[str] = []
    for path in (default_out(record.recipe, None), *sorted(directory.path.parent.iterdir())):
        if path.resolve() == directory.path.resolve() or path in found:
            continue
        try:
            other = RunDirectory(path)
            if not other.is_run():
                continue
            theirs = other.read()
            if (theirs.recipe, theirs.precision) != (record.recipe, "fp32") or _unfinished(path):
                continue
        except (ValueError, OSError) as error:  # a neighbour's damage is none of this run's
            complain(f"note: not compared with {path}, which cannot be read: {error}")
            continue
        different = [each for each in _different(record, theirs) if each.name != "precision"]
        if different:
            others.append(f"{path} ({_shown(different)})")
        else:
            found.append(path)
    if not found and others:
        complain(
            f"note: not compared with a run in fp32, as none has the same settings: {'; '.join(others[:3])}; "
            "--compare RUN_DIR names one"
        )
    steps = _trained_steps(directory.path)
    return next((path for path in found if _trained_steps(path) == steps), found[0] if found else None)


def compare_runs(run_dir: Path, other: Path) -> None:
    """Prints the test scores of two runs side by side, and in what the runs differ.

    Args:
        run_dir: One run.
        other: The run to compare with.

    Raises:
        ConfigError: if one of them has no test scores.
    """
    ours, theirs = final_scores(run_dir), final_scores(other)
    rows = []
    for task, values in ours.items():
        if task in theirs:
            a, b = values["ne"], theirs[task]["ne"]
            change = f"{100.0 * (a - b) / b:+.3f} %" if a is not None and b else None
            rows.append((task, a, b, change, values["auc"], theirs[task]["auc"]))
    steps, other_steps = _trained_steps(run_dir), _trained_steps(other)
    length = "" if steps == other_steps else f" (of other length: {other_steps} steps there, {steps} here)"
    say(f"\ntest scores beside {other}{length}:")
    say(format_table(("task", "NE", f"NE {other.name}", "NE change", "AUC", f"AUC {other.name}"), rows))
    try:
        different = _different(RunDirectory(run_dir).read(), RunDirectory(other).read())
    except (ValueError, OSError) as error:
        say(f"whether the runs differ in settings is not known: {error}")
    else:
        say(f"settings that differ: {_shown(different) if different else 'none'}")


def _different(ours: RunRecord, theirs: RunRecord) -> list[Setting]:
    """What the weights of two runs depend on and has two values; their lengths, which are said apart, left out."""
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(theirs, name), getattr(ours, name)) for name in ("recipe", "precision", "data")
    }
    found = [Setting(name, there, here) for name, (there, here) in pairs.items() if there != here]
    if not found or found[-1].name != "data":
        encodings: Mapping[str, str] = ours.encodings or {}
        changed = [name for name, text in (theirs.encodings or {}).items() if encodings.get(name, text) != text]
        found += [Setting(f"encoding of {name}", "another", "this") for name in changed]
    return found + differing(theirs.settings, ours.settings, except_for=CHANGEABLE)


def _shown(different: list[Setting]) -> str:
    more = f", and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    return ", ".join(f"{name} {there} there, {here} here" for name, there, here in different[:_SHOWN]) + more


def _test_tasks(run_dir: Path, records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    tests = [record for record in records if record["phase"] == "test"]
    if not tests:
        raise ConfigError(f"{run_dir} has no test scores yet; let the run finish, or evaluate it with `gem eval`")
    tasks: object = tests[-1].get("tasks")
    if not isinstance(tasks, dict) or not all(isinstance(values, dict) and "ne" in values for values in tasks.values()):
        raise ConfigError(f"{run_dir} has a test record without scores of tasks; name another run, or train it again")
    return tasks


def _unfinished(run_dir: Path) -> bool:
    records = read_metrics(run_dir)
    if not any(record["phase"] == "test" for record in records):
        return True
    _test_tasks(run_dir, records)
    return False


def _trained_steps(run_dir: Path) -> int | None:
    """Steps that a run trained for; None if it has not ended."""
    records = [record for record in read_metrics(run_dir) if record["phase"] in ("end", "test")]
    return max((int(record.get("step", 0)) for record in records), default=None)
