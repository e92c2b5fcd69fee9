"""What the report knows of a run, from its metrics.jsonl."""

from __future__ import annotations

import itertools
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gem_train.metrics_log import read_metrics

Line = dict[str, Any]


class Bar(NamedTuple):
    """A predictor to compare with."""

    predictor: str
    ne: float
    auc: float | None


class Account(NamedTuple):
    """Where a run's time and FLOPs went, over all logging intervals."""

    seconds: float
    samples_per_second: float | None
    """Median over the intervals."""
    flops: float | None
    """Model FLOPs of all ranks."""
    flops_per_sample: float | None
    phases: dict[str, float]
    """Cause to seconds of rank 0, longest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The lines of a run by phase."""

    name: str
    config: Line
    """The config lines merged, later ones winning."""
    starts: tuple[int, ...]
    """Steps at which processes started: 0, and the step of each resume."""
    begun: tuple[str, ...]
    """When they did, of those that say so: ISO 8601, UTC."""
    train: tuple[Line, ...]
    evaluations: dict[str, tuple[Line, ...]]
    """Split to its lines."""
    checkpoints: tuple[Line, ...]
    end: Line | None

    @property
    def tasks(self) -> tuple[str, ...]:
        """All task names, in order of appearance."""
        lines = [*self.train, *(line for lines in self.evaluations.values() for line in lines)]
        return tuple(dict.fromkeys(task for line in lines for task in line.get("tasks", {})))

    @property
    def reference_task(self) -> str | None:
        """The task that the bars are for."""
        named = self.config.get("reference_task")
        return named if named in self.tasks else (self.tasks[0] if self.tasks else None)

    @property
    def reference(self) -> tuple[Bar, ...]:
        """The bars, best NE first. They are test scores: a run without a test has nothing to set beside them."""
        if self.result_split != "test":
            return ()
        bars = [
            Bar(str(row["predictor"]), float(row["ne"]), row.get("auc"))
            for row in self.config.get("reference") or ()
            if row.get("ne") is not None
        ]
        return tuple(sorted(bars, key=lambda bar: bar.ne))

    @property
    def reference_standard_error(self) -> float | None:
        """Standard error of an NE on the bars' test split; None where it is not known."""
        value = self.config.get("reference_standard_error")
        return None if value is None else float(value)

    @property
    def result_split(self) -> str | None:
        """The split of the headline: test if it was evaluated, else validation."""
        return next((split for split in ("test", "validation") if self.evaluations.get(split)), None)

    def result(self, task: str, split: str | None = None) -> Line:
        """Metrics of the last evaluation of a task; empty if there is none.

        Args:
            task: The task.
            split: The split; None is `result_split`.
        """
        lines = self.evaluations.get(split or self.result_split or "", ())
        found: Line = lines[-1].get("tasks", {}).get(task, {}) if lines else {}
        return found

    @property
    def samples(self) -> int | None:
        """Samples trained."""
        lines = ([self.end] if self.end else []) + list(self.train[-1:])
        return next((int(line["samples"]) for line in lines if line.get("samples") is not None), None)

    @property
    def step(self) -> int | None:
        """Steps done."""
        lines = ([self.end] if self.end else []) + list(self.train[-1:])
        return next((int(line["step"]) for line in lines if line.get("step") is not None), None)

    @property
    def windows(self) -> tuple[Line, ...]:
        """The train lines over as many steps as most; a mean over fewer, as at a run's end, is noise beside them."""
        steps = [int(line["step"]) for line in self.train if line.get("step") is not None]
        if len(steps) < len(self.train):
            return self.train
        lengths = [step - before for before, step in itertools.pairwise([0, *steps])]
        usual = statistics.median_high(lengths) if lengths else 0
        return tuple(line for line, length in zip(self.train, lengths, strict=True) if length >= usual)

    def account(self) -> Account:
        """Sums over the logging intervals."""
        timed = [line for line in self.train if line.get("seconds")]
        counted = [line for line in timed if line.get("flops_per_second") is not None]
        flops = sum(line["flops_per_second"] * line["seconds"] for line in counted) if counted else None
        rates = [line["samples_per_second"] for line in timed if line.get("samples_per_second") is not None]
        per_sample = [line["flops_per_sample"] for line in timed if line.get("flops_per_sample") is not None]
        phases: dict[str, float] = {}
        for line in timed:
            for cause, seconds in (line.get("time") or {}).items():
                phases[cause] = phases.get(cause, 0.0) + float(seconds)
        return Account(
            seconds=sum(line["seconds"] for line in timed),
            samples_per_second=statistics.median(rates) if rates else None,
            flops=flops,
            flops_per_sample=statistics.mean(per_sample) if per_sample else None,
            phases=dict(sorted(phases.items(), key=lambda entry: -entry[1])),
        )

    def flops_by_module(self) -> dict[str, float]:
        """Module to forward FLOPs of all intervals, largest first."""
        out: dict[str, float] = {}
        for line in self.train:
            for module, flops in (line.get("flops") or {}).items():
                out[module] = out.get(module, 0.0) + float(flops)
        return dict(sorted(out.items(), key=lambda entry: -entry[1]))


def load_run(run_dir: str | os.PathLike[str]) -> Run:
    """Reads a run.

    Args:
        run_dir: Its directory.

    Returns:
        The run.

    Raises:
        ValueError: if there is no metrics.jsonl, it is damaged, or it has no train or evaluation line.
    """
    lines = read_metrics(run_dir)
    config: Line = {}
    for line in lines:
        if line["phase"] == "config":
            config |= line
    run = Run(
        name=str(config.get("run") or Path(run_dir).resolve().name),
        config=config,
        starts=tuple(int(line.get("start_step") or 0) for line in lines if line["phase"] == "config"),
        begun=tuple(str(line["begun"]) for line in lines if line["phase"] == "config" and line.get("begun")),
        train=tuple(line for line in lines if line["phase"] == "train"),
        evaluations={
            split: tuple(line for line in lines if line["phase"] == split) for split in ("validation", "test")
        },
        checkpoints=tuple(line for line in lines if line["phase"] == "checkpoint"),
        end=next((line for line in reversed(lines) if line["phase"] == "end"), None),
    )
    if not run.train and run.result_split is None:
        raise ValueError(
            f"{os.fspath(run_dir)!r} must hold a train or evaluation line, got {len(lines)} lines without; "
            "wait for the first logging interval"
        )
    return run
