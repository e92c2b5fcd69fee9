"""What the command line says of files that it cannot use."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_train.cli import main

QUICK = (
    "--device", "cpu", "--steps", "4", "--set", "data.global_batch_size=32", "--set", "data.max_history=8",
    "--set", "data.eval_batch_size=4096",
)  # fmt: skip


def train(out: Path, data: Path, *arguments: str) -> int:
    return main(["train", "ml-latest-small", "--data", str(data), "--out", str(out), *QUICK, *arguments])


def movielens(directory: Path, **changes: Any) -> Path:
    rng = np.random.default_rng(0)
    events: dict[str, Any] = {
        "user_id": rng.integers(12, size=400),
        "item_id": rng.integers(30, size=400),
        "timestamp": 1_000_000 + rng.integers(100_000, size=400),
        "rating": rng.integers(1, 11, size=400) / 2.0,
    }
    items = {"item_id": np.arange(30), "genres": [["Drama"]] * 30, "release_year": np.full(30, 1990)}
    for name, value in changes.items():
        if value is None:
            del events[name]
        else:
            events[name] = value(events[name])
    directory.mkdir()
    pq.write_table(pa.table(events), directory / "events.parquet")
    pq.write_table(pa.table(items), directory / "items.parquet")
    return directory


def _put(array: np.ndarray[Any, Any], row: int, value: float) -> np.ndarray[Any, Any]:
    out = array.copy()
    out[row] = value
    return out


@dataclass(frozen=True)
class BadData:
    id: str
    make: Callable[[Path], Path]
    parts: tuple[str, ...]


def _then(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        movielens(directory)
        change(directory)
        return directory

    return make


def _changed(**changes: Any) -> Callable[[Path], Path]:
    return lambda directory: movielens(directory, **changes)


EVENTS = "events.parquet"
BAD_DATA = [
    BadData("missing column", _changed(rating=None), (EVENTS, "missing ['rating']")),
    BadData("NaN", _changed(rating=lambda x: _put(x, 17, np.nan)), (EVENTS, "'rating'", "row 17", "finite")),
    BadData("label out of range", _changed(rating=lambda x: _put(x, 3, 9.0)), ("'rating'", "row 3", "<= 5")),
    BadData("negative user", _changed(user_id=lambda x: _put(x, 5, -1)), ("'user_id'", "row 5", ">= 0")),
    BadData("unknown item", _changed(item_id=lambda x: _put(x, 2, 99)), ("'item_id'", "99", "item table")),
    BadData("not Parquet", _then(lambda d: (d / EVENTS).write_text("user_id\n1\n")), (EVENTS, "a Parquet file, which")),
    BadData("truncated", _then(lambda d: os.truncate(d / EVENTS, 500)), (EVENTS, "complete Parquet file")),
    BadData(
        "no items",
        _then(lambda d: (d / "items.parquet").unlink()),
        ("hold events.parquet and items.parquet", "without items.parquet"),
    ),
]


@pytest.mark.parametrize("bad", BAD_DATA, ids=lambda b: b.id)
def test_bad_data_names_file_column_and_row(bad: BadData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bad.make(tmp_path / "data")
    assert train(tmp_path / "run", data) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("gem: error: ")
    for part in bad.parts:
        assert part in lines[0]
    assert not (tmp_path / "run").exists()


def test_good_files_of_that_form_train_without_the_scores_of_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", movielens(tmp_path / "data")) == 0
    out = capsys.readouterr().out
    report = (tmp_path / "run" / "report.html").read_text()
    for text in (out, report):
        assert "other predictors are left out: they were measured on a test split of 10,084 samples" in text
        assert "LightGBM" not in text


def test_training_labels_that_are_all_alike_are_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = movielens(tmp_path / "data", rating=lambda x: np.full_like(x, 1.0))
    assert train(tmp_path / "run", data) == 0
    said = capsys.readouterr()
    assert said.err.count("training labels of") == 2
    assert "training labels of like are 0, so that there is nothing to learn" in said.err


@pytest.mark.dist
def test_an_error_of_the_workers_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = movielens(tmp_path / "data", rating=lambda x: _put(x, 17, np.nan))
    assert train(tmp_path / "run", data, "--nproc", "2") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "column 'rating', row 17" in lines[0]
    assert not (tmp_path / "run").exists()
