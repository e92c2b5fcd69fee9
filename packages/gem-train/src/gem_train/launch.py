"""Starting and joining the processes of a run on one machine.

`run_workers` starts N copies of a command, each with RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them; `join`
works under either. The first error of any worker ends all of them, and that error is the one that is shown.
"""

import atexit
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from gem_train.errors import ConfigError
from gem_train.world import World

__all__ = [
    "WorkerError",
    "end_process",
    "exit_worker",
    "is_worker",
    "join",
    "join_alone",
    "joined",
    "leave",
    "report_worker_error",
    "run_workers",
    "select_device",
    "threads_per_process",
]

_RENDEZVOUS = "GEM_RENDEZVOUS_FILE"
_ERROR_FILE = "GEM_ERROR_FILE"
_PARENT = "GEM_LAUNCHER_PID"
_joined: list[str] = []
"""Backends of the groups that this process was in."""
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)


class WorkerError(NamedTuple):
    """The first error of a group of workers."""

    rank: int
    """Which worker."""
    exit_code: int
    """Its exit code."""
    message: str
    """What it said, or how it ended."""


def select_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a process.

    Args:
        name: "auto" (a GPU if there is one), "cpu" or "cuda".
        local_rank: Index of the process on this machine.

    Returns:
        The device; a GPU has its index.

    Raises:
        ConfigError: if a GPU is asked for and there is none, or fewer than processes.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device: must be auto, cpu or cuda, got {name!r}; name one of them")
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("--device: cuda was asked for, but torch sees no GPU; run `gem doctor`, or use --device cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--nproc: needs one GPU per process, got rank {local_rank} with {torch.cuda.device_count()} GPUs; "
            "start fewer processes"
        )
    return torch.device("cuda", local_rank)


def is_worker() -> bool:
    """Whether this process is one of several, started by `run_workers` or torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(device_name: str) -> World:
    """Joins the processes of the run, or makes a world of one.

    Args:
        device_name: "auto", "cpu" or "cuda".

    Returns:
        The world; gloo on the CPU, and NCCL for device tensors on GPUs.
    """
    if not is_worker():
        device = select_device(device_name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return World(device=device)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _die_with_launcher()
    device = select_device(device_name, int(os.environ.get("LOCAL_RANK", rank)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = _backend(device)
    options: dict[str, Any] = {}
    if _RENDEZVOUS in os.environ:
        options = {"init_method": f"file://{os.environ[_RENDEZVOUS]}", "rank": rank, "world_size": size}
    dist.init_process_group(backend, **options)
    _joined.append(backend)
    return World.from_process_group(device)


def join_alone(device: torch.device) -> None:
    """Makes a process group of this process alone, which sharded parameters ask for; nothing travels.

    Args:
        device: Where the parameters are.
    """
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    store = dist.HashStore()  # type: ignore[attr-defined]  # of torch.distributed, missing in its stubs
    dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    _joined.append(_backend(device))


def joined() -> bool:
    """Whether this process is or was in a process group, and has to end by `exit_worker`."""
    return bool(_joined)


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def _loopback() -> Literal["lo", "lo0"]:
    return "lo0" if sys.platform == "darwin" else "lo"


def leave() -> None:
    """Leaves the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def report_worker_error(message: str) -> bool:
    """Hands an error to the launcher, which shows the first one of all workers.

    Args:
        message: What the user should read.

    Returns:
        False if no launcher is listening, so that the caller must print the message itself.
    """
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        return False
    Path(path).write_text(json.dumps({"time": time.time(), "message": message}), encoding="utf-8")
    return True


def end_process(message: str, exit_code: int) -> NoReturn:
    """Ends this process at once, from any thread: a main thread that waits in a collective cannot be interrupted.

    Args:
        message: What the user should read; the launcher shows it, or without one this process.
        exit_code: Not 0, so that a launcher ends the other processes too.
    """
    if not report_worker_error(message):
        sys.stderr.write(f"gem: error: {message}\n")
    sys.stderr.flush()
    os._exit(exit_code)


def exit_worker(exit_code: int) -> NoReturn:
    """Ends a process that was a rank, without taking the interpreter apart.

    The threads of a gloo group live on after `destroy_process_group` as long as anything holds the group, as FSDP's
    caches do. One that drops the last reference to a tensor while the interpreter finalizes aborts the process
    ("terminate called without an active exception"), and a finished run counts as failed.

    Args:
        exit_code: What the launcher sees.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def run_workers(command: Sequence[str], num_processes: int) -> WorkerError | None:
    """Runs a command as several processes on the loopback interface, and waits for them.

    The first one keeps this process's standard output and error; the others are silent unless they fail. When one ends
    with an error the others get three seconds to end too, and are then killed. Signals to this process that ask it to
    end, or a terminal's Ctrl-Z, reach all of them.

    Args:
        command: Program and arguments; each copy learns its rank from RANK.
        num_processes: Copies to start.

    Returns:
        None if all succeeded, otherwise the first error.

    Raises:
        ConfigError: if `num_processes` < 1.
    """
    if num_processes < 1:
        raise ConfigError(f"--nproc: must be >= 1, got {num_processes}; give a number of processes")
    with tempfile.TemporaryDirectory(prefix="gem-launch-") as directory:
        workers: list[subprocess.Popen[bytes]] = []
        forwarded = {s: signal.signal(s, lambda number, _: _forward(workers, number)) for s in _FORWARDED}
        try:
            workers += (_start(command, rank, num_processes, Path(directory)) for rank in range(num_processes))
            failed = _wait(workers)
            return None if failed is None else _first_error(workers, Path(directory), failed)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
            for number, handler in forwarded.items():
                signal.signal(number, handler)


def threads_per_process(num_processes: int) -> int:
    """Intra-op threads that share this process's cores evenly."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)


def _start(command: Sequence[str], rank: int, size: int, directory: Path) -> subprocess.Popen[bytes]:
    loopback = _loopback()
    environment = {
        "OMP_NUM_THREADS": str(threads_per_process(size)),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would take the cores from the other processes
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        _RENDEZVOUS: str(directory / "rendezvous"),
        _ERROR_FILE: str(directory / f"error-{rank}.json"),
        _PARENT: str(os.getpid()),
    }
    if rank == 0:
        return subprocess.Popen(command, env=environment, process_group=0)
    with (directory / f"stderr-{rank}").open("wb") as stderr:
        return subprocess.Popen(command, env=environment, process_group=0, stdout=subprocess.DEVNULL, stderr=stderr)


def _wait(workers: list[subprocess.Popen[bytes]]) -> int | None:
    """Waits for all workers; at the first failure, for the grace period. Returns the rank that failed first."""
    failed: int | None = None
    deadline = float("inf")
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if failed is None:
            failed = next((rank for rank, worker in enumerate(workers) if worker.poll() not in (None, 0)), None)
            deadline = float("inf") if failed is None else time.monotonic() + _GRACE_SECONDS
    if failed is None:
        failed = next((rank for rank, worker in enumerate(workers) if worker.poll() not in (None, 0)), None)
    return failed


def _first_error(workers: list[subprocess.Popen[bytes]], directory: Path, failed: int) -> WorkerError:
    """The earliest error that a worker wrote down; a worker that was killed wrote none, and ended first."""
    reports = []
    for rank in range(len(workers)):
        path = directory / f"error-{rank}.json"
        if path.is_file():
            report = json.loads(path.read_text(encoding="utf-8"))
            reports.append((float(report["time"]), rank, str(report["message"])))
    code = workers[failed].returncode
    if reports and code >= 0:
        _, rank, message = min(reports)
        return WorkerError(rank, workers[rank].poll() or code, message)
    ending = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
    stderr = directory / f"stderr-{failed}"
    said = stderr.read_text(encoding="utf-8", errors="replace").strip() if stderr.is_file() else ""
    return WorkerError(
        failed, code if code > 0 else 128 - code, f"rank {failed} {ending}" + (f"\n{said}" if said else "")
    )


def _forward(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    """Hands a signal on; the workers are in groups of their own, so that a terminal's Ctrl-C reaches them only once."""
    suspended = number == signal.SIGTSTP
    _signal_all(workers, signal.SIGSTOP if suspended else number)
    if suspended:
        os.kill(os.getpid(), signal.SIGSTOP)
        _signal_all(workers, signal.SIGCONT)  # reached when the shell lets this process go on


def _signal_all(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(number)


def _die_with_launcher() -> None:
    """Asks the kernel to end this worker when its launcher dies, which could not tell it any more (Linux)."""
    parent = os.environ.get(_PARENT)
    if parent is None or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)
