"""The event log: events sorted per user and time, features as ids, histories as ranges."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gem_train.data.arguments import check_choice, check_kind, check_path
from gem_train.data.encoding import Encoder, encode_feature, standardise
from gem_train.data.errors import DataError
from gem_train.data.parquet import Table, check_unique, read_table
from gem_train.data.schema import DatasetSchema, DenseColumn

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
LAST_SECOND = 2**33
"""In the year 2242. Milliseconds since 1970 passed it after 99 days; features of the clock would be wrong silently.
Times before 1970 are negative, down to the same number."""

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class TableSpec(NamedTuple):
    """An embedding table that the log's features read: ids are in [0, num_rows)."""

    name: str
    num_rows: int


class FeatureSpec(NamedTuple):
    """A feature as it is named in a batch."""

    name: str
    table: str
    multi_valued: bool
    """True when a bag may hold any number of ids, False when it holds exactly one."""


class EncodedFeature(NamedTuple):
    """The ids of one feature for all events of the log. Event e has ids[offsets[e]:offsets[e + 1]]."""

    num_rows: int
    ids: Int64Array
    offsets: Int64Array | None
    """None when every event has exactly one id."""
    delay_seconds: int
    """An event younger than this shows id 0, because a label could be read from it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EventLog:
    """N events, sorted by user and then time. Built by `build_event_log` or `load_events`."""

    schema: DatasetSchema
    user: Int64Array
    """(N,) users, numbered from 0."""
    timestamp: Int64Array
    """(N,) seconds."""
    item: Int64Array
    """(N,) items of the whole log, numbered from 0. For statistics; a model reads `features`."""
    row: Int64Array
    """(N,) row of the event in its file."""
    history_start: Int64Array
    """(N,) position of the user's first event."""
    history_end: Int64Array
    """(N,) position after the user's last event with a strictly smaller timestamp."""
    labels: Mapping[str, Float32Array]
    """Task to (N,) values in {0, 1}; meaningless where `split` is -1 because the label is incomplete."""
    labelled: npt.NDArray[np.bool_]
    """(N,) whether the labels are complete."""
    split: npt.NDArray[np.int8]
    """(N,) index into SPLITS, -1 for events that are histories only."""
    validation_from: int
    """Timestamp of the first validation event. What is learned from the data reads earlier events only."""
    test_from: int
    """Timestamp of the first test event."""
    encoded: Mapping[str, EncodedFeature]
    encodings: Mapping[str, str]
    """Table, `dense` or `event_dense` to a fingerprint of what was learned from the data to encode it: vocabulary,
    boundaries, means. A model reads another log rightly only where these are equal."""
    dense: Float32Array
    """(N, num_dense), standardised by the training samples."""
    event_dense: Float32Array
    """(N, num_event_dense), standardised by the events of the training period."""

    @property
    def num_events(self) -> int:
        """N."""
        return len(self.timestamp)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the labels."""
        return tuple(self.labels)

    @property
    def num_dense(self) -> int:
        """Dense context features."""
        return int(self.dense.shape[1])

    @property
    def num_event_dense(self) -> int:
        """Dense features of a history event."""
        return int(self.event_dense.shape[1])

    @property
    def context_features(self) -> tuple[str, ...]:
        """Features with one bag per sample."""
        return self.schema.candidate_features

    @property
    def event_features(self) -> tuple[str, ...]:
        """Features with one bag per history event, as they are named in a batch."""
        return tuple(f"{self.schema.history}.{name}" for name in self.schema.history_features)

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The embedding tables. A feature of candidate and history reads one table."""
        return tuple(TableSpec(name, feature.num_rows) for name, feature in self.encoded.items())

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """All features of a batch, context features first."""
        names = [(name, name) for name in self.schema.candidate_features]
        names += [(f"{self.schema.history}.{name}", name) for name in self.schema.history_features]
        return tuple(FeatureSpec(full, name, self.encoded[name].offsets is not None) for full, name in names)

    def samples(self, split: Split) -> Int64Array:
        """Positions of a split's samples, in time order.

        Args:
            split: "train", "validation" or "test".

        Returns:
            (num_samples,) positions in the log.
        """
        check_split("EventLog.samples", split)
        positions = np.flatnonzero(self.split == SPLITS.index(split))
        return positions[np.lexsort((self.row[positions], self.timestamp[positions]))]


def check_split(owner: str, split: object) -> None:
    """Raises unless `split` names one."""
    check_choice(owner, "split", split, SPLITS)


def load_events(
    events: str | os.PathLike[str], schema: DatasetSchema, *, items: str | os.PathLike[str] | None = None
) -> EventLog:
    """Reads Parquet files into an event log.

    Args:
        events: File with a row per event, in any order.
        schema: What the columns mean.
        items: File with a row per item; needed when the schema has item columns.

    Returns:
        The log.

    Raises:
        DataError: if a file breaks a rule of the schema.
        TypeError: if `events` or `items` is no path, or `schema` no DatasetSchema.
        ValueError: if `items` and the schema's item_columns disagree.

    Warns:
        UserWarning: if all training labels of a task are alike.
    """
    for name, path in (("events", events), ("items", items)):
        if name == "events" or path is not None:
            check_path("load_events", name, path, "write a Parquet file with pyarrow.parquet.write_table first")
    _check_schema("load_events", schema)
    if (items is None) != (not schema.item_columns):
        raise ValueError(
            f"load_events: `items` must be given exactly when the schema has item_columns, got {items!r} with "
            f"{len(schema.item_columns)} item columns; give the file or change the schema"
        )
    event_table = read_table(events, schema.event_columns)
    item_table = None if items is None else read_table(items, schema.item_columns)
    return build_event_log(schema, event_table, item_table)


def _check_schema(owner: str, schema: object) -> None:
    check_kind(owner, "schema", schema, DatasetSchema, "it says what the columns mean")


def build_event_log(schema: DatasetSchema, events: Table, items: Table | None = None) -> EventLog:
    """Builds an event log from checked tables.

    Args:
        schema: What the columns mean.
        events: A row per event, in any order.
        items: A row per item, when the schema has item columns.

    Returns:
        The log.

    Raises:
        DataError: if an item repeats or is missing, a timestamp cannot be in seconds, a split is empty, a column holds
            none of the values that its feature lists, or numbers of a dense column are too large or too far apart.
        TypeError: if an argument has another type.

    Warns:
        UserWarning: if all training labels of a task are alike.
    """
    _check_schema("build_event_log", schema)
    for name, table in (("events", events), ("items", items)):
        if name == "events" or table is not None:
            check_kind("build_event_log", name, table, Table, "or give files to load_events")
    timestamp = events.columns[schema.timestamp].astype(np.int64)
    _check_seconds(schema, events, timestamp)
    distinct_users, user = np.unique(events.columns[schema.user], return_inverse=True)
    order = np.lexsort((np.arange(events.num_rows), timestamp, user))
    user, timestamp = user[order].astype(np.int64), timestamp[order]
    distinct_items, item = np.unique(events.columns[schema.item][order], return_inverse=True)
    start, end = _histories(user, timestamp, len(distinct_users))
    labelled = np.ones(events.num_rows, dtype=np.bool_)
    if schema.labelled is not None:
        labelled = events.columns[schema.labelled][order] == 1
    split, validation_from, test_from = _split(schema, events.file, timestamp, labelled)
    item_row = None
    if items is not None:
        item_row = _item_rows(schema, events, items, order, distinct_items)[item]
    encoder = Encoder(events, items, order, item_row, in_training=timestamp < validation_from)
    read = [f for f in schema.features if f.name in (*schema.candidate_features, *schema.history_features)]
    encoded, encodings = {}, {}
    for feature in read:
        num_rows, ids, offsets, encodings[feature.name] = encode_feature(encoder, feature)
        delay = schema.label_delay(feature.column) if feature.source == "events" else None
        encoded[feature.name] = EncodedFeature(num_rows, ids, offsets, delay or 0)
    clock = _Clock(timestamp, start, end)
    train = split == SPLITS.index("train")
    dense, encodings["dense"] = _standard(schema.context_dense, clock, events, order, train)
    event_dense, encodings["event_dense"] = _standard(schema.event_dense, clock, events, order, encoder.in_training)
    log = EventLog(
        schema=schema,
        user=user,
        timestamp=timestamp,
        item=item.astype(np.int64),
        row=(order if events.rows is None else events.rows[order]).astype(np.int64),
        history_start=start,
        history_end=end,
        labels={
            label.task: _label(label.op, events.columns[label.column][order], label.value) for label in schema.labels
        },
        labelled=labelled,
        split=split,
        validation_from=validation_from,
        test_from=test_from,
        encoded=encoded,
        encodings=encodings,
        dense=dense,
        event_dense=event_dense,
    )
    for remark in labels_alike(log, log.tasks):
        warnings.warn(f"{remark}; check the column, `op` and `value` of its Label", stacklevel=3)
    return log


def labels_alike(log: EventLog, tasks: tuple[str, ...]) -> list[str]:
    """What there is to say of tasks whose training samples all have one label.

    Args:
        log: The log.
        tasks: Those to look at.
    """
    train = log.samples("train")
    values = {task: log.labels[task][train] for task in tasks}
    return [
        f"all {len(train):,} training labels of {task} are {int(labels[0])}, so that there is nothing to learn"
        for task, labels in values.items()
        if len(labels) and (labels == labels[0]).all()
    ]


def _check_seconds(schema: DatasetSchema, events: Table, timestamp: Int64Array) -> None:
    far = np.flatnonzero((timestamp > LAST_SECOND) | (timestamp < -LAST_SECOND))
    if not far.size:
        return
    row = int(far[0])
    value = int(timestamp[row])
    units = (("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9))
    unit, factor = next((each for each in units if abs(value) // each[1] <= LAST_SECOND), units[-1])
    bound = f"at most {LAST_SECOND} (the year 2242)" if value > 0 else f"at least {-LAST_SECOND} (the year 1697)"
    raise DataError(
        f"must be seconds since 1970, {bound}",
        file=events.file,
        column=schema.timestamp,
        row=events.file_row(row),
        value=value,
        remedy=f"if these are {unit}, divide them by {factor:,}",
    )


def _histories(user: Int64Array, timestamp: Int64Array, num_users: int) -> tuple[Int64Array, Int64Array]:
    """Start of each event's user, and end of the part of the user's events that is strictly earlier."""
    position = np.arange(len(user))
    start = np.searchsorted(user, np.arange(num_users))[user]
    first_of_tie = np.ones(len(user), dtype=np.bool_)
    first_of_tie[1:] = (user[1:] != user[:-1]) | (timestamp[1:] != timestamp[:-1])
    end = np.maximum.accumulate(np.where(first_of_tie, position, 0))
    return start.astype(np.int64), end.astype(np.int64)


def _split(
    schema: DatasetSchema, file: str, timestamp: Int64Array, labelled: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int8], int, int]:
    rule = schema.split
    known = np.sort(timestamp[labelled])
    if not known.size:
        raise DataError(
            "at least one event must be labelled", file=file, column=schema.labelled, remedy="check the labels"
        )
    test_from = int(known[int((1.0 - rule.test_fraction) * len(known))])
    rest = known[known < test_from - rule.gap_seconds]
    if not rest.size:
        raise DataError(
            f"labelled events must exist before timestamp {test_from - rule.gap_seconds}, where the test split begins",
            file=file,
            column=schema.timestamp,
            remedy="give more data, or a smaller test_fraction or gap_seconds in a schema of your own (load_events)",
        )
    validation_from = int(rest[int((1.0 - rule.validation_fraction) * len(rest))])
    if rest[0] >= validation_from:
        raise DataError(
            f"labelled events must exist before timestamp {validation_from}, where the validation split begins",
            file=file,
            column=schema.timestamp,
            remedy="give more data, or a smaller validation_fraction in a schema of your own (load_events)",
        )
    split = np.full(len(timestamp), -1, dtype=np.int8)
    split[labelled & (timestamp < validation_from)] = SPLITS.index("train")
    before_gap = timestamp < test_from - rule.gap_seconds
    split[labelled & (timestamp >= validation_from) & before_gap] = SPLITS.index("validation")
    split[labelled & (timestamp >= test_from)] = SPLITS.index("test")
    return split, validation_from, test_from


def _item_rows(
    schema: DatasetSchema, events: Table, items: Table, order: Int64Array, distinct_items: npt.NDArray[np.generic]
) -> Int64Array:
    """Row in the item table of each distinct item of the events; -1 where it has none."""
    check_unique(items, schema.item)
    keys = items.columns[schema.item]
    by_key = np.argsort(keys, kind="stable")
    if keys.dtype.kind != distinct_items.dtype.kind:
        raise DataError(
            f"must have the type of the events' {schema.item} ({distinct_items.dtype})",
            file=items.file,
            column=schema.item,
            value=str(keys.dtype),
            remedy="use one type for item ids in both files",
        )
    found = np.minimum(np.searchsorted(keys[by_key], distinct_items), len(keys) - 1)
    rows = np.where(keys[by_key][found] == distinct_items, by_key[found], -1)
    if schema.unknown_items == "error" and (rows < 0).any():
        missing = distinct_items[rows < 0]
        row = int(np.flatnonzero(events.columns[schema.item] == missing[0])[0])
        raise DataError(
            f"every item must be in the item table {items.file} ({len(missing)} are not)",
            file=events.file,
            column=schema.item,
            row=events.file_row(row),
            value=missing[0].item(),
            remedy="add the items, or set unknown_items='empty' in a schema of your own (load_events)",
        )
    return rows.astype(np.int64)


def _label(op: str, values: npt.NDArray[np.generic], threshold: float) -> Float32Array:
    compare = {"ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "eq": np.equal}[op]
    return np.asarray(compare(values, threshold), dtype=np.float32)


class _Clock(NamedTuple):
    timestamp: Int64Array
    start: Int64Array
    end: Int64Array

    def feature(self, name: str) -> npt.NDArray[np.float64]:
        """One of CONTEXT_DENSE or EVENT_DENSE for every event, from the clock and strictly earlier events."""
        t = self.timestamp
        has_past = self.end > self.start
        match name:
            case "log1p_history_length":
                return np.log1p((self.end - self.start).astype(np.float64))
            case "log1p_seconds_since_last_event" | "log1p_seconds_since_previous_event":
                return np.log1p(np.where(has_past, t - t[np.maximum(self.end - 1, 0)], 0).astype(np.float64))
            case "log1p_seconds_since_first_event":
                return np.log1p(np.where(has_past, t - t[self.start], 0).astype(np.float64))
        period, function = {
            "hour_of_day_sin": (86_400, np.sin),
            "hour_of_day_cos": (86_400, np.cos),
            "day_of_week_sin": (604_800, np.sin),
            "day_of_week_cos": (604_800, np.cos),
        }[name]
        return np.asarray(function((t % period) * (2.0 * np.pi / period)), dtype=np.float64)


def _dense(
    entries: tuple[str | DenseColumn, ...], clock: _Clock, events: Table, order: Int64Array
) -> npt.NDArray[np.float64]:
    out = np.zeros((len(order), len(entries)), dtype=np.float64)
    for k, entry in enumerate(entries):
        if isinstance(entry, str):
            out[:, k] = clock.feature(entry)
            continue
        values = events.columns[entry.column][order].astype(np.float64)
        if entry.transform == "log1p":
            if (values <= -1.0).any():
                worst = int(np.flatnonzero(values <= -1.0)[0])
                raise DataError(
                    "must be > -1 for the transform log1p",
                    file=events.file,
                    column=entry.column,
                    row=events.file_row(int(order[worst])),
                    value=float(values[worst]),
                    remedy="correct or drop such rows, or use transform='identity' in a schema of your own",
                )
            values = np.log1p(values)
        out[:, k] = values
    return out


def _standard(
    entries: tuple[str | DenseColumn, ...],
    clock: _Clock,
    events: Table,
    order: Int64Array,
    training: npt.NDArray[np.bool_],
) -> tuple[Float32Array, str]:
    """Standardised dense features and their fingerprint; refuses columns that would come out destroyed."""
    values = _dense(entries, clock, events, order)
    standard, fingerprint = standardise(values, training)
    for k, entry in enumerate(entries):
        if isinstance(entry, DenseColumn):
            rule, row = _destroyed(values[:, k], standard[:, k], training)
            if rule:
                remedy = "correct or drop such rows"
                if entry.transform == "identity":
                    remedy += ", or use transform='log1p' in a schema of your own"
                raise DataError(
                    rule,
                    file=events.file,
                    column=entry.column,
                    row=events.file_row(int(order[row])),
                    value=events.columns[entry.column][order[row]].item(),
                    remedy=remedy,
                )
    return standard, fingerprint


def _destroyed(
    values: npt.NDArray[np.float64], standard: Float32Array, training: npt.NDArray[np.bool_]
) -> tuple[str, int]:
    """The rule that a dense column breaks, and the position of the value to blame; no rule if it breaks none."""
    lost = np.flatnonzero(~np.isfinite(standard))
    if lost.size:
        return "must be finite after standardising by the training period", int(lost[np.abs(values[lost]).argmax()])
    seen = np.flatnonzero(training)
    first, last = math.ceil(0.01 * (len(seen) - 1)), math.floor(0.99 * (len(seen) - 1))
    by_value = seen[np.argpartition(values[seen], (first, last))]
    low, high = by_value[first], by_value[last]
    if values[low] < values[high] and standard[low] == standard[high]:
        far = int(seen[np.abs(values[seen] - values[low]).argmax()])
        return "must not be so far from the others that 98 % of the training values become one number", far
    return "", -1
