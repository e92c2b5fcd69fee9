"""The records of a run: metrics.jsonl for the report and programs, TensorBoard for people who watch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from gem_train.errors import ConfigError
from gem_train.metrics_log import FILE_NAME, MetricsLog

__all__ = ["RunLog"]


class RunLog:
    """Writes every record to both places. Only the first rank has one."""

    def __init__(self, run_dir: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        """Opens the files.

        Args:
            run_dir: Directory of the run.
            resume_step: Step that the run continues from; records of later steps are dropped, they are done again.

        Raises:
            ConfigError: if there are records already, and no `resume_step`.
        """
        records = Path(run_dir) / FILE_NAME
        if resume_step is None and records.is_file() and records.stat().st_size:
            raise ConfigError(
                f"RunLog: `run_dir` must hold no records of another run without `resume_step`, got {records}; pass the "
                "step that the run goes on from, or name another directory"
            )
        self._metrics = MetricsLog(run_dir, resume_step=resume_step)
        purge = None if resume_step is None else resume_step + 1
        self._board = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge)

    def write(self, phase: str, values: Mapping[str, Any]) -> None:
        """Appends a record.

        Args:
            phase: One of the phases of `gem_train.metrics_log`.
            values: Its JSON values; numbers become TensorBoard scalars named `<phase>/<path>`.
        """
        self._metrics.write(phase, **values)
        if "step" in values and phase in ("train", "validation", "test"):
            self._scalars(phase, {k: v for k, v in values.items() if k != "step"}, int(values["step"]))

    def close(self) -> None:
        """Flushes and closes both."""
        self._metrics.close()
        self._board.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _scalars(self, name: str, value: Any, step: int) -> None:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                self._scalars(f"{name}/{key}", entry, step)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._board.add_scalar(name, value, step)
