"""Checkpoints that are either whole or absent.

A checkpoint is a directory `step-00000123` with

    *.distcp, .metadata   tensors, written by torch.distributed.checkpoint in a layout independent of the world size
    state.json            everything that is not a tensor
    manifest.json         size and SHA-256 of every other file, name, shape and dtype of every tensor

It is written under a temporary name, synced to the disk, and renamed once, so that a killed save is never seen. Loading
checks the manifest first, then the inventory: nothing is copied into the run before both hold.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from gem_train.checks import check_whole
from gem_train.errors import CheckpointError, ConfigError
from gem_train.replicas import find_differing_copies
from gem_train.world import World

__all__ = ["Checkpointer", "refuse_other"]

FORMAT_VERSION = 1
_PUBLISHED = re.compile(r"step-(\d{8,})")
_TEMPORARY = ".tmp-"
_LISTED = 8


class Checkpointer:
    """Saves, finds, verifies and loads the checkpoints of one run."""

    def __init__(self, directory: str | os.PathLike[str], *, world: World | None = None, keep_last: int = 2) -> None:
        """Points at a directory, which `prepare` or the first save creates.

        Args:
            directory: Where the checkpoints of one run lie, on storage that all ranks see.
            world: The ranks that save and load together; one process if not given.
            keep_last: Published checkpoints kept.

        Raises:
            TypeError: if `keep_last` is no whole number.
            ValueError: if it is < 1.
        """
        check_whole("Checkpointer", "keep_last", keep_last, minimum=1, remedy="the newest one is always kept")
        self.directory = Path(directory)
        self._world = world or World()
        self._keep_last = keep_last

    def steps(self) -> tuple[int, ...]:
        """Steps of the published checkpoints, oldest first."""
        return tuple(step for step, path in self._directories().items() if (path / "manifest.json").is_file())

    def _directories(self) -> dict[int, Path]:
        """Step -> directory, oldest first, also of checkpoints that have lost their manifest."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        matches = ((_PUBLISHED.fullmatch(path.name), path) for path in paths)
        return dict(sorted((int(match[1]), path) for match, path in matches if match))

    def latest(self) -> int | None:
        """Step of the newest published checkpoint, or None.

        Raises:
            CheckpointError: if a newer one has lost its manifest, so that a run that went on from this one would come
                to a step that cannot be saved.
        """
        latest = max(self.steps(), default=None)
        for step, path in self._directories().items():
            if step > (latest or 0) and not (path / "manifest.json").is_file():
                raise CheckpointError(
                    f"{path}/manifest.json is missing; the checkpoint is damaged, {self._instead(path)}"
                )
        return latest

    def _instead(self, damaged: Path) -> str:
        """What to do about a damaged checkpoint."""
        others = [step for step in self.steps() if self.path(step) != damaged]
        if not others:
            return "and there is no other; begin the run again"
        return f"remove {damaged} to go on from step {others[-1]}"

    def path(self, step: int) -> Path:
        """Directory of a step's checkpoint."""
        check_whole("Checkpointer", "step", step, minimum=0, remedy=f"there are checkpoints of {list(self.steps())}")
        return self.directory / f"step-{step:08d}"

    def prepare(self, *, after: int | None) -> None:
        """Makes the directory, and refuses one that cannot take the checkpoints of a run. All ranks call it.

        Args:
            after: Step of the checkpoint here that the run goes on from; None for a run that begins.

        Raises:
            ConfigError: if nothing can be written there, or it holds checkpoints of another run, or later ones.
        """
        self._world.on_first(lambda: self._prepare(after))

    def _prepare(self, after: int | None) -> None:
        probe = self.directory / f"{_TEMPORARY}probe"
        try:
            probe.mkdir(parents=True, exist_ok=True)
            (probe / "byte").write_bytes(b"0")
            shutil.rmtree(probe)
        except OSError as error:
            raise ConfigError(
                f"Checkpointer: `directory` must be one to write in, got {self.directory} ({error.strerror}); change "
                "its permissions, or name another"
            ) from error
        # Those that lost their manifest, too: a step that has a directory cannot be saved.
        others = [step for step in self._directories() if after is None or step > after]
        if others and after is None:
            raise ConfigError(
                f"Checkpointer: `directory` must hold no checkpoints of another run, got {self.directory} with those "
                f"of steps {others}; go on from one with Trainer.resume, or name another directory"
            )
        if others:
            raise ConfigError(
                f"Checkpointer: `directory` must hold no checkpoints later than step {after}, from which this run goes "
                f"on, got {self.directory} with those of steps {others}; resume the latest, or copy that of step "
                f"{after} to another directory and resume there"
            )

    def clear(self) -> None:
        """Removes the checkpoints and what saves that did not end have left, and nothing else."""
        for path in (*self._directories().values(), *self.directory.glob(f"{_TEMPORARY}*")):
            if path.is_dir():
                shutil.rmtree(path)

    def save(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, protect: Collection[int] = ()
    ) -> Path:
        """Publishes a checkpoint and removes those that are no longer kept. All ranks call it.

        Args:
            step: Steps done.
            tensors: Name -> tensor or DTensor. Plain tensors of one name must be equal, and so must replicas.
            state: JSON values; the first rank's are written.
            protect: Steps whose checkpoints are kept whatever their age.

        Returns:
            The published directory.

        Raises:
            CheckpointError: if this step is published already, ranks hold differing copies of a tensor, or it cannot be
                written in full, as on a full disk; what was written of it is removed.
        """
        final, temporary = self.path(step), self.directory / f"{_TEMPORARY}step-{step:08d}"
        if final.exists():
            raise CheckpointError(
                f"Checkpointer.save: {final} exists already; a published checkpoint is not overwritten"
            )
        self._check_copies(tensors)
        try:
            self._world.on_first(lambda: self._begin(temporary))
            self._write_tensors(tensors, temporary)
            self._world.on_first(lambda: (temporary / "state.json").write_text(_to_json(state), encoding="utf-8"))
            self._write_manifest(step, temporary)
            self._world.on_first(lambda: self._publish(temporary, final))
        # All ranks fail together: torch.distributed.checkpoint and `on_first` both see to it.
        except (OSError, RuntimeError, ConfigError, CheckpointException) as error:
            raise self._unwritten(step, temporary, tensors, error) from error
        self._world.on_first(lambda: self._remove_old(protect))
        return final

    def _begin(self, temporary: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        temporary.mkdir()

    def _unwritten(
        self, step: int, temporary: Path, tensors: Mapping[str, Tensor], error: BaseException
    ) -> CheckpointError:
        """The error of a save that did not come to its end, once what it left is removed."""
        if isinstance(error, CheckpointException):
            error = next((cause for cause, _ in error.failures.values()), error)
        reason = str(error).partition("\n")[0] or type(error).__name__
        exists = self.directory.is_dir()
        free = f", with {shutil.disk_usage(self.directory).free / 1e6:,.0f} MB free" if exists else ""
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / 1e6
        if self._world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        newest = max(self.steps(), default=None)
        kept = "none was saved before" if newest is None else f"--resume goes on from step {newest}"
        return CheckpointError(
            f"Checkpointer.save: {self.directory} must take the checkpoint of step {step} ({needed:,.0f} MB of "
            f"tensors), got {reason!r}{free}; nothing of it was kept and {kept}. Make room, or write elsewhere"
        )

    def load(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        only: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
        check: Callable[[dict[str, Any]], object] = lambda state: None,
    ) -> dict[str, Any]:
        """Copies a checkpoint into the given tensors. All ranks call it.

        Args:
            step: Which checkpoint.
            tensors: Name -> tensor or DTensor to fill; its sharding may differ from the one saved.
            only: Prefixes of the names to read; the rest of the checkpoint is left alone. Empty reads all of it.
            optional: Prefixes of names that may be on one side alone (state of ranks that do not exist here).
            check: Given the saved state before anything is copied; raises if it is not of this run.

        Returns:
            The state that was saved with it.

        Raises:
            CheckpointError: if the checkpoint is missing or damaged, or its names, shapes or dtypes differ.
        """
        path = self.path(step)
        manifest = self.verify(step)
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        self._world.on_all(lambda: check(state))
        ours = _merge(self._world.gather({name: _describe(tensor) for name, tensor in tensors.items()}))
        saved = {name: entry for name, entry in manifest["tensors"].items() if not only or name.startswith(only)}
        _compare(saved, ours, path, optional)
        wanted = {name: tensor.detach() for name, tensor in tensors.items() if name in saved}
        with warnings.catch_warnings():
            _ignore_single_process_warning()
            load_tensors(
                wanted,
                storage_reader=FileSystemReader(path),
                process_group=self._world.control,
                no_dist=self._world.control is None,
            )
        return state

    def verify(self, step: int) -> dict[str, Any]:
        """Checks every file of a checkpoint against its manifest; the ranks share the reading.

        Args:
            step: Which checkpoint.

        Returns:
            The manifest.

        Raises:
            CheckpointError: naming the first file that is missing, truncated or altered.
        """
        path = self.path(step)
        try:
            manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
            files: dict[str, dict[str, Any]] = manifest["files"]
            version: int = manifest["version"]
            tensors_are_listed = isinstance(manifest["tensors"], dict)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path}: there is no published checkpoint of step {step}; published are {list(self.steps())}"
            ) from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}/manifest.json is damaged ({error}); {self._instead(path)}") from None
        if version != FORMAT_VERSION or not tensors_are_listed:
            raise CheckpointError(
                f"{path}: its format is version {version}, this program reads version {FORMAT_VERSION}"
            )
        mine = sorted(files)[self._world.rank :: self._world.size]
        problems = [problem for name in mine if (problem := _file_problem(path / name, files[name]))]
        found = [problem for ranks_problems in self._world.gather(problems) for problem in ranks_problems]
        if found:
            raise CheckpointError(f"{found[0]}; the checkpoint of step {step} is damaged, {self._instead(path)}")
        return manifest

    def _check_copies(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises, on all ranks, if copies have drifted apart: the file would have one of them."""
        if differing := find_differing_copies(tensors, self._world):
            name, rank, other = differing[0]
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise CheckpointError(
                f"Checkpointer.save: tensors must be equal on all ranks that hold a copy, got {name}{more} with other "
                f"values on rank {other} than on rank {rank}; nothing was saved. Go on from the newest checkpoint "
                f"({self.latest()}), and look for what the ranks do unlike each other"
            )

    def _write_tensors(self, tensors: Mapping[str, Tensor], temporary: Path) -> None:
        with warnings.catch_warnings():
            _ignore_single_process_warning()
            save_tensors(
                {name: tensor.detach() for name, tensor in tensors.items()},
                storage_writer=FileSystemWriter(temporary, sync_files=True),
                process_group=self._world.control,
                no_dist=self._world.control is None,
            )

    def _write_manifest(self, step: int, temporary: Path) -> None:
        self._world.barrier()
        names = sorted(path.name for path in temporary.iterdir() if path.is_file())
        mine = names[self._world.rank :: self._world.size]
        described = _merge(self._world.gather({name: _describe_file(temporary / name) for name in mine}))

        def write() -> None:
            metadata = FileSystemReader(temporary).read_metadata().state_dict_metadata
            inventory = {
                name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype)}
                for name, entry in sorted(metadata.items())
                if isinstance(entry, TensorStorageMetadata)
            }
            manifest = {"version": FORMAT_VERSION, "step": step, "files": described, "tensors": inventory}
            (temporary / "manifest.json").write_text(_to_json(manifest), encoding="utf-8")

        self._world.on_first(write)

    def _publish(self, temporary: Path, final: Path) -> None:
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        temporary.rename(final)
        _sync(self.directory)

    def _remove_old(self, protect: Collection[int]) -> None:
        for step in self.steps()[: -self._keep_last]:
            if step not in protect:
                # Renamed first: a removal that is cut short leaves no half of a published checkpoint.
                doomed = self.directory / f"{_TEMPORARY}removed-{step:08d}"
                self.path(step).rename(doomed)
                shutil.rmtree(doomed)


def _compare(
    saved: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]], path: Path, optional: tuple[str, ...]
) -> None:
    """Raises if two inventories differ, listing the differences."""
    differences = []
    for name in sorted(saved.keys() | ours.keys()):
        theirs, mine = saved.get(name), ours.get(name)
        if theirs == mine or (optional and name.startswith(optional) and (theirs is None or mine is None)):
            continue
        differences.append(f"{name}: checkpoint {_entry(theirs)}, this run {_entry(mine)}")
    refuse_other(path, differences)


def refuse_other(path: Path, differences: Sequence[str]) -> None:
    """Refuses a checkpoint that differs from this run.

    Args:
        path: Of the checkpoint.
        differences: One phrase for each; none refuses nothing.

    Raises:
        CheckpointError: listing them.
    """
    if differences:
        more = f"; and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
        raise CheckpointError(
            f"{path} is of another model or configuration: {'; '.join(differences[:_LISTED])}{more}. "
            "Use the configuration that it was saved with"
        )


def _entry(entry: Mapping[str, Any] | None) -> str:
    return "has none" if entry is None else f"{tuple(entry['shape'])} {str(entry['dtype']).removeprefix('torch.')}"


def _describe(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: entry for part in parts for name, entry in part.items()}


def _describe_file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _file_problem(path: Path, expected: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != expected["size"]:
        return f"{path} has {size} bytes instead of {expected['size']}"
    if _describe_file(path)["sha256"] != expected["sha256"]:
        return f"{path} has another SHA-256 than its manifest says"
    return None


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


def _ignore_single_process_warning() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    # DCP's own file reader still passes through the typed storage that torch deprecates.
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
