"""The training loop: steps, records, evaluations and checkpoints of one run."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gem_train import rng
from gem_train.balance import SampleBalancer, balance_record
from gem_train.checkpoint import Checkpointer
from gem_train.checks import check_whole
from gem_train.config import TrainerConfig
from gem_train.description import OF_TRAINING, compare_descriptions, describe
from gem_train.errors import CheckpointError
from gem_train.evaluation import Evaluation, evaluate
from gem_train.feed import Feed, Staged
from gem_train.mfu import account
from gem_train.optimizer import build_adamw, optimizer_tensors
from gem_train.progress import Progress, SilentProgress
from gem_train.protocols import BatchSource, EmbeddingModule, StepWatch
from gem_train.run_log import RunLog
from gem_train.schedule import LearningRateSchedule
from gem_train.step import ClipGradients, Prepare, TrainStep
from gem_train.timing import PhaseTimer
from gem_train.window import Window, WindowRecord
from gem_train.world import World

__all__ = ["TrainResult", "Trainer"]

_DENSE_AND_SPARSE = ("model.", "embeddings.")


class TrainResult(NamedTuple):
    """How a run ended."""

    step: int
    """Steps done."""
    samples: int
    """Samples trained on, counting repeats."""
    reason: str
    """"finished", "max_seconds" or "interrupted"."""
    evaluations: dict[str, Evaluation]
    """Split -> scores at the end; empty after an interruption."""


class _NoWatch:
    """Lets a step take any time."""

    def step(self, label: str) -> AbstractContextManager[None]:
        return nullcontext()


class Trainer:
    """Trains a dense model and sparse tables on one source."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: nn.Module,
        embeddings: EmbeddingModule,
        sparse_learning_rate: float,
        train_source: BatchSource,
        total_steps: int,
        tasks: tuple[str, ...],
        eval_sources: Mapping[str, Callable[[], BatchSource]] | None = None,
        world: World | None = None,
        clip: ClipGradients = torch.nn.utils.clip_grad_norm_,
        checkpointer: Checkpointer | None = None,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        device_name: str = "cpu",
        balancer: SampleBalancer | None = None,
        watch: Callable[[], AbstractContextManager[StepWatch]] | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        """Binds the parts of a run; nothing is read or written yet.

        Args:
            config: Settings of the loop.
            model: A `TrainableModel`, on the world's device, sharded if the world has several ranks. If its `config` is
                a dataclass, checkpoints keep its values: they load into a model of the same only.
            embeddings: The sparse tables.
            sparse_learning_rate: Peak step size of the tables; it follows the dense schedule.
            train_source: This rank's training batches. If it has a `global_batch_size`, checkpoints keep it: a resumed
                run has the same.
            total_steps: Steps from the beginning to the end of the data, equal on all ranks; `config.max_steps` may cut
                them.
            tasks: Names of tasks of the model; the NE of the first one selects the best weights.
            eval_sources: Split ("validation", "test") -> function that makes a source at its beginning.
            world: The ranks; one process on the CPU if not given.
            clip: Gradient norm and clipping over the model's mesh.
            checkpointer: Where to save; None saves nothing.
            progress: What a person sees.
            should_stop: Asked before each step on every rank; true ends the run after a checkpoint.
            device_name: Name of the device, for the MFU.
            balancer: Spreads the samples of each step over the ranks, and says how even they are; None reports nothing.
            watch: Begins what ends the run when a step does not end, on all ranks; None lets a step take any time.
            prepare: Called with batch and embeddings before each forward pass of training, such as a
                `gem_train.recipes.SegmentCapture`, which puts parts of the model into CUDA graphs; None does nothing.

        Raises:
            TypeError: if an argument has another type.
            ValueError: if one is out of range, or does not fit the configuration or the model.
        """
        check_whole("Trainer", "total_steps", total_steps, minimum=1, remedy="check the data")
        _check_tasks(tasks, model)
        _check_rate(sparse_learning_rate)
        self._eval_sources = dict(eval_sources or {})
        for split, source in self._eval_sources.items():
            if not callable(source):
                raise TypeError(
                    f"Trainer: `eval_sources` must be functions that make a source, got {source!r} for {split!r}; "
                    "give one, or leave the split out"
                )
        for name, what, missing in (
            ("checkpoint_interval", "checkpointer", checkpointer is None),
            ("select_best", "checkpointer", checkpointer is None),
            ("eval_interval", "validation source", "validation" not in self._eval_sources),
            ("select_best", "validation source", "validation" not in self._eval_sources),
        ):
            value = getattr(config, name)
            if value and missing:
                unset = type(value)()
                raise ValueError(
                    f"Trainer: `{name}` must be {unset} without a {what}, got {value}; give one, or unset it"
                )
        self.config = config
        self.model = model
        self.embeddings = embeddings
        self.total_steps = min(int(total_steps), config.max_steps or int(total_steps))
        self.step = 0
        """Steps done."""
        self.samples = 0
        """Samples trained on by all ranks, counting repeats."""
        self.best: dict[str, float] | None = None
        """Step and NE of the best validation so far."""
        self._tasks = tuple(tasks)
        self._sparse_learning_rate = sparse_learning_rate
        self._source = train_source
        self._source_state = train_source.state_dict()
        self._world = world or World()
        self._checkpointer = checkpointer
        self._newest: int | None = None
        """Step of the newest checkpoint that is of this run, saved or loaded by it."""
        self._log: RunLog | None = None
        self._progress: Progress = progress or SilentProgress()
        self._should_stop = should_stop
        self._device_name = device_name
        self._balancer = balancer
        self._watch = watch or (lambda: nullcontext(_NoWatch()))
        self._timer = PhaseTimer(self._world.device)
        self._recorded_step = 0
        self._rates: list[float] = []
        """Samples per second of each training record of this process."""
        self._compared: dict[str, nn.Module] = {}
        """Modules that all ranks have, whose modes they compare: the experts of one are not those of another."""
        self._window = Window(self._tasks, self._world)
        self._optimizer = build_adamw(model, config)
        self._train_step = TrainStep(
            config,
            model=model,
            embeddings=embeddings,
            sparse_learning_rate=sparse_learning_rate,
            optimizer=self._optimizer,
            schedule=LearningRateSchedule.from_config(config, self.total_steps),
            clip=clip,
            device=self._world.device,
            timer=self._timer,
            prepare=prepare,
        )

    def run(self, log: RunLog | None = None) -> TrainResult:
        """Trains from the current step to the end, then evaluates. All ranks call it.

        Args:
            log: Where to write records, on the first rank only; the caller closes it.

        Returns:
            Where the run ended and its final scores.

        Raises:
            ConfigError: if the ranks were given different settings, or their models' training modes or learning rates
                come to differ; names the ranks. If checkpoints cannot be written, or their directory holds those of a
                run that this one does not go on from.
            NonFiniteError: if the loss or a gradient is not finite; nothing is saved from then on.
        """
        self._world.check_alike(
            "Trainer",
            {
                "total_steps": self.total_steps,
                "step": self.step,
                "tasks": self._tasks,
                "eval_sources": tuple(self._eval_sources),
                "sparse_learning_rate": self._sparse_learning_rate,
                **{field.name: getattr(self.config, field.name) for field in fields(self.config)},
            },
        )
        if self._checkpointer is not None:
            self._checkpointer.prepare(after=self._newest)
        modules = dict(self.model.named_modules())
        on_all = set(modules).intersection(*self._world.gather(list(modules)))
        self._compared = {name: module for name, module in modules.items() if name in on_all}
        self._log = log
        with self._watch() as watch:
            return self._run(watch, time.monotonic())

    def _run(self, watch: StepWatch, began: float) -> TrainResult:
        limit = self.config.max_seconds
        self._recorded_step = self.step

        def stop() -> bool:
            return self._should_stop() or (limit is not None and time.monotonic() - began > limit)

        feed = Feed(
            self._source,
            embeddings=self.embeddings,
            world=self._world,
            timer=self._timer,
            limit=self.total_steps - self.step,
            should_stop=stop,
            balance=self._balancer or (lambda batch: batch),
            alike=self._alike,
        )
        self.model.train()
        try:
            self._timer.sample(on=True)
            while self._one_step(feed, watch):
                self._pause()
        finally:
            feed.close()
        reason = "finished"
        if feed.stopped:
            reason = "interrupted" if any(self._world.gather(self._should_stop())) else "max_seconds"
        if feed.dropped:
            self._progress.say(
                f"the ranks' data ended unevenly, so that all ranks end after step {self.step}; {feed.dropped} samples "
                "that others had already read were not used"
            )
        return self._finish(reason, began)

    def evaluate(self, split: str) -> Evaluation:
        """Scores a split with the current weights and writes the record. All ranks call it.

        Args:
            split: A key of `eval_sources`.

        Raises:
            ValueError: if it is no key of them, or `tasks` are no outputs of the model.
        """
        if split not in self._eval_sources:
            raise ValueError(
                f"Trainer.evaluate: `split` must be one of {list(self._eval_sources)}, got {split!r}; name one that "
                "`eval_sources` has"
            )
        begin = time.perf_counter()
        with self._timer("eval"):
            result = evaluate(self.model, self.embeddings, self._eval_sources[split](), self._world)
        self._check_predicted(result.tasks)
        # The first of `tasks` selects the best weights, and stands for the split; the model's others come last.
        result = result._replace(tasks={task: result.tasks[task] for task in (*self._tasks, *result.tasks)})
        first = result.tasks[self._tasks[0]]
        values = {
            "step": self.step,
            "samples": self.samples,
            "seconds": time.perf_counter() - begin,
            "num_samples": result.num_samples,
            "loss": result.loss,
            "ne": first["ne"],
            "auc": first["auc"],
            "calibration": first["calibration"],
            "samples_per_second": statistics.median(self._rates) if self._rates else None,
            "tasks": result.tasks,
        }
        self._write(split, values)
        self._progress.say(f"step {self.step}  {split}: {_scores(first)} ({result.num_samples:,} samples)")
        return result

    def save(self) -> None:
        """Publishes a checkpoint of the current step, unless this run has one of it. All ranks call it.

        Raises:
            CheckpointError: if it cannot be written, or another run has one of this step there.
        """
        if self._checkpointer is None or self.step == self._newest:
            return
        if self.step:
            self._train_step.guard.check(self.step - 1, wait=True)
        begin = time.perf_counter()
        with self._timer("checkpoint"):
            protect = [int(self.best["step"])] if self.best else []
            path = self._checkpointer.save(self.step, self._tensors(), self._state(), protect=protect)
        self._newest = self.step
        if self._log is not None:
            size = sum(file.stat().st_size for file in path.iterdir())
            self._write("checkpoint", {"step": self.step, "seconds": time.perf_counter() - begin, "bytes": size})

    def resume(self, step: int) -> None:
        """Continues from a checkpoint. All ranks call it, before `run`.

        Args:
            step: Which checkpoint.

        Raises:
            TypeError: if `step` is no whole number.
            ValueError: if the trainer ends before that step.
            CheckpointError: if it is damaged, or of another model or batch size.
        """
        if self._checkpointer is None:
            raise ValueError("Trainer.resume: needs a checkpointer, got None; construct the trainer with one")
        path = self._checkpointer.path(step)

        def check(state: dict[str, Any]) -> None:
            compare_descriptions(path, state.get("description"), self._description())
            saved, ours = state.get("global_batch_size"), self._batch_size()
            if None not in (saved, ours) and saved != ours:
                # Steps are counted and scheduled in batches: with others, data would be left out or missing at the end.
                raise CheckpointError(
                    f"{path} is of a run with `global_batch_size` {saved}, got a source with {ours}; "
                    f"resume with {saved}"
                )
            if step > self.total_steps:
                raise ValueError(
                    f"Trainer.resume: `step` must be at most `total_steps` ({self.total_steps}), got {step}; "
                    "construct the trainer with more, or resume an earlier checkpoint"
                )

        tensors = self._tensors()
        mine = f"rng.rank_{self._world.rank}."
        state = self._checkpointer.load(step, tensors, optional=("rng.",), check=check)
        self.embeddings.load_state_dict(_strip(tensors, "embeddings."))
        self._window.load_merged(_strip(tensors, "window."))
        self._window.load_account(state["window"])
        try:
            self._source.load_state_dict(state["source"])
        except ValueError as error:
            raise CheckpointError(f"{path} is of other data: {error}") from error
        self._source_state = state["source"]
        self.step, self.samples, self.best = int(state["step"]), int(state["samples"]), state["best"]
        self._newest = self.step
        if self._world.rank < int(state["world_size"]):
            rng.restore(_strip(tensors, mine), self._world.device)
        else:
            rng.seed_all(self.config.seed + 7919 * self._world.rank + self.step)

    def load_weights(self, step: int) -> None:
        """Loads model and tables of a checkpoint, and leaves everything else. All ranks call it.

        Args:
            step: Which checkpoint.

        Raises:
            TypeError: if `step` is no whole number.
            CheckpointError: if it is damaged or of another model.
        """
        if self._checkpointer is None:
            raise ValueError("Trainer.load_weights: needs a checkpointer, got None; construct the trainer with one")
        tensors = {k: v for k, v in self._tensors().items() if k.startswith(_DENSE_AND_SPARSE)}
        path = self._checkpointer.path(step)

        def check(state: dict[str, Any]) -> None:
            compare_descriptions(path, state.get("description"), self._description(), leave_out=OF_TRAINING)

        state = self._checkpointer.load(step, tensors, only=_DENSE_AND_SPARSE, check=check)
        self.embeddings.load_state_dict(_strip(tensors, "embeddings."))
        self.step, self.samples = int(state["step"]), int(state["samples"])
        self._newest = self.step

    def _description(self) -> dict[str, Any]:
        return describe(self.model, self.embeddings, self._tasks)

    def _batch_size(self) -> int | None:
        size = getattr(self._source, "global_batch_size", None)
        return None if size is None else int(size)

    def _check_predicted(self, predicted: Collection[str]) -> None:
        """Refuses tasks that the model turns out not to have, where its config did not tell."""
        if unknown := [task for task in self._tasks if task not in predicted]:
            raise ValueError(
                f"Trainer: `tasks` must be outputs of the model that have labels, {list(predicted)}, got {unknown}; "
                "name those"
            )

    def _one_step(self, feed: Feed, watch: StepWatch) -> bool:
        """All of a step that must end in time; false if there is no batch for it."""
        with watch.step(f"step {self.step + 1}"):
            staged = feed.next()
            if staged is not None:
                self._train(staged, feed)
        return staged is not None

    def _train(self, staged: Staged, feed: Feed) -> None:
        self._window.add_flops(self.model.flops(staged.host_batch))  # type: ignore[operator]
        following = self.step + 1
        balance: dict[str, Any] | None = None
        if self._balancer is not None and following % self.config.log_interval == 0:
            # Before the next batch is staged, whose report would take this one's place.
            report = self._balancer.report(staged.host_batch)
            balance = balance_record(self._balancer.mode, report, tuple(staged.host_batch.sequences))
        pauses = _due(following, self.config.eval_interval) or _due(following, self.config.checkpoint_interval)
        result = self._train_step(self.step, staged, ahead=feed.ahead, look_up_ahead=not pauses)
        self.step += 1
        self.samples += staged.num_samples
        self._source_state = staged.source_state
        self._check_predicted([task for task in result.logits if task in staged.batch.labels])
        self._window.add(result, staged.batch.labels, staged.num_samples)
        if self.step % self.config.log_interval == 0:
            self._record(balance)
        self._progress.step(self.step)

    def _alike(self) -> dict[str, object]:
        """What would train other weights on every rank, without an error, if it differed."""
        return {
            "learning_rate of the dense optimizer": [float(group["lr"]) for group in self._optimizer.param_groups],
            "learning_rate of the embeddings": getattr(self.embeddings, "learning_rate", None),
            "modes of modules": _modes(self._compared),
        }

    def _pause(self) -> None:
        """What is due between two steps, and may take long."""
        if _due(self.step, self.config.eval_interval) and self.step < self.total_steps:
            self._validate()
        if _due(self.step, self.config.checkpoint_interval):
            self.save()
        self._timer.sample(on=(self.step + 1) % self.config.log_interval == 0)

    def _validate(self) -> Evaluation | None:
        """Scores the validation split; a new best is saved at once."""
        if "validation" not in self._eval_sources:
            return None
        result = self.evaluate("validation")
        if self.config.select_best and result.ne is not None and (self.best is None or result.ne < self.best["ne"]):
            self.best = {"step": self.step, "ne": result.ne}
            self.save()
        return result

    def _finish(self, reason: str, began: float) -> TrainResult:
        evaluations: dict[str, Evaluation] = {}
        if reason != "interrupted" and self.step > self._recorded_step:
            self._record()  # an interrupted run keeps its open window: the resumed one will close it
        self.save()
        if reason != "interrupted":
            validation = self._validate()
            if validation is not None:
                evaluations["validation"] = validation
        # Before the test, whose record is the last line of a finished run.
        seconds = time.monotonic() - began
        self._write("end", {"step": self.step, "samples": self.samples, "seconds": seconds, "reason": reason})
        if reason != "interrupted":
            if self.config.select_best and self.best is not None and int(self.best["step"]) != self.step:
                last = self.step, self.samples, self._newest
                self.load_weights(int(self.best["step"]))
                self._progress.say(f"testing with the weights of step {self.step}, the best validation NE")
                evaluations |= self._evaluate_test()
                self.step, self.samples, self._newest = last
            else:
                evaluations |= self._evaluate_test()
        self._progress.close()
        return TrainResult(self.step, self.samples, reason, evaluations)

    def _evaluate_test(self) -> dict[str, Evaluation]:
        return {split: self.evaluate(split) for split in self._eval_sources if split != "validation"}

    def _record(self, balance: dict[str, Any] | None = None) -> None:
        """Merges the window over the ranks and writes it, with how even its last step was."""
        window = self._window.close()
        mfu = self._mfu(window)
        rate = window.samples / window.seconds
        self._rates.append(rate)
        phases = self._timer.interval(self.step - self._recorded_step)
        phases["other"] = max(0.0, window.seconds - sum(phases.values()))
        self._recorded_step = self.step
        self._write(
            "train",
            {
                "step": self.step,
                "samples": self.samples,
                "seconds": window.seconds,
                "loss": window.loss,
                "samples_per_second": rate,
                "flops_per_second": window.flops / window.seconds,
                "flops_per_sample": window.flops / max(1, window.samples),
                "mfu": mfu,
                "learning_rate": self._train_step.learning_rate(self.step - 1),
                "grad_norm": window.grad_norm,
                "tasks": window.tasks,
                "time": phases,
                "flops": window.flops_by_module,
                "memory_bytes": self._peak_memory(),
                "balance": balance,
            },
        )
        ne = next(iter(window.tasks.values()))["ne"]
        self._progress.values({"loss": window.loss, "NE": ne, "samples/s": rate, "MFU": mfu})

    def _mfu(self, window: WindowRecord) -> float | None:
        """MFU of a window; None where the peak is unknown, or where the account says that a number is wrong."""
        try:
            return account(window.flops, window.seconds, self._world.size, self._device_name).mfu
        except ValueError as error:
            self._progress.say(f"no MFU for step {self.step}: {error}")
            return None

    def _peak_memory(self) -> int | None:
        """Bytes that torch allocated at most on the device, of the rank with most; None on the CPU."""
        if self._world.device.type != "cuda":
            return None
        return max(int(peak) for peak in self._world.gather(torch.cuda.max_memory_allocated(self._world.device)))

    def _write(self, phase: str, values: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(phase, values)

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor of the run by name; those of the model, optimizer and tables are the live ones."""
        random_state = rng.capture(self._world.device)
        parts: dict[str, Mapping[str, Tensor]] = {
            "model.": self.model.state_dict(),
            "optimizer.": optimizer_tensors(self.model, self._optimizer),
            "embeddings.": self.embeddings.state_dict(),
            "window.": self._window.merged_tensors(),
            f"rng.rank_{self._world.rank}.": random_state,
        }
        return {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples": self.samples,
            "total_steps": self.total_steps,
            "world_size": self._world.size,
            "global_batch_size": self._batch_size(),
            "description": self._description(),
            "best": self.best,
            "source": self._source_state,
            "window": self._window.merged_account(),
        }


def _modes(modules: Mapping[str, nn.Module]) -> str:
    """The mode of the model, and of each module that is in another than the one that holds it."""
    training = {name: module.training for name, module in modules.items()}
    changes = [name for name in training if not name or training[name] != training[name.rpartition(".")[0]]]
    return ", ".join(f"{name or 'model'} {'training' if training[name] else 'evaluation'}" for name in changes)


def _check_tasks(tasks: tuple[str, ...], model: nn.Module) -> None:
    named = isinstance(tasks, tuple | list) and all(isinstance(task, str) for task in tasks)
    if not named or not tasks or len(set(tasks)) < len(tasks):
        raise ValueError(
            f"Trainer: `tasks` must be names, at least one, each once, got {tasks!r}; name those of the model"
        )
    known = getattr(getattr(model, "config", None), "tasks", None)
    if isinstance(known, tuple | list) and not set(tasks) <= set(known):
        raise ValueError(f"Trainer: `tasks` must be tasks of the model, {known!r}, got {tasks!r}; name those")


def _check_rate(rate: float) -> None:
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= rate < math.inf:
        raise ValueError(
            f"Trainer: `sparse_learning_rate` must be a finite number >= 0, got {rate!r}; 0 leaves the tables alone"
        )


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _strip(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _scores(values: Mapping[str, Any]) -> str:
    shown = [("NE", values["ne"]), ("AUC", values["auc"]), ("calibration", values["calibration"])]
    known = [f"{name} {value:.4f}" for name, value in shown if value is not None and math.isfinite(value)]
    return "  ".join(known) or f"no NE or AUC: all labels are {1 if values['base_rate'] else 0}"
