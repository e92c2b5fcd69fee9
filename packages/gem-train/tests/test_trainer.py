"""The loop: what it trains, records, resumes and refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from trainer_toys import CONFIG, ToyModel, ToyTables, assert_same, make_trainer, weights

from gem_train.checkpoint import Checkpointer
from gem_train.data import EventLog, EventSource
from gem_train.errors import CheckpointError, ConfigError
from gem_train.evaluation import Evaluation
from gem_train.metrics_log import read_metrics
from gem_train.optimizer import optimizer_tensors
from gem_train.run_log import RunLog
from gem_train.trainer import Trainer
from gem_train.world import World

OpenLog = Callable[..., RunLog]


def test_it_learns_and_counts_every_sample(events: EventLog, tmp_path: Path, open_log: OpenLog) -> None:
    trainer = make_trainer(events, dataclasses.replace(CONFIG, eval_interval=10))
    result = trainer.run(open_log(tmp_path))
    num_train = len(events.samples("train"))
    assert (result.step, result.samples, result.reason) == (2 * math.ceil(num_train / 64), 2 * num_train, "finished")
    assert {s: e.num_samples for s, e in result.evaluations.items()} == {
        "validation": len(events.samples("validation")),
        "test": len(events.samples("test")),
    }
    assert result.evaluations["test"].tasks["click"]["count"] == len(events.samples("test"))
    records = read_metrics(tmp_path)
    train = [record for record in records if record["phase"] == "train"]
    # Each sample is in one record: the last, shorter window is written too.
    assert sum(record["tasks"]["click"]["count"] for record in train) == result.samples
    assert train[-1]["loss"] < 0.97 * train[0]["loss"]
    assert [r["step"] for r in records if r["phase"] == "validation"][:2] == [10, 20]
    assert records[-2] | {"seconds": 0} == {
        "phase": "end", "step": result.step, "samples": result.samples, "seconds": 0, "reason": "finished"
    }  # fmt: skip
    last = records[-1]
    assert (last["phase"], last["step"], last["samples"]) == ("test", result.step, result.samples)
    scores = result.evaluations["test"].tasks["click"]
    assert [last[k] for k in ("ne", "auc", "calibration")] == [scores[k] for k in ("ne", "auc", "calibration")]
    assert last["samples_per_second"] == statistics.median(r["samples_per_second"] for r in train)
    assert all(sum(r["time"].values()) == pytest.approx(r["seconds"], rel=0.05) for r in train)
    per_sample = 2.0 * sum(p.numel() for p in trainer.model.parameters() if p.ndim == 2)
    assert sum(r["flops"]["mlp"] for r in train) == per_sample * result.samples
    assert all(r["flops_per_sample"] == pytest.approx(3.0 * per_sample) for r in train)
    assert any((tmp_path / "tensorboard").iterdir())


def test_two_runs_are_bitwise_equal(events: EventLog) -> None:
    first = make_trainer(events)
    first.run()
    second = make_trainer(events)
    second.run()
    assert_same(weights(first), weights(second))


@pytest.mark.parametrize("stop", [1, 7, 8, 12])
def test_a_resumed_run_is_bitwise_equal(events: EventLog, tmp_path: Path, open_log: OpenLog, stop: int) -> None:
    whole = make_trainer(events)
    whole.run(open_log(tmp_path / "whole"))

    interrupted: Trainer | None = None
    interrupted = make_trainer(
        events,
        checkpointer=Checkpointer(tmp_path / "checkpoints"),
        should_stop=lambda: interrupted is not None and interrupted.step >= stop - 1,
    )
    assert interrupted.run(open_log(tmp_path / "parts")).reason == "interrupted"
    torch.manual_seed(99)
    resumed = make_trainer(
        events,
        checkpointer=Checkpointer(tmp_path / "checkpoints"),
    )
    torch.manual_seed(99)
    resumed.resume(interrupted.step)
    assert resumed.step == interrupted.step < whole.step
    result = resumed.run(open_log(tmp_path / "parts", resume_step=interrupted.step))
    assert result.step == whole.step
    assert_same(weights(resumed), weights(whole))
    optimizers = [optimizer_tensors(t.model, t._optimizer) for t in (resumed, whole)]
    assert_same(*optimizers)
    keys = ("step", "samples", "loss", "grad_norm", "learning_rate", "tasks")
    curves = [
        [{k: r[k] for k in keys} for r in read_metrics(tmp_path / name) if r["phase"] == "train"]
        for name in ("parts", "whole")
    ]
    assert curves[0] == curves[1]


def test_a_complete_run_resumes_to_nothing(events: EventLog, tmp_path: Path) -> None:
    trainer = make_trainer(events, checkpointer=Checkpointer(tmp_path))
    done = trainer.run()
    again = make_trainer(events, checkpointer=Checkpointer(tmp_path))
    again.resume(done.step)
    result = again.run()
    assert result.step == done.step
    assert result.evaluations["test"].tasks == done.evaluations["test"].tasks


def test_resume_refuses_a_step_after_the_last(events: EventLog, tmp_path: Path) -> None:
    make_trainer(events, dataclasses.replace(CONFIG, max_steps=4), checkpointer=Checkpointer(tmp_path)).run()
    shorter = make_trainer(events, dataclasses.replace(CONFIG, max_steps=3), checkpointer=Checkpointer(tmp_path))
    before = weights(shorter)
    with pytest.raises(ValueError, match=r"Trainer\.resume: `step` must be at most `total_steps` \(3\), got 4"):
        shorter.resume(4)
    assert_same(weights(shorter), before)


def test_resume_refuses_another_model(events: EventLog, tmp_path: Path) -> None:
    trainer = make_trainer(events, dataclasses.replace(CONFIG, max_steps=2), checkpointer=Checkpointer(tmp_path))
    trainer.run()
    other = make_trainer(events, checkpointer=Checkpointer(tmp_path), model=lambda num_dense: ToyModel(num_dense + 1))
    before = weights(other)
    with pytest.raises(
        CheckpointError, match=r"model\.mlp\.0\.weight: checkpoint \(16, 31\) float32, this run \(16, 32\)"
    ):
        other.resume(2)
    assert_same(weights(other), before)


@dataclasses.dataclass(frozen=True)
class Described:
    """What a model says of itself."""

    tasks: tuple[str, ...] = ("click", "buy")
    features: tuple[str, ...] = ("item", "user")
    activation: str = "relu"
    dropout: float = 0.1


def describing(config: Described) -> Callable[[int], ToyModel]:
    def make(num_dense: int) -> ToyModel:
        model = ToyModel(num_dense)
        model.config = config
        return model

    return make


SHORT = dataclasses.replace(CONFIG, max_steps=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("buy", "click")}, r"model\.tasks: checkpoint \['click', 'buy'\], this run \['buy', 'click'\]"),
        (
            {"features": ("user", "item")},
            r"model\.features: checkpoint \['item', .*, this run \['user', 'item'\]",
        ),
        ({"activation": "gelu"}, r"model\.activation: checkpoint 'relu', this run 'gelu'"),
    ],
    ids=["tasks", "features", "activation"],
)
def test_a_model_of_equal_shapes_and_another_meaning_is_refused(
    events: EventLog, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_trainer(events, SHORT, model=describing(Described()), checkpointer=Checkpointer(tmp_path)).run()
    other = make_trainer(events, SHORT, model=describing(Described(**change)), checkpointer=Checkpointer(tmp_path))
    before = weights(other)
    for load in (other.resume, other.load_weights):
        with pytest.raises(CheckpointError, match=f"is of another model or configuration: {message}. Use"):
            load(2)
    assert_same(weights(other), before)
    assert other.step == 0


def test_weights_load_under_another_dropout_and_from_checkpoints_that_do_not_describe_their_model(
    events: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_trainer(events, SHORT, model=describing(Described()), checkpointer=Checkpointer(tmp_path / "new"))
    first.run()
    other = describing(Described(dropout=0.5))
    again = make_trainer(events, SHORT, model=other, checkpointer=Checkpointer(tmp_path / "new"))
    with pytest.raises(CheckpointError, match=r"model\.dropout: checkpoint 0\.1, this run 0\.5"):
        again.resume(2)
    again.load_weights(2)
    assert_same(weights(again), weights(first))
    old = make_trainer(events, SHORT, checkpointer=Checkpointer(tmp_path / "old"))
    state = old._state
    later = ("description", "global_batch_size")
    monkeypatch.setattr(old, "_state", lambda: {k: v for k, v in state().items() if k not in later})
    old.run()
    again = make_trainer(events, SHORT, model=other, checkpointer=Checkpointer(tmp_path / "old"))
    again.resume(2)
    assert_same(weights(again), weights(old))


def test_resume_refuses_another_batch_size(events: EventLog, tmp_path: Path) -> None:
    """Steps are counted in batches: fewer larger ones would end before the data does, or after it."""
    make_trainer(events, SHORT, checkpointer=Checkpointer(tmp_path)).run()
    for size in (128, 2048):
        source = EventSource(events, "train", global_batch_size=size, seed=1, epochs=2)
        other = make_trainer(events, train_source=source, checkpointer=Checkpointer(tmp_path))
        with pytest.raises(
            CheckpointError, match=f"step-00000002 is of a run with `global_batch_size` 64, got a source with {size}; "
        ):
            other.resume(2)


def test_the_checkpoints_of_another_run_are_refused_before_training(events: EventLog, tmp_path: Path) -> None:
    make_trainer(events, SHORT, checkpointer=Checkpointer(tmp_path)).run()
    other = make_trainer(events, SHORT, checkpointer=Checkpointer(tmp_path, keep_last=1))
    with pytest.raises(ConfigError, match=r"`directory` must hold no checkpoints of another run, .* \[2\]; go on"):
        other.run()
    assert other.step == 0
    other.step = 2
    with pytest.raises(CheckpointError, match=r"step-00000002 exists already"):
        other.save()
    longer = dataclasses.replace(CONFIG, max_steps=4)
    for load in ("resume", "load_weights"):
        again = make_trainer(events, longer, checkpointer=Checkpointer(tmp_path))
        getattr(again, load)(2)
        if load == "resume":
            again.run()
            assert Checkpointer(tmp_path).steps() == (2, 4)
            assert again.run().step == 4  # of its own checkpoints it thinks nothing
        else:
            with pytest.raises(ConfigError, match=r"no checkpoints later than step 2, .* of steps \[4\]; resume the"):
                again.run()


def test_a_place_that_takes_no_checkpoint_is_refused_before_training(events: EventLog, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = make_trainer(events, SHORT, checkpointer=Checkpointer(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"Checkpointer: `directory` must be one to write in, got .*file \("):
        trainer.run()
    assert trainer.step == 0


def test_the_records_of_another_run_are_refused(tmp_path: Path, open_log: OpenLog) -> None:
    open_log(tmp_path).write("train", {"step": 1})
    with pytest.raises(ConfigError, match=r"RunLog: `run_dir` must hold no records .* got .*metrics\.jsonl; pass"):
        open_log(tmp_path)
    open_log(tmp_path, resume_step=1)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"total_steps": 2.5}, TypeError, r"`total_steps` must be a whole number, got 2\.5"),
        ({"total_steps": 0}, ValueError, r"`total_steps` must be >= 1, got 0"),
        ({"sparse_learning_rate": -1.0}, ValueError, r"`sparse_learning_rate` must be a finite number >= 0, got -1\.0"),
        (
            {"sparse_learning_rate": math.nan},
            ValueError,
            r"`sparse_learning_rate` must be a finite number >= 0, got nan",
        ),
        ({"eval_sources": {"valid": None}}, TypeError, r"`eval_sources` must be functions .*, got None for 'valid'"),
        ({"tasks": ("clik", "buy")}, ValueError, r"tasks of the model, \('click', 'buy'\), got \('clik', 'buy'\)"),
        ({"tasks": "click"}, ValueError, r"`tasks` must be names, .*, got 'click'"),
        ({"tasks": ()}, ValueError, r"`tasks` must be names, at least one, each once, got \(\)"),
        ({"tasks": ("buy", "buy")}, ValueError, r"`tasks` must be names, .* each once, got \('buy', 'buy'\)"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_arguments_are_refused_by_name(
    events: EventLog, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    whole = make_trainer(events, model=describing(Described()))
    given: dict[str, Any] = {"sparse_learning_rate": 1.0, "total_steps": 2, "tasks": ("click",)}
    with pytest.raises(error, match=f"^Trainer: .*{message}; "):
        Trainer(
            CONFIG, model=whole.model, embeddings=whole.embeddings,
            train_source=EventSource(events, global_batch_size=64), **given | arguments,
        )  # fmt: skip


def test_the_first_of_tasks_stands_for_a_split(
    events: EventLog, tmp_path: Path, open_log: OpenLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first that the model gives."""
    scores = {task: {"ne": ne, "auc": 0.5, "calibration": 1.0} for task, ne in (("buy", 0.9), ("click", 0.8))}
    monkeypatch.setattr("gem_train.trainer.evaluate", lambda *_: Evaluation(10, 0.7, scores))
    trainer = make_trainer(events)
    trainer._log = open_log(tmp_path)
    result = trainer.evaluate("test")
    assert (result.ne, list(result.tasks), read_metrics(tmp_path)[-1]["ne"]) == (0.8, ["click", "buy"], 0.8)
    with pytest.raises(ValueError, match=r"`split` must be one of \['validation', 'test'\], got 'tset'"):
        trainer.evaluate("tset")


def test_tasks_that_the_model_turns_out_not_to_have_are_named(events: EventLog) -> None:
    trainer = make_trainer(events, tasks=("clik",))
    with pytest.raises(ValueError, match=r"`tasks` must be outputs of the model .*, \['click'\], got \['clik'\]; name"):
        trainer.run()


def test_intervals_of_what_is_not_there_are_refused(events: EventLog, tmp_path: Path) -> None:
    for name, value, what in (
        ("checkpoint_interval", 3, "checkpointer"),
        ("select_best", True, "checkpointer"),
    ):
        with pytest.raises(
            ValueError, match=f"Trainer: `{name}` must be {type(value)()} without a {what}, got {value}; give"
        ):
            make_trainer(events, dataclasses.replace(CONFIG, **{name: value}))
    trainer = make_trainer(events)
    for name, value in (("eval_interval", 2), ("select_best", True)):
        with pytest.raises(
            ValueError, match=f"Trainer: `{name}` must be {type(value)()} without a validation source, got"
        ):
            Trainer(
                dataclasses.replace(CONFIG, **{name: value}), model=trainer.model, embeddings=trainer.embeddings,
                sparse_learning_rate=1.0, train_source=EventSource(events, global_batch_size=64), total_steps=2,
                tasks=("click",), checkpointer=Checkpointer(tmp_path),
            )  # fmt: skip


def test_select_best_tests_the_best_weights(events: EventLog, tmp_path: Path, open_log: OpenLog) -> None:
    # A learning rate that grows too large late: the best validation is not the last one.
    config = dataclasses.replace(
        CONFIG, learning_rate=0.5, max_grad_norm=0.0, eval_interval=2, select_best=True, keep_last=1, decay="constant",
        warmup_steps=200,
    )  # fmt: skip
    trainer = make_trainer(events, config, checkpointer=Checkpointer(tmp_path / "c", keep_last=1))
    result = trainer.run(open_log(tmp_path))
    validations = [r for r in read_metrics(tmp_path) if r["phase"] == "validation"]
    best = min(validations, key=lambda record: record["tasks"]["click"]["ne"])
    assert trainer.best == {"step": best["step"], "ne": best["tasks"]["click"]["ne"]}
    test = next(r for r in read_metrics(tmp_path) if r["phase"] == "test")
    assert test["step"] == best["step"]
    end = next(r for r in read_metrics(tmp_path) if r["phase"] == "end")
    assert (end["step"], end["samples"]) == (result.step, result.samples) == (trainer.step, trainer.samples)
    assert result.samples > test["samples"]
    assert set(Checkpointer(tmp_path / "c").steps()) == {best["step"], result.step}


def test_time_budget_stops_with_the_reason(events: EventLog) -> None:
    result = make_trainer(events, dataclasses.replace(CONFIG, max_seconds=1e-9)).run()
    assert result.reason == "max_seconds"
    assert result.step == 0
    assert "test" in result.evaluations


class Recorder(ToyTables):
    """Tables that write down what is asked of them, batches by number."""

    def __init__(self, rows: Mapping[str, int], features: Mapping[str, str], calls: list[Any]) -> None:
        super().__init__(rows, features)
        self.calls = calls
        self.count = 0

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
        self.calls.append(("exchange", self.count))
        self.count += 1
        return self.count - 1, ids

    def start_lookup(self, pending: Any) -> None:
        self.calls.append(("start", pending[0], self.learning_rate))

    def lookup(self, pending: Any) -> dict[str, Tensor]:
        self.calls.append(("lookup", pending[0]))
        found = super().lookup(pending[1])
        if torch.is_grad_enabled():
            found["topics"].register_hook(lambda _: self.calls.append(("update", pending[0])))
        return found


def test_ids_leave_before_backward_and_rows_after_it(events: EventLog, tmp_path: Path) -> None:
    """The next lookup starts with its own rate, and not before a checkpoint or an evaluation."""
    config = dataclasses.replace(CONFIG, max_steps=6, eval_interval=2, checkpoint_interval=3)
    plain = make_trainer(events, config, checkpointer=Checkpointer(tmp_path / "plain"))
    plain.run()
    trainer = make_trainer(events, config, checkpointer=Checkpointer(tmp_path / "recorded"))
    calls: list[Any] = []
    tables = Recorder({table.name: table.num_rows for table in events.tables}, trainer.embeddings.features, calls)
    trainer.embeddings = trainer._train_step._embeddings = tables
    step, optimizer = trainer._train_step, trainer._optimizer
    optimizer.register_step_post_hook(lambda *_: calls.append("optimizer"))
    trainer._eval_sources = {}
    trainer.run()
    rate = [20.0 * step._schedule(k) for k in range(6)]
    expected: list[Any] = [("exchange", 0)]
    for k in range(6):
        following = [("exchange", k + 1)] if k < 5 else []
        starts = [("start", k + 1, rate[k + 1])] if k in (0, 4) else []
        expected += [("lookup", k), *following, ("update", k), *starts, "optimizer"]
    assert calls == expected
    assert_same(weights(trainer), weights(plain))


def test_a_watch_stands_around_steps_and_not_around_pauses(events: EventLog, tmp_path: Path) -> None:
    """Reading a batch, training on it and its record must end in time; evaluations and checkpoints may take long."""
    seen: list[Any] = []

    class Watch:
        @contextlib.contextmanager
        def step(self, label: str) -> Iterator[None]:
            seen.append(label)
            yield
            seen.append("between")

    @contextlib.contextmanager
    def begin() -> Iterator[Watch]:
        seen.append("begin")
        yield Watch()
        seen.append("end")

    class Source(EventSource):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                seen.append("read")
                yield batch

    source = Source(events, "train", global_batch_size=64, epochs=1)
    config = dataclasses.replace(CONFIG, max_steps=3, eval_interval=2, checkpoint_interval=2)
    trainer = make_trainer(events, config, train_source=source, watch=begin, checkpointer=Checkpointer(tmp_path))
    for name in ("evaluate", "save", "_record"):
        method = getattr(trainer, name)
        setattr(trainer, name, lambda *a, name=name, method=method: (seen.append(name), method(*a))[1])
    trainer.config = dataclasses.replace(config, log_interval=3)
    trainer.run()
    assert seen == [
        "begin",
        "step 1", "read", "read", "between",
        "step 2", "read", "between", "evaluate", "save",
        "step 3", "_record", "between",
        "step 4", "between", "save", "evaluate", "evaluate", "end",
    ]  # fmt: skip


class Others(World):
    """Another rank was given other settings."""

    theirs: ClassVar[dict[str, str]] = {}

    def gather(self, value: Any) -> list[Any]:
        return [value, value | self.theirs if isinstance(value, dict) else value]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            {"total_steps": "7"},
            r"`total_steps` must be equal on all ranks, got \d+ on rank 0, 7 on rank 1; set the",
        ),
        ({"learning_rate": "0.5"}, r"`learning_rate` must be equal on all ranks, got 0\.02 on rank 0, 0\.5 on rank 1"),
        (
            {"sparse_learning_rate": "1.0", "tasks": "('b',)"},
            r"`tasks` must .* got \('click',\) on .*; `sparse_lear",
        ),
    ],
    ids=["steps", "rate", "two"],
)
def test_ranks_with_other_settings_are_refused(
    events: EventLog, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(Others, "theirs", theirs)
    trainer = make_trainer(events, world=Others())
    with pytest.raises(ConfigError, match=rf"^Trainer: {message}"):
        trainer.run()
    assert trainer.step == 0
