"""Values to embedding ids. Vocabularies and boundaries are learned from the training period only."""

from __future__ import annotations

import hashlib
import reprlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gem_train.data.errors import DataError
from gem_train.data.parquet import Array, Table
from gem_train.data.ranges import expand_ranges
from gem_train.data.schema import BucketFeature, CategoricalFeature, Feature

Int64Array = npt.NDArray[np.int64]


class Encoder(NamedTuple):
    """The tables of a log, and how its N sorted events refer to them."""

    events: Table
    items: Table | None
    order: Int64Array
    """(N,) row in `events` of each sorted event."""
    item_row: Int64Array | None
    """(N,) row in `items`, -1 where the item is not in the table."""
    in_training: npt.NDArray[np.bool_]
    """(N,) whether the event lies in the training period."""


class FeatureIds(NamedTuple):
    """A feature's column as ids."""

    num_ids: int
    ids: Int64Array
    """The ids of all events."""
    offsets: Int64Array | None
    """(N + 1,), or None when each event has exactly one id."""
    encoding: str
    """Fingerprint of what decides which id a value gets; equal strings mean equal ids for equal values."""


def encode_feature(encoder: Encoder, feature: Feature) -> FeatureIds:
    """Turns a feature's column into ids.

    Args:
        encoder: The tables.
        feature: The feature.

    Returns:
        Its ids, and what they follow from.

    Raises:
        DataError: if the column holds none of the values that the feature lists.
    """
    table = encoder.items if feature.source == "items" else encoder.events
    rows = encoder.item_row if feature.source == "items" else encoder.order
    assert table is not None
    assert rows is not None
    if feature.column in table.lists:
        assert isinstance(feature, CategoricalFeature)
        return _encode_lists(feature, table, rows, encoder.in_training)
    present = rows >= 0
    values = table.columns[feature.column][np.maximum(rows, 0)]
    seen = values[encoder.in_training & present]
    if isinstance(feature, BucketFeature):
        boundaries = _boundaries(feature, seen)
        ids = 1 + np.searchsorted(boundaries, values.astype(np.float64), side="right")
        num_ids, encoding = len(boundaries) + 2, _fingerprint(feature, boundaries)
    else:
        vocabulary = _vocabulary(feature, seen)
        ids = _look_up(vocabulary, values)
        _check_occurs(table, feature, values[present], ids[present])
        num_ids, encoding = len(vocabulary) + 1, _fingerprint(feature, vocabulary)
    return FeatureIds(num_ids, np.where(present, ids, 0).astype(np.int64), None, encoding)


def _encode_lists(
    feature: CategoricalFeature, table: Table, rows: Int64Array, in_training: npt.NDArray[np.bool_]
) -> FeatureIds:
    lists = table.lists[feature.column]
    lengths = np.diff(lists.offsets)
    starts = lists.offsets[:-1]
    event_lengths = np.where(rows >= 0, lengths[np.maximum(rows, 0)], 0)
    event_starts = starts[np.maximum(rows, 0)]
    seen = lists.values[expand_ranges(event_starts[in_training], event_lengths[in_training])]
    vocabulary = _vocabulary(feature, seen)
    ids = _look_up(vocabulary, lists.values)
    _check_occurs(table, feature, lists.values, ids)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(event_lengths, out=offsets[1:])
    spread = ids[expand_ranges(event_starts, event_lengths)]
    return FeatureIds(len(vocabulary) + 1, spread, offsets, _fingerprint(feature, vocabulary))


def standardise(
    values: npt.NDArray[np.float64], training: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float32], str]:
    """Mean 0 and variance 1 over the training rows; a constant column becomes 0.

    What float32 cannot hold is infinite or NaN, and so is a whole column whose mean or deviation float64 cannot hold.

    Args:
        values: (N, columns).
        training: (N,) the rows that mean and deviation are taken from.

    Returns:
        (N, columns), and a fingerprint of means and deviations.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = values[training].mean(axis=0), values[training].std(axis=0)
        scale = np.where(std > 1e-12, std, 1.0)
        scale[~np.isfinite(mean) | ~np.isfinite(std)] = np.nan
        standard = np.asarray((values - mean) / scale, dtype=np.float32)
    # To five digits: the last bits of a sum differ between processors, and + 0.0 makes -0.0 equal to 0.0.
    told = [f"{round(m / s, 5) + 0.0:.5f} {s:.5g}" for m, s in zip(mean.tolist(), scale.tolist(), strict=True)]
    fingerprint = f"{len(told)} columns, digest {_digest(chr(10).join(told).encode())}"
    return standard, fingerprint


def _fingerprint(feature: Feature, learned: Array) -> str:
    """Of the vocabulary in its order, or of the boundaries, whatever the width of their type."""
    if learned.dtype.kind in "iub":
        content = learned.astype("<i8").tobytes()
    elif learned.dtype.kind == "f":
        content = learned.astype("<f8").tobytes()
    else:
        content = "".join(f"{len(value)}:{value}" for value in learned.astype(np.str_).tolist()).encode()
    what, count = ("boundaries", len(learned)) if isinstance(feature, BucketFeature) else ("ids", len(learned) + 1)
    return f"{count} {what} of {feature.source}.{feature.column}, digest {_digest(content)}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _vocabulary(feature: CategoricalFeature, seen: Array) -> Array:
    if feature.values is not None:
        return np.asarray(feature.values, dtype=seen.dtype if seen.dtype.kind in "if" else np.str_)
    values, counts = np.unique(seen, return_counts=True)
    values, counts = values[counts >= feature.min_count], counts[counts >= feature.min_count]
    return values[np.argsort(-counts, kind="stable")]


def _check_occurs(table: Table, feature: CategoricalFeature, values: Array, ids: Int64Array) -> None:
    """Refuses a given vocabulary that has none of the values, as in the wrong case: all events would be alike."""
    if feature.values is not None and values.size and not ids.any():
        raise DataError(
            f"must hold at least one of the `values` of feature {feature.name!r}, which are "
            f"{reprlib.repr(feature.values)}",
            file=table.file,
            column=feature.column,
            value=np.unique(values)[:6].tolist(),
            remedy="give `values` as the column holds them, or leave them out to take those of the training period",
        )


def _look_up(vocabulary: Array, values: Array) -> Int64Array:
    """1 + position in the vocabulary, 0 for values that are not in it."""
    if not vocabulary.size:
        return np.zeros(len(values), dtype=np.int64)
    order = np.argsort(vocabulary, kind="stable")
    ordered = vocabulary[order]
    found = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.where(ordered[found] == values, order[found] + 1, 0).astype(np.int64)


def _boundaries(feature: BucketFeature, seen: Array) -> npt.NDArray[np.float64]:
    if feature.boundaries is not None:
        return np.asarray(feature.boundaries, dtype=np.float64)
    assert feature.num_buckets is not None
    if not seen.size:
        return np.empty(0, dtype=np.float64)
    levels = np.linspace(0.0, 1.0, feature.num_buckets + 1)[1:-1]
    return np.unique(np.quantile(seen.astype(np.float64), levels, method="lower"))
