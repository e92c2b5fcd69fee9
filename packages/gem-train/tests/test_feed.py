"""Batches one ahead, and the end on which all ranks agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from trainer_toys import ToyTables

from gem_train.data import EventLog, EventSource
from gem_train.feed import Feed
from gem_train.timing import PhaseTimer
from gem_train.world import Agreement, World


class Uneven:
    """A source whose slices are given, for a world that disagrees."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.position = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_feed_state_is_that_of_the_batch_given(events: EventLog) -> None:
    source = EventSource(events, "train", global_batch_size=64, seed=1)
    batches = list(EventSource(events, "train", global_batch_size=64, seed=1))
    tables = ToyTables({}, {})
    feed = Feed(source, embeddings=tables, world=World(), timer=PhaseTimer(torch.device("cpu")), limit=3)
    for k in range(3):
        staged = feed.next()
        assert torch.equal(staged.batch.sample_index, batches[k].sample_index)
        assert staged.source_state["next_sample"] == 64 * (k + 1)
    assert feed.next() is None
    assert feed.next() is None


def test_feed_ahead_is_what_next_gives(events: EventLog) -> None:
    source = EventSource(events, "train", global_batch_size=64, seed=1)
    feed = Feed(source, embeddings=ToyTables({}, {}), world=World(), timer=PhaseTimer(torch.device("cpu")), limit=2)
    first = feed.next()
    assert source.state_dict()["next_sample"] == 64, "nothing is read before it is asked for"
    second = feed.ahead()
    assert feed.ahead() is second
    assert feed.next() is second
    assert not torch.equal(first.batch.sample_index, second.batch.sample_index)
    assert feed.ahead() is None
    assert feed.next() is None


@pytest.mark.gpu
def test_feed_does_not_wait_for_the_model_on_a_gpu(events: EventLog) -> None:
    """The next batch is on the device while the model's stream still works; the stream then waits for the copy."""
    device = torch.device("cuda", torch.cuda.current_device())
    expected = list(EventSource(events, "train", global_batch_size=64, seed=1))[1]
    source = EventSource(events, "train", global_batch_size=64, seed=1)
    feed = Feed(source, embeddings=ToyTables({}, {}), world=World(device=device), timer=PhaseTimer(device))
    feed.next()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2 * 10**9)  # about a second
    busy.record()
    ahead = feed.ahead()
    assert ahead.copied is not None
    ahead.copied.synchronize()
    assert not busy.query()
    staged = feed.next()
    assert staged is ahead
    assert torch.equal(staged.batch.dense.cpu(), expected.dense)
    for name, (values, offsets) in expected.ids.items():
        assert torch.equal(staged.batch.ids[name][0].cpu(), values), name
        assert torch.equal(staged.batch.ids[name][1].cpu(), offsets), name
    assert busy.query()


def test_feed_of_an_empty_source_ends_at_once() -> None:
    feed = Feed(Uneven([]), embeddings=ToyTables({}, {}), world=World(), timer=PhaseTimer(torch.device("cpu")))
    assert feed.next() is None
    assert not feed.stopped


class UnevenWorld(World):
    """A world in which another rank has `others` batches of 5 samples."""

    others = 2

    def agree(self, *, has_batch: bool, num_samples: int, stop: bool = False, alike: Any = None) -> Agreement:
        other, UnevenWorld.others = UnevenWorld.others > 0, UnevenWorld.others - 1
        return Agreement(has_batch and other, has_batch or other, num_samples + 5 * other, stop)


def test_feed_ends_on_all_ranks_when_it_ends_on_one(events: EventLog) -> None:
    source = EventSource(events, "train", global_batch_size=64)
    feed = Feed(source, embeddings=ToyTables({}, {}), world=UnevenWorld(), timer=PhaseTimer(torch.device("cpu")))
    given = [feed.next(), feed.next(), feed.next()]
    assert [staged.num_samples if staged else None for staged in given] == [69, 69, None]
    assert (feed.stopped, feed.dropped) == (False, 64)
    feed.close()
