"""Two processes of `gem train` that do not go on alike.

One has less data, one stops training its model, one refuses its trainer, one does not come to the end of a step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import nn

from gem_train.cli import main
from gem_train.data import EventSource, generate
from gem_train.launch import WorkerError, run_workers
from gem_train.metrics_log import read_metrics
from gem_train.trainer import _modes

BATCH, STEPS, LATE_STEP, LIMIT_S = 32, 3, 3, 2.0

# All runs in the same two processes, which take longer to start than to train.
WORKER = f"""
import json, os, sys, time
from pathlib import Path

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
if rank == 0:
    said = os.open(folder / "said.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)

from gem_model import RankingModel
from gem_train import Trainer
from gem_train.cli.main import main
from gem_train.data import EventSource
from gem_train.launch import leave

def train(name, *settings):
    os.environ["GEM_RENDEZVOUS_FILE"] = str(folder / f"rendezvous-{{name}}")
    sets = ["data.global_batch_size={BATCH}", "data.max_history=8", "data.prefetch_batches=0",
            "data.eval_batch_size=4096", "trainer.log_interval=1", *settings]
    flags = [flag for text in sets for flag in ("--set", text)]
    return main(["train", "synthetic", "--device", "cpu", "--out", str(folder / name), *flags])

read = EventSource.__iter__

def shorter(source):
    for number, batch in enumerate(read(source)):
        if rank == 1 and source.split == "train" and number == {STEPS}:
            return
        yield batch

EventSource.__iter__ = shorter
code = train("uneven")
(folder / f"uneven-{{rank}}.json").write_text(json.dumps([code, time.time()]))
EventSource.__iter__ = read

code = train("experts", "model.num_experts=3", "parallel.ep=2", "trainer.max_steps=2")
(folder / f"experts-{{rank}}.json").write_text(json.dumps(code))

forward, calls = RankingModel.forward, 0

def evaluates(model, *arguments):
    global calls
    calls += 1
    if rank == 1 and calls == 2:
        model.eval()
    return forward(model, *arguments)

def refuses(trainer, *arguments, **named):
    made(trainer, *arguments, **named | {{"tasks": named["tasks"] if rank == 0 else ()}})

# Their errors are read here, not by the launcher.
listening = os.environ.pop("GEM_ERROR_FILE")
RankingModel.forward = evaluates
modes = train("modes")
leave()
RankingModel.forward, calls = forward, 0
made, Trainer.__init__ = Trainer.__init__, refuses
began = time.time()
refused = train("refused")
leave()
Trainer.__init__ = made
(folder / f"refused-{{rank}}.json").write_text(json.dumps([modes, refused, time.time() - began]))
os.environ["GEM_ERROR_FILE"] = listening

def lags(model, *arguments):
    global calls
    calls += model.training
    if rank == 1 and model.training and calls == {LATE_STEP}:
        (folder / "lags-since").write_text(str(time.time()))
        time.sleep(120)
    return forward(model, *arguments)

RankingModel.forward = lags
sys.exit(train("late", "trainer.step_timeout_s={LIMIT_S}"))
"""


class Outcome(NamedTuple):
    folder: Path
    error: WorkerError | None
    ended: float


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "worker.py"
    script.write_text(WORKER)
    return Outcome(folder, run_workers([sys.executable, str(script), str(folder)], 2), time.time())


@pytest.mark.dist
def test_all_ranks_end_when_the_data_of_one_does(outcome: Outcome) -> None:
    ends = [json.loads((outcome.folder / f"uneven-{rank}.json").read_text()) for rank in range(2)]
    assert [code for code, _ in ends] == [0, 0]
    assert abs(ends[0][1] - ends[1][1]) < 10
    assert EventSource(generate(), "train", global_batch_size=BATCH).num_batches > STEPS + 1
    records = read_metrics(outcome.folder / "uneven")
    assert [r["step"] for r in records if r["phase"] == "train"] == list(range(1, STEPS + 1))
    (end,) = [r for r in records if r["phase"] == "end"]
    assert (end["step"], end["samples"], end["reason"]) == (STEPS, STEPS * BATCH, "finished")
    said = (outcome.folder / "said.txt").read_text()
    assert "all_gather_into_tensor" not in said  # torch 2.13 warns of the name
    assert (
        f"the ranks' data ended unevenly, so that all ranks end after step {STEPS}; {BATCH // 2} samples that others "
        "had already read were not used"
    ) in said


@pytest.mark.dist
def test_ranks_whose_models_train_and_evaluate_are_named(outcome: Outcome) -> None:
    said = (outcome.folder / "said.txt").read_text()
    assert (
        "gem: error: Trainer: `modes of modules` must be equal on all ranks, got 'model training' on rank 0, "
        "'model evaluation' on rank 1; set the same on every rank"
    ) in said.splitlines()
    # Step 2 was the first that differed, and no step after it was made.
    assert [r["step"] for r in read_metrics(outcome.folder / "modes") if r["phase"] == "train"] == [1]


def test_modes_are_told_by_the_modules_that_change_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.Dropout(), nn.Linear(1, 1)), nn.Linear(1, 1))
    modes = _modes(dict(model.named_modules()))
    assert modes == "model training"
    model[0].eval()
    model[0][1].train()
    assert _modes(dict(model.named_modules())) == "model training, 0 evaluation, 0.1 training"
    model.training = False  # the container's own mode, as of frozen normalisation
    assert _modes(dict(model.named_modules())) == "model evaluation, 0.1 training, 1 training"


@pytest.mark.dist
def test_ranks_with_unequal_numbers_of_experts_train_as_one_process(outcome: Outcome, tmp_path: Path) -> None:
    """They have other numbers of modules, which is no difference of their modes."""
    assert [json.loads((outcome.folder / f"experts-{rank}.json").read_text()) for rank in range(2)] == [0, 0]
    sets = [f"data.global_batch_size={BATCH}", "data.max_history=8", "data.eval_batch_size=4096",
            "trainer.log_interval=1", "model.num_experts=3"]  # fmt: skip
    flags = [flag for text in sets for flag in ("--set", text)]
    assert main(["train", "synthetic", "--device", "cpu", "--out", str(tmp_path / "one"), "--steps", "2", *flags]) == 0
    losses = [
        [r["loss"] for r in read_metrics(path) if r["phase"] == "train"]
        for path in (outcome.folder / "experts", tmp_path / "one")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.dist
def test_what_one_rank_refuses_ends_all_before_a_run_is_made(outcome: Outcome) -> None:
    ends = [json.loads((outcome.folder / f"refused-{rank}.json").read_text()) for rank in range(2)]
    assert [end[:2] for end in ends] == [[2, 2], [2, 2]]
    assert max(seconds for *_, seconds in ends) < 60
    said = (outcome.folder / "said.txt").read_text()
    assert "gem: error: rank 1: Trainer: `tasks` must be names, at least one, each once, got ()" in said
    assert not (outcome.folder / "refused").exists()


@pytest.mark.dist
def test_a_step_that_does_not_end_ends_the_run_and_names_the_late_rank(outcome: Outcome) -> None:
    assert outcome.error is not None
    assert outcome.error.exit_code == 124
    message = outcome.error.message
    assert message.count("\n") == 0, message
    assert f"'step {LATE_STEP}' takes longer than {LIMIT_S:g} s on rank {outcome.error.rank}; rank 1 (in " in message
    assert "has not come to collective" in message
    assert message.endswith("in which [0] wait; the limit is trainer.step_timeout_s")
    # The watch's own bound, the launcher's grace, and room for a busy machine.
    assert outcome.ended - float((outcome.folder / "lags-since").read_text()) < 2 * LIMIT_S + 2 + 3 + 5
    records = read_metrics(outcome.folder / "late")
    assert [r["step"] for r in records if r["phase"] == "train"] == list(range(1, LATE_STEP))
