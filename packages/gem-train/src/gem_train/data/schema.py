"""What the columns of a ranking data set mean: labels, features, histories and the split, as frozen data."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from gem_train.data.arguments import check_choice, check_integer, check_kind, check_list, check_number, check_text

ColumnKind = Literal["int", "float", "string", "strings"]
Operator = Literal["ge", "gt", "le", "lt", "eq"]
Source = Literal["events", "items"]
Transform = Literal["identity", "log1p"]
UnknownItems = Literal["error", "empty"]

CONTEXT_DENSE = (
    "log1p_history_length",
    "log1p_seconds_since_last_event",
    "log1p_seconds_since_first_event",
    "hour_of_day_sin",
    "hour_of_day_cos",
    "day_of_week_sin",
    "day_of_week_cos",
)
"""Dense context features that every log can compute from the user's past and the sample's clock alone."""

EVENT_DENSE = ("log1p_seconds_since_previous_event", "hour_of_day_sin", "hour_of_day_cos")
"""Dense features that every history event can carry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a Parquet file and the values it may hold. Nulls, NaN and infinities are never allowed."""

    name: str
    kind: ColumnKind
    """int: any integer or boolean type; float: any number; string; strings: a list of strings."""
    minimum: float | None = None
    """Smallest allowed value of a number, inclusive."""
    maximum: float | None = None
    """Largest allowed value of a number, inclusive."""

    def __post_init__(self) -> None:
        check_text("Column", "name", self.name)
        owner = f"Column {self.name!r}"
        check_choice(owner, "kind", self.kind, get_args(ColumnKind))
        for argument in ("minimum", "maximum"):
            bound = getattr(self, argument)
            if bound is None:
                continue
            check_number(owner, argument, bound)
            if self.kind in ("string", "strings"):
                raise ValueError(
                    f"{owner}: `{argument}` must be None for kind {self.kind!r}, which has no order, got {bound}; "
                    "remove it"
                )
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(
                f"{owner}: `minimum` must be <= `maximum`, got {self.minimum} and {self.maximum}; no value is between "
                "them, swap them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A binary task: 1 where `column <op> value` holds, and 0 for every other value of the column.

    So with op "eq" and value 1, a -1 that stands for "not known" is a negative, and so is a 7. The column's `minimum`
    and `maximum` say which values there can be, and others are then refused (`Column(name="click", kind="int",
    minimum=0, maximum=1)`); `DatasetSchema.labelled` says which events have no label yet.
    """

    task: str
    column: str
    op: Operator
    value: float
    delay_seconds: int = 0
    """Seconds after its event at which the label becomes known. A history carries it only from then on."""

    def __post_init__(self) -> None:
        check_text("Label", "task", self.task)
        owner = f"Label {self.task!r}"
        check_text(owner, "column", self.column)
        check_choice(owner, "op", self.op, get_args(Operator))
        check_number(owner, "value", self.value)
        check_integer(owner, "delay_seconds", self.delay_seconds, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoricalFeature:
    """Ids from a column's values; id 0 stands for values not in the vocabulary.

    The vocabulary is `values` when given, and otherwise the values seen in the training period, most frequent first.
    """

    name: str
    column: str
    source: Source = "events"
    """`items` reads the column of the event's row in the item table."""
    min_count: int = 1
    """Values with fewer training events share id 0, so that its embedding is trained too."""
    values: tuple[float, ...] | tuple[str, ...] | None = None
    """A vocabulary fixed in advance, of the column's kind. The data must hold at least one of them."""

    def __post_init__(self) -> None:
        owner = _feature(self)
        check_integer(owner, "min_count", self.min_count, 1)
        if self.values is None:
            return
        check_list(owner, "values", self.values, "give the vocabulary as a tuple")
        if not self.values:
            raise ValueError(
                f"{owner}: `values` must hold a value, got {self.values!r}, with which all events are alike; leave it "
                "out to take the values of the training period"
            )
        for value in self.values:
            check_kind(owner, "values", value, Hashable, "give numbers or texts")
        repeated = [value for value in set(self.values) if self.values.count(value) > 1]
        if repeated:
            raise ValueError(f"{owner}: `values` must be distinct, got {repeated[0]!r} twice; give each once")
        if self.min_count != 1:
            raise ValueError(
                f"{owner}: `min_count` must be left out with `values`, which are the vocabulary whatever their counts, "
                f"got {self.min_count}; give one of the two"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFeature:
    """Ids 1 + (number of boundaries <= value) from a numeric column; id 0 stands for an item not in the table.

    Boundaries are given, or taken as `num_buckets` quantiles of the training period.
    """

    name: str
    column: str
    source: Source = "events"
    boundaries: tuple[float, ...] | None = None
    num_buckets: int | None = None

    def __post_init__(self) -> None:
        owner = _feature(self)
        if (self.boundaries is None) == (self.num_buckets is None):
            given = "neither" if self.boundaries is None else "both"
            raise ValueError(f"{owner}: `boundaries` or `num_buckets` must be given, got {given}; give one of them")
        if self.num_buckets is not None:
            check_integer(owner, "num_buckets", self.num_buckets, 2)
        if self.boundaries is None:
            return
        check_list(owner, "boundaries", self.boundaries, "give the numbers as a tuple")
        if not self.boundaries:
            raise ValueError(
                f"{owner}: `boundaries` must hold a number, got {self.boundaries!r}, with which all events are alike; "
                "give some, or `num_buckets` instead"
            )
        for boundary in self.boundaries:
            check_number(owner, "boundaries", boundary)
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"{owner}: `boundaries` must increase, got {self.boundaries}; sort them")


Feature = CategoricalFeature | BucketFeature


def _feature(feature: Feature) -> str:
    """What errors call it; refuses names and a source that are none."""
    kind = type(feature).__name__
    check_text(kind, "name", feature.name)
    owner = f"{kind} {feature.name!r}"
    check_text(owner, "column", feature.column)
    check_choice(owner, "source", feature.source, get_args(Source))
    return owner


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn:
    """A numeric event column as a dense feature."""

    column: str
    transform: Transform = "identity"

    def __post_init__(self) -> None:
        check_text("DenseColumn", "column", self.column)
        check_choice(f"DenseColumn {self.column!r}", "transform", self.transform, get_args(Transform))

    @property
    def name(self) -> str:
        """The name under which the feature is listed."""
        return self.column if self.transform == "identity" else f"{self.transform}_{self.column}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """Test is the end of time, validation the end of the rest.

    With N labelled events in time order, test is every labelled event at or after the timestamp of event
    floor((1 - test_fraction) N). Training and validation are the labelled events earlier than that by more than
    `gap_seconds`, split by the same rule. A gap equal to the label's delay keeps training labels out of the test
    period.
    """

    test_fraction: float = 0.1
    validation_fraction: float = 0.1
    gap_seconds: int = 0

    def __post_init__(self) -> None:
        for name in ("test_fraction", "validation_fraction"):
            value = getattr(self, name)
            check_number("TimeSplit", name, value)
            if not 0.0 < value < 1.0:
                raise ValueError(f"TimeSplit: `{name}` must be between 0 and 1, got {value}; 0.1 is usual")
        check_integer("TimeSplit", "gap_seconds", self.gap_seconds, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSchema:
    """All that the reader knows about a data set.

    An event is a row (user, item, timestamp, ...) of the events file. Each labelled event is a sample: its candidate
    is its item, its history the same user's events with a strictly smaller timestamp.
    """

    name: str
    event_columns: tuple[Column, ...]
    labels: tuple[Label, ...]
    features: tuple[Feature, ...]
    candidate_features: tuple[str, ...]
    """Features read for the sample itself. None may come from the column of one of `labels`.

    Of other columns the schema does not know which are outcomes of the event. So keep the Label of an outcome that is
    not to be predicted, and leave its task out of the model (the settings `model.tasks` and `model.priors`): the sample
    cannot read its column then, and histories only once it is known."""
    history_features: tuple[str, ...]
    """Features read for each history event. One from a label's column is id 0 until the label is known."""
    item_columns: tuple[Column, ...] = ()
    """Columns of the item table; empty when there is none."""
    user: str = "user_id"
    item: str = "item_id"
    timestamp: str = "timestamp"
    """Name of the event column with the time in seconds."""
    labelled: str | None = None
    """Integer event column, 1 where the label is complete. Other events are histories only (censored)."""
    context_dense: tuple[str | DenseColumn, ...] = CONTEXT_DENSE
    event_dense: tuple[str | DenseColumn, ...] = EVENT_DENSE
    history: str = "history"
    """Name of the sequence."""
    max_history: int = 200
    """A history keeps at most this many of its latest events. `RunConfig.resolve` takes this or the recipe's
    `data.max_history`, whichever is less, unless `data.max_history` is set by name."""
    unknown_items: UnknownItems = "error"
    """What an event whose item is not in the item table means: an error, or an item without features."""
    split: TimeSplit = TimeSplit()

    def __post_init__(self) -> None:
        for argument in ("name", "user", "item", "timestamp", "history"):
            check_text("DatasetSchema", argument, getattr(self, argument))
        for argument, kinds in _ELEMENTS.items():
            _check_elements(argument, getattr(self, argument), kinds)
        check_kind("DatasetSchema", "split", self.split, TimeSplit, "for example TimeSplit(test_fraction=0.1)")
        check_integer("DatasetSchema", "max_history", self.max_history, 1)
        check_choice("DatasetSchema", "unknown_items", self.unknown_items, get_args(UnknownItems))
        if self.unknown_items != "error" and not self.item_columns:
            raise ValueError(
                "DatasetSchema: `unknown_items` must be 'error' without `item_columns`, where no item is unknown, "
                f"got {self.unknown_items!r}; leave it out"
            )
        for argument in ("event_columns", "item_columns"):
            _distinct(argument, [column.name for column in getattr(self, argument)], self.name)
        events = {c.name: c for c in self.event_columns}
        items = {c.name: c for c in self.item_columns}
        for role in ("user", "item", "timestamp"):
            self._require(
                getattr(self, role), events, f"`{role}`", ("int",) if role == "timestamp" else ("int", "string")
            )
        if self.labelled is not None:
            check_text("DatasetSchema", "labelled", self.labelled)
            self._require(self.labelled, events, "`labelled`", ("int",))
        if items:
            self._require(self.item, items, "`item`", ("int", "string"))
        if not self.labels:
            raise ValueError(
                f"DatasetSchema: `labels` of {self.name!r} must hold a task, got none; give at least one Label"
            )
        _distinct("labels", [label.task for label in self.labels], self.name)
        _distinct("features", [feature.name for feature in self.features], self.name)
        for label in self.labels:
            self._require(label.column, events, f"`labels` ({label.task})", ("int", "float"))
        for feature in self.features:
            self._check_feature(feature, items if feature.source == "items" else events)
        self._check_lists(events)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the labels."""
        return tuple(label.task for label in self.labels)

    @property
    def num_dense(self) -> int:
        """Dense context features."""
        return len(self.context_dense)

    @property
    def num_event_dense(self) -> int:
        """Dense features of a history event."""
        return len(self.event_dense)

    @property
    def context_features(self) -> tuple[str, ...]:
        """Features with one bag per sample."""
        return self.candidate_features

    @property
    def event_features(self) -> tuple[str, ...]:
        """Features with one bag per history event, as they are named in a batch."""
        return tuple(f"{self.history}.{name}" for name in self.history_features)

    def label_delay(self, column: str) -> int | None:
        """Seconds after which the values of an event column are known; None for a column that is no label's source."""
        delays = [label.delay_seconds for label in self.labels if label.column == column]
        return max(delays) if delays else None

    def _check_feature(self, feature: Feature, columns: dict[str, Column]) -> None:
        if feature.source == "items" and not self.item_columns:
            raise ValueError(
                f"DatasetSchema: `item_columns` must hold {feature.column!r}, which feature {feature.name!r} reads, "
                "got none; declare the columns of the item table"
            )
        kinds = ("int", "float") if isinstance(feature, BucketFeature) else ("int", "float", "string", "strings")
        self._require(feature.column, columns, f"`features` ({feature.name})", kinds)
        if isinstance(feature, CategoricalFeature):
            kind = columns[feature.column].kind
            holds, words = _VALUES[kind]
            wrong = [value for value in feature.values or () if not holds(value)]
            if wrong:
                raise ValueError(
                    f"DatasetSchema: `values` of feature {feature.name!r} must be {words}, as its column "
                    f"{feature.column!r} is of kind {kind}, got {wrong[0]!r}; give them as the column holds them"
                )

    def _check_lists(self, events: dict[str, Column]) -> None:
        features = {feature.name: feature for feature in self.features}
        for argument in ("candidate_features", "history_features"):
            names: tuple[str, ...] = getattr(self, argument)
            _distinct(argument, list(names), self.name)
            for name in names:
                if name not in features:
                    raise ValueError(
                        f"DatasetSchema: `{argument}` must name features, which are {sorted(features)}, got {name!r}; "
                        "define it"
                    )
        for name in self.candidate_features:
            feature = features[name]
            if feature.source == "events" and self.label_delay(feature.column) is not None:
                raise ValueError(
                    f"DatasetSchema: `candidate_features` must not read the source of a label, got {name!r}, which "
                    f"reads {feature.column!r}; use it in history_features only"
                )
        for argument, known in (("context_dense", CONTEXT_DENSE), ("event_dense", EVENT_DENSE)):
            entries: tuple[str | DenseColumn, ...] = getattr(self, argument)
            _distinct(argument, [e if isinstance(e, str) else e.name for e in entries], self.name)
            for entry in entries:
                self._check_dense(argument, known, entry, events)

    def _check_dense(
        self, argument: str, known: tuple[str, ...], entry: str | DenseColumn, events: dict[str, Column]
    ) -> None:
        if isinstance(entry, str):
            if entry not in known:
                raise ValueError(
                    f"DatasetSchema: `{argument}` must name some of {', '.join(known)}, got {entry!r}; name one, or "
                    "give a DenseColumn"
                )
            return
        self._require(entry.column, events, f"`{argument}`", ("int", "float"))
        delay = self.label_delay(entry.column)
        if delay is not None and (argument == "context_dense" or delay > 0):
            raise ValueError(
                f"DatasetSchema: `{argument}` must not read the source of a label that is not known then, got "
                f"{entry.column!r}; use a history feature, which hides it until it is known"
            )

    def _require(self, name: str, columns: dict[str, Column], role: str, kinds: tuple[str, ...]) -> None:
        if name not in columns:
            raise ValueError(
                f"DatasetSchema: {role} must name a declared column, which are {sorted(columns)}, got {name!r}; "
                "declare it"
            )
        if columns[name].kind not in kinds:
            raise ValueError(
                f"DatasetSchema: {role} must have a column of kind {' or '.join(kinds)}, got {name!r} of kind "
                f"{columns[name].kind}; name another, or declare it so"
            )


def _is_int64(value: object) -> bool:
    """Booleans among them: a column of kind int may be of a boolean type."""
    return isinstance(value, Integral) and -(2**63) <= int(value) < 2**63


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_VALUES: dict[ColumnKind, tuple[Callable[[object], bool], str]] = {
    "int": (_is_int64, "whole numbers (int) of 64 bits"),
    "float": (_is_finite, "finite numbers"),
    "string": (_is_text, "texts (str)"),
    "strings": (_is_text, "texts (str)"),
}
"""What a vocabulary for a column of each kind holds, and in words."""


_ELEMENTS: dict[str, tuple[type, ...]] = {
    "event_columns": (Column,),
    "item_columns": (Column,),
    "labels": (Label,),
    "features": (CategoricalFeature, BucketFeature),
    "candidate_features": (str,),
    "history_features": (str,),
    "context_dense": (str, DenseColumn),
    "event_dense": (str, DenseColumn),
}


def _check_elements(argument: str, value: object, kinds: tuple[type, ...]) -> None:
    """Refuses one element in place of a tuple of one, and elements of another kind."""
    words = " or ".join(kind.__name__ for kind in kinds)
    if not isinstance(value, tuple | list):
        remedy = f"put a comma after it: {argument}=({value!r},)" if isinstance(value, kinds) else "give a tuple"
        raise TypeError(f"DatasetSchema: `{argument}` must be a tuple of {words}, got {type(value).__name__}; {remedy}")
    for element in value:
        if not isinstance(element, kinds):
            raise TypeError(f"DatasetSchema: `{argument}` must hold {words} only, got {element!r}; name them all so")


def _distinct(argument: str, names: list[str], schema: str) -> None:
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"DatasetSchema: `{argument}` of {schema!r} must not repeat a name, got {repeated} twice; give each once"
        )
