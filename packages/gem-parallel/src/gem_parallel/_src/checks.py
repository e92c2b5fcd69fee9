"""Checks of arguments that say nothing of ranks."""

from __future__ import annotations

__all__ = ["check_number"]


def check_number(owner: str, argument: str, value: object) -> None:
    """Refuse what is neither int nor float: other numbers may fail later, in JSON, torch or fbgemm."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: `{argument}` must be a number, got {type(value).__name__} {value!r}; pass a float")
