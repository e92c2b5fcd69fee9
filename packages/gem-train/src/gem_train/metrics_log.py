"""The file metrics.jsonl of a run: what the trainer writes and the report reads.

One JSON object per line. `phase` says what the line is; all other keys are optional, unknown keys are kept. Numbers
that do not exist (an AUC with one class) are null, never NaN.

phase "config": one line per process start.
    run: name of the run. recipe, precision, dataset: names. world_size: ranks. parameters: {"dense": int,
    "sparse": int}. parallel: axis name to degree. dense_wire: which dense parameters travel in what,
    empty if all do in the dtype of compute. cuda_graphs: "on" or "off", and in which steps or why.
    device: name of the device. device_peak_flops: FLOP/s of one device in bf16 without sparsity, or null.
    mfu_reason: why there is no MFU, when there is none. num_devices: int. seed: int.
    reference: list of {"predictor", "ne", "auc"}, the task's published or measured
    bars, and reference_task: the task they are for. reference_standard_error: of an NE on their test split, or null.
    reference_note: why there are no bars, where the data is not theirs. layers: list of {"fqn", "kind", "precision",
    "backend", "reason"}, the precision report. settings: dotted name to value. changed: settings that are not the
    recipe's, to the recipe's value. begun: time, ISO 8601 in UTC. commit: of the checkout that the packages lie in, or
    null. versions: package to version. start_step: the step resumed from, else 0.
phase "train": one line per logging interval, its values over that interval.
    step: steps done. samples: samples done, of all ranks. seconds: wall time of the interval. loss: mean of the
    weighted loss per sample. samples_per_second. flops_per_second: model FLOPs, of all ranks. flops_per_sample.
    mfu. learning_rate. grad_norm. tasks: task name to metrics, as below. time: seconds of the interval by cause:
    {"data", "embedding", "forward", "backward", "optimizer", "checkpoint", "eval", "other"}. flops: module to
    forward FLOPs of the interval. memory_bytes: peak device memory of the rank with most. balance: of the interval's
    last step over several ranks, else null: {"mode": "reader", "exchange" or "none", "ratio": work of the heaviest rank
    over the mean, "ratio_as_read": before samples moved, "moved": samples, "heaviest_rank", "heaviest_samples": its
    number of samples, "dearest": list of {"lengths": sequence to events, "share": of the rank's work}}.
phase "validation" | "test": one line per evaluation. That of the test split is the last line of a finished run.
    step, samples (trained up to the weights that are scored), seconds, num_samples (evaluated), loss. ne, auc,
    calibration: of the first task. samples_per_second: of training, median of the "train" lines of this process.
    tasks: task name to metrics.
phase "checkpoint": step, seconds, bytes.
phase "end": training is over; the test follows unless it was interrupted. step, samples, seconds (of the process's
    training, validations included), reason: "finished", "max_seconds" or "interrupted".

The metrics of a task are those of `gem_train.metrics.BinaryMetrics.compute`: ne, auc, calibration, logloss, count,
base_rate, and, in evaluations, curve: list of {"count", "prediction", "label"}.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends lines to a run's metrics.jsonl, each flushed so that a killed run loses none.

    Only rank 0 of a run opens one.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        """Opens the file, which is created if need be.

        Args:
            run_dir: Directory of the run; created if it does not exist.
            resume_step: Step of the checkpoint that the run continues from. Lines of later steps are dropped, because
                those steps are done again. None keeps everything.
        """
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        if self.path.exists():
            kept = read_metrics(directory)
            if resume_step is not None:
                kept = [line for line in kept if line.get("step", 0) <= resume_step]
            # Written anew also without a resume: a killed writer may have left half a line at the end.
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(_encode(line) for line in kept), encoding="utf-8")
            temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, phase: str, **values: Any) -> None:
        """Appends one line.

        Args:
            phase: What the line is.
            **values: JSON values; NaN and infinities become null.
        """
        self._file.write(_encode({"phase": phase, **values}))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the lines of a run's metrics.jsonl. A last line cut off by a killed writer is left out.

    Args:
        run_dir: Directory of the run.

    Returns:
        The lines, in file order.

    Raises:
        ValueError: if there is no file, or a line before the last is not a JSON object with a phase.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        raise ValueError(
            f"the directory of a run must hold {FILE_NAME}, got {os.fspath(run_dir)!r}; name one that does"
        )
    lines = path.read_text(encoding="utf-8").split("\n")
    out: list[dict[str, Any]] = []
    for number, text in enumerate(lines):
        if not text:
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:  # no newline after it: the writer was killed
                break
            raise ValueError(
                f"line {number + 1} of {path} must be JSON, got an error ({error}); remove the line"
            ) from error
        if not isinstance(line, dict) or not isinstance(line.get("phase"), str):
            raise ValueError(
                f"line {number + 1} of {path} must be an object with a phase, got another; remove the line"
            )
        out.append(line)
    return out


def _encode(line: dict[str, Any]) -> str:
    return json.dumps(_finite(line), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
