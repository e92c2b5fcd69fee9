"""Which data a run of the command line takes: the data it was trained with, and no other."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_train.cli import main

QUICK = ("--device", "cpu", "--set", "data.global_batch_size=32", "--set", "data.max_history=8")


def write_data(directory: Path, *, first_item: int = 0) -> Path:
    rng = np.random.default_rng(0)
    events = {
        "user_id": rng.integers(12, size=400),
        "item_id": first_item + rng.integers(30, size=400),
        "timestamp": 1_000_000 + rng.integers(100_000, size=400),
        "rating": rng.integers(1, 11, size=400) / 2.0,
    }
    items = {"item_id": first_item + np.arange(30), "genres": [["Drama"]] * 30, "release_year": np.full(30, 1990)}
    directory.mkdir()
    pq.write_table(pa.table(events), directory / "events.parquet")
    pq.write_table(pa.table(items), directory / "items.parquet")
    return directory


def fingerprint(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data, data of the same sizes but other items, and a run that was given a relative path."""
    base = tmp_path_factory.mktemp("data")
    write_data(base / "own")
    write_data(base / "other", first_item=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        assert main(["train", "ml-latest-small", "--data", "own", "--out", "run", *QUICK, "--steps", "2"]) == 0
    return base


def test_data_with_another_vocabulary_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = trained / "run", trained / "other"
    before = fingerprint(run)
    for command in (
        ["eval", str(run)],
        ["train", "ml-latest-small", "--out", str(run), "--resume", "--steps", "4"],
    ):
        assert main([*command, "--data", str(other), "--device", "cpu"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"gem: error: --data: {other} is encoded otherwise than the data {run} was trained with")
        assert "item: run 31 ids of events.item_id, digest " in err
        assert "genres" not in err
        assert fingerprint(run) == before


def test_the_same_data_elsewhere_is_taken(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(trained / "own", tmp_path / "copy")
    assert main(["eval", str(trained / "run"), "--data", str(copy), "--device", "cpu"]) == 0
    assert "note" not in capsys.readouterr().err


def test_a_run_without_encodings_is_taken_with_a_note(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained / "run", tmp_path / "old"))
    values = json.loads((run / "config.json").read_text())
    del values["encodings"]
    (run / "config.json").write_text(json.dumps(values))
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert "did not record how its data was encoded" in capsys.readouterr().err


def test_the_data_is_found_from_anywhere(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(trained / "run"), "--device", "cpu"]) == 0
    run = str(shutil.copytree(trained / "run", tmp_path / "run"))
    assert main(["train", "ml-latest-small", "--out", run, "--device", "cpu", "--resume", "--steps", "3"]) == 0


def test_resume_with_another_recipe_blames_the_recipe(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "synthetic", "--out", str(trained / "run"), "--device", "cpu", "--resume"]) == 2
    assert "is a run of ml-latest-small, got synthetic; name that recipe" in capsys.readouterr().err
