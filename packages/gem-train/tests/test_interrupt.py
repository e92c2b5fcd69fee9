"""Ctrl-C while the command line is still importing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n"


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("torch", ("train", "synthetic")),
        # Imported by the command that runs.
        ("gem_model", ("train", "synthetic", "--device", "cpu")),
        ("gem_parallel", ("plan", "explain", "synthetic")),
    ],
)
def test_one_line_and_its_exit_code(package: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text(INTERRUPTED)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-c", "from gem_train.cli import command; command()", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gem: error: interrupted\n")


def test_the_library_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, gem_train\nassert 'torch' not in sys.modules\n"
        "from gem_train import Trainer, data\nassert data.Batch and gem_train.Trainer is Trainer\n"
        "assert set(gem_train.__all__) <= set(dir(gem_train))\n"
        "try:\n    gem_train.Trainr\nexcept AttributeError as error:\n    assert 'Trainr' in str(error)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
