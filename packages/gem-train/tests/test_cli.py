"""The command line end to end: what it writes, what it refuses, and that a killed run continues bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gem_train.checkpoint import Checkpointer
from gem_train.cli import main
from gem_train.metrics_log import read_metrics

QUICK = (
    "--device", "cpu", "--set", "data.global_batch_size=32", "--set", "data.max_history=8",
    "--set", "data.eval_batch_size=4096", "--set", "trainer.log_interval=2",
)  # fmt: skip


def train(out: Path, *arguments: str, recipe: str = "synthetic", steps: int = 4) -> int:
    return main(["train", recipe, "--out", str(out), *QUICK, "--steps", str(steps), *arguments])


def read_checkpoint(directory: Path, step: int | None = None) -> dict[str, Tensor]:
    checkpointer = Checkpointer(directory / "checkpoints")
    step = checkpointer.latest() if step is None else step
    assert step is not None
    metadata = FileSystemReader(checkpointer.path(step)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checkpointer.load(step, tensors)
    return tensors


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(theirs[name])), name


def curve(directory: Path) -> list[dict[str, Any]]:
    """The records without what depends on the clock."""
    timed = ("seconds", "samples_per_second", "flops_per_second", "time", "mfu")
    records = [r for r in read_metrics(directory) if r["phase"] in ("train", "validation", "test")]
    return [{name: value for name, value in record.items() if name not in timed} for record in records]


def fingerprint(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests copy it before they write."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train(out) == 0
    return out


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_train_writes_everything_a_run_needs(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "checkpoints", "config.json", "metrics.jsonl", "report.html", "tensorboard"
    }  # fmt: skip
    phases = [record["phase"] for record in read_metrics(finished)]
    assert phases == ["config", "train", "train", "checkpoint", "validation", "end", "test"]
    assert Checkpointer(finished / "checkpoints").steps() == (4,)
    first = read_metrics(finished)[0]
    assert first["recipe"] == "synthetic"
    assert first["parameters"]["dense"] > 0 < first["parameters"]["sparse"]
    settings = json.loads((finished / "config.json").read_text())["settings"]
    assert settings["data"]["global_batch_size"] == 32
    assert settings["trainer"]["max_steps"] == 4


def test_results_go_to_stdout_and_progress_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run") == 0
    out, err = capsys.readouterr()
    assert "NE" in out
    assert f"report: {tmp_path / 'run' / 'report.html'}" in out
    assert "step 4/4" in err
    assert "step" not in out


def test_eval_repeats_the_test_score(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(finished)
    assert main(["eval", str(finished), "--json", "--device", "cpu"]) == 0
    values = json.loads(capsys.readouterr().out)
    test = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert test["phase"] == "test"
    assert values["step"] == 4
    assert {k: test[k] for k in ("ne", "auc", "calibration")} == {
        k: values["tasks"]["click"][k] for k in ("ne", "auc", "calibration")
    }
    assert test["samples_per_second"] > 0
    assert values["tasks"]["click"]["ne"] == test["tasks"]["click"]["ne"]
    assert main(["eval", str(finished), "--split", "validation", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("validation of ")
    assert fingerprint(finished) == before


def test_report_is_written_again(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_copy / "report.html").unlink()
    assert main(["report", str(run_copy)]) == 0
    assert capsys.readouterr().out.strip() == str(run_copy / "report.html")
    assert (run_copy / "report.html").stat().st_size > 1000


def test_compare_prints_the_other_run_beside(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "other", "--seed", "7", "--compare", str(finished)) == 0
    out = capsys.readouterr().out
    assert f"test scores beside {finished}:" in out
    assert f"NE {finished.name}" in out


def test_low_precision_is_set_beside_the_fp32_run_next_to_it(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_copy.parent / "a-note").write_text("not a run")
    assert train(run_copy.parent / "low", "--precision", "mxfp8") == 0
    assert f"test scores beside {run_copy}:" in capsys.readouterr().out
    assert train(run_copy.parent / "low", "--precision", "mxfp8", "--overwrite", steps=2) == 0
    assert f"beside {run_copy} (of other length: 4 steps there, 2 here):" in capsys.readouterr().out
    short = Path(shutil.copytree(run_copy, run_copy.parent / "short"))
    records = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(r | {"step": min(2, r["step"])} if "step" in r else r) for r in records]
    (short / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert train(run_copy.parent / "low", "--precision", "mxfp8", "--overwrite", steps=2) == 0
    assert f"test scores beside {short}:" in capsys.readouterr().out
    shutil.rmtree(short)
    assert train(run_copy.parent / "again") == 0
    assert "test scores beside" not in capsys.readouterr().out


def test_overwrite_replaces_the_run_and_nothing_else(run_copy: Path) -> None:
    (run_copy / "notes.txt").write_text("mine")
    assert train(run_copy, "--overwrite", steps=2) == 0
    assert Checkpointer(run_copy / "checkpoints").steps() == (2,)
    assert sum(record["phase"] == "config" for record in read_metrics(run_copy)) == 1
    assert (run_copy / "notes.txt").read_text() == "mine"


def test_overwrite_with_a_mistake_keeps_the_run(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(run_copy)
    assert train(run_copy, "--overwrite", "--set", "model.dim=0") == 2
    assert "`dim` must be >= 1, got 0" in capsys.readouterr().err
    assert fingerprint(run_copy) == before


def test_a_longer_run_continues_with_its_own_settings(run_copy: Path) -> None:
    assert main(["train", "synthetic", "--out", str(run_copy), "--device", "cpu", "--resume", "--steps", "6"]) == 0
    records = read_metrics(run_copy)
    assert [r["step"] for r in records if r["phase"] == "train"] == [2, 4, 6]
    assert [r["start_step"] for r in records if r["phase"] == "config"] == [0, 4]
    assert records[-1]["samples"] == 6 * 32


# ------------------------------------------------------------------ what a user can get wrong


@dataclass(frozen=True)
class Wrong:
    id: str
    arguments: tuple[str, ...]
    message: str


WRONG = [
    Wrong("unknown recipe", ("train", "synthetik"), "no recipe 'synthetik'; did you mean synthetic?"),
    Wrong("unknown field", ("--set", "trainer.seeds=1"), "`trainer.seeds`; the nearest are trainer.seed"),
    Wrong("abbreviation", ("--set", "trainer.lr=1"), "`trainer.lr`; the nearest are trainer.learning_rate, "),
    Wrong("wrong type", ("--set", "trainer.keep_last=x"), "`trainer.keep_last` takes a value of type int, got 'x'"),
    Wrong("out of range", ("--set", "trainer.beta2=2"), "`beta2` must lie in [0, 1), got 2.0"),
    Wrong("model", ("--set", "model.num_layers=3"), "--set model.num_layers=3: RankingConfig: `self_attention`"),
    Wrong(
        "given twice",
        ("--seed", "1", "--set", "trainer.seed=2"),
        "--seed 1 and --set trainer.seed=2 are the same setting; give one of them",
    ),
    Wrong(
        "steps twice", ("--set", "trainer.max_steps=0"), "--steps 1 and --set trainer.max_steps=0 are the same setti"
    ),
    Wrong("no value", ("--set", "trainer.seed"), "--set: must be NAME=VALUE, got 'trainer.seed'"),
    Wrong("data for generated", ("--data", "somewhere"), "recipe synthetic generates its data"),
    Wrong("nothing to resume", ("--resume",), "holds no run; leave --resume out"),
    Wrong("both flags", ("--resume", "--overwrite"), "exclude each other"),
    Wrong("nproc", ("--nproc", "0"), "--nproc: must be >= 1, got 0"),
    Wrong(
        "dense axes",
        ("--nproc", "8", "--ep", "3"),
        "--ep 3 on 8 processes: dp_replicate * dp_shard * ep = 1 * 2 * 3 = 6 must be the number of processes, got 8; "
        "nearest: --dp-replicate 1 --dp-shard 2 --ep 4, or --dp-replicate 1 --dp-shard 4 --ep 2, or --dp-replicate ",
    ),
    Wrong(
        "sparse axes",
        ("--nproc", "8", "--dp-replicate", "2", "--sparse-replicate", "3"),
        "--dp-replicate 2 --sparse-replicate 3 on 8 processes: sparse_replicate * sparse_shard = 3 * 2 = 6 must be the "
        "number of processes, got 8; nearest: --sparse-replicate 4 --sparse-shard 2, or --sparse-replicate 2 --sparse-",
    ),
    Wrong(
        "more copies than processes",
        ("--nproc", "2", "--sparse-replicate", "4"),
        "sparse_replicate * sparse_shard = 4 * 1 = 4 must be the number of processes, got 2; nearest: --sparse-rep",
    ),
    Wrong("degree", ("--nproc", "2", "--ep", "0"), "ParallelConfig: `ep` must be >= 1, got 0"),
    Wrong(
        "layout of one",
        ("--dp-shard", "2"),
        "--dp-shard 2 on 1 process: dp_replicate * dp_shard * ep = 1 * 2 * 1 = 2 must be the number of processes, got "
        "1; nearest: --dp-replicate 1 --dp-shard 1 --ep 1",
    ),
    Wrong(
        "replicas only",
        ("--nproc", "2", "--dp-replicate", "2", "--set", "parallel.collectives=nccl_zero_cta"),
        "dp_shard * ep must be above 1, got 1 on 2 processes; leave it out, or set it to default",
    ),
    Wrong(
        "engine of one",
        ("--set", "parallel.collectives=nccl_zero_cta"),
        "--set parallel.collectives=nccl_zero_cta: an engine serves ranks that share dense parameters or experts",
    ),
    Wrong("no experts", ("--set", "model.num_experts=0"), "`num_experts` must be >= 1, got 0"),
    Wrong(
        "experts", ("--nproc", "2", "--ep", "2", "--set", "model.num_experts=1"), "model has model.num_experts=1; add"
    ),
    Wrong("degree twice", ("--ep", "2", "--set", "parallel.ep=2"), "--ep 2 and --set parallel.ep=2 are the same"),
    Wrong("wire", ("--set", "parallel.wire_dtype=int8"), "must be one of float32, float16, bfloat16, float8_e4m3fn"),
    Wrong(
        "at rest",
        ("--set", "parallel.table_gather=rows", "--set", "parallel.sharded_at_rest=false"),
        "`sharded_at_rest` must be true with table_gather=rows",
    ),
    Wrong("missing data", ("train", "ml-latest-small", "--data", "/nonexistent"), "must exist, got '/nonexistent'"),
    Wrong(
        "no events there",
        ("train", "ml-latest-small", "--data", "."),
        "--data: the directory of ml-latest-small must hold events.parquet and items.parquet, got '.' without "
        "events.parquet and items.parquet; name the directory",
    ),
    Wrong("eval of nothing", ("eval", "nowhere"), "nowhere holds no run"),
    Wrong("report of nothing", ("report", "nowhere"), "nowhere holds no metrics.jsonl"),
    Wrong("recipes of nothing", ("recipes", "movielens"), "no recipe 'movielens'"),
    Wrong("compare with nothing", ("--compare", "nowhere"), "must hold metrics.jsonl, got 'nowhere'"),
    Wrong("task", ("--set", "model.tasks=foo"), "--set model.tasks=foo: the data has no foo; it has click"),
    Wrong("feature", ("--set", "model.context_features=item,x"), "features=item,x: the data has no x; it has item, t"),
    Wrong("dense", ("--set", "model.num_dense=99"), "--set model.num_dense=99: the data has 7 columns; leave it at 7"),
    Wrong("events", ("--set", "model.sequences.history.event_features=history.a"), "has no history.a; it has history."),
    Wrong("event dense", ("--set", "model.sequences.0.num_event_dense=9"), "sequences.history.num_event_dense=9: the"),
    Wrong(
        "sequence",
        ("--set", "model.sequences.0.name=past", "--set", "model.sequences.0.event_features=past.item"),
        "--set model.sequences.0.name=past: the data has no past; it has history",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.id)
def test_a_mistake_gives_one_line_and_code_2(
    wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = wrong.arguments
    if arguments[0] not in ("train", "eval", "report", "recipes"):
        arguments = ("train", "synthetic", *QUICK, "--steps", "1", *arguments)
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("gem: error: ")
    assert wrong.message in lines[-1]
    assert len(lines) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_may_read_less_than_the_data_has(tmp_path: Path) -> None:
    less = ("--set", "model.context_features=item", "--set", "model.sequences.history.event_features=")
    assert train(tmp_path / "run", *less, steps=2) == 0
    assert read_metrics(tmp_path / "run")[-1]["phase"] == "test"


def test_comparing_with_an_unfinished_run_is_refused_before_training(
    run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_copy / "metrics.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:-1]))
    assert train(tmp_path / "new", "--compare", str(run_copy)) == 2
    assert f"--compare: {run_copy} has no test scores yet" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP's waiting is changed on Linux only")
@pytest.mark.parametrize("command", ["train", "eval", "recipes"])
def test_the_process_starts_anew_with_threads_that_do_not_spin(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(
        sys, "argv", ["gem", command, "nothing", *(() if command == "recipes" else ("--device", "cpu"))]
    )
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert main() == 2
    if command == "recipes":
        assert started == []
    else:
        assert started == [(sys.executable, sys.orig_argv, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})]
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        assert main() == 2
        assert len(started) == 1


def test_traceback_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nothing", "--traceback", "--out", str(tmp_path / "x")]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_existing_run_is_left_alone(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(run_copy)
    assert train(run_copy) == 2
    assert "holds a run already; --resume continues it, --overwrite replaces it" in capsys.readouterr().err
    assert fingerprint(run_copy) == before


def test_a_foreign_directory_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for flag in ((), ("--overwrite",)):
        assert train(tmp_path, *flag) == 2
        assert "exists and holds no run of gem" in capsys.readouterr().err
    assert fingerprint(tmp_path).keys() == {"thesis.txt"}


def test_a_run_is_not_continued_to_fewer_steps(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(run_copy)
    base = ["train", "synthetic", "--out", str(run_copy), "--device", "cpu", "--resume"]
    for fewer in (("--steps", "3"), ("--set", "trainer.max_steps=3"), ("--steps", "3", "--nproc", "2")):
        assert main([*base, *fewer]) == 2
        error = capsys.readouterr().err
        assert f"--steps: must be at least 4, the step of the last checkpoint in {run_copy}, got 3; name" in error
        assert len(error.splitlines()) == 1
        assert fingerprint(run_copy) == before


def test_a_trained_model_is_not_told_to_have_more_experts(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(run_copy)
    for command in (["eval", str(run_copy)], ["train", "synthetic", "--out", str(run_copy), "--resume"]):
        assert main([*command, "--device", "cpu", "--nproc", "2", "--ep", "2"]) == 2
        error = capsys.readouterr().err
        assert "the model has model.num_experts=1; leave --ep out" in error
        assert len(error.splitlines()) == 1
    assert fingerprint(run_copy) == before


def test_an_engine_of_the_run_does_not_keep_one_process_from_scoring_it(run_copy: Path) -> None:
    values = json.loads((run_copy / "config.json").read_text())
    values["assignments"]["parallel.collectives"] = "nccl_zero_cta"
    values["settings"]["parallel"]["collectives"] = "nccl_zero_cta"
    (run_copy / "config.json").write_text(json.dumps(values))
    assert main(["eval", str(run_copy), "--device", "cpu"]) == 0


def test_resume_with_other_settings_is_refused(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = fingerprint(run_copy)
    assert train(run_copy, "--resume", "--set", "trainer.learning_rate=0.5", "--set", "model.dim=32") == 2
    error = capsys.readouterr().err
    assert "model.dim: run 64, now 32; trainer.learning_rate: run 0.002, now 0.5" in error
    assert train(run_copy, "--resume", "--precision", "bf16") == 2
    assert "was trained in fp32, got bf16" in capsys.readouterr().err
    assert fingerprint(run_copy) == before


def test_a_checkpoint_of_another_model_is_refused(
    run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert train(other, "--set", "model.head_hidden=16") == 0
    capsys.readouterr()
    shutil.rmtree(run_copy / "checkpoints")
    shutil.copytree(other / "checkpoints", run_copy / "checkpoints")
    before = fingerprint(run_copy)
    for command in (["train", "synthetic", "--out", str(run_copy), "--resume"], ["eval", str(run_copy)]):
        assert main([*command, "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert "is of another model or configuration: model.heads." in error
        assert "float32, this run (" in error
        assert fingerprint(run_copy) == before


def test_a_damaged_checkpoint_is_refused(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = next((run_copy / "checkpoints").rglob("*.distcp"))
    os.truncate(data, data.stat().st_size - 1)
    before = fingerprint(run_copy)
    assert train(run_copy, "--resume", steps=6) == 2
    assert "the checkpoint of step 4 is damaged" in capsys.readouterr().err
    assert main(["eval", str(run_copy), "--device", "cpu"]) == 2
    assert data.name in capsys.readouterr().err
    assert fingerprint(run_copy) == before


def test_a_diverging_run_fails_with_the_tensor_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = train(
        tmp_path / "run", "--set", "trainer.learning_rate=1e30", "--set", "trainer.max_grad_norm=0",
        "--set", "trainer.warmup_steps=0", "--set", "trainer.checkpoint_interval=1", steps=12,
    )  # fmt: skip
    assert code == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gem: error: step ")
    assert "is NaN or infinite; the step was not applied and nothing was saved" in error
    saved = read_checkpoint(tmp_path / "run")
    assert all(torch.isfinite(t).all() for name, t in saved.items() if name.startswith(("model.", "embeddings.")))


# ------------------------------------------------------------------ help, recipes, doctor


@pytest.mark.parametrize("command", ["train", "eval", "report", "recipes", "doctor"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: gem {command}" in capsys.readouterr().out


def test_the_flags_of_train_are_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = set(capsys.readouterr().out.replace("[", " ").replace("]", " ").replace(",", " ").split())
    assert {word for word in words if word.startswith("--") and word.strip("-").replace("-", "").isalpha()} == {
        "--compare", "--data", "--device", "--dp-replicate", "--dp-shard", "--ep", "--help", "--nproc",
        "--nproc-per-node", "--out", "--overwrite", "--precision", "--resume", "--seed", "--set", "--sparse-replicate",
        "--sparse-shard", "--steps", "--traceback",
    }  # fmt: skip


def test_recipes_lists_names_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "ml-latest-small" in capsys.readouterr().out
    assert main(["recipes", "synthetic"]) == 0
    assert "model.sequences.history.window" in capsys.readouterr().out


# ------------------------------------------------------------------ killed and continued

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
def test_a_killed_run_continues_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out)
    wait_for_checkpoint(out, 6, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    latest = Checkpointer(out / "checkpoints").latest()
    assert latest is not None
    assert 6 <= latest < STEPS
    assert f"resumed at step {latest}" in finish(start(out, "--resume"))
    assert_same(read_checkpoint(out, STEPS), read_checkpoint(whole, STEPS))
    assert curve(out) == curve(whole)


@pytest.mark.slow
def test_a_terminated_run_saves_and_continues_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out)
    wait_for_checkpoint(out, 3, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert f"continue with --out {out} --resume" in err.decode()
    assert read_metrics(out)[-1]["reason"] == "interrupted"
    finish(start(out, "--resume"))
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
