"""Reading Parquet columns into numpy, with every row checked against its `Column`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem_train.data.errors import DataError
from gem_train.data.schema import Column

Array = npt.NDArray[Any]


class StringLists(NamedTuple):
    """A column of lists of strings: row r holds values[offsets[r]:offsets[r + 1]]."""

    values: Array
    offsets: npt.NDArray[np.int64]


class Table(NamedTuple):
    """Checked columns of one file, all of the same number of rows."""

    file: str
    num_rows: int
    columns: Mapping[str, Array]
    """int columns as int64, float as float64, string as numpy unicode."""
    lists: Mapping[str, StringLists]
    rows: npt.NDArray[np.int64] | None = None
    """Row in the file of each row here, when a filter left some out; None when none was."""

    def file_row(self, row: int) -> int:
        """Row in the file of a row of this table."""
        return row if self.rows is None else int(self.rows[row])


def read_table(path: str | os.PathLike[str], columns: Sequence[Column]) -> Table:
    """Reads and checks the named columns of a Parquet file.

    Args:
        path: The file.
        columns: The columns to read; others are left alone.

    Returns:
        The columns, in file order.

    Raises:
        DataError: if the file cannot be read, is empty, lacks a column or has it twice, or holds a value that a column
            forbids.
    """
    file = os.fspath(path)
    if not Path(file).is_file():
        raise DataError("the file must exist", file=file, remedy="give the path of a Parquet file")
    with Path(file).open("rb") as opened:
        start = opened.read(16)
    if start and not start.startswith((b"PAR1", b"PARE")):  # PARE: an encrypted footer, of which pyarrow tells
        raise DataError(
            "the file must be a Parquet file, which begins with b'PAR1'",
            file=file,
            value=start,
            remedy="if it is CSV, write it as Parquet with pyarrow.parquet.write_table(pyarrow.csv.read_csv(file), "
            "new_file) or pandas.read_csv(file).to_parquet(new_file), otherwise copy it again",
        )
    try:
        parquet = pq.ParquetFile(file)
        found = list(parquet.schema_arrow.names)
        missing = [c.name for c in columns if c.name not in found]
        if missing:
            raise DataError(
                f"the schema's columns must be present; missing {missing}, found {found}",
                file=file,
                column=missing[0],
                remedy="rename the file's columns or name them in the schema",
            )
        repeated = [c.name for c in columns if found.count(c.name) > 1]
        if repeated:
            raise DataError(
                f"a column must be in the file once; it holds {found.count(repeated[0])} of this name",
                file=file,
                column=repeated[0],
                remedy="drop or rename the others",
            )
        arrow = parquet.read(columns=[c.name for c in columns])
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"the file must be a complete Parquet file ({str(error).splitlines()[0]})",
            file=file,
            remedy="write or copy it again",
        ) from error
    if arrow.num_rows == 0:
        raise DataError("the file must have rows", file=file, remedy="check the job that wrote it", value=0)
    plain: dict[str, Array] = {}
    lists: dict[str, StringLists] = {}
    for column in columns:
        data = arrow.column(column.name).combine_chunks()
        if isinstance(data, pa.ChunkedArray):  # combine_chunks of zero or several chunks, by pyarrow version
            data = pa.concat_arrays(data.chunks)
        if column.kind == "strings":
            lists[column.name] = _string_lists(file, column, data)
        elif column.kind == "string":
            plain[column.name] = _strings(file, column, data)
        else:
            plain[column.name] = _numbers(file, column, data)
    return Table(file, arrow.num_rows, plain, lists)


def check_unique(table: Table, column: str) -> None:
    """Raises DataError if two rows of a table share a key.

    Args:
        table: The table.
        column: Its key column.
    """
    values = table.columns[column]
    order = np.argsort(values, kind="stable")
    repeated = np.flatnonzero(values[order[1:]] == values[order[:-1]])
    if repeated.size:
        first, second = int(order[repeated[0]]), int(order[repeated[0] + 1])
        raise DataError(
            f"each {column} must have one row; row {first} has it already",
            file=table.file,
            column=column,
            row=second,
            value=values[second].item(),
            remedy="keep one of the rows",
        )


def _no_nulls(file: str, column: Column, data: pa.Array) -> None:
    if data.null_count:
        row = int(np.flatnonzero(pc.is_null(data).to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"must not be null ({data.null_count} nulls)",
            file=file,
            column=column.name,
            row=row,
            remedy="fill or drop these rows",
        )


def _wrong_type(file: str, column: Column, data: pa.Array, wanted: str) -> DataError:
    remedy = "cast the column"
    if pa.types.is_timestamp(data.type):
        seconds = f"pa.timestamp('s', {data.type.tz!r})"
        remedy = f"make it seconds since 1970 with pc.cast(pc.cast(column, {seconds}, safe=False), pa.int64())"
    return DataError(f"must have {wanted}", file=file, column=column.name, value=str(data.type), remedy=remedy)


def _numbers(file: str, column: Column, data: pa.Array) -> Array:
    kind = data.type
    integer = pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    if column.kind == "int" and not integer:
        raise _wrong_type(file, column, data, "an integer type")
    if not integer and not pa.types.is_floating(kind):
        raise _wrong_type(file, column, data, "a number type")
    _no_nulls(file, column, data)
    values: npt.NDArray[Any] = data.to_numpy(zero_copy_only=False)
    if values.dtype == np.uint64 and values.size and int(values.max()) > np.iinfo(np.int64).max:
        row = int(values.argmax())
        raise DataError(
            "must fit int64",
            file=file,
            column=column.name,
            row=row,
            value=int(values[row]),
            remedy="map the ids to smaller numbers",
        )
    values = values.astype(np.int64 if column.kind == "int" else np.float64)
    if column.kind == "float" and not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        _raise_value(file, column, row, "must be finite", values, "fill or drop these rows")
    if column.minimum is not None and (values < column.minimum).any():
        row = int(np.flatnonzero(values < column.minimum)[0])
        _raise_value(file, column, row, f"must be >= {column.minimum}", values, "correct or drop these rows")
    if column.maximum is not None and (values > column.maximum).any():
        row = int(np.flatnonzero(values > column.maximum)[0])
        _raise_value(file, column, row, f"must be <= {column.maximum}", values, "correct or drop these rows")
    return values


def _raise_value(file: str, column: Column, row: int, rule: str, values: Array, remedy: str) -> None:
    raise DataError(rule, file=file, column=column.name, row=row, value=values[row].item(), remedy=remedy)


def _is_string(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_string(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _strings(file: str, column: Column, data: pa.Array) -> Array:
    if not _is_string(data.type):
        raise _wrong_type(file, column, data, "a string type")
    _no_nulls(file, column, data)
    # Through the dictionary, so that Python strings are made once per distinct value and not once per row.
    coded = data if pa.types.is_dictionary(data.type) else data.dictionary_encode()
    distinct = np.asarray(coded.dictionary.to_pylist(), dtype=np.str_)
    codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return distinct[codes] if distinct.size else np.empty(0, dtype=np.str_)


def _string_lists(file: str, column: Column, data: pa.Array) -> StringLists:
    kind = data.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not _is_string(kind.value_type):
        raise _wrong_type(file, column, data, "a list of strings")
    _no_nulls(file, column, data)
    flat = data.flatten()  # honours slices, unlike data.values
    if flat.null_count:
        flat_row = int(np.flatnonzero(pc.is_null(flat).to_numpy(zero_copy_only=False))[0])
        lengths = pc.list_value_length(data).to_numpy(zero_copy_only=False)
        row = int(np.searchsorted(np.cumsum(lengths), flat_row, side="right"))
        raise DataError(
            "must not hold null elements",
            file=file,
            column=column.name,
            row=row,
            remedy="drop them from the lists",
        )
    offsets = np.zeros(len(data) + 1, dtype=np.int64)
    np.cumsum(pc.list_value_length(data).to_numpy(zero_copy_only=False), out=offsets[1:])
    return StringLists(_strings(file, column, flat), offsets)
