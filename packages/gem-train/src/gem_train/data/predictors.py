"""Predictors without a model, as bars for one: base rate and streaming click-through rates."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gem_train.data.arguments import check_choice, check_flag, check_kind, check_number
from gem_train.data.log import EventLog, Split, check_split

Float64Array = npt.NDArray[np.float64]


class Score(NamedTuple):
    """One row of a scoreboard."""

    predictor: str
    ne: float
    auc: float | None


class Scoreboard(NamedTuple):
    """Scores of predictors on one test split."""

    num_samples: int
    """Samples of the split."""
    num_positives: int
    """Samples whose label of the task is 1."""
    ne_standard_error: float | None
    """Standard error of an NE on this split, None where it was not measured."""
    scores: tuple[Score, ...]


SCOREBOARD: dict[str, Scoreboard] = {
    "ml-latest-small": Scoreboard(
        num_samples=10_084,
        num_positives=4_128,
        ne_standard_error=0.085,
        scores=(
            Score("base rate of train", 1.019, 0.5),
            Score("item CTR, streaming", 0.976, 0.667),
            Score("user CTR, streaming", 0.7595, 0.816),
            Score("LightGBM, static features", 0.992, 0.601),
            Score("DIN + streaming statistics", 0.696, 0.860),
            Score("DeepFM + streaming statistics", 0.679, 0.865),
            Score("LightGBM, streaming features", 0.632, 0.881),
        ),
    ),
    "ml-latest-2149u": Scoreboard(
        num_samples=20_659,
        num_positives=10_872,
        ne_standard_error=0.018,
        scores=(
            Score("base rate of train", 1.001, 0.5),
            Score("item CTR, streaming", 0.934, 0.678),
            Score("user CTR, streaming", 0.8605, 0.748),
            Score("LightGBM, static features", 0.960, 0.644),
            Score("DeepFM + streaming statistics", 0.766, 0.812),
            Score("LightGBM, streaming features", 0.745, 0.822),
        ),
    ),
    "online-retail": Scoreboard(
        num_samples=27_391,
        num_positives=6_389,
        ne_standard_error=None,
        scores=(
            Score("base rate of train", 1.012, 0.5),
            Score("item CTR, frozen", 1.016, 0.567),
            Score("LightGBM, streaming features", 0.816, 0.773),
        ),
    ),
}
"""Test scores measured on exactly these splits, first task of each schema. deepctr-torch 0.3.0 with batch 1024,
embedding 16, history 50, Adam 1e-3 and early stopping; LightGBM with hand-made counts and rates per user, item and
genre. A model that reads the labelled history sees all that the user statistics hold. The standard errors are those of
a bootstrap over the test users, who are few."""


def base_rate(log: EventLog, task: str, split: Split = "test") -> Float64Array:
    """The mean label of everything before the test period, for every sample of the split.

    Args:
        log: The log.
        task: The task.
        split: The split.

    Returns:
        (num_samples,) probabilities, in the order of `log.samples(split)`.

    Raises:
        TypeError, ValueError: if `log` is none, or has no such task or split.
    """
    _check("base_rate", log, task, split)
    return np.full(len(log.samples(split)), _prior(log, task))


def click_through_rate(
    log: EventLog,
    task: str,
    split: Split = "test",
    *,
    key: Literal["user", "item"],
    prior_weight: float,
    frozen: bool = False,
) -> Float64Array:
    """The mean of the labels of the same user or item that are known at the sample's time, shrunk to the base rate.

    A label is known when its event is strictly earlier than the sample and at least the label's delay old.

    Args:
        log: The log.
        task: The task.
        split: The split.
        key: What the rate is per.
        prior_weight: Events that the base rate counts for.
        frozen: Count training and validation labels only, and all of them.

    Returns:
        (num_samples,) probabilities, in the order of `log.samples(split)`.

    Raises:
        TypeError, ValueError: if `log` is none, has no such task or split, or an option has another type or range.
    """
    owner = "click_through_rate"
    _check(owner, log, task, split)
    check_choice(owner, "key", key, ("user", "item"))
    check_number(owner, "prior_weight", prior_weight)
    if prior_weight <= 0:
        raise ValueError(f"{owner}: `prior_weight` must be > 0, got {prior_weight}; give a number of events")
    check_flag(owner, "frozen", frozen)
    keys = log.user if key == "user" else log.item
    delay = next(label.delay_seconds for label in log.schema.labels if label.task == task)
    positions = log.samples(split)
    counted = np.flatnonzero((log.split == 0) | (log.split == 1) if frozen else log.labelled)
    time = log.timestamp - log.timestamp.min()  # from 0, also before 1970
    span = int(time.max()) + 2
    codes = keys[counted] * span + time[counted]
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    labels = np.concatenate([[0.0], np.cumsum(log.labels[task][counted][order], dtype=np.float64)])
    # Strictly earlier, and known: t_e <= t - max(delay, 1), in whole seconds.
    latest = np.maximum(time[positions] - max(delay, 1), -1)
    if frozen:
        latest = np.full(len(positions), span - 2)
    begin = np.searchsorted(codes, keys[positions] * span, side="left")
    end = np.maximum(np.searchsorted(codes, keys[positions] * span + latest, side="right"), begin)
    positives: Float64Array = labels[end] - labels[begin]
    return (positives + prior_weight * _prior(log, task)) / (end - begin + prior_weight)


def _check(owner: str, log: object, task: object, split: object) -> None:
    check_kind(owner, "log", log, EventLog, "make one with load_events or generate")
    assert isinstance(log, EventLog)
    check_choice(owner, "task", task, log.tasks)
    check_split(owner, split)


def _prior(log: EventLog, task: str) -> float:
    before_test = (log.split == 0) | (log.split == 1)
    return float(log.labels[task][before_test].mean(dtype=np.float64))
