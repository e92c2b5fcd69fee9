from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gem_train.checkpoint import Checkpointer
from gem_train.config import TrainerConfig
from gem_train.data import EventLog, EventSource, generate
from gem_train.errors import CheckpointError, NonFiniteError
from gem_train.feed import Feed
from gem_train.guard import GradientGuard
from gem_train.metrics_log import read_metrics
from gem_train.optimizer import build_adamw, optimizer_tensors
from gem_train.run_log import RunLog
from gem_train.timing import PhaseTimer
from gem_train.trainer import Trainer
from gem_train.world import Agreement, World

DIM = 8


class ToyTables:
    """Plain SGD tables; the update runs inside backward, as in a fused sparse optimizer."""

    def __init__(self, rows: Mapping[str, int], features: Mapping[str, str], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = {name: 0.1 * torch.randn(count, DIM, generator=generator) for name, count in rows.items()}
        self.features = features
        self.learning_rate = 0.0

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
        return ids

    def start_lookup(self, pending: Any) -> None:
        """Rows are at hand: nothing to start."""

    def lookup(self, pending: Any) -> dict[str, Tensor]:
        return {name: self._pooled(name, *pending[name]) for name in self.features}

    def _pooled(self, feature: str, values: Tensor, offsets: Tensor) -> Tensor:
        weight = self.weights[self.features[feature]]
        rows = weight[values].requires_grad_(torch.is_grad_enabled())
        if rows.requires_grad:

            def update(gradient: Tensor) -> None:
                weight.index_add_(0, values, gradient, alpha=-self.learning_rate)

            rows.register_hook(update)
        lengths = offsets.diff()
        bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return torch.zeros(len(lengths), DIM).index_add(0, bag, rows)

    def set_learning_rate(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def state_dict(self) -> dict[str, Tensor]:
        return {f"tables.{name}.weight": weight for name, weight in self.weights.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state[f"tables.{name}.weight"])


class Loss(NamedTuple):
    sum: dict[str, Tensor]
    count: int
    total: Tensor


class Part(NamedTuple):
    forward: float


class Flops(NamedTuple):
    forward: float
    total: float
    by_module: dict[str, Part]


class ToyModel(nn.Module):
    def __init__(self, num_dense: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3 * DIM + num_dense, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, batch: Any, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        offsets = batch.sequences["history"].offsets
        sample = torch.repeat_interleave(torch.arange(batch.num_samples), offsets.diff())
        liked = embeddings["history.topics"] * (2.0 * (batch.ids["history.click"][0] == 2).float() - 1.0)[:, None]
        history = torch.zeros(batch.num_samples, DIM).index_add(0, sample, liked)
        history = history / offsets.diff().clamp(min=1)[:, None]
        x = torch.cat((embeddings["topics"], history, embeddings["topics"] * history, batch.dense), dim=1)
        return {"click": self.mlp(x)[:, 0]}

    def loss(self, outputs: Mapping[str, Tensor], batch: Any) -> Loss:
        value = nn.functional.binary_cross_entropy_with_logits(outputs["click"], batch.labels["click"], reduction="sum")
        return Loss({"click": value}, batch.num_samples, value)

    def flops(self, batch: Any) -> Flops:
        forward = 2.0 * batch.num_samples * sum(p.numel() for p in self.mlp.parameters() if p.ndim == 2)
        return Flops(forward, 3.0 * forward, {"mlp": Part(forward)})


CONFIG = TrainerConfig(learning_rate=2e-2, warmup_steps=4, log_interval=4, decay="linear", seed=3)


@pytest.fixture(scope="module")
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


def make_trainer(events: EventLog, config: TrainerConfig = CONFIG, **arguments: Any) -> Trainer:
    torch.manual_seed(config.seed)
    rows = {table.name: table.num_rows for table in events.tables}
    source = EventSource(events, "train", global_batch_size=64, seed=1, epochs=2)
    return Trainer(
        config,
        model=arguments.pop("model", ToyModel)(events.num_dense),
        embeddings=ToyTables(rows, {"topics": "topics", "history.topics": "topics"}),
        sparse_learning_rate=20.0,
        train_source=arguments.pop("train_source", source),
        total_steps=source.num_batches,
        tasks=("click",),
        eval_sources={
            split: lambda split=split: EventSource(events, split, global_batch_size=100)
            for split in ("validation", "test")
        },
        **arguments,
    )


def weights(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {f"model.{k}": v.clone() for k, v in trainer.model.state_dict().items()}
    return tensors | {f"tables.{k}": v.clone() for k, v in trainer.embeddings.state_dict().items()}


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


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


class Poisoned(nn.Module):
    """Passes everything to a model, and spoils one thing at one step."""

    def __init__(self, inner: ToyModel, at: int, what: str) -> None:
        super().__init__()
        self.inner, self.at, self.what, self.calls = inner, at, what, 0

    def forward(self, batch: Any, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        poisoned = self.training and self.calls == self.at
        self.calls += self.training
        if poisoned and self.what == "rows":
            embeddings["topics"].register_hook(lambda g: torch.full_like(g, math.nan))
        if poisoned and self.what == "parameter":
            handle = self.inner.mlp[3].weight.register_hook(lambda g: torch.full_like(g, math.inf))
            self.handle = handle
        outputs = self.inner(batch, embeddings)
        return {"click": outputs["click"] * math.nan} if poisoned and self.what == "loss" else outputs

    def loss(self, outputs: Mapping[str, Tensor], batch: Any) -> Loss:
        return self.inner.loss(outputs, batch)

    def flops(self, batch: Any) -> Flops:
        return self.inner.flops(batch)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        pytest.param("loss", "the loss is NaN", id="loss"),
        pytest.param("parameter", r"parameter inner\.mlp\.3\.weight is NaN", id="parameter"),
    ],
)
def test_a_nan_stops_the_run_before_the_update(events: EventLog, tmp_path: Path, what: str, named: str) -> None:
    config = dataclasses.replace(CONFIG, checkpoint_interval=2)
    clean = make_trainer(
        events,
        dataclasses.replace(config, max_steps=5, decay="constant"),
        model=lambda n: Poisoned(ToyModel(n), -1, what),
    )
    clean.run()
    trainer = make_trainer(
        events, dataclasses.replace(config, decay="constant"), model=lambda n: Poisoned(ToyModel(n), 5, what),
        checkpointer=Checkpointer(tmp_path),
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=rf"^step 5: .*{named}"):
        trainer.run()
    assert Checkpointer(tmp_path).steps() == (2, 4)
    dense = {k: v for k, v in weights(trainer).items() if k.startswith("model.")}
    assert_same(dense, {k: v for k, v in weights(clean).items() if k.startswith("model.")})
    if what == "loss":
        assert all(torch.isfinite(v).all() for v in weights(trainer).values())


def test_guard_zeroes_the_rows_gradient_it_refuses() -> None:
    model = nn.Linear(2, 1)
    guard = GradientGuard(model, build_adamw(model, CONFIG), torch.device("cpu"))
    source = torch.ones(3, 2, requires_grad=True)
    rows = source * 1.0
    guard.watch({"item": rows})
    (rows * torch.tensor([[1.0, math.nan]])).sum().backward()
    assert torch.equal(source.grad, torch.zeros(3, 2))
    guard.arm()
    with pytest.raises(NonFiniteError, match="step 4: the gradient of the looked-up rows of feature item is NaN"):
        guard.check(4)


def test_guard_skips_the_update_on_the_device() -> None:
    model = nn.Linear(2, 1)
    optimizer = build_adamw(model, CONFIG)
    guard = GradientGuard(model, optimizer, torch.device("cpu"))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    guard.watch({})
    (model(torch.ones(1, 2)) * math.inf).sum().backward()
    guard.inspect_parameters()
    guard.arm()
    optimizer.step()
    assert_same(model.state_dict(), before)
    assert float(optimizer.state[model.weight]["step"]) == 0.0


@pytest.mark.gpu
def test_guard_on_a_gpu_skips_at_once_and_reports_one_step_later() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Linear(2, 1).to(device)
    optimizer = build_adamw(model, CONFIG)
    guard = GradientGuard(model, optimizer, device)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for step, factor in enumerate((math.inf, 1.0)):
        guard.watch({})
        (model(torch.ones(1, 2, device=device)) * factor).sum().backward()
        guard.inspect_parameters()
        guard.arm()
        if step == 0:
            guard.check(step)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model.state_dict(), before)
    with pytest.raises(NonFiniteError, match=r"^step 0: the gradient of parameter weight is NaN or infinite"):
        guard.check(1)


class Uneven:
    """A source whose slices are given, for a world that disagrees."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.position = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_feed_state_is_that_of_the_batch_given(events: EventLog) -> None:
    source = EventSource(events, "train", global_batch_size=64, seed=1)
    batches = list(EventSource(events, "train", global_batch_size=64, seed=1))
    tables = ToyTables({}, {})
    feed = Feed(source, embeddings=tables, world=World(), timer=PhaseTimer(torch.device("cpu")), limit=3)
    for k in range(3):
        staged = feed.next()
        assert torch.equal(staged.batch.sample_index, batches[k].sample_index)
        assert staged.source_state["next_sample"] == 64 * (k + 1)
    assert feed.next() is None
    assert feed.next() is None


def test_feed_ahead_is_what_next_gives(events: EventLog) -> None:
    source = EventSource(events, "train", global_batch_size=64, seed=1)
    feed = Feed(source, embeddings=ToyTables({}, {}), world=World(), timer=PhaseTimer(torch.device("cpu")), limit=2)
    first = feed.next()
    assert source.state_dict()["next_sample"] == 64, "nothing is read before it is asked for"
    second = feed.ahead()
    assert feed.ahead() is second
    assert feed.next() is second
    assert not torch.equal(first.batch.sample_index, second.batch.sample_index)
    assert feed.ahead() is None
    assert feed.next() is None


@pytest.mark.gpu
def test_feed_does_not_wait_for_the_model_on_a_gpu(events: EventLog) -> None:
    """The next batch is on the device while the model's stream still works; the stream then waits for the copy."""
    device = torch.device("cuda", torch.cuda.current_device())
    expected = list(EventSource(events, "train", global_batch_size=64, seed=1))[1]
    source = EventSource(events, "train", global_batch_size=64, seed=1)
    feed = Feed(source, embeddings=ToyTables({}, {}), world=World(device=device), timer=PhaseTimer(device))
    feed.next()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2 * 10**9)  # about a second
    busy.record()
    ahead = feed.ahead()
    assert ahead.copied is not None
    ahead.copied.synchronize()
    assert not busy.query()
    staged = feed.next()
    assert staged is ahead
    assert torch.equal(staged.batch.dense.cpu(), expected.dense)
    for name, (values, offsets) in expected.ids.items():
        assert torch.equal(staged.batch.ids[name][0].cpu(), values), name
        assert torch.equal(staged.batch.ids[name][1].cpu(), offsets), name
    assert busy.query()


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


def test_ranks_that_count_other_steps_are_refused(events: EventLog) -> None:
    class Others(World):
        def gather(self, value: Any) -> list[Any]:
            return [value, 7]

    trainer = make_trainer(events, world=Others())
    with pytest.raises(
        ValueError, match=r"`total_steps` must be equal on all ranks, got \[\d+, 7\]; give the smallest"
    ):
        trainer.run()
    assert trainer.step == 0


def test_feed_of_an_empty_source_ends_at_once() -> None:
    feed = Feed(Uneven([]), embeddings=ToyTables({}, {}), world=World(), timer=PhaseTimer(torch.device("cpu")))
    assert feed.next() is None
    assert not feed.stopped


class UnevenWorld(World):
    """A world in which another rank has `others` batches of 5 samples."""

    others = 2

    def agree(self, *, has_batch: bool, num_samples: int, stop: bool = False) -> Agreement:
        other, UnevenWorld.others = UnevenWorld.others > 0, UnevenWorld.others - 1
        return Agreement(has_batch and other, has_batch or other, num_samples + 5 * other, stop)


def test_feed_ends_on_all_ranks_when_it_ends_on_one(events: EventLog) -> None:
    source = EventSource(events, "train", global_batch_size=64)
    feed = Feed(source, embeddings=ToyTables({}, {}), world=UnevenWorld(), timer=PhaseTimer(torch.device("cpu")))
    given = [feed.next(), feed.next(), feed.next()]
    assert [staged.num_samples if staged else None for staged in given] == [69, 69, None]
    assert (feed.stopped, feed.dropped) == (False, 64)
    feed.close()


def test_weight_decay_spares_biases() -> None:
    model = nn.Linear(3, 2)
    optimizer = build_adamw(model, dataclasses.replace(CONFIG, weight_decay=0.5, learning_rate=1.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), 0.5 * weight)
    assert torch.equal(model.bias.detach(), bias)
