"""The data sets: MovieLens as shipped, Online Retail's derivation on made-up lines, the synthetic rule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gem_train.data import (
    SCOREBOARD,
    DataError,
    EventLog,
    EventSource,
    base_rate,
    click_through_rate,
    generate,
    load_movielens,
    load_online_retail,
)
from gem_train.data.log import SPLITS
from gem_train.metrics import BinaryMetrics

DAY = 86_400
ALL_BOUGHT_AGAIN = pytest.mark.filterwarnings("ignore:all 165 training labels of repurchase are 1")
"""What the made-up lines of `write_retail` are loaded with."""


def score(log: EventLog, task: str, probabilities: np.ndarray, split: Any = "test") -> dict[str, Any]:
    metrics = BinaryMetrics()
    labels = torch.from_numpy(log.labels[task][log.samples(split)])
    metrics.update(torch.from_numpy(probabilities), labels, from_logits=False)
    return metrics.compute()


def test_movielens_split(movielens_log: EventLog) -> None:
    assert movielens_log.num_events == 100_836
    assert [len(movielens_log.samples(s)) for s in SPLITS] == [81_676, 9_076, 10_084]
    assert (movielens_log.validation_from, movielens_log.test_from) == (1_459_788_590, 1_498_029_450)
    like = movielens_log.labels["like"]
    assert like.mean() == pytest.approx(0.48, abs=0.005)
    assert like[movielens_log.samples("train")].mean() == pytest.approx(0.48789, abs=1e-5)
    assert like[movielens_log.samples("test")].mean() == pytest.approx(0.40936, abs=1e-5)
    before = np.unique(movielens_log.user[movielens_log.timestamp < movielens_log.test_from])
    test = movielens_log.user[movielens_log.samples("test")]
    assert len(np.unique(test)) == 74
    assert (~np.isin(test, before)).mean() == pytest.approx(0.84, abs=0.005), "samples of users who are new"
    ties = movielens_log.history_end < np.arange(movielens_log.num_events)
    assert ties.mean() == pytest.approx(0.16, abs=0.01)


def test_movielens_history_lengths(movielens_log: EventLog) -> None:
    test = movielens_log.samples("test")
    lengths = movielens_log.history_end[test] - movielens_log.history_start[test]
    quantiles = np.quantile(lengths, [0.1, 0.5, 0.9, 0.99, 1.0], method="lower").tolist()
    assert quantiles == pytest.approx([21, 193, 1_598, 2_596, 2_697], abs=1)


def test_reference_predictors(movielens_log: EventLog) -> None:
    """The published bars of the scoreboard come out of this log, so split, ties and labels are those of the bars."""
    bars = {row.predictor: row for row in SCOREBOARD["ml-latest-small"].scores}
    user = score(movielens_log, "like", click_through_rate(movielens_log, "like", key="user", prior_weight=5))
    item = score(movielens_log, "like", click_through_rate(movielens_log, "like", key="item", prior_weight=20))
    base = score(movielens_log, "like", base_rate(movielens_log, "like"))
    for name, got in (("user CTR, streaming", user), ("item CTR, streaming", item), ("base rate of train", base)):
        assert got["ne"] == pytest.approx(bars[name].ne, abs=5.1e-4), name
        assert got["auc"] == pytest.approx(bars[name].auc, abs=5.1e-4), name
        assert got["count"] == 10_084


def test_movielens_batches_have_no_rating_of_the_sample(movielens_log: EventLog) -> None:
    assert "rating" not in movielens_log.context_features
    batch = next(iter(EventSource(movielens_log, "test", global_batch_size=64)))
    assert set(batch.ids) == {
        "item", "genres", "year", "history.item", "history.genres", "history.year", "history.rating",
    }  # fmt: skip
    ratings = batch.ids["history.rating"][0]
    assert set(ratings.tolist()) <= set(range(1, 11))


def test_movielens_rating_out_of_range(tmp_path: Path) -> None:
    good = {"user_id": [1, 1], "item_id": [1, 1], "timestamp": [5, 6], "rating": [4.0, 6.0]}
    pq.write_table(pa.table(good), tmp_path / "events.parquet")
    pq.write_table(
        pa.table({"item_id": [1], "genres": [["Drama"]], "release_year": [1990]}), tmp_path / "items.parquet"
    )
    with pytest.raises(DataError, match=r"column 'rating', row 1: must be <= 5.0, got 6.0"):
        load_movielens(tmp_path)


def write_retail(directory: Path, num_lines: int = 3_000, seed: int = 0) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    codes = ["10001", "10002", "10003A", "10004bc", "POST", "1000", "C2"]
    minute = np.sort(rng.integers(0, 200 * 1_440, size=num_lines // 3).repeat(3))  # baskets share a minute
    lines: dict[str, list[Any]] = {
        "customer_id": rng.integers(0, 6, size=num_lines // 3).repeat(3).tolist(),
        "item_id": [codes[k] for k in rng.integers(len(codes), size=num_lines)],
        "timestamp": (1_290_000_000 + 60 * minute).tolist(),
        "invoice": [f"5{k // 3}" for k in range(num_lines)],
        "quantity": rng.integers(-1, 4, size=num_lines).tolist(),
        "unit_price": rng.choice([0.0, 1.25, 3.5, 7.0], size=num_lines).tolist(),
    }
    lines["timestamp"][0] = 1_290_000_000
    pq.write_table(pa.table(lines), directory / "events.parquet")
    items = {"item_id": codes, "description": ["RED Heart-mug", "", "mug", "red  box ", "x", "y", "z"]}
    pq.write_table(pa.table(items), directory / "items.parquet")
    return lines


@ALL_BOUGHT_AGAIN
def test_online_retail_derivation(tmp_path: Path) -> None:
    """Usable lines, labels, censoring and split against loops over the lines."""
    lines = write_retail(tmp_path)
    log = load_online_retail(tmp_path)
    n = len(lines["timestamp"])
    usable, seen = [], set()
    for r in range(n):
        key = lines["customer_id"][r], lines["invoice"][r], lines["item_id"][r]
        code = lines["item_id"][r]
        good = lines["customer_id"][r] > 0 and lines["quantity"][r] > 0 and lines["unit_price"][r] > 0
        if good and code[:5].isdigit() and len(code) >= 5 and key not in seen:
            seen.add(key)
            usable.append(r)
    assert sorted(log.row.tolist()) == usable
    end = max(lines["timestamp"])
    labels = {}
    for r in usable:
        pair = lines["customer_id"][r], lines["item_id"][r]
        labels[r] = any(
            0 < lines["timestamp"][s] - lines["timestamp"][r] <= 60 * DAY
            for s in usable
            if (lines["customer_id"][s], lines["item_id"][s]) == pair
        )
    known = {r for r in usable if lines["timestamp"][r] + 60 * DAY <= end}
    for position, row in enumerate(log.row.tolist()):
        assert bool(log.labels["repurchase"][position]) == labels[row]
        assert bool(log.labelled[position]) == (row in known)
    times = sorted(lines["timestamp"][r] for r in known)
    assert log.test_from == times[int(0.9 * len(times))]
    train = log.samples("train")
    assert log.timestamp[train].max() + 60 * DAY < log.test_from
    assert 0 < len(known) < len(usable)


@ALL_BOUGHT_AGAIN
def test_online_retail_history_shows_a_label_after_60_days_only(tmp_path: Path) -> None:
    write_retail(tmp_path)
    log = load_online_retail(tmp_path)
    by_row = {int(row): position for position, row in enumerate(log.row)}
    hidden = shown = 0
    for batch in EventSource(log, "test", global_batch_size=50):
        sequence = batch.sequences["history"]
        ids = batch.ids["history.bought_again"][0].tolist()
        offsets = sequence.offsets.tolist()
        for b, row in enumerate(batch.sample_index.tolist()):
            end = log.history_end[by_row[row]]
            events = range(end - (offsets[b + 1] - offsets[b]), end)
            for event, t in zip(events, range(offsets[b], offsets[b + 1]), strict=True):
                if log.timestamp[by_row[row]] - log.timestamp[event] >= 60 * DAY:
                    assert ids[t] == 1 + int(log.labels["repurchase"][event])
                    shown += 1
                else:
                    assert ids[t] == 0
                    hidden += 1
    assert min(shown, hidden) > 100


@ALL_BOUGHT_AGAIN
def test_delayed_rate_counts_known_labels_only(tmp_path: Path) -> None:
    write_retail(tmp_path)
    log = load_online_retail(tmp_path)
    prior = log.labels["repurchase"][(log.split == 0) | (log.split == 1)].mean(dtype=np.float64)
    for key, codes in (("user", log.user), ("item", log.item)):
        got = click_through_rate(log, "repurchase", key=key, prior_weight=3)
        for value, sample in zip(got, log.samples("test"), strict=True):
            known = (codes == codes[sample]) & (log.timestamp + 60 * DAY <= log.timestamp[sample])
            positives = log.labels["repurchase"][known].sum()
            assert value == pytest.approx((positives + 3 * prior) / (known.sum() + 3), rel=1e-12)


def test_rates_of_times_before_1970_are_those_of_later_times(small_log: EventLog) -> None:
    early = replace(small_log, timestamp=small_log.timestamp - 2 * 10**9)
    for key in ("user", "item"):
        rates = [click_through_rate(log, "click", key=key, prior_weight=3) for log in (small_log, early)]
        np.testing.assert_array_equal(*rates)


def test_synthetic_rule_is_in_the_history() -> None:
    """Rates per user help over the base rate, and rates per user and topic help more: there is something to learn."""
    log = generate(num_users=400, seed=1)
    assert [len(log.samples(s)) > 500 for s in SPLITS] == [True] * 3
    base = score(log, "click", base_rate(log, "click"))["ne"]
    user = score(log, "click", click_through_rate(log, "click", key="user", prior_weight=5))["ne"]
    topics = log.encoded["topics"]
    assert topics.offsets is not None
    main_topic = topics.ids[topics.offsets[:-1]]
    clicks = log.labels["click"]
    prior = clicks[log.samples("train")].mean()
    loss = 0.0
    samples = log.samples("test")
    for s in samples:
        past = slice(log.history_start[s], log.history_end[s])
        same = clicks[past][main_topic[past] == main_topic[s]]
        p = (same.sum() + 2 * prior) / (len(same) + 2)
        loss -= math.log(p if clicks[s] else 1 - p)
    rate = clicks[samples].mean()
    topic = loss / len(samples) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert topic < 0.95 < base
    assert topic < user


def test_synthetic_is_reproducible() -> None:
    a, b, c = generate(seed=5), generate(seed=5), generate(seed=6)
    assert np.array_equal(a.labels["click"], b.labels["click"])
    assert np.array_equal(a.dense, b.dense)
    assert not (len(a.row) == len(c.row) and np.array_equal(a.labels["click"], c.labels["click"]))
    assert (a.history_end < np.arange(a.num_events)).mean() > 0.05, "ties exist"
    with pytest.raises(ValueError, match="`num_users` must be >= 10, got 2; raise it"):
        generate(num_users=2)
