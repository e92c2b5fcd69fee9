"""Ranks of one host as processes with a time budget: what hangs or fails becomes a row, and the next launch runs."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["ENVIRONMENT", "Launch", "Rank", "Task", "announce", "run_launch"]

GROUP_TIMEOUT = timedelta(seconds=60)
GRACE_S = 5.0
"""Between the first rank that fails, or ends, and the end of the others."""
ENVIRONMENT = {
    # Loopback only, and no NVLink multicast.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

_started = time.monotonic()


def announce(text: str, since: float | None = None) -> None:
    """Write a progress line with the seconds since ``since``, a value of ``time.monotonic``; default: this import."""
    print(f"[{time.monotonic() - (since or _started):6.1f} s] {text}", flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A function ``run(rank, **arguments)`` of a module of this package."""

    part: str
    module: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Tasks that run one after the other in the same processes."""

    name: str
    tasks: tuple[Task, ...]
    size: int
    device: str
    budget_s: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Rank:
    """This process among the ranks of a launch."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None
    """gloo, on host memory; None on one rank."""
    rows: Path
    deadline: float
    started: float
    part: str = ""

    def say(self, text: str) -> None:
        """Progress, from the first rank only."""
        if self.rank == 0:
            announce(f"{self.part}: {text}", self.started)

    def row(self, **values: Any) -> None:
        """Keep a result, from the first rank only."""
        if self.rank == 0:
            with self.rows.open("a") as file:
                file.write(json.dumps({"part": self.part, **values}) + "\n")

    def reduce(self, *values: float, op: dist.ReduceOp.RedOpType = dist.ReduceOp.MAX) -> list[float]:
        """Numbers over all ranks."""
        message = torch.tensor(values, dtype=torch.float64)
        if self.control is not None:
            dist.all_reduce(message, op=op, group=self.control)
        return message.tolist()

    def has_seconds(self, seconds: float) -> bool:
        """Whether so much of the budget is left, the same on all ranks."""
        return self.reduce(self.deadline - time.monotonic(), op=dist.ReduceOp.MIN)[0] >= seconds

    def attempt(self, function: Callable[[], object], **row: Any) -> bool:
        """Whether a function ran on all ranks; if it raised on one, a row with status "error" says why.

        Where not all raise, the others may wait in a collective until its timeout, which ends the launch.
        """
        problem = None
        try:
            function()
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if self.reduce(float(problem is not None))[0] == 0.0:
            return True
        self.row(status="error", reason=(problem or "another rank failed")[:400], **row)
        self.say(f"{row.get('name')}: {problem or 'another rank failed'}")
        return False

    def barrier(self) -> None:
        """Wait for all ranks and for this rank's device."""
        self.synchronize()
        if self.control is not None:
            dist.barrier(group=self.control)

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run_launch(launch: Launch, keep: Callable[[list[dict[str, Any]]], None]) -> None:
    """Start the processes, wait for them at most as long as the budget, end what is left.

    Args:
        launch: What to run.
        keep: Takes the rows of the tasks as they are written, and one with status "error" if a rank failed or the time
            ran out.
    """
    announce(f"launch {launch.name}: {launch.size} x {launch.device}, at most {launch.budget_s:.0f} s")
    context = mp.get_context("spawn")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gem-multi-gpu-") as name, _environment(launch):
        folder = Path(name)
        processes = [
            context.Process(target=_work, args=(launch, rank, str(folder), begin, _started), daemon=True)
            for rank in range(launch.size)
        ]
        for process in processes:
            process.start()
        rows = _Written(folder / "rows.jsonl", keep)
        problem = _wait(processes, folder, begin + launch.budget_s, rows)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(GRACE_S)
        rows.read()
        if problem:
            print(_logs(folder, launch.size), file=sys.stderr, flush=True)
            reason = _reason(folder, launch.size) or problem
            unfinished = launch.tasks[rows.tasks_done :] or launch.tasks
            parts = dict.fromkeys(task.part for task in unfinished)
            keep([{"part": part, "name": launch.name, "status": "error", "reason": reason} for part in parts])
    seconds = time.monotonic() - begin
    announce(f"launch {launch.name}: {problem or 'ended'} after {seconds:.1f} s")


class _Written:
    """Rows of a file that grows, handed on as they come: what ends the benchmark ends none that were measured."""

    def __init__(self, path: Path, keep: Callable[[list[dict[str, Any]]], None]) -> None:
        self._path, self._keep, self._at = path, keep, 0
        self.tasks_done = 0

    def read(self) -> None:
        """Hand on the lines since the last call."""
        if not self._path.exists():
            return
        text = self._path.read_bytes()[self._at :]
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        rows = [json.loads(line) for line in whole.splitlines()]
        self.tasks_done += sum("task_done" in row for row in rows)
        rows = [row for row in rows if "task_done" not in row]
        if rows:
            self._keep(rows)


@contextlib.contextmanager
def _environment(launch: Launch) -> Iterator[None]:
    threads = str(max(1, (os.cpu_count() or 1) // launch.size))
    wanted = {**ENVIRONMENT, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), **launch.environment}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _wait(processes: list[Any], folder: Path, deadline: float, rows: _Written) -> str:
    """Until all ranks are done; why they are not, else an empty string."""
    while time.monotonic() < deadline:
        rows.read()
        done = [(folder / f"{rank}.done").exists() for rank in range(len(processes))]
        if all(done):
            # What torch still tears down is not worth waiting for.
            end = time.monotonic() + GRACE_S
            while any(process.is_alive() for process in processes) and time.monotonic() < end:
                time.sleep(0.05)
            return ""
        failed = [
            rank
            for rank, process in enumerate(processes)
            if ((folder / f"{rank}.error").exists() or not process.is_alive())
            # Asked last: it may have ended well since.
            and not (folder / f"{rank}.done").exists()
        ]
        if failed:
            time.sleep(min(GRACE_S, max(0.0, deadline - time.monotonic())))
            return f"rank {failed[0]} failed"
        time.sleep(0.05)
    return "out of time"


def _logs(folder: Path, size: int) -> str:
    """What the ranks left, the first to fail first."""
    paths = [folder / f"{rank}.{suffix}" for rank in range(size) for suffix in ("stack", "error")]
    paths = sorted((path for path in paths if path.exists()), key=lambda path: path.stat().st_mtime)
    texts = [(path, path.read_text(errors="replace")[-4000:]) for path in paths]
    return "\n".join(f"--- rank {path.stem}\n{text}" for path, text in texts if text)


def _reason(folder: Path, size: int) -> str:
    """One line: a crash, else the first exception, else where a rank hung."""
    logs = _logs(folder, size)
    for pattern in (r"^Fatal Python error: .*", r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", r"^Timeout \(.*"):
        found = re.search(pattern, logs, re.MULTILINE)
        if found:
            rank = re.findall(r"--- rank (\d+)", logs[: found.start()])[-1]
            text = "still ran when the time was over" if pattern.startswith("^Timeout") else found.group()
            return f"rank {rank}: {text}"[:400]
    return ""


def _work(launch: Launch, rank: int, folder_name: str, begin: float, started: float) -> None:
    """Main function of a rank. ``begin`` and ``started`` are of the host's monotonic clock."""
    folder = Path(folder_name)
    _end_with_parent(os.getppid())
    deadline = begin + launch.budget_s
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(max(1.0, deadline - time.monotonic() - 1.0), file=stack, exit=True)
    try:
        me = _join(launch, rank, folder, deadline, started)
        for task in launch.tasks:
            # Where one rank fails the others may wait for it, so no task follows.
            me.part = task.part
            importlib.import_module(f"multi_gpu.{task.module}").run(me, **task.arguments)
            me.row(task_done=True)
        me.barrier()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    (folder / f"{rank}.done").touch()
    sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()
    # Without destroy_process_group: an NCCL communicator that does not end would keep the process.
    os._exit(0)


def _join(launch: Launch, rank: int, folder: Path, deadline: float, started: float) -> Rank:
    device = torch.device(launch.device, rank) if launch.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Groups of a mesh take the default, which is minutes.
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, GROUP_TIMEOUT)
    control = None
    if launch.size > 1:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            # A file and no server, which would listen on all interfaces.
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=launch.size,
            timeout=GROUP_TIMEOUT,
        )
        control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    return Rank(
        rank=rank,
        size=launch.size,
        device=device,
        control=control,
        rows=folder / "rows.jsonl",
        deadline=deadline,
        started=started,
    )


def _end_with_parent(parent: int) -> None:
    """A rank whose parent was killed must not keep a GPU."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
