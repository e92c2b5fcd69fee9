"""Checks of what the public functions and classes of gem_train.data are given: one wording for one kind of mistake."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Sequence
from numbers import Integral, Real


def check_integer(owner: str, name: str, value: object, minimum: int | None = None) -> None:
    """Raises unless `value` is an int, one of numpy's included, of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{owner}: `{name}` must be an int, got {_shown(value)}; pass int(x)")
    if minimum is not None and int(value) < minimum:
        raise ValueError(f"{owner}: `{name}` must be >= {minimum}, got {value}; raise it")


def check_number(owner: str, name: str, value: object) -> None:
    """Raises unless `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: `{name}` must be a number, got {_shown(value)}; pass float(x)")
    if not math.isfinite(value):
        raise ValueError(f"{owner}: `{name}` must be finite, got {value}; pass a number that is")


def check_flag(owner: str, name: str, value: object) -> None:
    """Raises unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` must be a bool, got {_shown(value)}; pass True or False")


def check_text(owner: str, name: str, value: object) -> None:
    """Raises unless `value` is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{owner}: `{name}` must be a str, got {_shown(value)}; give the name")


def check_choice(owner: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raises unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        listed = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
        raise ValueError(f"{owner}: `{name}` must be {listed}, got {_shown(value)}; name one of them")


def check_list(owner: str, name: str, value: object, remedy: str) -> None:
    """Raises unless `value` is a tuple or list."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{owner}: `{name}` must be a tuple, got {_shown(value)}; {remedy}")


def check_kind(owner: str, name: str, value: object, kind: type, remedy: str) -> None:
    """Raises unless `value` is a `kind`."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{owner}: `{name}` must be {article} {kind.__name__}, got {_shown(value)}; {remedy}")


def check_path(owner: str, name: str, value: object, remedy: str) -> None:
    """Raises unless `value` is a path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{owner}: `{name}` must be a path, got {_shown(value)}; {remedy}")


def check_directory(owner: str, directory: object) -> None:
    """Raises unless `directory` is a path."""
    check_path(owner, "directory", directory, "name the directory that holds events.parquet and items.parquet")


def _shown(value: object) -> str:
    """Its type, and what it is if that is short."""
    plain = value is None or isinstance(value, str | int | float | tuple | list)
    return f"{type(value).__name__} {reprlib.repr(value)}" if plain else type(value).__name__
