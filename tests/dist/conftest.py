"""Starts several gloo processes of one script, and waits for them with a limit."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 240


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


def _launch(world_size: int, script: str, *arguments: str) -> None:
    """Runs `tests/dist/<script>` once per rank; fails with the output of the first rank that failed."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env={**_environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    for index, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, f"rank {index} of {world_size} ended with {rank.returncode}:\n{output}"


def _gem(*arguments: str, cwd: Path) -> str:
    """Runs the command line; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "gem_train.cli", *arguments],
        cwd=cwd,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"gem {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def launch() -> Callable[..., None]:
    return _launch


@pytest.fixture
def gem() -> Callable[..., str]:
    return _gem
