"""Histories, labels, ids and splits against a loop over events, and against looking ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gem_train.data import Batch, EventLog, EventSource, load_events
from gem_train.data.collate import collate
from gem_train.data.log import SPLITS


def bags(pair: tuple[torch.Tensor, torch.Tensor]) -> list[list[int]]:
    values, offsets = pair
    assert values.dtype == offsets.dtype == torch.int64
    return [values[a:b].tolist() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def test_batch_equals_loop(toy: Any, toy_log: EventLog) -> None:
    """All samples of all splits, and events that are no sample, in one shuffled batch."""
    events, items = toy.columns()
    log, limit = toy_log, toy.schema.max_history
    positions = np.random.default_rng(1).permutation(log.num_events)
    batch = collate(log, positions, limit)
    sequence = batch.sequences["history"]
    offsets = sequence.offsets.tolist()
    ids = {name: bags(pair) for name, pair in batch.ids.items()}
    by_row = {int(row): position for position, row in enumerate(log.row)}
    longest = 0
    for b, row in enumerate(batch.sample_index.tolist()):
        user, now = events["user_id"][row], events["timestamp"][row]
        past = [r for r in range(600) if events["user_id"][r] == user and events["timestamp"][r] < now]
        past = sorted(past, key=lambda r: (events["timestamp"][r], r))[-limit:]
        longest = max(longest, len(past))
        span = slice(offsets[b], offsets[b + 1])
        assert sequence.age[span].tolist() == [now - events["timestamp"][r] for r in past]
        assert [float(batch.labels[t][b]) for t in ("good", "sold")] == [
            events["stars"][row] >= 4,
            events["bought"][row],
        ]
        for name in ("item", "tags", "weight", "price"):
            feature, position = log.encoded[name], by_row[row]
            at = feature.offsets
            span_ids = slice(position, position + 1) if at is None else slice(at[position], at[position + 1])
            assert ids[name][b] == feature.ids[span_ids].tolist()
        assert ids["history.stars"][span] == [[1 + int(events["stars"][r])] for r in past]
        known = [now - events["timestamp"][r] >= 40 for r in past]
        assert ids["history.bought"][span] == [
            [1 + int(events["bought"][r]) if k else 0] for r, k in zip(past, known, strict=True)
        ]
        assert ids["history.item"][span] == [[int(log.encoded["item"].ids[by_row[r]])] for r in past]
        assert [len(x) for x in ids["history.tags"][span]] == [
            len(items["tags"][int(events["item_id"][r][1:])]) for r in past
        ]
    assert sequence.max_seqlen == longest == limit
    assert min(offsets[b + 1] - offsets[b] for b in range(600)) == 0
    assert (sequence.age > 0).all()


def test_ids_follow_the_vocabulary(toy: Any, toy_log: EventLog) -> None:
    """Ids are in range, equal values share an id, rare and later values are id 0."""
    events, items = toy.columns()
    train = toy_log.timestamp < toy_log.validation_from
    item = np.asarray(events["item_id"])[toy_log.row]
    ids = toy_log.encoded["item"].ids
    for value in np.unique(item):
        got = np.unique(ids[item == value])
        assert len(got) == 1
        assert (got[0] == 0) == ((item[train] == value).sum() < 2)
    for name, rows in toy_log.tables:
        feature = toy_log.encoded[name]
        assert feature.num_rows == rows
        assert feature.ids.min() >= 0
        assert feature.ids.max() < rows
    weight = np.asarray([items["weight"][int(i[1:])] for i in item])
    np.testing.assert_array_equal(toy_log.encoded["weight"].ids, 1 + (weight >= 1) + (weight >= 2))
    price = np.asarray(events["price"])[toy_log.row]
    share = np.bincount(toy_log.encoded["price"].ids[train])[1:] / train.sum()
    assert share == pytest.approx([0.25] * 4, abs=0.01)
    assert np.all(np.diff(toy_log.encoded["price"].ids[np.argsort(price)]) >= 0)


def test_dense_features(toy: Any, toy_log: EventLog) -> None:
    """Standardised by the training period; against a loop."""
    events, _ = toy.columns()
    raw = np.empty((600, 2))
    for position, row in enumerate(toy_log.row):
        user, now = events["user_id"][row], events["timestamp"][row]
        past = np.asarray(events["timestamp"])[(np.asarray(events["user_id"]) == user)]
        past = past[past < now]
        raw[position] = np.log1p(len(past)), np.log1p(now - past.max()) if len(past) else 0
    train = toy_log.split == SPLITS.index("train")
    expected = (raw - raw[train].mean(0)) / raw[train].std(0)
    np.testing.assert_allclose(toy_log.dense[:, :2], expected, rtol=1e-5, atol=1e-6)
    assert toy_log.num_dense == 7
    assert toy_log.num_event_dense == 2
    np.testing.assert_allclose(toy_log.event_dense[toy_log.timestamp < toy_log.validation_from].mean(0), 0, atol=1e-5)


def test_split_rule(toy: Any, toy_log: EventLog) -> None:
    events, _ = toy.columns()
    known = np.sort(events["timestamp"][events["complete"] == 1])
    test_from = known[int(0.8 * len(known))]
    rest = known[known < test_from - 40]
    validation_from = rest[int(0.8 * len(rest))]
    assert (toy_log.validation_from, toy_log.test_from) == (validation_from, test_from)
    for position, row in enumerate(toy_log.row):
        time, split = events["timestamp"][row], toy_log.split[position]
        complete = events["complete"][row] == 1
        expected = -1
        if complete and time >= test_from:
            expected = 2
        elif complete and validation_from <= time < test_from - 40:
            expected = 1
        elif complete and time < validation_from:
            expected = 0
        assert split == expected
    assert all(len(toy_log.samples(split)) for split in SPLITS)
    train = toy_log.samples("train")
    assert np.all(np.diff(toy_log.timestamp[train]) >= 0)
    with pytest.raises(ValueError, match="`split` must be train, validation or test, got str 'dev'; name one"):
        toy_log.samples("dev")


def batches(log: EventLog, split: str, rows: set[int] | None = None) -> dict[int, Batch]:
    return {
        int(log.row[p]): collate(log, np.asarray([p]), 7)
        for p in log.samples(split)
        if rows is None or int(log.row[p]) in rows
    }


def assert_same_inputs(a: Batch, b: Batch) -> None:
    assert torch.equal(a.dense, b.dense)
    for name, pair in a.ids.items():
        assert torch.equal(pair[0], b.ids[name][0]), name
        assert torch.equal(pair[1], b.ids[name][1]), name
    for x, y in zip(a.sequences["history"], b.sequences["history"], strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_no_look_ahead(toy: Any, toy_log: EventLog, tmp_path: Path) -> None:
    """Inputs of a sample do not change when outcomes at or after its time change, nor when they are not yet known."""
    events, items = toy.columns()
    for cut in (1_050, toy_log.validation_from, toy_log.test_from, 1_150):
        changed = {name: np.array(values) for name, values in events.items()}
        later = changed["timestamp"] >= cut
        changed["stars"][later] = 5 - changed["stars"][later]
        not_known = changed["timestamp"] > cut - 40
        changed["bought"][not_known] = 1 - changed["bought"][not_known]
        # Prices and items of later events change as well, as long as training statistics do not read them.
        free = changed["timestamp"] > max(cut, toy_log.validation_from)
        changed["price"][free] += 3
        changed["item_id"][free] = "i0"
        paths = toy.write(tmp_path, changed, items)
        other = load_events(paths[0], toy.schema, items=paths[1])
        at_cut = {int(r) for r, t in zip(toy_log.row, toy_log.timestamp, strict=True) if t == cut}
        for split in SPLITS:
            mine, theirs = batches(toy_log, split, at_cut), batches(other, split, at_cut)
            assert mine.keys() == theirs.keys()
            for row, batch in mine.items():
                assert_same_inputs(batch, theirs[row])


def test_unknown_items_can_be_empty(toy: Any, tmp_path: Path) -> None:
    events, items = toy.columns()
    events["item_id"] = ["new", *list(events["item_id"])[1:]]
    paths = toy.write(tmp_path, events, items)
    log = load_events(paths[0], replace(toy.schema, unknown_items="empty"), items=paths[1])
    position = int(np.flatnonzero(log.row == 0)[0])
    tags = log.encoded["tags"]
    assert tags.offsets is not None
    assert tags.offsets[position + 1] == tags.offsets[position]
    assert log.encoded["weight"].ids[position] == 0


def test_names_for_model_and_tables(toy_log: EventLog) -> None:
    assert toy_log.tasks == ("good", "sold")
    assert toy_log.context_features == ("item", "tags", "weight", "price")
    assert toy_log.event_features == ("history.item", "history.tags", "history.stars", "history.bought")
    batch = next(iter(EventSource(toy_log, global_batch_size=5)))
    assert {f.name for f in toy_log.features} == set(batch.ids)
    assert {f.name for f in toy_log.features if f.multi_valued} == {"tags", "history.tags"}
    assert {f.table for f in toy_log.features} == {t.name for t in toy_log.tables}
    assert batch.dense.dtype == batch.sequences["history"].dense.dtype == torch.float32
    assert all(x.dtype == torch.float32 for x in batch.labels.values())
    moved = batch.to("cpu")
    assert_same_inputs(batch, moved)
    assert torch.equal(moved.sample_index, batch.sample_index)


def test_collate_without_samples(toy_log: EventLog) -> None:
    batch = collate(toy_log, np.empty(0, dtype=np.int64), 7)
    assert batch.num_samples == 0
    assert batch.sequences["history"].max_seqlen == 0
    assert batch.sequences["history"].dense.shape == (0, 2)
    assert batch.dense.shape == (0, 7)
    for values, offsets in batch.ids.values():
        assert values.shape == (0,)
        assert offsets.tolist() == [0]
