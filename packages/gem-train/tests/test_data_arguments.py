"""Arguments of another type are refused by name: the function, the argument, what it takes, what came, what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gem_train.data import (
    SYNTHETIC,
    BucketFeature,
    CategoricalFeature,
    Column,
    DenseColumn,
    EventLog,
    EventSource,
    Label,
    TimeSplit,
    base_rate,
    build_event_log,
    click_through_rate,
    generate,
    load_movielens,
    load_online_retail,
)

LABEL: dict[str, Any] = {"task": "a", "column": "b", "op": "ge", "value": 1}
RATE: dict[str, Any] = {"key": "user", "prior_weight": 5}
NAMED: dict[str, Any] = {"name": "a", "column": "b"}

CASES: dict[str, tuple[Callable[[EventLog], Any], str]] = {
    "generate users": (lambda log: generate(num_users="a"), "generate: `num_users` must be an int, got str 'a'; pass"),
    "generate float": (lambda log: generate(num_items=20.0), "`num_items` must be an int, got float 20.0; pass int"),
    "generate flag": (lambda log: generate(num_topics=True), "`num_topics` must be an int, got bool True; pass"),
    "generate mean": (lambda log: generate(mean_events="40"), "`mean_events` must be a number, got str '40'; pass"),
    "generate NaN": (lambda log: generate(mean_events=float("nan")), "`mean_events` must be finite, got nan; pass"),
    "generate seed": (lambda log: generate(seed=-1), "generate: `seed` must be >= 0, got -1; raise it"),
    "generate no seed": (lambda log: generate(seed=None), "generate: `seed` must be an int, got NoneType None; pass"),
    "movielens": (lambda log: load_movielens(3), "load_movielens: `directory` must be a path, got int 3; name the dir"),
    "retail": (lambda log: load_online_retail(None), "load_online_retail: `directory` must be a path, got NoneType"),
    "schema": (
        lambda log: build_event_log("x", None),
        "build_event_log: `schema` must be a DatasetSchema, got str 'x'",
    ),
    "events": (lambda log: build_event_log(SYNTHETIC, {}), "build_event_log: `events` must be a Table, got dict; or"),
    "source log": (
        lambda log: EventSource("a", global_batch_size=8),
        "EventSource: `log` must be an EventLog, got str",
    ),
    "source split": (
        lambda log: EventSource(log, "dev", global_batch_size=8),
        "EventSource: `split` must be train, val",
    ),
    "source batch": (
        lambda log: EventSource(log, global_batch_size="8"),
        "`global_batch_size` must be an int, got str",
    ),
    "source epochs": (
        lambda log: EventSource(log, global_batch_size=8, epochs=1.5),
        "`epochs` must be an int, got flo",
    ),
    "source shuffle": (
        lambda log: EventSource(log, global_batch_size=8, shuffle="no"),
        "`shuffle` must be a bool, got s",
    ),
    "source history": (
        lambda log: EventSource(log, global_batch_size=8, max_history="9"),
        "`max_history` must be an int",
    ),
    "source balance": (
        lambda log: EventSource(log, global_batch_size=8, balance_lengths=1),
        "`balance_lengths` must be a",
    ),
    "source pin": (
        lambda log: EventSource(log, global_batch_size=8, pin_memory="no"),
        "`pin_memory` must be a bool, got",
    ),
    "state": (
        lambda log: EventSource(log, global_batch_size=8).load_state_dict(None),
        "`state` must be a dict, got None",
    ),
    "base rate log": (
        lambda log: base_rate("a", "click"),
        "base_rate: `log` must be an EventLog, got str 'a'; make one",
    ),
    "base rate task": (lambda log: base_rate(log, "buy"), "base_rate: `task` must be click, got str 'buy'; name one"),
    "rate task": (
        lambda log: click_through_rate(log, "buy", **RATE),
        "click_through_rate: `task` must be click, got s",
    ),
    "rate key": (
        lambda log: click_through_rate(log, "click", **RATE | {"key": "ad"}),
        "`key` must be user or item, got",
    ),
    "rate prior": (
        lambda log: click_through_rate(log, "click", **RATE | {"prior_weight": 0}),
        "`prior_weight` must be > 0",
    ),
    "rate frozen": (
        lambda log: click_through_rate(log, "click", **RATE, frozen=1),
        "`frozen` must be a bool, got int 1",
    ),
    "column": (lambda log: Column(name=3, kind="int"), "Column: `name` must be a str, got int 3; give the name"),
    "column minimum": (lambda log: Column(name="a", kind="int", minimum="0"), "Column 'a': `minimum` must be a number"),
    "label": (lambda log: Label(**LABEL | {"value": "x"}), "Label 'a': `value` must be a number, got str 'x'; pass"),
    "label delay": (
        lambda log: Label(**LABEL, delay_seconds=1.5),
        "Label 'a': `delay_seconds` must be an int, got float",
    ),
    "feature": (
        lambda log: CategoricalFeature(name="a", column=None),
        "CategoricalFeature 'a': `column` must be a str",
    ),
    "feature source": (
        lambda log: CategoricalFeature(**NAMED, source="item"),
        "`source` must be events or items, got str",
    ),
    "feature count": (
        lambda log: CategoricalFeature(**NAMED, min_count="2"),
        "`min_count` must be an int, got str '2'",
    ),
    "feature values": (
        lambda log: CategoricalFeature(**NAMED, values="abc"),
        "`values` must be a tuple, got str 'abc'",
    ),
    "buckets": (lambda log: BucketFeature(**NAMED, num_buckets=2.0), "BucketFeature 'a': `num_buckets` must be an int"),
    "boundaries": (lambda log: BucketFeature(**NAMED, boundaries=3), "`boundaries` must be a tuple, got int 3; give"),
    "boundary": (lambda log: BucketFeature(**NAMED, boundaries=(1, "2")), "`boundaries` must be a number, got str '2'"),
    "dense": (
        lambda log: DenseColumn(column="a", transform="log"),
        "DenseColumn 'a': `transform` must be identity or l",
    ),
    "split": (
        lambda log: TimeSplit(test_fraction="a"),
        "TimeSplit: `test_fraction` must be a number, got str 'a'; pass",
    ),
    "gap": (lambda log: TimeSplit(gap_seconds=0.5), "TimeSplit: `gap_seconds` must be an int, got float 0.5; pass"),
    "schema split": (
        lambda log: replace(SYNTHETIC, split=0.1),
        "DatasetSchema: `split` must be a TimeSplit, got float",
    ),
    "schema history": (lambda log: replace(SYNTHETIC, max_history="64"), "`max_history` must be an int, got str '64'"),
    "schema user": (lambda log: replace(SYNTHETIC, user=3), "DatasetSchema: `user` must be a str, got int 3; give"),
    "schema items": (
        lambda log: replace(SYNTHETIC, unknown_items="x"),
        "`unknown_items` must be error or empty, got str",
    ),
}


@pytest.fixture(scope="module")
def log() -> EventLog:
    return generate(num_users=20, mean_events=5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_refused(case: tuple[Callable[[EventLog], Any], str], log: EventLog) -> None:
    call, text = case
    with pytest.raises((TypeError, ValueError)) as caught:
        call(log)
    assert text in str(caught.value)
    assert "; " in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert generate(num_users=np.int64(20), mean_events=np.float32(5)).num_events > 0
    assert TimeSplit(test_fraction=np.float32(0.25), gap_seconds=np.int32(3)).gap_seconds == 3
