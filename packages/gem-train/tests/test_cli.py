"""What the commands write and print."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cli_runs import fingerprint, train

from gem_train import trainer
from gem_train.checkpoint import Checkpointer
from gem_train.cli import main
from gem_train.cli.table import print_scores
from gem_train.evaluation import Evaluation
from gem_train.metrics_log import read_metrics

pytestmark = pytest.mark.usefixtures("small_data", "no_report")


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


def test_results_go_to_stdout_and_progress_to_stderr(finished: Path) -> None:
    out, err = ((finished.parent / name).read_text() for name in ("stdout", "stderr"))
    assert "NE" in out
    assert f"report: {finished / 'report.html'}" in out
    assert (finished / "report.html").stat().st_size > 1000
    assert "step 4/4" in err
    assert "step" not in out


def test_scores_that_do_not_exist_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"ne": None, "auc": None, "calibration": None, "count": 1200, "base_rate": 0.0}
    print_scores({"test": Evaluation(1200, 0.1, {"click": metrics})}, None, "click")
    assert "test, click: all 1,200 labels are 0, so that NE, AUC and calibration do not" in capsys.readouterr().out
    assert trainer._scores(metrics) == "no NE or AUC: all labels are 0"


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


def test_the_record_of_a_run_says_how_it_was_made(finished: Path) -> None:
    (config,) = [record for record in read_metrics(finished) if record["phase"] == "config"]
    assert config["settings"]["data.max_history"] == 8
    assert config["settings"]["model.sequences.history.event_features"][0] == "history.item"
    recipe = {"data.global_batch_size": 128, "data.max_history": 64, "trainer.max_steps": None}
    assert {name: config["changed"][name] for name in recipe} == recipe
    assert "trainer.learning_rate" not in config["changed"]
    assert datetime.fromisoformat(config["begun"]).utcoffset() == timedelta(0)
    assert config["commit"] is None or re.fullmatch(r"[0-9a-f]{12}(, changed since)?", config["commit"])
    text = (finished / "report.html").read_text()
    assert "<h2>Settings</h2>" in text


def test_report_is_written_again(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_copy / "report.html").unlink()
    assert main(["report", str(run_copy)]) == 0
    assert capsys.readouterr().out.strip() == str(run_copy / "report.html")
    assert (run_copy / "report.html").stat().st_size > 1000
    other = Path(shutil.copytree(run_copy, run_copy.parent / "other"))
    assert main(["report", str(run_copy), "--compare", str(other)]) == 0
    assert "<h2>Comparison</h2>" in (run_copy / "report.html").read_text()


def test_report_says_where_it_cannot_write(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert main(["report", str(run_copy)]) == 2
    assert f"gem: error: {run_copy} must be a directory to write report.html in;" in capsys.readouterr().err


def test_compare_prints_the_other_run_beside(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "other", "--seed", "7", "--compare", str(finished)) == 0
    out = capsys.readouterr().out
    assert f"test scores beside {finished}:" in out
    assert f"NE {finished.name}" in out
    assert "settings that differ: trainer.seed 0 there, 7 here" in out


def test_low_precision_is_set_beside_the_fp32_run_next_to_it(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_copy.parent / "a-note").write_text("not a run")
    assert train(run_copy.parent / "low", "--precision", "bf16") == 0
    assert f"test scores beside {run_copy}:" in capsys.readouterr().out
    assert train(run_copy.parent / "low", "--precision", "bf16", "--overwrite", steps=2) == 0
    assert f"beside {run_copy} (of other length: 4 steps there, 2 here):" in capsys.readouterr().out
    short = Path(shutil.copytree(run_copy, run_copy.parent / "short"))
    records = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(r | {"step": min(2, r["step"])} if "step" in r else r) for r in records]
    (short / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert train(run_copy.parent / "low", "--precision", "bf16", "--overwrite", steps=2) == 0
    assert f"test scores beside {short}:" in capsys.readouterr().out
    shutil.rmtree(short)
    assert train(run_copy.parent / "again") == 0
    assert "test scores beside" not in capsys.readouterr().out


def test_low_precision_is_set_only_beside_a_run_of_equal_settings(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A change of NE that comes from the seed or the learning rate is not to be read as one of precision."""
    low = run_copy.parent / "low"
    changes = ("--seed", "5", "--set", "trainer.learning_rate=0.05", "--set", "trainer.keep_last=3")
    assert train(low, "--precision", "bf16", *changes) == 0
    said = capsys.readouterr()
    assert "test scores beside" not in said.out
    (note,) = [line for line in said.err.splitlines() if "not compared" in line]
    assert note == (
        f"note: not compared with a run in fp32, as none has the same settings: {run_copy} (trainer.learning_rate "
        "0.002 there, 0.05 here, trainer.seed 0 there, 5 here); --compare RUN_DIR names one"
    )
    assert train(low, "--precision", "bf16", "--overwrite", *changes, "--compare", str(run_copy)) == 0
    out = capsys.readouterr().out
    assert f"test scores beside {run_copy}:" in out
    assert "settings that differ: precision fp32 there, bf16 here, trainer.learning_rate 0.002 there, 0.05 h" in out


def test_a_damaged_neighbour_does_not_fail_a_finished_run(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, file, text in (("b", "metrics.jsonl", "garbage\n{}\n"), ("c", "config.json", "{"),
                             ("d", "metrics.jsonl", '{"phase": "test", "step": 1}\n')):  # fmt: skip
        damaged = Path(shutil.copytree(run_copy, run_copy.parent / name))
        (damaged / file).write_text(text)
    assert train(run_copy.parent / "low", "--precision", "bf16", steps=2) == 0
    said = capsys.readouterr()
    assert f"beside {run_copy} (of other length" in said.out
    for name, reason in (("b", "line 1 of"), ("c", "is damaged"), ("d", "a test record without scores")):
        (note,) = [line for line in said.err.splitlines() if f"not compared with {run_copy.parent / name}, " in line]
        assert reason in note


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


def test_a_model_may_read_less_than_the_data_has(tmp_path: Path) -> None:
    less = ("--set", "model.context_features=item", "--set", "model.sequences.history.event_features=")
    assert train(tmp_path / "run", *less, steps=2) == 0
    assert read_metrics(tmp_path / "run")[-1]["phase"] == "test"


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
    out = capsys.readouterr().out
    for text in (
        "model.sequences.history.window=32  (a whole number)\n    Events seen on either side by `window` attention.\n",
        "trainer.decay=cosine  (one of cosine, linear, constant)\n    Form of the fall from the peak to",
        "trainer.max_steps=none  (a whole number or none)\n    Stop after this many steps; none trains to the end",
    ):
        assert text in out
    fields = [line for line in out.splitlines()[2:] if not line.startswith("    ")]
    assert len(fields) > 70
    for line in fields:
        assert re.fullmatch(r"[\w.]+=\S*( \S+)*  \([^<>]+\)", line), line
    assert out.count(")\n    ") > 0.9 * len(fields), "nearly all have a text"


def test_a_reader_that_goes_away_ends_the_command_without_a_word(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m gem_train.cli recipes synthetic | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")
