"""What the command line refuses, in one line, with nothing read or changed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cli_runs import QUICK, fingerprint, read_checkpoint, train

from gem_train.cli import main
from gem_train.data import EventLog
from gem_train.recipes import registry

pytestmark = pytest.mark.usefixtures("small_data", "no_report")


@dataclass(frozen=True)
class Wrong:
    id: str
    arguments: tuple[str, ...]
    message: str


WRONG = [
    Wrong("unknown recipe", ("train", "synthetik"), "no recipe 'synthetik'; did you mean synthetic?"),
    Wrong("unknown field", ("--set", "trainer.seeds=1"), "`trainer.seeds`; the nearest are trainer.seed"),
    Wrong("abbreviation", ("--set", "trainer.lr=1"), "`trainer.lr`; the nearest are trainer.learning_rate, "),
    Wrong(
        "wrong type",
        ("--set", "trainer.keep_last=x"),
        "trainer.keep_last=x: `keep_last` must be a whole number, got 'x'",
    ),
    Wrong("out of range", ("--set", "trainer.beta2=2"), "--set trainer.beta2=2: `beta2` must lie in [0, 1"),
    Wrong("flag out of range", ("--seed", "-1"), "--seed -1: `seed` must be >= 0, got -1; the recipe has 0"),
    Wrong(
        "width", ("--set", "model.embedding_dim=6"), "`embedding_dim` must be a multiple of 4 from 4 to 1024, as the"
    ),
    Wrong("too large", ("--set", "model.dim=1000000000"), "dim=1000000000: the model's weights must fit in the "),
    Wrong("too many experts", ("--set", "model.num_experts=1000000000"), "weights must fit in the "),
    Wrong(
        "two names",
        ("--set", "model.sequences.0.window=2", "--set", "model.sequences.history.window=3"),
        "--set model.sequences.0.window=2 and --set model.sequences.history.window=3 are the same setting; give one",
    ),
    Wrong("before the data", ("train", "ml-latest-small", "--steps", "-1"), "--steps -1: `max_steps` must"),
    Wrong(
        "data of no recipe", ("recipes", "--data", "x"), "--data: must come with the RECIPE whose data it holds, got"
    ),
    Wrong(
        "precision of a plan of numbers",
        ("plan", "explain", "cluster-4096", "--precision", "fp32"),
        "--precision: recipe cluster-4096 is numbers, of which only mxfp8 changes any",
    ),
    Wrong("plan", ("plan", "explain", "ml-latest-small", "--set", "data.max_history=0"), "`max_history` must"),
    Wrong(
        "layers",
        ("--set", "model.num_layers=1"),
        "--set model.num_layers=1: a sequence names the self-attention of each layer: window, block or none; add "
        "--set model.sequences.history.self_attention=block",
    ),
    Wrong(
        "more layers",
        ("--set", "model.num_layers=3"),
        "add --set model.sequences.history.self_attention=block,none,none",
    ),
    Wrong(
        "attention of other layers",
        ("--set", "model.num_layers=3", "--set", "model.sequences.0.self_attention=block"),
        "`self_attention` of sequence 'history' must have `num_layers` = 3 entries, got 1; give one kind per layer",
    ),
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
    Wrong("nproc", ("--nproc", "0"), "--nproc: must be >= 1, got 0; give a number of processes"),
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
    Wrong("degree", ("--nproc", "2", "--ep", "0"), "`ep` must be >= 1, got 0"),
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
    Wrong("dense wire", ("--set", "parallel.dense_wire=mxfp4"), "must be one of param_dtype, mxfp8, got 'mxfp4'"),
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
    for name, recipe in registry._RECIPES.items():
        monkeypatch.setitem(registry._RECIPES, name, dataclasses.replace(recipe, load=_reads_nothing))
    arguments = wrong.arguments
    if arguments[0] not in ("train", "eval", "report", "recipes", "plan"):
        arguments = ("train", "synthetic", *QUICK, "--steps", "1", *arguments)
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("gem: error: ")
    assert wrong.message in lines[-1]
    assert len(lines) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "usage", "last"),
    [
        ("", "gem [-h]", "gem: error: the following arguments are required: COMMAND; `gem --help` lists what there is"),
        ("trian", "gem [-h]", "invalid choice: 'trian' "),
        (
            "train",
            "gem train",
            "gem train: error: the following arguments are required: RECIPE; `gem train --help` lists",
        ),
        (
            "train synthetic --stepz=4",
            "gem train",
            "unrecognized arguments: --stepz=4; did you mean --steps; `gem train",
        ),
        (
            "train synthetic --bogus",
            "gem train",
            "unrecognized arguments: --bogus; `gem train --help` lists what there is",
        ),
        (
            "plan explain synthetic x",
            "gem plan explain",
            "gem plan explain: error: unrecognized arguments: x; `gem plan ex",
        ),
        ("plan explain synthetic --gather x", "gem plan explain", "--gather: invalid choice: 'x' "),
        ("plan swep", "gem plan [-h]", "gem plan: error: argument ACTION: invalid choice: 'swep' "),
        (
            "report d --picture x",
            "gem report",
            "gem report: error: unrecognized arguments: --picture x; `gem report --help",
        ),
    ],
)
def test_wrong_arguments_show_the_usage_of_their_command(
    arguments: str, usage: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {usage}")
    assert last in err.splitlines()[-1]
    assert err.endswith(" --help` lists what there is\n")


def test_comparing_with_an_unfinished_run_is_refused_before_training(
    run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_copy / "metrics.jsonl"
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:-1]))
    assert train(tmp_path / "new", "--compare", str(run_copy)) == 2
    assert f"--compare: {run_copy} has no test scores yet" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


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


def test_eval_refuses_a_step_and_a_layout_before_it_reads_data(
    run_copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = registry._RECIPES["synthetic"]
    monkeypatch.setitem(registry._RECIPES, "synthetic", dataclasses.replace(recipe, load=_reads_nothing))
    for flags, message in (
        (("--step", "3"), f"--step: must be the step of a checkpoint in {run_copy}, got 3; there are 4"),
        (("--nproc", "2", "--ep", "0"), "--ep 0: `ep` must be >= 1, got 0; the recipe has 1"),
        (("--nproc", "0"), "--nproc: must be >= 1, got 0; give a number of processes"),
    ):
        assert main(["eval", str(run_copy), "--device", "cpu", *flags]) == 2
        assert capsys.readouterr().err == f"gem: error: {message}\n"


def _reads_nothing(_: Path | None) -> EventLog:
    raise AssertionError("no data may be read before the flags are checked")


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
        assert "is of another model or configuration: model.head_hidden: checkpoint [" in error
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
