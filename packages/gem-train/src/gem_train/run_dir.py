"""The directory of a run: who may write into it, and with which settings it was made."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gem_train.checks import check_fields
from gem_train.errors import ConfigError

__all__ = ["CHANGEABLE", "RunDirectory", "RunRecord", "Setting", "differing"]

FORMAT_VERSION = 1
_OWN = ("tensorboard/events.out.tfevents.*", "config.json", "metrics.jsonl", "report.html")
"""Files of a run beside its checkpoints."""

CHANGEABLE = frozenset(
    {
        "trainer.max_steps",
        "trainer.max_seconds",
        "trainer.step_timeout_s",
        "trainer.capture",
        "trainer.log_interval",
        "trainer.eval_interval",
        "trainer.checkpoint_interval",
        "trainer.keep_last",
        "data.eval_batch_size",
        "data.prefetch_batches",
        "data.balance",
        "parallel.dp_replicate",
        "parallel.dp_shard",
        "parallel.ep",
        "parallel.sparse_replicate",
        "parallel.sparse_shard",
        "parallel.sharded_at_rest",
        "parallel.table_gather",
        "parallel.collectives",
        "parallel.prefetch",
    }
)
"""Settings that a resumed run may change. `trainer.max_steps` moves the end of the learning rate schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What config.json says."""

    recipe: str
    """Name of the recipe."""
    precision: str
    """Name of the precision recipe."""
    data: str | None
    """Data directory, or None for generated data."""
    assignments: dict[str, str]
    """The user's changes to the recipe: dotted field name -> text."""
    settings: dict[str, Any]
    """All settings, changes applied."""
    versions: dict[str, str]
    """Package -> version that made the run."""
    encodings: dict[str, str] | None = None
    """`EventLog.encodings` of the data; None in runs of versions that did not keep them."""


class RunDirectory:
    """Guards a run's directory against being mixed up with another run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Names the directory; nothing is read or made.

        Args:
            path: The directory.
        """
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoints"

    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "config.json").is_file()

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuses to write where something else lies; changes nothing.

        Args:
            resume: The user wants to continue the run that is here.
            overwrite: The user wants to replace the run that is here.

        Raises:
            ConfigError: with the flag that would allow it.
        """
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other; give one of them")
        occupied = self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        if resume and not self.is_run():
            raise ConfigError(f"--resume: {self.path} holds no run; leave --resume out to begin one")
        if occupied and not self.is_run():
            raise ConfigError(f"--out: {self.path} exists and holds no run of gem; choose another directory")
        if occupied and not resume and not overwrite:
            raise ConfigError(
                f"--out: {self.path} holds a run already; --resume continues it, --overwrite replaces it, "
                "or choose another directory"
            )

        if not self.path.exists():
            parent = next(each for each in self.path.absolute().parents if each.exists())
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                raise ConfigError(
                    f"--out: {self.path} cannot be made in {parent}, which is no directory to write in; "
                    "choose another directory"
                )
        elif occupied and not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigError(
                f"--out: {self.path} must be a directory to write in; change its permissions, or choose "
                "another directory"
            )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Makes the directory, and keeps other processes from holding it until the end, or the end of this process.

        Raises:
            ConfigError: if it cannot be made, or another process holds it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                f"--out: {self.path} cannot be made ({error.strerror}); choose another directory"
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"--out: another process is training in {self.path}; wait for its end, or choose another directory"
                ) from error
            except OSError:
                pass  # a file system without locks
            yield
        finally:
            os.close(descriptor)

    def clear(self) -> None:
        """Removes what a run wrote here, and nothing else."""
        from gem_train.checkpoint import Checkpointer  # imports torch, which nothing else here needs

        Checkpointer(self.checkpoints).clear()
        for pattern in _OWN:
            for path in self.path.glob(pattern):
                path.unlink()
        for directory in (self.checkpoints, self.path / "tensorboard"):
            with suppress(OSError):  # it holds something of the user's, or there is none
                directory.rmdir()

    def write(self, record: RunRecord) -> None:
        """Writes config.json in one step.

        Args:
            record: What made the run.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        values = {"format": FORMAT_VERSION} | {name: getattr(record, name) for name in RunRecord.__dataclass_fields__}
        temporary = self.path / "config.json.tmp"
        temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")
        temporary.replace(self.path / "config.json")

    def read(self) -> RunRecord:
        """Reads config.json.

        Raises:
            ConfigError: if there is none, or it is not readable.
        """
        path = self.path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{self.path} holds no run (there is no config.json); name the directory of a run")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("format") != FORMAT_VERSION:
                raise ConfigError(f"{path} is of another format; use the version of gem-train that wrote it")
            record = RunRecord(**values)
            check_fields(record)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); name another run") from error
        return record

    def compare_encodings(self, record: RunRecord, encodings: Mapping[str, str], data: str | None) -> str | None:
        """Refuses data whose values would reach other embedding rows, or other dense values, than in training.

        Args:
            record: What made the run.
            encodings: `EventLog.encodings` of the data in hand.
            data: Its directory; None for generated data.

        Returns:
            None, or a note to print if the run does not say what it was trained with.

        Raises:
            ConfigError: listing each encoding that differs.
        """
        if record.encodings is None:
            return (
                f"note: {self.path} is of a version that did not record how its data was encoded; whether "
                f"{data or 'the generated data'} is encoded alike was not checked"
            )
        different = [
            f"{name}: run {record.encodings.get(name, 'none')}, now {encodings.get(name, 'none')}"
            for name in sorted(record.encodings.keys() | encodings.keys())
            if record.encodings.get(name) != encodings.get(name)
        ]
        if different:
            raise ConfigError(
                f"--data: {data or 'the generated data'} is encoded otherwise than the data {self.path} was trained "
                f"with, so its scores would mean nothing: {'; '.join(different)}; name the data of the run"
            )
        return None

    def compare(self, settings: Mapping[str, Any], *, changeable: frozenset[str] = frozenset()) -> None:
        """Refuses settings that differ from those of the run.

        Args:
            settings: JSON values of the settings in hand.
            changeable: Dotted names that may differ.

        Raises:
            ConfigError: listing each setting that differs.
        """
        different = [
            f"{name}: run {saved!r}, now {ours!r}"
            for name, saved, ours in differing(self.read().settings, settings, except_for=changeable)
        ]
        if different:
            more = f"; and {len(different) - 8} more" if len(different) > 8 else ""
            raise ConfigError(
                f"{self.path} was made with other settings: {'; '.join(different[:8])}{more}; "
                "use those, or begin another run"
            )


class Setting(NamedTuple):
    """A setting that two runs have different values of."""

    name: str
    """Dotted."""
    theirs: Any
    ours: Any


def differing(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], *, except_for: frozenset[str] = frozenset()
) -> list[Setting]:
    """The settings in which two runs differ, by name.

    Args:
        theirs: JSON values of the settings of one.
        ours: Of the other.
        except_for: Dotted names that are left out.
    """
    one, two = (_flatten(json.loads(json.dumps(dict(settings)))) for settings in (theirs, ours))
    return [
        Setting(name, one.get(name, "none"), two.get(name, "none"))
        for name in sorted(one.keys() | two.keys())
        if name not in except_for and one.get(name) != two.get(name)
    ]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, entry in value.items() for k, v in _flatten(entry, f"{prefix}{key}.").items()}
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return {k: v for i, entry in enumerate(value) for k, v in _flatten(entry, f"{prefix}{i}.").items()}
    return {prefix[:-1]: value}
