"""Whether a run's steps come from CUDA graphs, what it says of that, and, on a GPU, that they change nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import curve, train
from trainer_toys import CONFIG, make_trainer

from gem_train.cli import main
from gem_train.data import EventLog, EventSource
from gem_train.data.prefetch import PINNING
from gem_train.errors import ConfigError
from gem_train.metrics_log import read_metrics
from gem_train.recipes import RunConfig, SegmentCapture, capture, check_capture, get
from gem_train.recipes.capture import make_capture

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def config(**changes: str) -> RunConfig:
    recipe = get("synthetic")
    return RunConfig.resolve(recipe, recipe.schema, {name.replace("__", "."): text for name, text in changes.items()})


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from gem_model import RankingModel

    return RankingModel(config().model)


@pytest.mark.parametrize(
    ("changes", "device", "processes", "note"),
    [
        ({}, CUDA, 1, "on, in training steps of 128 samples"),
        ({"trainer__capture": "on"}, CUDA, 1, "on, in training steps of 128 samples"),
        ({"trainer__capture": "off"}, CUDA, 1, "off: trainer.capture=off"),
        ({}, CPU, 1, "off: they need a CUDA device, and the device is the CPU"),
        (
            {},
            CUDA,
            2,
            "off: over 2 processes dense parameters are gathered anew in every step, and a graph reads them at one "
            "address",
        ),
        (
            {"parallel__dense_wire": "mxfp8"},
            CUDA,
            1,
            "off: with parallel.dense_wire=mxfp8 dense parameters are gathered anew in every step, and a graph reads "
            "them at one address",
        ),
    ],
)
def test_a_run_says_whether_and_why_not(
    changes: dict[str, str], device: torch.device, processes: int, note: str, model: torch.nn.Module
) -> None:
    made, said = make_capture(config(**changes), model, device, processes, 128)
    assert said == note
    assert (made is not None) == note.startswith("on")


def test_on_is_refused_where_no_graph_can_be(model: torch.nn.Module) -> None:
    wired = {"trainer__capture": "on", "parallel__dense_wire": "mxfp8"}
    for changes, device, processes, why in (
        ({"trainer__capture": "on"}, CPU, 1, "the device is the CPU"),
        ({"trainer__capture": "on"}, CUDA, 4, "over 4 processes"),
        (wired, CUDA, 1, "with parallel.dense_wire=mxfp8"),
    ):
        message = rf"--set trainer.capture=on: .*{why}.*; set trainer.capture=auto"
        with pytest.raises(ConfigError, match=message):
            check_capture(config(**changes), device, processes)
        with pytest.raises(ConfigError, match=message):
            make_capture(config(**changes), model, device, processes, 128)


@pytest.mark.usefixtures("small_data", "no_report")
def test_on_without_a_gpu_ends_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--set", "trainer.capture=on") == 2
    assert "gem: error: --set trainer.capture=on: CUDA graphs are not possible here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_on_the_cpu_says_that_it_has_none(finished: Path) -> None:
    note = "off: they need a CUDA device, and the device is the CPU"
    assert f"CUDA graphs: {note}\n" in (finished.parent / "stderr").read_text()
    assert read_metrics(finished)[0]["cuda_graphs"] == note
    assert "CUDA graphs" in (finished / "report.html").read_text()


@pytest.mark.usefixtures("small_data", "no_report")
def test_the_setting_may_change_when_a_run_resumes(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "synthetic", "--out", str(run_copy), "--device", "cpu", "--resume", "--steps", "5"]
    assert main([*arguments, "--set", "trainer.capture=off"]) == 0
    said = capsys.readouterr().err
    assert "CUDA graphs: off: trainer.capture=off\n" in said
    assert "changed: trainer.capture, 'auto' before, 'off' from here on\n" in said
    assert "changed: trainer.max_steps, 4 before, 5 from here on; the learning rate's schedule ends there\n" in said


class Batch:
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples


def test_the_first_full_batch_is_captured_while_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    seen = []
    monkeypatch.setattr(
        capture, "capture_segments", lambda m, batch, rows: seen.append((m, batch.num_samples, rows, PINNING.locked()))
    )
    prepare = SegmentCapture(model, 64)
    for count in (63, 64, 64, 20):
        prepare(Batch(count), {})
    assert seen == [(model, 64, {}, True)]
    assert not PINNING.locked()


def test_graphs_that_memory_has_no_room_for(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    tried = []

    def refuse(*_: Any) -> None:
        tried.append(True)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(capture, "capture_segments", refuse)
    with pytest.raises(ConfigError, match=r"trainer.capture=on: .* ran out of it; set trainer.capture=off, or"):
        SegmentCapture(model, 64, required=True)(Batch(64), {})
    prepare, said = SegmentCapture(model, 64), []
    prepare.say = said.append
    for _ in range(2):
        prepare(Batch(64), {})
    assert len(tried) == 2, "once each"
    assert said == [
        "CUDA graphs: off: the device ran out of memory for them; steps run without, as with trainer.capture=off"
    ]


def test_the_trainer_prepares_each_training_step_and_no_evaluation(events: EventLog) -> None:
    sizes = []
    trainer = make_trainer(events, prepare=lambda batch, embeddings: sizes.append((batch.num_samples, len(embeddings))))
    result = trainer.run()
    assert len(sizes) == result.step
    assert sum(count for count, _ in sizes) == result.samples
    assert {rows for _, rows in sizes} == {2}
    assert sizes[0] == (64, 2)
    assert CONFIG.capture == "auto"


def test_features_that_share_offsets_share_their_copies(events: EventLog) -> None:
    batch = next(iter(EventSource(events, "train", global_batch_size=64)))
    assert batch.ids["history.item"][1] is batch.ids["history.click"][1]
    made = []

    def copy(x: torch.Tensor) -> torch.Tensor:
        made.append(x)
        return x.clone()

    copied = batch._map(copy)
    assert copied.ids["history.item"][1] is copied.ids["history.click"][1]
    assert len(made) == len({id(x) for x in made})
    for name, (values, offsets) in batch.ids.items():
        assert torch.equal(copied.ids[name][0], values)
        assert torch.equal(copied.ids[name][1], offsets)


def test_the_reader_pins_while_it_builds(events: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **arguments: Any) -> torch.Tensor:
        asked.append((pin_memory, PINNING.locked()))
        return empty(*shape, **arguments)

    monkeypatch.setattr(torch, "empty", unpinned)
    for pin_memory in (True, False):
        for prefetch_batches in (0, 2):
            source = EventSource(
                events, "train", global_batch_size=64, pin_memory=pin_memory, prefetch_batches=prefetch_batches
            )
            assert len(list(source)) > 1
            assert set(asked) == {(pin_memory, pin_memory)}
            asked.clear()


@pytest.mark.gpu
def test_batches_of_a_pinning_reader_are_page_locked(events: EventLog) -> None:
    plain = EventSource(events, "train", global_batch_size=64, seed=1)
    pinned = EventSource(events, "train", global_batch_size=64, seed=1, pin_memory=True, prefetch_batches=2)
    for expected, batch in zip(plain, pinned, strict=True):
        assert batch.dense.is_pinned()
        assert batch.pin_memory().dense is batch.dense
        for name, (values, offsets) in expected.ids.items():
            assert batch.ids[name][0].is_pinned()
            assert torch.equal(batch.ids[name][0], values)
            assert torch.equal(batch.ids[name][1], offsets)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_data", "no_report")
@pytest.mark.parametrize("precision", ["fp32", "bf16_activations"])
def test_graphs_change_no_loss(precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs of full steps and a smaller last one, dropout, evaluations between, and a resume from a checkpoint."""
    base = [
        "train", "synthetic", "--device", "cuda", "--precision", precision, "--set", "trainer.log_interval=2",
        "--set", "data.global_batch_size=100", "--set", "data.epochs=2", "--set", "data.max_history=8",
        "--set", "data.eval_batch_size=4096", "--set", "model.dropout=0.1",
        "--set", "model.sequences.history.dropout=0.1",
        "--set", "trainer.eval_interval=7", "--set", "trainer.checkpoint_interval=8", "--set", "trainer.keep_last=9",
    ]  # fmt: skip
    curves = {}
    for mode in ("off", "on"):
        assert main([*base, "--out", str(tmp_path / mode), "--set", f"trainer.capture={mode}"]) == 0
        note = "on, in training steps of 100 samples" if mode == "on" else "off: trainer.capture=off"
        assert f"CUDA graphs: {note}\n" in capsys.readouterr().err
        curves[mode] = losses(tmp_path / mode)
    assert len(curves["off"]) > 20
    assert curves["on"] == pytest.approx(curves["off"], rel=1e-5)
    steps = sorted((tmp_path / "on" / "checkpoints").glob("step-*"))
    assert len(steps) > 2
    for path in steps[1:]:
        shutil.rmtree(path)
    # Goes on with graphs that are captured anew, in the middle of an epoch.
    assert main([*base, "--out", str(tmp_path / "on"), "--resume"]) == 0
    assert losses(tmp_path / "on") == pytest.approx(curves["on"], rel=1e-5)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in curve(run)]
