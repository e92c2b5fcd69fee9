"""Writing the report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gem_train._version import __version__
from gem_train.report import sections
from gem_train.report.html import STYLE, text
from gem_train.report.run import load_run


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    compare: Sequence[str | os.PathLike[str]] = (),
    output: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes a run's report: one HTML file with its plots inside, without scripts or links.

    It may be written while the run goes on.

    Args:
        run_dir: Directory of the run, with metrics.jsonl.
        compare: Directories of runs to set beside it.
        output: The file; defaults to report.html in the run's directory.

    Returns:
        Path of the file.

    Raises:
        ValueError: if a directory has no metrics.jsonl or nothing to report.
    """
    run = load_run(run_dir)
    runs = (run, *(load_run(directory) for directory in compare))
    body = (
        sections.header(run),
        sections.results(run),
        sections.comparison(runs),
        sections.learning(runs),
        sections.calibration(run),
        sections.throughput(run),
        sections.settings(run),
        sections.layout(run),
        sections.balance(run),
        sections.details(run),
    )
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(run.name)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(body)
        + f"\n<footer>gem-train {text(__version__)}</footer></body></html>\n"
    )
    path = Path(run_dir) / "report.html" if output is None else Path(output)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)  # a reader sees the old page or the new one
    return path
