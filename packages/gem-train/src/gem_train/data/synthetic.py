"""A generated log with a rule that a model can learn from histories, for tests and the recipe `synthetic`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gem_train.data.arguments import check_integer, check_number
from gem_train.data.log import EventLog, build_event_log
from gem_train.data.parquet import StringLists, Table
from gem_train.data.ranges import lengths_to_offsets
from gem_train.data.schema import CategoricalFeature, Column, DatasetSchema, Label

SYNTHETIC = DatasetSchema(
    name="synthetic",
    event_columns=(
        Column(name="user_id", kind="int"),
        Column(name="item_id", kind="int"),
        Column(name="timestamp", kind="int"),
        Column(name="click", kind="int", minimum=0, maximum=1),
    ),
    item_columns=(Column(name="item_id", kind="int"), Column(name="topics", kind="strings")),
    labels=(Label(task="click", column="click", op="eq", value=1),),
    features=(
        CategoricalFeature(name="item", column="item_id"),
        CategoricalFeature(name="topics", column="topics", source="items"),
        CategoricalFeature(name="click", column="click", values=(0, 1)),
    ),
    candidate_features=("item", "topics"),
    history_features=("item", "topics", "click"),
    max_history=64,
)


def generate(
    *, num_users: int = 500, num_items: int = 200, num_topics: int = 8, mean_events: float = 40.0, seed: int = 0
) -> EventLog:
    """Generates a log in which clicks follow from the user's tastes.

    Each item has one or two topics, each user likes about half of the topics. A click has probability
    sigmoid(2 b + 2.5 t), b the item's own appeal (standard normal, halved) and t in [-1, 1] the share of liked minus
    disliked topics. Users are not a feature, so a model must read the tastes from the clicks of the history. Numbers
    of events are geometric, and one event in ten shares its second with the one before.

    Args:
        num_users: Users.
        num_items: Items.
        num_topics: Topics.
        mean_events: Mean number of events of a user.
        seed: Of all draws.

    Returns:
        The log.

    Raises:
        ValueError: if a number is too small or not finite.
        TypeError: if it is none.
    """
    for name, value, minimum in (
        ("num_users", num_users, 10),
        ("num_items", num_items, 2),
        ("num_topics", num_topics, 2),
        ("seed", seed, 0),
    ):
        check_integer("generate", name, value, minimum)
    check_number("generate", "mean_events", mean_events)
    if mean_events < 2:
        raise ValueError(f"generate: `mean_events` must be >= 2, got {mean_events}; raise it")
    rng = np.random.default_rng(seed)
    appeal = 0.5 * rng.standard_normal(num_items)
    first = rng.integers(num_topics, size=num_items)
    second = rng.integers(num_topics, size=num_items)  # the same topic again gives an item with one topic
    taste = rng.choice([-1.0, 1.0], size=(num_users, num_topics))
    user = np.repeat(np.arange(num_users), rng.geometric(1.0 / mean_events, size=num_users))
    item = rng.integers(num_items, size=len(user))
    liking = 0.5 * (taste[user, first[item]] + taste[user, second[item]])
    probability = 1.0 / (1.0 + np.exp(-(2.0 * appeal[item] + 2.5 * liking)))
    timestamp = 1_600_000_000 + rng.integers(86_400 * 90, size=num_users)[user] + _gaps(rng, user)
    events = Table(
        "synthetic",
        len(user),
        {
            "user_id": user,
            "item_id": item,
            "timestamp": timestamp,
            "click": (rng.random(len(user)) < probability).astype(np.int64),
        },
        {},
    )
    two = first != second
    topics = np.stack([first, second], axis=1)[np.stack([np.ones_like(two), two], axis=1)]
    names = np.asarray([f"topic{t}" for t in range(num_topics)])
    lists = {"topics": StringLists(names[topics], lengths_to_offsets(1 + two.astype(np.int64)))}
    items = Table("synthetic items", num_items, {"item_id": np.arange(num_items)}, lists)
    return build_event_log(SYNTHETIC, events, items)


def _gaps(rng: np.random.Generator, user: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Seconds since the user's first event, with ties."""
    steps = np.where(rng.random(len(user)) < 0.1, 0, rng.geometric(1.0 / 3_600.0, size=len(user)))
    total: npt.NDArray[np.int64] = np.cumsum(steps, dtype=np.int64)
    since_first: npt.NDArray[np.int64] = total - total[np.searchsorted(user, user)]
    return since_first
