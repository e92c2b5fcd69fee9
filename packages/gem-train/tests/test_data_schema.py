"""A schema that contradicts itself is refused when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gem_train.data import BucketFeature, CategoricalFeature, Column, DatasetSchema, DenseColumn, Label, TimeSplit


@dataclass(frozen=True)
class Case:
    id: str
    make: Callable[[DatasetSchema], Any]
    match: str


CASES = [
    Case("label as candidate", lambda s: replace(s, candidate_features=("stars",)), "'stars', the source of a label"),
    Case(
        "label as dense context",
        lambda s: replace(s, context_dense=(DenseColumn(column="stars"),)),
        "source of a label that is not known",
    ),
    Case(
        "delayed label as dense",
        lambda s: replace(s, event_dense=(DenseColumn(column="bought"),)),
        "source of a label that is not known",
    ),
    Case("no user column", lambda s: replace(s, user="member"), "user names column 'member', declared are"),
    Case("timestamp of strings", lambda s: replace(s, timestamp="item_id"), "kind int, 'item_id' is string"),
    Case("no labels", lambda s: replace(s, labels=()), "has no labels"),
    Case("label column", lambda s: replace(s, labels=(replace(s.labels[0], column="x"),)), r"labels \(good\) names"),
    Case("task twice", lambda s: replace(s, labels=s.labels * 2), r"repeats \['good', 'sold'\]"),
    Case("feature twice", lambda s: replace(s, features=s.features * 2), "features of 'toy' repeats"),
    Case("list twice", lambda s: replace(s, candidate_features=("item", "item")), "candidate_features of"),
    Case("undefined feature", lambda s: replace(s, history_features=("colour",)), "'colour', the features are"),
    Case("unknown dense", lambda s: replace(s, context_dense=("noon",)), "'noon'; choose from"),
    Case("max_history", lambda s: replace(s, max_history=0), "max_history must be >= 1, got 0"),
    Case("no item table", lambda s: replace(s, item_columns=()), "item_columns is empty"),
    Case("buckets of strings", lambda s: replace(s, features=(replace(s.features[3], column="item_id"),)), "int or"),
    Case("column kind", lambda s: Column(name="a", kind="bytes"), "kind must be"),
    Case("minimum of strings", lambda s: Column(name="a", kind="string", minimum=0), "are for numbers"),
    Case("label op", lambda s: Label(task="a", column="b", op="ne", value=1), "op must be"),
    Case("label delay", lambda s: Label(task="a", column="b", op="eq", value=1, delay_seconds=-1), ">= 0, got -1"),
    Case("label value", lambda s: Label(task="a", column="b", op="eq", value=float("nan")), "must be finite"),
    Case("min_count", lambda s: CategoricalFeature(name="a", column="b", min_count=0), "min_count must be >= 1"),
    Case("values twice", lambda s: CategoricalFeature(name="a", column="b", values=(1, 1)), "must be distinct"),
    Case("both buckets", lambda s: BucketFeature(name="a", column="b", boundaries=(1.0,), num_buckets=3), "not both"),
    Case("no buckets", lambda s: BucketFeature(name="a", column="b"), "needs boundaries or num_buckets"),
    Case("boundaries", lambda s: BucketFeature(name="a", column="b", boundaries=(2.0, 1.0)), "must increase"),
    Case("one bucket", lambda s: BucketFeature(name="a", column="b", num_buckets=1), "must be >= 2"),
    Case("test_fraction", lambda s: TimeSplit(test_fraction=1.0), "test_fraction must be between"),
    Case("gap", lambda s: TimeSplit(gap_seconds=-1), "gap_seconds must be >= 0"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_refused(case: Case, toy: Any) -> None:
    with pytest.raises(ValueError, match=case.match):
        case.make(toy.schema)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"labels": Label(task="a", column="stars", op="ge", value=4)},
            r"tuple of Label, got Label; put a comma .*\(Lab",
        ),
        (
            {"candidate_features": "item"},
            r"tuple of str, got str; put a comma after it: candidate_features=\('item',\)",
        ),
        (
            {"features": None},
            "features must be a tuple of CategoricalFeature or BucketFeature, got NoneType; give a tup",
        ),
        ({"event_columns": ("user_id",)}, "event_columns must hold Column only, got 'user_id'"),
    ],
)
def test_fields_of_another_type_are_refused(toy: Any, change: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        replace(toy.schema, **change)


def test_label_delay(toy: Any) -> None:
    assert toy.schema.label_delay("bought") == 40
    assert toy.schema.label_delay("stars") == 0
    assert toy.schema.label_delay("price") is None
