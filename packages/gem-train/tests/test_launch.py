from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gem_train.errors import ConfigError
from gem_train.launch import is_worker, join, run_workers, select_device, threads_per_process

PLAIN = """
import os, sys, time, signal, pathlib
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""
PRELUDE = f"{PLAIN}from gem_train.launch import exit_worker, join, leave, report_worker_error\n"


def launch(tmp_path: Path, body: str, num_processes: int = 2, *, prelude: str = PRELUDE) -> object:
    script = tmp_path / "worker.py"
    script.write_text(prelude + body + ("\nexit_worker(0)\n" if prelude is PRELUDE else ""))
    return run_workers([sys.executable, str(script), str(tmp_path)], num_processes)


@pytest.mark.dist
def test_workers_join_and_agree(tmp_path: Path) -> None:
    body = """
import torch
world = join("cpu")
assert (world.rank, world.size) == (rank, size)
agreed = world.agree(has_batch=rank == 0, num_samples=10 + rank, stop=False)
assert agreed == (False, True, 10 + 11 + 12, False), agreed
assert world.agree(has_batch=True, num_samples=0, stop=rank == 2).stop
assert world.gather("abc"[rank]) == ["a", "b", "c"]
assert float(world.sum(torch.tensor(rank + 0.5))) == 4.5
from gem_train.errors import ConfigError

def refused(call):
    try:
        call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")

assert world.agree(has_batch=True, num_samples=1, alike={"rate": 0.5}) == (True, True, 3, False)
said = refused(lambda: world.agree(has_batch=True, num_samples=1, alike={"mode": rank == 1, "rate": 0.5}))
assert said == (
    "ConfigError: Trainer: `mode` must be equal on all ranks, got False on ranks 0, 2, True on rank 1; set the same on "
    "every rank"
), said

def table():
    if rank == 1:
        raise ValueError("a bad table")
    return rank

said = refused(lambda: world.on_all(table))
assert said == ("ValueError: a bad table" if rank == 1 else "ConfigError: rank 1: a bad table"), said
assert world.on_all(lambda: rank) == rank
world.barrier()
(pathlib.Path(sys.argv[1]) / f"done-{rank}-{os.environ['OMP_NUM_THREADS']}").touch()
leave()
"""
    assert launch(tmp_path, body, 3) is None
    assert len(list(tmp_path.glob("done-*"))) == 3


@pytest.mark.dist
def test_the_first_error_is_shown_and_the_others_stop(tmp_path: Path) -> None:
    body = """
if rank == 1:
    report_worker_error("the data of rank 1 is bad")
    sys.exit(7)
time.sleep(1.0)
if rank == 0:
    report_worker_error("connection lost")
    sys.exit(1)
time.sleep(120)
"""
    begin = time.monotonic()
    error = launch(tmp_path, body, 3)
    assert time.monotonic() - begin < 100
    assert error == (1, 7, "the data of rank 1 is bad")


@pytest.mark.dist
def test_a_killed_worker_ends_the_run(tmp_path: Path) -> None:
    body = """
(pathlib.Path(sys.argv[1]) / f"pid-{rank}").write_text(str(os.getpid()))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(120)
"""
    error = launch(tmp_path, body, prelude=PLAIN)
    assert error is not None
    assert (error.rank, error.exit_code) == (1, 137)
    assert error.message == "rank 1 was killed by signal 9 (SIGKILL)"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid-0").read_text()), 0)


@pytest.mark.dist
def test_an_unreported_error_shows_what_the_worker_wrote(tmp_path: Path) -> None:
    error = launch(tmp_path, "if rank == 1:\n    raise KeyError('lost')\ntime.sleep(60)\n", prelude=PLAIN)
    assert error is not None
    assert error.message.startswith("rank 1 ended with code 1\n")
    assert error.message.endswith("KeyError: 'lost'")


@pytest.mark.dist
def test_workers_end_with_their_launcher(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        PRELUDE
        + "join('cpu')\n(pathlib.Path(sys.argv[1]) / f'pid-{rank}').write_text(str(os.getpid()))\ntime.sleep(120)\n"
    )
    command = [sys.executable, str(worker), str(tmp_path)]
    code = f"from gem_train.launch import run_workers; run_workers({command!r}, 2)"
    launcher = subprocess.Popen([sys.executable, "-c", code])
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    deadline = time.monotonic() + 60
    while not all(f.is_file() and f.read_text() for f in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    pids = [int(f.read_text()) for f in files]
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_alone_reaches_every_worker_once(tmp_path: Path, number: int) -> None:
    """As `kill -INT` sends it, where a terminal's Ctrl-C goes to a whole process group."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, pathlib, signal, sys, time\nfile = pathlib.Path(sys.argv[1]) / f'got-{os.environ[\"RANK\"]}'\n"
        "got = []\nfor number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, lambda number, _: got.append(number))\nfile.write_text('ready')\n"
        "while not got:\n    time.sleep(0.05)\ntime.sleep(0.3)\nfile.write_text(repr(got))\nsys.exit(130)\n"
    )
    command = [sys.executable, str(worker), str(tmp_path)]
    code = f"import sys\nfrom gem_train.launch import run_workers\nsys.exit(run_workers({command!r}, 2).exit_code)"
    launcher = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    files = [tmp_path / "got-0", tmp_path / "got-1"]
    _wait_until(lambda: all(f.is_file() and f.read_text() == "ready" for f in files))
    # Stopped and continued with the launcher, as by Ctrl-Z and fg.
    launcher.send_signal(signal.SIGTSTP)
    _wait_until(lambda: _state(launcher.pid) == "T")
    launcher.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    os.killpg(launcher.pid, number)
    assert launcher.wait(timeout=30) == 130
    assert [f.read_text() for f in files] == [f"[{int(number)}]"] * 2


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.dist
def test_a_thread_of_the_group_that_is_still_at_work_does_not_fail_the_run(tmp_path: Path) -> None:
    """A process that leaves through sys.exit here is aborted: the thread of gloo runs Python in a dying interpreter."""
    error = launch(
        tmp_path,
        """
import atexit, threading, torch
import torch.distributed as dist

world = join('cpu')
atexit.register(lambda: print('said at exit', file=open(pathlib.Path(sys.argv[1]) / f'exit-{rank}', 'w')))
if rank == 1:
    time.sleep(0.5)
held, running = dist.group.WORLD, threading.Event()
def busy(future):
    running.set()
    for _ in range(30_000):
        time.sleep(0.001)
work = dist.all_reduce(torch.ones(1), async_op=True)
work.get_future().then(busy)
running.wait()
leave()
""",
    )
    assert error is None
    assert [(tmp_path / f"exit-{rank}").read_text() for rank in range(2)] == ["said at exit\n"] * 2


def test_one_process_needs_no_group() -> None:
    assert not is_worker()
    world = join("cpu")
    assert (world.rank, world.size, world.device, world.control) == (0, 1, torch.device("cpu"), None)
    assert world.agree(has_batch=True, num_samples=3) == (True, True, 3, False)


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--nproc: must be >= 1, got 0"):
        run_workers(["true"], 0)
    with pytest.raises(ConfigError, match="--device: must be auto, cpu or cuda, got 'tpu'"):
        select_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        select_device("cuda")
    assert select_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert select_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="got rank 2 with 2 GPUs"):
        select_device("cuda", 2)


def test_threads_share_the_cores() -> None:
    assert threads_per_process(10_000) == 1
    assert 1 <= threads_per_process(1) <= (os.cpu_count() or 1)
