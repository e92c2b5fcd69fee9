"""Killed, terminated and resumed runs, and runs of several processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runs import QUICK, assert_same, curve, fingerprint, read_checkpoint

from gem_train.checkpoint import Checkpointer
from gem_train.cli import main
from gem_train.metrics_log import read_metrics
from gem_train.run_dir import RunDirectory

LONG = ("--set", "trainer.checkpoint_interval=3", "--set", "trainer.keep_last=99", "--set", "model.dropout=0.1")
STEPS = 14


def start(out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gem_train.cli", "train", "synthetic", "--out", str(out), *QUICK, *LONG]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--steps", str(STEPS), *arguments], env=environment, stderr=subprocess.PIPE)


def wait_for_checkpoint(out: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    checkpointer = Checkpointer(out / "checkpoints")
    while (checkpointer.latest() or 0) < step:
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def finish(process: subprocess.Popen[bytes]) -> str:
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err.decode()
    return err.decode()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    finish(start(out))
    return out


@pytest.mark.slow
def test_a_run_that_is_terminated_and_then_killed_continues_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out)
    wait_for_checkpoint(out, 3, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert f"continue with --out {out} --resume" in err.decode()
    assert read_metrics(out)[-1]["reason"] == "interrupted"
    saved = Checkpointer(out / "checkpoints").latest()
    assert saved is not None
    assert saved < STEPS - 3
    process = start(out, "--resume")
    wait_for_checkpoint(out, saved + 1, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    latest = Checkpointer(out / "checkpoints").latest()
    assert latest is not None
    assert saved < latest < STEPS
    assert f"resumed at step {latest}" in finish(start(out, "--resume"))
    assert_same(read_checkpoint(out, STEPS), read_checkpoint(whole, STEPS))
    assert curve(out) == curve(whole)


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_follow_one_and_resume_as_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two ranks add the same numbers in another order; AdamW's first steps amplify that, so the bound is on the curve.

    Dropout draws differ between ranks, so it is off here. Each of the two holds one of two experts and half of a copy
    of the tables.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    off = ("--set", "model.dropout=0.0", "--set", "model.num_experts=2")
    layout = ("--nproc", "2", "--ep", "2", "--sparse-replicate", "2")
    arguments = [argument for argument in LONG if not argument.startswith("model.dropout")][:-1]
    base = ["train", "synthetic", *QUICK, *arguments, *off, "--steps", "7"]
    assert main([*base, "--out", str(one)]) == 0
    assert main([*base, "--out", str(two), *layout]) == 0
    config = read_metrics(two)[0]
    assert config["parallel"] == {"dp_replicate": 1, "dp_shard": 1, "ep": 2, "sparse_replicate": 2, "sparse_shard": 1}
    assert config["parameters"] == read_metrics(one)[0]["parameters"]
    losses = [[r["loss"] for r in curve(path) if r["phase"] == "train"] for path in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    counts = [[r["tasks"]["click"]["count"] for r in curve(path)] for path in (one, two)]
    assert counts[0] == counts[1]
    scores = [[r["tasks"]["click"]["ne"] for r in curve(path) if r["phase"] == "test"] for path in (one, two)]
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)
    capfd.readouterr()
    # The checkpoint of one layout is scored on another.
    for flags in ((), layout):
        assert main(["eval", str(two), "--device", "cpu", "--json", *flags]) == 0
        scored = json.loads(capfd.readouterr().out)
        assert scored["tasks"]["click"]["ne"] == pytest.approx(scores[1][0], rel=1e-6)
        assert scored["step"] == 7
    # 7 = 3 + 4: the same data, spread over another number of ranks from step 6 on.
    for source, processes in ((one, "2"), (two, "1")):
        shutil.rmtree(source / "checkpoints" / "step-00000007")
        assert main([*base, "--out", str(source), "--resume", "--nproc", processes]) == 0
        note = "note: the layout of the run (ep 2, sparse_replicate 2) does not fit one process and is left out"
        assert (note in capfd.readouterr().err) == (source == two)
        again = [r["loss"] for r in curve(source) if r["phase"] == "train"]
        assert again == pytest.approx(losses[0], rel=1e-5)
        assert [r["world_size"] for r in read_metrics(source) if r["phase"] == "config"][-1] == int(processes)


@pytest.mark.usefixtures("small_data")
def test_a_run_that_another_process_trains_is_refused_before_anything_is_said_of_it(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_copy / "checkpoints")
    before = fingerprint(run_copy)
    with RunDirectory(run_copy).hold():
        assert main(["train", "synthetic", "--out", str(run_copy), "--device", "cpu", "--resume"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gem: error: --out: another process is training in {run_copy}; wait for its end")
    assert fingerprint(run_copy) == before


@pytest.mark.gpu
def test_a_gpu_follows_the_cpu_and_resumes(tmp_path: Path) -> None:
    """TF32 is off, so that both compute in float32; sums have another order, and AdamW's first steps amplify that."""
    base = ["train", "synthetic", *QUICK, "--set", "trainer.checkpoint_interval=2", "--set", "trainer.eps=1e-2"]
    for device in ("cpu", "cuda"):
        assert main([*base, "--steps", "6", "--out", str(tmp_path / device), "--device", device]) == 0
    losses = [[r["loss"] for r in curve(tmp_path / n) if r["phase"] == "train"] for n in ("cpu", "cuda")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    records = [r for r in read_metrics(tmp_path / "cuda") if r["phase"] == "train"]
    assert all(r["memory_bytes"] > 0 and r["time"]["forward"] > 0 for r in records)
    shutil.rmtree(tmp_path / "cuda" / "checkpoints" / "step-00000006")
    assert main([*base, "--steps", "6", "--out", str(tmp_path / "cuda"), "--device", "cuda", "--resume"]) == 0
    again = [r["loss"] for r in curve(tmp_path / "cuda") if r["phase"] == "train"]
    assert again == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_without_samples_takes_part(tmp_path: Path) -> None:
    for name, processes in (("one", "1"), ("two", "2")):
        arguments = ["--set", "trainer.log_interval=1", "--nproc", processes]
        base = ["train", "synthetic", "--device", "cpu", "--set", "data.global_batch_size=1", "--steps", "3"]
        assert main([*base, "--set", "data.max_history=8", "--out", str(tmp_path / name), *arguments]) == 0
    losses = [[r["loss"] for r in curve(tmp_path / n) if r["phase"] == "train"] for n in ("one", "two")]
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
