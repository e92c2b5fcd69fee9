"""The same tiny hybrid model on 1 and on 8 processes, on all five axes at once, to the same curve.

    python examples/same_curve.py

MovieLens ml-latest-small (data/ml-latest-small), 8 gloo processes on this machine: dense parameters in 2 copies
(dp_replicate) of 2 shards (dp_shard), experts over 2 ranks (ep), tables in 2 copies (sparse_replicate) over 4 ranks
(sparse_shard), samples moved between the ranks by what they cost. Then the checkpoints change places: what 1 process
began, 8 finish, and the other way round. All four curves are printed and drawn; the exit code is 1 if one leaves the
first by more than BOUND.

A step's loss is over the same 64 samples on any number of processes. What differs is the order of float32 sums, about
1e-7 of the loss in a step, which training carries on. A sample that is lost or counted twice is at 1e-2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gem_train import Checkpointer, RunLog, Trainer, World
from gem_train.data import EventLog
from gem_train.metrics_log import read_metrics
from gem_train.recipes import RunConfig, build, get

ROOT = Path(__file__).resolve().parents[1]
BOUND = 1e-6
"""Largest difference of two losses of a step, relative."""
SETTINGS = {
    "data.global_batch_size": "64",
    "data.max_history": "64",
    "data.prefetch_batches": "0",
    "model.num_experts": "2",
    "model.dropout": "0.0",  # every rank draws its own
    "model.sequences.history.dropout": "0.0",
    "trainer.log_interval": "1",
    "trainer.warmup_steps": "0",
    "trainer.decay": "constant",  # a decay would end where a run is stopped
    # With the usual eps, both optimizers turn a gradient that is zero up to rounding into a step of the learning rate:
    # then a run differs from itself by 1e-4 after 24 steps if it only reads each batch in another order.
    "trainer.eps": "1e-2",
    "sparse.eps": "1e-4",
}
LAYOUT = {
    "parallel.dp_replicate": "2",
    "parallel.dp_shard": "2",
    "parallel.ep": "2",
    "parallel.sparse_replicate": "2",
    "parallel.sparse_shard": "4",
    "data.balance": "exchange",
}


class Run(NamedTuple):
    """A run, or the rest of one."""

    name: str
    processes: int
    steps: int
    """Step to stop at; half of it is where a run is taken over."""
    begun_by: str | None = None
    """Run whose checkpoint it goes on from."""


def checkpoints(directory: Path, name: str, world: World | None = None) -> Checkpointer:
    """Those of a run."""
    return Checkpointer(directory / name / "checkpoints", world=world)


def work(rank: int, run: Run, log: EventLog, directory: Path) -> None:
    """One process of a run; writes its losses and a checkpoint."""
    torch.set_num_threads(1)
    if run.processes > 1:
        rendezvous = f"file://{directory}/rendezvous-{run.name}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=run.processes)
    world = World.from_process_group(torch.device("cpu"))
    layout = LAYOUT if run.processes > 1 else {}
    recipe = get("ml-latest-small")
    length = {"trainer.max_steps": str(run.steps), "trainer.checkpoint_interval": str(run.steps // 2)}
    config = RunConfig.resolve(recipe, log, SETTINGS | layout | length)
    parts = build(config, log, world)
    trainer = Trainer(
        config.trainer,
        model=parts.model,
        embeddings=parts.embeddings,
        sparse_learning_rate=config.sparse.learning_rate,
        train_source=parts.train_source,
        total_steps=parts.train_source.num_batches,
        tasks=log.tasks,
        world=world,
        clip=parts.clip,
        balancer=parts.balancer,
        checkpointer=checkpoints(directory, run.name, world),
    )
    if run.begun_by is not None:
        trainer.resume(run.steps // 2)
    records = RunLog(directory / run.name) if world.is_first else None
    trainer.run(records)
    if records is not None:
        records.close()
    if run.processes > 1:
        dist.destroy_process_group()


def start(run: Run, log: EventLog, directory: Path) -> dict[int, float]:
    """Runs all processes of a run and returns its curve, step -> loss."""
    # Forked: the modules are loaded once, and the data is read once.
    context: Any = multiprocessing.get_context("fork")
    if run.begun_by is not None:  # in a directory of its own: the other run has gone on, too, and keeps what it saved
        begun, own = (checkpoints(directory, name).path(run.steps // 2) for name in (run.begun_by, run.name))
        shutil.copytree(begun, own)
    began = time.monotonic()
    workers = [context.Process(target=work, args=(rank, run, log, directory)) for rank in range(run.processes)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        if any(worker.exitcode for worker in workers):
            for worker in workers:
                worker.kill()
        time.sleep(0.02)
    failed = [rank for rank, worker in enumerate(workers) if worker.exitcode]
    if failed:
        sys.exit(f"{run.name}: ranks {failed} failed")
    print(f"{run.name}: {time.monotonic() - began:.1f} s", flush=True)
    return {r["step"]: r["loss"] for r in read_metrics(directory / run.name) if r["phase"] == "train"}


def difference(curve: dict[int, float], reference: dict[int, float]) -> float:
    """Largest relative difference of a loss; a step that only one of the two has is an error."""
    later = {step: loss for step, loss in reference.items() if step >= min(curve)}
    if curve.keys() != later.keys():
        raise ValueError(f"difference: the curves must have the same steps, got {sorted(curve.keys() ^ later.keys())}")
    return max(abs(curve[step] - loss) / loss for step, loss in later.items())


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """The curves, and below them how far each is from the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    reference = next(iter(curves.values()))
    for index, (name, curve) in enumerate(curves.items()):
        steps = list(curve)
        above.plot(steps, list(curve.values()), label=name, linewidth=6 - 1.5 * index)
        if index:
            apart = [max(abs(curve[step] - reference[step]) / reference[step], 1e-9) for step in steps]
            below.semilogy(steps, apart, color=f"C{index}")
    below.axhline(BOUND, color="black", linestyle="--")
    below.text(1, BOUND, " bound", verticalalignment="top")
    above.set_ylabel("loss")
    below.set_ylabel("difference from the first")
    below.set_xlabel("step")
    figure.legend(loc="outside upper center", ncols=len(curves), frameon=False)
    figure.savefig(path)


def main() -> int:
    """Runs all four, prints and draws them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=24, help="training steps, an even number (default: 24)")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "ml-latest-small", help="directory of the data")
    parser.add_argument("--out", type=Path, help="keep logs, checkpoints and curves.svg here")
    args = parser.parse_args()
    if args.steps < 2 or args.steps % 2:
        parser.error(f"--steps must be an even number of at least 2, got {args.steps}")
    if args.out is not None and args.out.exists():
        parser.error(f"--out must not exist yet, got {args.out}")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    log = get("ml-latest-small").load(args.data)
    runs = (
        Run("1-process", 1, args.steps),
        Run("8-processes", 8, args.steps),
        Run("8-then-1", 1, args.steps, begun_by="8-processes"),
        Run("1-then-8", 8, args.steps, begun_by="1-process"),
    )
    with tempfile.TemporaryDirectory() as temporary:
        directory = (args.out or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        curves = {run.name: start(run, log, directory) for run in runs}
        if args.out is not None:
            draw(curves, args.out / "curves.svg")
    reference = curves["1-process"]
    print(f"{'step':>5}" + "".join(f"{name:>14}" for name in curves))
    for step in reference:
        print(
            f"{step:>5}"
            + "".join(f"{curve[step]:>14.8f}" if step in curve else f"{'':>14}" for curve in curves.values())
        )
    apart = {name: difference(curve, reference) for name, curve in curves.items() if name != "1-process"}
    for name, value in apart.items():
        print(f"{name}: {value:.1e} from 1-process, bound {BOUND:.0e}")
    return int(max(apart.values()) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
