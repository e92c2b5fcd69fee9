"""A schema that contradicts itself is refused when it is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gem_train.data import BucketFeature, CategoricalFeature, Column, DatasetSchema, DenseColumn, Label, TimeSplit


@dataclass(frozen=True)
class Case:
    id: str
    make: Callable[[DatasetSchema], Any]
    match: str


CASES = [
    Case(
        "label as candidate",
        lambda s: replace(s, candidate_features=("stars",)),
        "source of a label, got 'stars', which reads 'stars'; use",
    ),
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
    Case(
        "no user column",
        lambda s: replace(s, user="member"),
        r"`user` must name a declared column, which are \['bought', .*got 'member'; declare it",
    ),
    Case(
        "timestamp of strings",
        lambda s: replace(s, timestamp="item_id"),
        "`timestamp` must have a column of kind int, got 'item_id' of kind string; name",
    ),
    Case("no labels", lambda s: replace(s, labels=()), "`labels` of 'toy' must hold a task, got none; give"),
    Case(
        "label column",
        lambda s: replace(s, labels=(replace(s.labels[0], column="x"),)),
        r"`labels` \(good\) must name a declared column.* got 'x'",
    ),
    Case(
        "task twice",
        lambda s: replace(s, labels=s.labels * 2),
        r"`labels` of 'toy' must not repeat a name, got \['good', 'sold'\] twice; give",
    ),
    Case("feature twice", lambda s: replace(s, features=s.features * 2), "`features` of 'toy' must not repeat"),
    Case("list twice", lambda s: replace(s, candidate_features=("item", "item")), "`candidate_features` of"),
    Case(
        "undefined feature",
        lambda s: replace(s, history_features=("colour",)),
        "`history_features` must name features, which are .* got 'colour'; define it",
    ),
    Case(
        "unknown dense",
        lambda s: replace(s, context_dense=("noon",)),
        "`context_dense` must name some of log1p_history_length, .*, got 'noon'; name one",
    ),
    Case("max_history", lambda s: replace(s, max_history=0), "`max_history` must be >= 1, got 0; raise it"),
    Case(
        "no item table",
        lambda s: replace(s, item_columns=()),
        "`item_columns` must hold '.*', which feature .* reads, got none; declare",
    ),
    Case("buckets of strings", lambda s: replace(s, features=(replace(s.features[3], column="item_id"),)), "int or"),
    Case(
        "column kind",
        lambda s: Column(name="a", kind="bytes"),
        "`kind` must be int, float, string or strings, got str 'bytes'; name",
    ),
    Case(
        "minimum of strings",
        lambda s: Column(name="a", kind="string", minimum=0),
        "`minimum` must be None for kind 'string', which has no order, got 0; remove it",
    ),
    Case(
        "bounds without a value between them",
        lambda s: Column(name="a", kind="int", minimum=5, maximum=1),
        "Column 'a': `minimum` must be <= `maximum`, got 5 and 1; no value",
    ),
    Case(
        "event column twice",
        lambda s: replace(s, event_columns=(*s.event_columns, Column(name="price", kind="string"))),
        r"`event_columns` of 'toy' must not repeat a name, got \['price'\] twice; give",
    ),
    Case(
        "item column twice",
        lambda s: replace(s, item_columns=s.item_columns * 2),
        r"`item_columns` of 'toy' must not repeat a name",
    ),
    Case(
        "no values",
        lambda s: CategoricalFeature(name="a", column="b", values=()),
        r"must hold a value, got \(\), .*; l",
    ),
    Case(
        "no boundaries", lambda s: BucketFeature(name="a", column="b", boundaries=()), r"must hold a number, got \(\), "
    ),
    *(
        Case(
            f"values {values} of {column}",
            lambda s, column=column, values=values: replace(  # type: ignore[misc]
                s, features=(*s.features, CategoricalFeature(name="f", column=column, values=values))
            ),
            rf"`values` of feature 'f' must be {words}.*, as its column '{column}' is of .*, got {re.escape(got)}; ",
        )
        for column, values, words, got in (
            ("bought", (0.2, 0.7), "whole numbers", "0.2"),
            ("bought", ("0", "1"), "whole numbers", "'0'"),
            ("bought", ("a",), "whole numbers", "'a'"),
            ("bought", (0, 2**63), "whole numbers", "9223372036854775808"),
            ("stars", (1, float("nan")), "finite numbers", "nan"),
            ("stars", ("1",), "finite numbers", "'1'"),
            ("item_id", (1, 2), "texts", "1"),
        )
    ),
    Case(
        "label op",
        lambda s: Label(task="a", column="b", op="ne", value=1),
        "Label 'a': `op` must be ge, gt, le, lt or eq, got str 'ne'; name",
    ),
    Case("label delay", lambda s: Label(task="a", column="b", op="eq", value=1, delay_seconds=-1), ">= 0, got -1"),
    Case("label value", lambda s: Label(task="a", column="b", op="eq", value=float("nan")), "must be finite"),
    Case("min_count", lambda s: CategoricalFeature(name="a", column="b", min_count=0), "`min_count` must be >= 1"),
    Case(
        "values twice",
        lambda s: CategoricalFeature(name="a", column="b", values=(1, 1)),
        "`values` must be distinct, got 1 twice; give each once",
    ),
    Case(
        "both buckets",
        lambda s: BucketFeature(name="a", column="b", boundaries=(1.0,), num_buckets=3),
        "`boundaries` or `num_buckets` must be given, got both; give one",
    ),
    Case(
        "no buckets",
        lambda s: BucketFeature(name="a", column="b"),
        "`boundaries` or `num_buckets` must be given, got neither; give one",
    ),
    Case(
        "boundaries", lambda s: BucketFeature(name="a", column="b", boundaries=(2.0, 1.0)), "`boundaries` must increase"
    ),
    Case("one bucket", lambda s: BucketFeature(name="a", column="b", num_buckets=1), "must be >= 2"),
    Case("test_fraction", lambda s: TimeSplit(test_fraction=1.0), "`test_fraction` must be between"),
    Case("gap", lambda s: TimeSplit(gap_seconds=-1), "`gap_seconds` must be >= 0"),
    Case(
        "min_count of a vocabulary",
        lambda s: CategoricalFeature(name="a", column="b", values=(1, 2), min_count=3),
        "CategoricalFeature 'a': `min_count` must be left out with `values`, .*, got 3; give one",
    ),
    Case(
        "unknown items without item table",
        lambda s: replace(
            s,
            item_columns=(),
            features=s.features[:1],
            candidate_features=("item",),
            history_features=("item",),
            unknown_items="empty",
        ),
        "`unknown_items` must be 'error' without `item_columns`, .*, got 'empty'; leave it out",
    ),
]


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
            "`features` must be a tuple of CategoricalFeature or BucketFeature, got NoneType; give a tup",
        ),
        ({"event_columns": ("user_id",)}, "`event_columns` must hold Column only, got 'user_id'"),
    ],
)
def test_fields_of_another_type_are_refused(toy: Any, change: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        replace(toy.schema, **change)


def test_values_of_the_kind_of_the_column_are_taken(toy: Any) -> None:
    for column, values in (("bought", (False, True)), ("bought", (np.int8(0), 1)), ("stars", (1, np.float32(2.5)))):
        replace(toy.schema, features=(*toy.schema.features, CategoricalFeature(name="f", column=column, values=values)))


def test_label_delay(toy: Any) -> None:
    assert toy.schema.label_delay("bought") == 40
    assert toy.schema.label_delay("stars") == 0
    assert toy.schema.label_delay("price") is None
