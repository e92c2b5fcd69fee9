"""The tuning file: which configuration was fastest for which kernel, on which GPU, with which versions.

It lies in Triton's cache, which the ranks of a job share. Written by ``python -m gem_kernels warm``; read once in every
process. A choice is one of the configurations that ship with the package.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
_REMEDY = "delete it and warm again, or set GEM_KERNELS_TUNING=off"


class Key(NamedTuple):
    """What a configuration is chosen for."""

    op: str
    kernel: str
    """Of the op: "forward", "dq", "dkdv", "dqdkdv", or the name of a matmul."""
    dtype: str
    sizes: str
    """What the model fixes: "D128", or "K512 N512"."""
    shape: str
    """Class of lengths, see ``length_class``; "any" where lengths do not matter."""


class Choice(NamedTuple):
    """The fastest of a kernel's configurations, and what the one that ships as the default took."""

    key: Key
    config: Mapping[str, int]
    ms: float
    """Milliseconds of the calls of the cases that the kernel is part of."""
    default: Mapping[str, int]
    default_ms: float


class MadeFor(NamedTuple):
    """Where choices hold: elsewhere nobody has measured them."""

    gpu: str
    capability: tuple[int, int]
    triton: str
    gem_kernels: str
    candidates: str
    """Hash of the configurations that there are to choose from."""

    def difference(self, other: MadeFor) -> str:
        """The first field in which another one differs, in words; empty if none."""
        for name, mine, theirs in zip(self._fields, self, other, strict=True):
            if mine != theirs:
                return f"{name} {theirs!r}, here {mine!r}"
        return ""


class StaleError(Exception):
    """The file is of another GPU or of other versions."""


def file_name(gpu: str) -> str:
    """Name of a GPU's tuning file in Triton's cache."""
    words = "".join(c if c.isalnum() else "-" for c in gpu)
    return f"gem_kernels-tuning-{words}.json"


def read(path: Path, made_for: MadeFor) -> dict[Key, Choice]:
    """Choices of a file.

    Raises:
        StaleError: if it was made for something else.
        ValueError: if it is no tuning file, or not a whole one.
    """
    try:
        content = json.loads(path.read_text())
        number = content["format"]
        if number != FORMAT:
            raise StaleError(f"format {number!r}, here {FORMAT}")
        head = dict(content["made_for"])
        other = MadeFor(**{**head, "capability": tuple(head["capability"])})
        choices = [_load(entry) for entry in content["choices"]]
    # JSON and decoding errors are ValueErrors.
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"tuning: `{path}` must be a tuning file of gem_kernels, got {type(error).__name__}: {error}; {_REMEDY}."
        ) from error
    difference = made_for.difference(other)
    if difference:
        raise StaleError(difference)
    return {choice.key: choice for choice in choices}


def _load(entry: Mapping[str, Any]) -> Choice:
    key = Key(*(str(entry[name]) for name in Key._fields))
    configs = [{str(name): int(value) for name, value in entry[part].items()} for part in ("config", "default")]
    return Choice(key, configs[0], float(entry["ms"]), configs[1], float(entry["default_ms"]))


def write_whole(path: Path, text: str) -> None:
    """Write a file that other processes read: renamed into place, so that they see no file or a whole one."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def add(path: Path, made_for: MadeFor, choices: Sequence[Choice]) -> dict[Key, Choice]:
    """Add choices to a file, or begin one; returns what it holds then.

    A choice that is there stays: processes may have read it. Processes that add at the same time take turns. A stale
    file is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _turn(path):
        try:
            kept = read(path, made_for) if path.exists() else {}
        except StaleError:
            kept = {}
        merged = {choice.key: choice for choice in choices} | kept
        content = {
            "format": FORMAT,
            "made_for": made_for._asdict(),
            "choices": [
                {**key._asdict(), **{name: value for name, value in merged[key]._asdict().items() if name != "key"}}
                for key in sorted(merged)
            ],
        }
        write_whole(path, json.dumps(content, indent=1) + "\n")
    return merged


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """One process at a time; where files cannot be locked, the last to rename wins, with a whole file."""
    with path.with_suffix(".lock").open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield


def digest(choices: Mapping[Key, Choice]) -> str:
    """Hash of what is chosen, equal on all ranks that choose alike; times do not count."""
    text = json.dumps([[*key, sorted(choices[key].config.items())] for key in sorted(choices)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
