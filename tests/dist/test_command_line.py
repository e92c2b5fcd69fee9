"""`gem train` on several processes follows the curve of one, and a run goes on at another number of processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RTOL = 1e-4
"""For sums of another order over 12 steps; a lost sample or a wrong weight is at 1e-2 or more."""

COMMON = (
    *("train", "synthetic", "--device", "cpu", "--set", "trainer.log_interval=2"),
    # With the usual eps, AdamW turns a gradient that is zero up to rounding into a step of the learning rate.
    *("--set", "trainer.eps=1e-2"),
    # A decay would end at the step where a run is stopped, and stopping would change the run.
    *("--set", "trainer.decay=constant"),
)


def losses(run: Path) -> dict[int, float]:
    """Step -> training loss of the steps since the last record."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record.get("phase") == "train"}


def scores(run: Path) -> dict[str, Any]:
    """Split -> the scores of the last evaluation."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        record["phase"]: {**record["tasks"]["click"], "num_samples": record["num_samples"]}
        for record in records
        if record.get("phase") in ("validation", "test")
    }


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one") / "run"


def check_equal(run: Path, reference: Path) -> None:
    ours, theirs = losses(run), losses(reference)
    assert list(ours) == list(theirs) == [2, 4, 6, 8, 10, 12]
    assert ours == pytest.approx(theirs, rel=RTOL)
    for split, expected in scores(reference).items():
        actual = scores(run)[split]
        assert actual["num_samples"] == expected["num_samples"]
        for name in ("ne", "auc", "calibration"):
            assert actual[name] == pytest.approx(expected[name], rel=RTOL), (split, name)


def reference_run(gem: Any, run: Path) -> Path:
    if not run.exists():
        gem(*COMMON, "--steps", "12", "--out", str(run), cwd=run.parent)
    return run


def test_two_processes_follow_the_curve_of_one(gem, one_process: Path, tmp_path: Path) -> None:
    gem(*COMMON, "--steps", "12", "--nproc", "2", "--out", "run", cwd=tmp_path)
    check_equal(tmp_path / "run", reference_run(gem, one_process))
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_a_run_goes_on_at_another_number_of_processes(gem, one_process: Path, tmp_path: Path) -> None:
    gem(*COMMON, "--steps", "6", "--nproc", "2", "--out", "two", cwd=tmp_path)
    for world_size in (1, 3):
        run = tmp_path / f"then-{world_size}"
        shutil.copytree(tmp_path / "two", run)
        gem(*COMMON, "--steps", "12", "--nproc", str(world_size), "--out", run.name, "--resume", cwd=tmp_path)
        check_equal(run, reference_run(gem, one_process))


def test_parameters_in_mxfp8_on_the_wire_at_any_number_of_processes(gem, tmp_path: Path) -> None:
    """Two processes begin and one goes on, as one from the start: what compute reads does not depend on the ranks."""
    wired = (*COMMON, "--set", "parallel.dense_wire=mxfp8")
    said = gem(*wired, "--steps", "8", "--out", "one", cwd=tmp_path)
    assert "dense parameters on the wire: mxfp8 in blocks of 1x32: " in said
    gem(*wired, "--steps", "4", "--nproc", "2", "--out", "two", cwd=tmp_path)
    gem(*wired, "--steps", "8", "--out", "two", "--resume", cwd=tmp_path)
    ours, theirs = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert list(ours) == list(theirs) == [2, 4, 6, 8]
    assert ours == pytest.approx(theirs, rel=RTOL)
    for split, expected in scores(tmp_path / "one").items():
        assert scores(tmp_path / "two")[split]["ne"] == pytest.approx(expected["ne"], rel=RTOL)
    assert "dense parameters on the wire" in (tmp_path / "two" / "report.html").read_text()
