"""Scores of a split are those of all its samples, however they are cut into batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gem_train.data import EventLog, EventSource, generate
from gem_train.evaluation import Evaluation, evaluate
from gem_train.metrics import BinaryMetrics
from gem_train.world import Agreement, World


class Loss(NamedTuple):
    total: Tensor


class ByIndex(nn.Module):
    """A logit for each sample that depends on the sample alone."""

    def forward(self, batch: Any, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"click": torch.sin(batch.sample_index.double()).float()}

    def loss(self, outputs: Mapping[str, Tensor], batch: Any) -> Loss:
        return Loss(
            nn.functional.binary_cross_entropy_with_logits(outputs["click"], batch.labels["click"], reduction="sum")
        )


class NoTables:
    def exchange(self, ids: Any) -> None:
        return None

    def lookup(self, pending: None) -> dict[str, Tensor]:
        return {}


@pytest.fixture(scope="module")
def events() -> EventLog:
    return generate(num_users=40, num_items=30, mean_events=12.0)


def score(events: EventLog, world: World | None = None, **options: Any) -> Evaluation:
    source = EventSource(events, "test", **options)
    return evaluate(ByIndex(), NoTables(), source, world or World())  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_last_smaller_batch_counts_in_full(events: EventLog, size: int) -> None:
    (whole,) = EventSource(events, "test", global_batch_size=10_000)
    expected = BinaryMetrics()
    logits = ByIndex()(whole, {})["click"]
    expected.update(logits, whole.labels["click"])
    found = score(events, global_batch_size=size)
    assert found.num_samples == whole.num_samples == len(events.samples("test"))
    scores = {name: value for name, value in found.tasks["click"].items() if name != "curve"}
    assert scores == pytest.approx(expected.compute(), rel=1e-12, abs=0)
    assert found.loss == pytest.approx(expected.compute()["logloss"], rel=1e-6)


class EndsEarly(World):
    """A world in which another rank has three batches of 5 samples."""

    given = 0

    def agree(self, *, has_batch: bool, num_samples: int, stop: bool = False, **options: Any) -> Agreement:
        EndsEarly.given += 1
        other = EndsEarly.given <= 3
        return Agreement(has_batch and other, has_batch or other, num_samples + 5 * other, stop)


def test_data_that_ends_unevenly_is_an_error(events: EventLog) -> None:
    """Training may leave a few samples out and says so; a score of a part of the split would be taken for the whole."""
    with pytest.raises(ValueError, match=r"same number of batches, got one that ended .* others had 6 samples more"):
        score(events, EndsEarly(), global_batch_size=6)
