"""Scores as text."""

from collections.abc import Mapping, Sequence
from typing import Any

from gem_train.cli.output import say
from gem_train.data import Scoreboard
from gem_train.evaluation import Evaluation

__all__ = ["format_table", "print_scores", "undefined_scores"]


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


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
