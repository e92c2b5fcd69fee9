"""What the columns of a ranking data set mean: labels, features, histories and the split, as frozen data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ColumnKind = Literal["int", "float", "string", "strings"]
Operator = Literal["ge", "gt", "le", "lt", "eq"]
Source = Literal["events", "items"]

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
        if self.kind not in ("int", "float", "string", "strings"):
            raise ValueError(f"Column: kind must be int, float, string or strings, got {self.kind!r}; name one of them")
        if self.kind in ("string", "strings") and (self.minimum is not None or self.maximum is not None):
            raise ValueError(f"Column: minimum and maximum are for numbers, got them on {self.name!r}; remove them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A binary task: 1 where `column <op> value` holds."""

    task: str
    column: str
    op: Operator
    value: float
    delay_seconds: int = 0
    """Seconds after its event at which the label becomes known. A history carries it only from then on."""

    def __post_init__(self) -> None:
        if self.op not in ("ge", "gt", "le", "lt", "eq"):
            raise ValueError(f"Label: op must be ge, gt, le, lt or eq, got {self.op!r}; name one of them")
        if self.delay_seconds < 0:
            raise ValueError(f"Label: delay_seconds must be >= 0, got {self.delay_seconds}; give the delay in seconds")
        if not math.isfinite(self.value):
            raise ValueError(f"Label: value must be finite, got {self.value}; give the threshold of the rule")


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
    """A vocabulary fixed in advance."""

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(
                f"CategoricalFeature: min_count must be >= 1, got {self.min_count}; use 1 to keep all values"
            )
        if self.values is not None and len(set(self.values)) != len(self.values):
            raise ValueError(f"CategoricalFeature: values of {self.name!r} must be distinct; remove the repeated ones")


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
        if (self.boundaries is None) == (self.num_buckets is None):
            raise ValueError(
                f"BucketFeature: {self.name!r} needs boundaries or num_buckets, and not both; give one of them"
            )
        if self.boundaries is not None and list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(
                f"BucketFeature: boundaries of {self.name!r} must increase, got {self.boundaries}; sort them"
            )
        if self.num_buckets is not None and self.num_buckets < 2:
            raise ValueError(
                f"BucketFeature: num_buckets of {self.name!r} must be >= 2, got {self.num_buckets}; raise it"
            )


Feature = CategoricalFeature | BucketFeature


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn:
    """A numeric event column as a dense feature."""

    column: str
    transform: Literal["identity", "log1p"] = "identity"

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
            if not 0.0 < value < 1.0:
                raise ValueError(f"TimeSplit: {name} must be between 0 and 1, got {value}; 0.1 is usual")
        if self.gap_seconds < 0:
            raise ValueError(f"TimeSplit: gap_seconds must be >= 0, got {self.gap_seconds}; give the label's delay")


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
    """Features read for the sample itself. None may come from a label's column."""
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
    """A history keeps this many of its latest events."""
    unknown_items: Literal["error", "empty"] = "error"
    """What an event whose item is not in the item table means: an error, or an item without features."""
    split: TimeSplit = TimeSplit()

    def __post_init__(self) -> None:
        for argument, kinds in _ELEMENTS.items():
            _check_elements(argument, getattr(self, argument), kinds)
        events = {c.name: c for c in self.event_columns}
        items = {c.name: c for c in self.item_columns}
        for role in ("user", "item", "timestamp"):
            self._require(getattr(self, role), events, role, ("int",) if role == "timestamp" else ("int", "string"))
        if self.labelled is not None:
            self._require(self.labelled, events, "labelled", ("int",))
        if items:
            self._require(self.item, items, "item", ("int", "string"))
        if not self.labels:
            raise ValueError(f"DatasetSchema: {self.name!r} has no labels; give at least one task")
        _distinct("labels", [label.task for label in self.labels], self.name)
        _distinct("features", [feature.name for feature in self.features], self.name)
        for label in self.labels:
            self._require(label.column, events, f"labels ({label.task})", ("int", "float"))
        for feature in self.features:
            self._check_feature(feature, items if feature.source == "items" else events)
        self._check_lists(events)
        if self.max_history < 1:
            raise ValueError(
                f"DatasetSchema: max_history must be >= 1, got {self.max_history}; give a number of events"
            )

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
            raise ValueError(f"DatasetSchema: feature {feature.name!r} reads the item table, but item_columns is empty")
        kinds = ("int", "float") if isinstance(feature, BucketFeature) else ("int", "float", "string", "strings")
        self._require(feature.column, columns, f"feature {feature.name}", kinds)

    def _check_lists(self, events: dict[str, Column]) -> None:
        features = {feature.name: feature for feature in self.features}
        for argument in ("candidate_features", "history_features"):
            names: tuple[str, ...] = getattr(self, argument)
            _distinct(argument, list(names), self.name)
            for name in names:
                if name not in features:
                    raise ValueError(
                        f"DatasetSchema: {argument} names {name!r}, the features are {sorted(features)}; define it"
                    )
        for name in self.candidate_features:
            feature = features[name]
            if feature.source == "events" and self.label_delay(feature.column) is not None:
                raise ValueError(
                    f"DatasetSchema: candidate feature {name!r} reads {feature.column!r}, the source of a label; "
                    "use it in history_features only"
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
                    f"DatasetSchema: {argument} names {entry!r}; choose from {known} or give a DenseColumn"
                )
            return
        self._require(entry.column, events, argument, ("int", "float"))
        delay = self.label_delay(entry.column)
        if delay is not None and (argument == "context_dense" or delay > 0):
            raise ValueError(
                f"DatasetSchema: {argument} reads {entry.column!r}, the source of a label that is not known then; "
                "use a history feature, which hides it until it is known"
            )

    def _require(self, name: str, columns: dict[str, Column], role: str, kinds: tuple[str, ...]) -> None:
        if name not in columns:
            raise ValueError(f"DatasetSchema: {role} names column {name!r}, declared are {sorted(columns)}; declare it")
        if columns[name].kind not in kinds:
            raise ValueError(
                f"DatasetSchema: {role} needs a column of kind {' or '.join(kinds)}, {name!r} is {columns[name].kind}"
            )


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
        raise TypeError(f"DatasetSchema: {argument} must be a tuple of {words}, got {type(value).__name__}; {remedy}")
    for element in value:
        if not isinstance(element, kinds):
            raise TypeError(f"DatasetSchema: {argument} must hold {words} only, got {element!r}; name them all so")


def _distinct(argument: str, names: list[str], schema: str) -> None:
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"DatasetSchema: {argument} of {schema!r} repeats {repeated}; give each name once")
