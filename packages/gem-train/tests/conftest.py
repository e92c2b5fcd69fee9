from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_train.data import (
    BucketFeature,
    CategoricalFeature,
    Column,
    DatasetSchema,
    DenseColumn,
    EventLog,
    Label,
    TimeSplit,
    generate,
    load_events,
    load_movielens,
)
from gem_train.run_log import RunLog

# Under importlib mode a test file's neighbours are not importable by themselves.
sys.path.insert(0, str(Path(__file__).parent))

MOVIELENS_DIR = Path(__file__).resolve().parents[3] / "data" / "ml-latest-small"

# Small, and with everything in it: two tasks, a delay, censoring, item lists, buckets, ties.
TOY = DatasetSchema(
    name="toy",
    event_columns=(
        Column(name="user_id", kind="int", minimum=0),
        Column(name="item_id", kind="string"),
        Column(name="timestamp", kind="int", minimum=0),
        Column(name="stars", kind="float", minimum=0, maximum=5),
        Column(name="bought", kind="int", minimum=0, maximum=1),
        Column(name="complete", kind="int", minimum=0, maximum=1),
        Column(name="price", kind="float", minimum=0),
    ),
    item_columns=(
        Column(name="item_id", kind="string"),
        Column(name="tags", kind="strings"),
        Column(name="weight", kind="float", minimum=0),
    ),
    labels=(
        Label(task="good", column="stars", op="ge", value=4),
        Label(task="sold", column="bought", op="eq", value=1, delay_seconds=40),
    ),
    labelled="complete",
    features=(
        CategoricalFeature(name="item", column="item_id", min_count=2),
        CategoricalFeature(name="tags", column="tags", source="items"),
        BucketFeature(name="weight", column="weight", source="items", boundaries=(1.0, 2.0)),
        BucketFeature(name="price", column="price", num_buckets=4),
        CategoricalFeature(name="stars", column="stars", values=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0)),
        CategoricalFeature(name="bought", column="bought", values=(0, 1)),
    ),
    candidate_features=("item", "tags", "weight", "price"),
    history_features=("item", "tags", "stars", "bought"),
    event_dense=("log1p_seconds_since_previous_event", DenseColumn(column="price", transform="log1p")),
    max_history=7,
    split=TimeSplit(test_fraction=0.2, validation_fraction=0.2, gap_seconds=40),
)


def toy_columns(num_events: int = 600, num_users: int = 13, seed: int = 0) -> tuple[dict, dict]:
    """Rows in no order, about three events of one user per distinct second, users of one event."""
    rng = np.random.default_rng(seed)
    user = rng.integers(num_users - 3, size=num_events)
    user[:3] = np.arange(num_users - 3, num_users)
    timestamp = 1_000 + rng.integers(200, size=num_events)
    events = {
        "user_id": user,
        "item_id": [f"i{k}" for k in rng.integers(40, size=num_events)],
        "timestamp": timestamp,
        "stars": rng.integers(6, size=num_events).astype(np.float32),
        "bought": rng.integers(2, size=num_events),
        "complete": (timestamp <= 1_160).astype(np.int8),
        "price": rng.random(num_events) * 10,
    }
    tags = [[f"t{t}" for t in rng.choice(6, size=rng.integers(4), replace=False)] for _ in range(40)]
    items = {"item_id": [f"i{k}" for k in range(40)], "tags": tags, "weight": rng.random(40) * 3}
    return events, items


def write_toy(directory: Path, events: dict, items: dict) -> tuple[Path, Path]:
    paths = directory / "events.parquet", directory / "items.parquet"
    pq.write_table(pa.table(events), paths[0], row_group_size=100)
    tags = items["tags"] if isinstance(items["tags"], pa.Array) else pa.array(items["tags"], pa.list_(pa.string()))
    pq.write_table(pa.table({**items, "tags": tags}), paths[1])
    return paths


class Toy(NamedTuple):
    """The toy data set: a schema, columns that satisfy it, and a writer of both files."""

    schema: DatasetSchema
    columns: Callable[..., tuple[dict, dict]]
    write: Callable[[Path, dict, dict], tuple[Path, Path]]


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy(TOY, toy_columns, write_toy)


@pytest.fixture(scope="session")
def toy_log(tmp_path_factory: pytest.TempPathFactory) -> EventLog:
    events, items = write_toy(tmp_path_factory.mktemp("toy"), *toy_columns())
    return load_events(events, TOY, items=items)


@pytest.fixture(scope="session")
def movielens_log() -> EventLog:
    return load_movielens(MOVIELENS_DIR)


@pytest.fixture(scope="session")
def small_log() -> EventLog:
    return generate(num_users=60)


def give_small_data(patch: pytest.MonkeyPatch, log: EventLog) -> None:
    from gem_train.recipes import registry

    patch.setitem(registry._RECIPES, "synthetic", replace(registry.get("synthetic"), load=lambda _: log))


@pytest.fixture
def small_data(monkeypatch: pytest.MonkeyPatch, small_log: EventLog) -> None:
    """The recipe `synthetic` has an eighth of its users."""
    give_small_data(monkeypatch, small_log)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end without the pictures of their report, which take longer than the run."""
    monkeypatch.setattr("gem_train.cli.train.write_report", lambda directory, **_: Path(directory) / "report.html")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, small_log: EventLog) -> Path:
    """A finished run, with its report; what it printed is beside it. Tests copy it before they write."""
    from cli_runs import train

    out = tmp_path_factory.mktemp("runs") / "finished"
    with (
        (out.parent / "stdout").open("w") as stdout,
        (out.parent / "stderr").open("w") as stderr,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.MonkeyPatch.context() as patch,
    ):
        give_small_data(patch, small_log)
        assert train(out) == 0
    return out


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def events() -> EventLog:
    return generate(num_users=80, num_items=60, mean_events=20.0)


OpenLog = Callable[..., RunLog]


@pytest.fixture
def open_log() -> Iterator[OpenLog]:
    with contextlib.ExitStack() as stack:

        def open_one(*args: Any, **kwargs: Any) -> RunLog:
            log = RunLog(*args, **kwargs)
            stack.callback(log.close)
            return log

        yield open_one
