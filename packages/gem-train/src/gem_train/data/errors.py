"""The one error of the data layer."""

from __future__ import annotations

from typing import Any


class DataError(ValueError):
    """A data file breaks a rule of its schema.

    Attributes:
        file: The file, as it was given.
        column: The column concerned, or None when the file as a whole is at fault.
        row: Row index in the file, from 0, or None when no single row is at fault.
        rule: The rule that is broken.
        value: The value found, or None.

    The message ends with what to do about it.
    """

    def __init__(
        self,
        rule: str,
        *,
        file: str,
        remedy: str,
        column: str | None = None,
        row: int | None = None,
        value: Any = None,
    ) -> None:
        self.file = file
        self.column = column
        self.row = row
        self.rule = rule
        self.value = value
        where = file
        if column is not None:
            where += f", column {column!r}"
        if row is not None:
            where += f", row {row}"
        found = "" if value is None else f", got {value!r}"
        super().__init__(f"{where}: {rule}{found}; {remedy}")
