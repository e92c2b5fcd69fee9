"""Order, shards and resume of the reader."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from gem_train.data import EventLog, EventSource
from gem_train.data.balance import deal_by_length
from gem_train.data.prefetch import prefetch
from gem_train.data.ranges import expand_ranges, repeat_each
from gem_train.protocols import BatchSource

SIZE = 37


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def source(log: EventLog, **changes: Any) -> EventSource:
    options: dict[str, Any] = {"global_batch_size": SIZE, "seed": 3, "epochs": 3, **changes}
    return EventSource(log, options.pop("split", "train"), **options)


def global_batches(log: EventLog, world_size: int = 1, state: dict | None = None, **changes: Any) -> list[list[int]]:
    """Sample rows of every global batch, ranks put together; all ranks must deliver the same number."""
    sources = [source(log, rank=r, world_size=world_size, **changes) for r in range(world_size)]
    for one in sources:
        if state is not None:
            one.load_state_dict(state)
    parts = [[batch.sample_index.tolist() for batch in one] for one in sources]
    return [flat(slices) for slices in zip(*parts, strict=True)]


def test_satisfies_protocol(toy_log: EventLog) -> None:
    assert isinstance(source(toy_log), BatchSource)


def test_three_epochs(toy_log: EventLog) -> None:
    reader = source(toy_log)
    rows = [batch.sample_index.tolist() for batch in reader]
    assert len(rows) == reader.num_batches == 3 * reader.batches_per_epoch
    per_epoch = reader.batches_per_epoch
    epochs = [flat(rows[e * per_epoch : (e + 1) * per_epoch]) for e in range(3)]
    train = sorted(toy_log.row[toy_log.samples("train")].tolist())
    assert all(sorted(epoch) == train for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != train
    assert len(train) % SIZE, "the last batch of an epoch is a short one"
    assert len(rows[per_epoch - 1]) == len(train) % SIZE
    assert [batch.sample_index.tolist() for batch in reader] == rows, "a new pass begins after a complete one"
    assert rows != [batch.sample_index.tolist() for batch in source(toy_log, seed=4)]


def test_evaluation_is_in_time_order(toy_log: EventLog) -> None:
    for split in ("validation", "test"):
        rows = flat(global_batches(toy_log, split=split, epochs=1))
        assert rows == toy_log.row[toy_log.samples(split)].tolist()
        assert rows == flat(global_batches(toy_log, 3, split=split, epochs=1))


@pytest.mark.parametrize("balance", [False, True], ids=["contiguous", "balanced"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 40])
def test_ranks_share_each_global_batch(world_size: int, balance: bool, toy_log: EventLog) -> None:
    """40 ranks on batches of 37: some slices are empty, and no rank misses a batch."""
    one = global_batches(toy_log)
    many = global_batches(toy_log, world_size, balance_lengths=balance)
    if balance:
        one, many = [sorted(batch) for batch in one], [sorted(batch) for batch in many]
    assert many == one


@pytest.mark.parametrize("depth", [0, 2], ids=["plain", "prefetch"])
def test_resume_after_any_batch_on_any_world_size(depth: int, toy_log: EventLog) -> None:
    whole = global_batches(toy_log)
    reader = source(toy_log, prefetch_batches=depth)
    states = [reader.state_dict()]
    states += [reader.state_dict() for _ in reader]
    assert len(states) == len(whole) + 1
    for done, state in enumerate(states):
        assert global_batches(toy_log, state=state) == whole[done:]
    for done in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        for world_size in (2, 5):
            assert global_batches(toy_log, world_size, states[done], prefetch_batches=depth) == whole[done:]


def test_resume_with_another_batch_size_loses_and_repeats_nothing(toy_log: EventLog) -> None:
    whole = flat(global_batches(toy_log))
    reader = source(toy_log)
    for _, _batch in zip(range(4), reader, strict=False):
        pass
    state = reader.state_dict()
    rest = flat(global_batches(toy_log, 2, state, global_batch_size=50))
    assert whole[4 * SIZE :] == rest


def test_state_is_the_same_on_all_ranks_of_any_world(toy_log: EventLog) -> None:
    readers = [source(toy_log)]
    readers += [source(toy_log, rank=r, world_size=4, prefetch_batches=2 * (r % 2)) for r in range(4)]
    for batches in zip(*readers, strict=True):
        assert len(batches) == 5
        assert all(reader.state_dict() == readers[0].state_dict() for reader in readers)


def test_finished_state_yields_nothing_once(toy_log: EventLog) -> None:
    reader = source(toy_log)
    assert len(list(reader)) == reader.num_batches
    again = source(toy_log)
    again.load_state_dict(reader.state_dict())
    assert list(again) == []
    assert len(list(again)) == again.num_batches
    longer = source(toy_log, epochs=4)
    longer.load_state_dict(reader.state_dict())
    assert len(list(longer)) == reader.batches_per_epoch


def test_broken_off_iteration_continues_and_reset_restarts(toy_log: EventLog) -> None:
    whole = global_batches(toy_log)
    reader = source(toy_log, prefetch_batches=3)
    for batch in reader:
        assert batch.sample_index.tolist() == whole[0]
        break
    assert next(iter(reader)).sample_index.tolist() == whole[1]
    reader.reset()
    assert next(iter(reader)).sample_index.tolist() == whole[0]


def test_evaluation_between_training_batches(toy_log: EventLog) -> None:
    whole, evaluated = global_batches(toy_log), global_batches(toy_log, split="test", epochs=1)
    evaluation = source(toy_log, split="test", epochs=1)
    for number, batch in enumerate(source(toy_log)):
        assert batch.sample_index.tolist() == whole[number]
        if number % 7 == 0:
            assert [b.sample_index.tolist() for b in evaluation] == evaluated


@pytest.mark.parametrize("replace", [iter, EventSource.reset, lambda s: s.load_state_dict(s.state_dict())])
def test_replaced_iterator_is_refused(replace: Any, toy_log: EventLog) -> None:
    reader = source(toy_log)
    old = iter(reader)
    next(old)
    replace(reader)
    state = reader.state_dict()
    with pytest.raises(RuntimeError, match="was replaced by a later"):
        next(old)
    assert reader.state_dict() == state


def test_foreign_state_is_refused(toy_log: EventLog) -> None:
    reader = source(toy_log)
    good = reader.state_dict()
    for key, value in (("seed", 9), ("num_samples", 5), ("split", "test"), ("shuffle", False), ("version", 0)):
        with pytest.raises(ValueError, match=f"`{key}` must be .* as here, got {value!r}"):
            reader.load_state_dict({**good, key: value})
    with pytest.raises(ValueError, match="`epoch` and `next_sample` must be"):
        reader.load_state_dict({**good, "next_sample": 10**6})
    with pytest.raises(ValueError, match="must have keys"):
        reader.load_state_dict({"epoch": 0})


@pytest.mark.parametrize(
    "changes",
    [{"global_batch_size": 0}, {"world_size": 0}, {"rank": 1}, {"rank": -1}, {"epochs": 0}, {"max_history": 0},
     {"prefetch_batches": -1}, {"seed": -1}],
    ids=str,
)  # fmt: skip
def test_bad_arguments(changes: dict[str, int], toy_log: EventLog) -> None:
    with pytest.raises(ValueError, match=f"EventSource: `{next(iter(changes))}` must be"):
        source(toy_log, **changes)


def test_max_history_limits(toy_log: EventLog) -> None:
    assert max(b.sequences["history"].max_seqlen for b in source(toy_log, max_history=3)) == 3
    assert max(b.sequences["history"].max_seqlen for b in source(toy_log)) == 7


def test_threads_end(toy_log: EventLog) -> None:
    before = threading.active_count()
    reader = iter(source(toy_log, prefetch_batches=2))
    next(reader)
    assert threading.active_count() == before + 1
    reader.close()
    assert threading.active_count() == before
    assert len(list(source(toy_log, prefetch_batches=1))) == source(toy_log).num_batches
    assert threading.active_count() == before


def test_prefetch_is_bounded_and_passes_errors_on() -> None:
    made: list[int] = []

    def numbers() -> Any:
        for n in range(100):
            if n == 7:
                raise KeyError("seven")
            made.append(n)
            yield n

    taken = prefetch(numbers(), 2)
    got = [next(taken)]
    threading.Event().wait(0.05)
    assert len(made) <= 4  # one taken, two waiting, one in the thread's hand
    with pytest.raises(KeyError, match="seven"):
        got += list(taken)
    assert got == made[: len(got)]
    assert threading.active_count() == len(threading.enumerate())
    assert not [t for t in threading.enumerate() if t.name == "gem-train-prefetch"]


def test_reader_error_reaches_the_loop(toy_log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_train.data.source.collate", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        next(iter(source(toy_log, prefetch_batches=2)))


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1024, 1030])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_dealing_is_a_permutation(n: int, world_size: int) -> None:
    lengths = np.random.default_rng(n).integers(0, 500, size=n)
    assert sorted(deal_by_length(lengths, world_size).tolist()) == list(range(n))


def test_dealing_balances() -> None:
    """Log-normal lengths on 8 ranks: contiguous slices exceed the mean by a sixth, dealt ones by under one per cent."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(4, 1.2, size=1024).astype(np.int64), 2_000)

    def excess(order: np.ndarray) -> float:
        loads = lengths[order].reshape(8, 128).sum(axis=1)
        return float(loads.max() / loads.mean() - 1)

    assert excess(np.arange(1024)) > 0.10
    assert excess(deal_by_length(lengths, 8)) < 0.01


def test_batches_own_their_memory(toy_log: EventLog) -> None:
    """Writing into a batch must not reach the log."""
    before = {name: feature.ids.copy() for name, feature in toy_log.encoded.items()}
    for batch in source(toy_log, split="test", epochs=1):
        for values, _ in batch.ids.values():
            values.fill_(-1)
        batch.dense.fill_(torch.nan)
        batch.sequences["history"].dense.fill_(torch.nan)
    assert all(np.array_equal(before[name], feature.ids) for name, feature in toy_log.encoded.items())
    assert np.isfinite(toy_log.dense).all()
    assert np.isfinite(toy_log.event_dense).all()


def test_ranges_are_those_of_numpy_and_python() -> None:
    rng = np.random.default_rng(0)
    for count, longest in ((0, 1), (1, 1), (1, 5), (40, 1), (40, 2), (40, 9)):
        lengths, starts = rng.integers(0, longest, count), rng.integers(0, 100, count)
        ranges = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        assert expand_ranges(starts, lengths).tolist() == np.concatenate([np.empty(0, np.int64), *ranges]).tolist()
        assert repeat_each(starts, lengths).tolist() == np.repeat(starts, lengths).tolist()
