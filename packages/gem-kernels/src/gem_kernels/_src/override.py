"""Choices that a block of code replaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


@contextlib.contextmanager
def replaced(table: dict[K, V], key: K, value: V) -> Iterator[None]:
    """``table[key]`` is ``value`` inside the block; afterwards it is what it was, or absent again."""
    before = table.get(key)
    table[key] = value
    try:
        yield
    finally:
        del table[key]
        if before is not None:
            table[key] = before
