"""Scores as text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gem_train.cli.output import say
from gem_train.data import Scoreboard
from gem_train.errors import ConfigError
from gem_train.evaluation import Evaluation
from gem_train.metrics_log import read_metrics

__all__ = ["compare_runs", "final_scores", "format_table", "print_scores", "trained_steps", "undefined_scores"]


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns; numbers with four digits, missing ones as a dash.

    Args:
        header: Column names.
        rows: Cells.
    """
    cells = [list(header)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def print_scores(
    evaluations: Mapping[str, Evaluation], reference: Scoreboard | str | None, reference_task: str
) -> None:
    """Prints the scores of a run, and of other predictors on its test split.

    Args:
        evaluations: Split -> scores.
        reference: Their scores, or why they are left out.
        reference_task: The task that they are for.
    """
    rows = [
        (split, task, values["ne"], values["auc"], values["calibration"], f"{values['count']:,}")
        for split, result in evaluations.items()
        for task, values in result.tasks.items()
    ]
    say(format_table(("split", "task", "NE", "AUC", "calibration", "samples"), rows))
    for split, result in evaluations.items():
        for task, values in result.tasks.items():
            if values["ne"] is None:
                say(f"{split}, {task}: {undefined_scores(values)}")
    if isinstance(reference, str):
        say(f"\n{reference}")
    elif reference is not None:
        error = reference.ne_standard_error
        known = "" if error is None else f" (standard error of an NE on it: {error:g})"
        say(f"\nother predictors on this test split, task {reference_task}{known}:")
        say(format_table(("predictor", "NE", "AUC"), [(s.predictor, s.ne, s.auc) for s in reference.scores]))


def undefined_scores(values: Mapping[str, Any]) -> str:
    """Why a task has no NE.

    Args:
        values: Its metrics.
    """
    label = 1 if values["base_rate"] else 0
    return f"all {values['count']:,} labels are {label}, so that NE, AUC and calibration do not exist"


def final_scores(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Task -> metrics of a run's last test evaluation.

    Args:
        run_dir: Directory of the run.

    Raises:
        ConfigError: if the run has no test scores.
    """
    tests = [record for record in read_metrics(run_dir) if record["phase"] == "test"]
    if not tests:
        raise ConfigError(f"{run_dir} has no test scores yet; let the run finish, or evaluate it with `gem eval`")
    scores: dict[str, dict[str, Any]] = tests[-1]["tasks"]
    return scores


def compare_runs(run_dir: Path, other: Path) -> None:
    """Prints the test scores of two runs side by side.

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
    steps, other_steps = trained_steps(run_dir), trained_steps(other)
    note = "" if steps == other_steps else f" (of other length: {other_steps} steps there, {steps} here)"
    say(f"\ntest scores beside {other}{note}:")
    say(format_table(("task", "NE", f"NE {other.name}", "NE change", "AUC", f"AUC {other.name}"), rows))


def trained_steps(run_dir: Path) -> int | None:
    """Steps that a run trained for; None if it has not ended.

    Args:
        run_dir: Directory of the run.
    """
    records = [record for record in read_metrics(run_dir) if record["phase"] in ("end", "test")]
    return max((int(record["step"]) for record in records), default=None)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
