"""The choices of this process: read once, at the first launch of a kernel that there is something to choose for."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from gem_kernels._src.override import replaced
from gem_kernels._src.tables import attention, norm_linear
from gem_kernels._src.tuning.choices import Choice, Key, MadeFor, StaleError, file_name, read
from gem_kernels._version import __version__

VARIABLE = "GEM_KERNELS_TUNING"
OFF = "off"
C = TypeVar("C")


class Question(NamedTuple):
    """A choice that a launch asked for."""

    default: Any
    others: tuple[Any, ...]


_trials: dict[Key, Any] = {}
_asked: dict[Key, Question] | None = None


def as_numbers(config: Any) -> dict[str, int]:
    """The numbers of a configuration, by name."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.compare}


def choose(key: Key, default: C, others: tuple[C, ...]) -> C:
    """What tuning chose for ``key`` among the default and the others; the default where nobody tuned.

    Raises:
        ValueError: if the tuning file is damaged or names a configuration that is none of these.
    """
    if _asked is not None:
        _asked[key] = Question(default, others)
    if key in _trials:
        trial: C = _trials[key]
        return trial
    choice = table().get(key)
    if choice is None:
        return default
    for config in (default, *others):
        if as_numbers(config) == choice.config:
            return config
    raise ValueError(
        f"tuning: `{tuning_path()}` must choose one of {len(others) + 1} configurations for {' '.join(key)}, got "
        f"{dict(choice.config)}; delete it and warm again, or set {VARIABLE}=off."
    )


def trying(key: Key, config: Any) -> contextlib.AbstractContextManager[None]:
    """Use ``config`` for ``key`` inside the block, in all threads: for tuning and for tests."""
    return replaced(_trials, key, config)


@contextlib.contextmanager
def asking() -> Iterator[dict[Key, Question]]:
    """What launches inside the block ask for."""
    global _asked
    before, _asked = _asked, {}
    try:
        yield _asked
    finally:
        _asked = before


def made_for(device: int | torch.device | None = None) -> MadeFor:
    """This GPU and these versions."""
    import triton

    return MadeFor(
        gpu=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        triton=triton.__version__,
        gem_kernels=__version__,
        candidates=candidates_digest(),
    )


def candidates_digest() -> str:
    """Hash of the tables of configurations."""
    hopper = (attention.HOPPER["gdpa"], attention.HOPPER["jagged_attention"])
    tables = (attention.CANDIDATES, *hopper, attention.LARGE, norm_linear.LARGE, norm_linear.CANDIDATES)
    return hashlib.sha256(repr(tables).encode()).hexdigest()[:16]


def tuning_path() -> Path | None:
    """The file that ``GEM_KERNELS_TUNING`` names, else that of this GPU in Triton's cache; None if switched off."""
    value = os.environ.get(VARIABLE, "")
    if value == OFF:
        return None
    if value:
        return Path(value)
    import triton

    return Path(triton.knobs.cache.dir) / file_name(torch.cuda.get_device_name())


@functools.cache
def table() -> Mapping[Key, Choice]:
    """The choices that hold in this process: none without a file, without a GPU, or where it is of something else.

    Raises:
        ValueError: if the file is damaged, or ``GEM_KERNELS_TUNING`` names one that is not there.
    """
    if not torch.cuda.is_available():
        return {}
    path = tuning_path()
    return {} if path is None else load(path, made_for(), must_exist=bool(os.environ.get(VARIABLE)))


def load(path: Path, here: MadeFor, *, must_exist: bool) -> Mapping[Key, Choice]:
    """Choices of a file that hold here; warns of a stale one."""
    if not path.exists():
        if must_exist:
            raise ValueError(
                f"tuning: {VARIABLE} must be {OFF} or name a file, got `{path}`, which is not there; write it with "
                f"`python -m gem_kernels warm`, or set {VARIABLE}={OFF}."
            )
        return {}
    try:
        return read(path, here)
    except StaleError as error:
        warnings.warn(
            f"tuning: `{path}` is ignored, it was made for {error}; `python -m gem_kernels warm` replaces it.",
            UserWarning,
            stacklevel=2,
        )
        return {}


def forget() -> None:
    """Read the file again at the next launch: for ``warm``, which writes it, and for tests."""
    table.cache_clear()
