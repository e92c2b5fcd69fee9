"""Every rule on a file: the error names file, column, row, rule and value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_train.data import CategoricalFeature, Column, DataError, DatasetSchema, DenseColumn, load_events


@dataclass(frozen=True)
class Case:
    id: str
    change: Callable[[dict, dict], Any]
    file: str
    column: str | None
    row: int | None
    match: str
    value: Any = field(default=None)
    schema: Callable[[DatasetSchema], DatasetSchema] = lambda schema: schema


def put(table: int, column: str, row: int, value: Any) -> Callable[[dict, dict], None]:
    def change(*tables: dict) -> None:
        values = list(tables[table][column])
        values[row] = value
        tables[table][column] = values

    return change


def drop(table: int, column: str) -> Callable[[dict, dict], None]:
    return lambda *tables: tables[table].pop(column)


def cast(table: int, column: str, dtype: pa.DataType) -> Callable[[dict, dict], None]:
    def change(*tables: dict) -> None:
        values = tables[table][column]
        if pa.types.is_string(dtype):
            values = [str(v) for v in values]
        tables[table][column] = pa.array(values, dtype)

    return change


def clear(*tables: dict) -> None:
    for name, dtype in zip(
        tables[0], (pa.int64(), pa.string(), pa.int64(), pa.float32(), pa.int64(), pa.int8(), pa.float64()), strict=True
    ):
        tables[0][name] = pa.array([], dtype)


def milliseconds(events: dict, items: dict) -> None:
    events["timestamp"] = np.asarray(events["timestamp"]) * 1_000_000_000


def nanoseconds(events: dict, items: dict) -> None:
    events["timestamp"] = np.asarray(events["timestamp"])
    events["timestamp"][3] = 1_700_000_000 * 10**9


def as_uint64(events: dict, items: dict) -> None:
    values = np.asarray(events["user_id"]).astype(np.uint64)
    values[5] = 2**63 + 7
    events["user_id"] = values


def long_before(events: dict, items: dict) -> None:
    events["timestamp"] = np.asarray(events["timestamp"])
    events["timestamp"][4] = -(2**63)


CASES = [
    Case("missing event column", drop(0, "stars"), "events", "stars", None, r"missing \['stars'\], found \['user_id'"),
    Case("missing item column", drop(1, "weight"), "items", "weight", None, r"missing \['weight'\]"),
    Case("no rows", clear, "events", None, None, "must have rows", 0),
    Case("null label", put(0, "stars", 4, None), "events", "stars", 4, "must not be null"),
    Case("NaN label", put(0, "stars", 6, float("nan")), "events", "stars", 6, "must be finite"),
    Case("infinite price", put(0, "price", 6, float("inf")), "events", "price", 6, "must be finite", float("inf")),
    Case("null user", put(0, "user_id", 0, None), "events", "user_id", 0, "must not be null"),
    Case("null item", put(0, "item_id", 599, None), "events", "item_id", 599, "must not be null"),
    Case("null tags", put(1, "tags", 3, None), "items", "tags", 3, "must not be null"),
    Case("null tag", put(1, "tags", 9, ["t0", None]), "items", "tags", 9, "must not hold null elements"),
    Case("negative user", put(0, "user_id", 2, -1), "events", "user_id", 2, "must be >= 0", -1),
    Case("stars too high", put(0, "stars", 2, 5.5), "events", "stars", 2, "must be <= 5", 5.5),
    Case("label not binary", put(0, "bought", 7, 2), "events", "bought", 7, "must be <= 1", 2),
    Case("milliseconds", milliseconds, "events", "timestamp", 0, "the year 2242.*if these are mill.* by 1,000$"),
    Case(
        "nanoseconds", nanoseconds, "events", "timestamp", 3, "if these are nanoseconds, divide them by 1,000,000,000"
    ),
    Case(
        "far too early",
        long_before,
        "events",
        "timestamp",
        4,
        r"at least -8589934592 \(the year 1697\)",
        -(2**63),
        lambda s: replace(
            s, event_columns=(*s.event_columns[:2], Column(name="timestamp", kind="int"), *s.event_columns[3:])
        ),
    ),
    Case("too large id", as_uint64, "events", "user_id", 5, "must fit int64", 2**63 + 7),
    Case("float user", cast(0, "user_id", pa.float64()), "events", "user_id", None, "an integer type", "double"),
    Case(
        "timestamps",
        cast(0, "timestamp", pa.timestamp("us", "UTC")),
        "events",
        "timestamp",
        None,
        "an integer type",
        "timestamp[us, tz=UTC]",
    ),
    Case("string stars", cast(0, "stars", pa.string()), "events", "stars", None, "a number type", "string"),
    Case("string weight", cast(1, "weight", pa.string()), "items", "weight", None, "a number type", "string"),
    Case("repeated item", put(1, "item_id", 8, "i3"), "items", "item_id", 8, "row 3 has it already", "i3"),
    Case("unknown item", put(0, "item_id", 11, "new"), "events", "item_id", 11, "must be in the item table", "new"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_broken_file(toy: Any, case: Case, tmp_path: Path) -> None:
    events, items = toy.columns()
    case.change(events, items)
    paths = toy.write(tmp_path, events, items)
    with pytest.raises(DataError, match=case.match) as caught:
        load_events(paths[0], case.schema(toy.schema), items=paths[1])
    error = caught.value
    assert isinstance(error, ValueError)
    assert (Path(error.file).stem, error.column, error.row) == (case.file, case.column, case.row)
    if case.value is not None:
        assert error.value == case.value
    text = str(error)
    assert text.startswith(error.file)
    assert "; " in text, "the message ends with a remedy"
    for part in (error.column, error.row):
        assert part is None or re.search(rf"\b{re.escape(str(part))}\b", text)


def with_price_column(transform: Any = "identity") -> Callable[[DatasetSchema], DatasetSchema]:
    return lambda s: replace(s, context_dense=(DenseColumn(column="price", transform=transform),), event_dense=())


def prices(change: Callable[[np.ndarray, np.ndarray], Any]) -> Callable[[dict, dict], None]:
    """Changes prices, given those of the training period and of the test period as rows."""

    def apply(events: dict, items: dict) -> None:
        time = np.asarray(events["timestamp"])
        row = change(np.flatnonzero(time < 1_040), np.flatnonzero((time > 1_150) & (time <= 1_160)))
        events["price"] = np.array(events["price"])
        for at, value in row.items():
            events["price"][at] = value

    return apply


@pytest.mark.parametrize(
    ("change", "value", "match"),
    [
        (lambda train, test: {train[7]: 1e200}, 1e200, "must be finite after standardising"),
        (lambda train, test: {train[3]: 1e308, train[7]: 1.5e308}, 1.5e308, "must be finite after standardising"),
        (lambda train, test: {test[7]: 1e300, test[2]: 1e39}, 1e300, "must be finite after standardising"),
        (lambda train, test: {test[7]: 1e40}, 1e40, "must be finite after standardising .*; correct or drop such rows"),
        (
            lambda train, test: {train[7]: 1e38},
            1e38,
            "98 % of the training values become one.*, or use transform='log1p'",
        ),
        (lambda train, test: {train[7]: 1e12}, 1e12, "98 % of the training values become one number"),
    ],
)
def test_numbers_that_would_destroy_a_dense_column(
    toy: Any, change: Any, value: float, match: str, tmp_path: Path
) -> None:
    events, items = toy.columns()
    prices(change)(events, items)
    paths = toy.write(tmp_path, events, items)
    with pytest.raises(DataError, match=match) as caught:
        load_events(paths[0], with_price_column()(toy.schema), items=paths[1])
    row = int(np.flatnonzero(events["price"] == value)[0])
    assert (caught.value.column, caught.value.row, caught.value.value) == ("price", row, value)
    log = load_events(paths[0], with_price_column("log1p")(toy.schema), items=paths[1])
    assert np.isfinite(log.dense).all()


def test_dense_columns_that_are_left_alone(toy: Any, tmp_path: Path) -> None:
    """One far value that others can still be told apart beside, one column that is constant, and one that nearly is."""
    for values in (
        np.r_[1e6, np.arange(599)],
        np.full(600, 7.0),
        np.r_[1.0, np.zeros(599)],
        1e30 + 1e20 * np.arange(600),
    ):
        events, items = toy.columns()
        events["price"] = values[np.argsort(np.argsort(events["timestamp"], kind="stable"))]
        paths = toy.write(tmp_path, events, items)
        log = load_events(paths[0], with_price_column()(toy.schema), items=paths[1])
        assert np.isfinite(log.dense).all()


@pytest.mark.parametrize(
    ("feature", "file", "match"),
    [
        (CategoricalFeature(name="f", column="item_id", values=("I1", "I2")), "events",
         r"column 'item_id': must hold .* `values` of feature 'f', which are \('I1', 'I2'\), got \['i0', 'i1',"),
        (CategoricalFeature(name="f", column="bought", values=(3,)), "events", r"which are \(3,\), got \[0, 1\]; give"),
        (CategoricalFeature(name="f", column="stars", values=(0.5,)), "events", r"which are \(0.5,\), got \[0.0, 1.0,"),
        (CategoricalFeature(name="f", column="tags", source="items", values=("T",)), "items", r"got \['t0', 't1',"),
        (CategoricalFeature(name="f", column="weight", source="items", values=(9.0,)), "items", r"which are \(9.0,\)"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_no_event_has_a_value_of(
    toy: Any, feature: CategoricalFeature, file: str, match: str, tmp_path: Path
) -> None:
    paths = toy.write(tmp_path, *toy.columns())
    schema = replace(toy.schema, features=(*toy.schema.features, feature), history_features=("f",))
    with pytest.raises(DataError, match=match) as caught:
        load_events(paths[0], schema, items=paths[1])
    assert Path(caught.value.file).stem == file


def test_training_labels_that_are_all_alike_are_warned_of(toy: Any, tmp_path: Path) -> None:
    events, items = toy.columns()
    events["bought"] = np.zeros(600, dtype=np.int64)
    paths = toy.write(tmp_path, events, items)
    with pytest.warns(UserWarning, match=r"^all \d+ training labels of sold are 0, so .*; check the column, `op` and"):
        load_events(paths[0], toy.schema, items=paths[1])


def test_items_given_as_numbers(toy: Any, tmp_path: Path) -> None:
    events, items = toy.columns()
    items["item_id"] = np.arange(40)
    paths = toy.write(tmp_path, events, items)
    with pytest.raises(DataError, match="a string type, got 'int64'"):
        load_events(paths[0], toy.schema, items=paths[1])


def test_a_column_that_is_there_twice(toy: Any, tmp_path: Path) -> None:
    events, items = toy.columns()
    paths = toy.write(tmp_path, events, items)
    table = pq.read_table(paths[0])
    pq.write_table(table.append_column("stars", table["stars"]), paths[0])
    with pytest.raises(
        DataError, match=r"'stars': a column must be in the file once; it holds 2 of this name; drop or"
    ):
        load_events(paths[0], toy.schema, items=paths[1])


def test_arguments_of_another_type_are_refused(toy: Any, tmp_path: Path) -> None:
    events, items = toy.write(tmp_path, *toy.columns())
    with pytest.raises(TypeError, match="`events` must be a path, got Table; write a Parquet file with pyarrow"):
        load_events(pq.read_table(events), toy.schema, items=items)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`schema` must be a DatasetSchema, got NoneType"):
        load_events(events, None, items=items)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`items` must be a path, got Table; write a"):
        load_events(events, toy.schema, items=pq.read_table(items))  # type: ignore[arg-type]


def test_not_parquet(toy: Any, tmp_path: Path) -> None:
    path = tmp_path / "events.parquet"
    path.write_text("user_id,item_id\n1,2\n")
    with pytest.raises(DataError, match=r"begins with b'PAR1', got b'user_id,.*; if it is CSV, .*read_csv\(file\)"):
        load_events(path, toy.schema, items=path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_truncated_file(toy: Any, share: float, tmp_path: Path) -> None:
    events, items = toy.write(tmp_path, *toy.columns())
    data = events.read_bytes()
    events.write_bytes(data[: int(share * len(data))])
    with pytest.raises(DataError, match="complete Parquet file"):
        load_events(events, toy.schema, items=items)


def test_damaged_page(toy: Any, tmp_path: Path) -> None:
    events, items = toy.write(tmp_path, *toy.columns())
    data = bytearray(events.read_bytes())
    data[8:200] = b"\xff" * 192  # inside the first column chunk; the footer stays readable
    events.write_bytes(bytes(data))
    with pytest.raises(DataError, match="complete Parquet file"):
        load_events(events, toy.schema, items=items)


def test_missing_file(toy: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must exist"):
        load_events(tmp_path / "none.parquet", toy.schema, items=tmp_path / "none.parquet")


def test_items_must_match_schema(toy: Any, tmp_path: Path) -> None:
    events, _ = toy.write(tmp_path, *toy.columns())
    with pytest.raises(ValueError, match="exactly when the schema has item_columns"):
        load_events(events, toy.schema)


def test_row_order_types_and_row_groups_do_not_matter(toy: Any, tmp_path: Path) -> None:
    events, items = toy.columns()
    order = np.lexsort((np.arange(600), events["timestamp"]))
    narrow = {
        "user_id": pa.array(events["user_id"], pa.int16()),
        "item_id": pa.array(events["item_id"], pa.large_string()).dictionary_encode(),
        "timestamp": pa.array(events["timestamp"], pa.uint32()),
        "stars": pa.array(events["stars"].astype(np.int8)),
        "bought": pa.array(events["bought"].astype(bool)),
        "complete": pa.array(events["complete"].astype(bool)),
        "price": pa.array(events["price"]),
        "unused": pa.array([None] * 600),
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    wide = toy.write(tmp_path / "a", {k: np.asarray(v)[order] for k, v in events.items()}, items)
    other = toy.write(tmp_path / "b", {k: v.take(pa.array(order)) for k, v in narrow.items()}, items)
    pq.write_table(pq.read_table(other[0]), other[0], row_group_size=7)
    a, b = load_events(wide[0], toy.schema, items=wide[1]), load_events(other[0], toy.schema, items=other[1])
    for name in ("user", "timestamp", "row", "split", "history_start", "history_end", "dense", "event_dense"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for name, feature in a.encoded.items():
        np.testing.assert_array_equal(feature.ids, b.encoded[name].ids, err_msg=name)
