"""The pytest plugin of the GPU lane, tried without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder, source, *arguments, **variables):
    """Pytest with the plugin on one file of tests, in a process of its own."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    sm100: needs Blackwell\n")
    (folder / "test_it.py").write_text(source)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "CUDA", "GEM"))}
    env |= {"PYTHONPATH": str(ROOT / ".ci"), **variables}
    command = [sys.executable, "-m", "pytest", "-p", "gpu_lane", "-q", *arguments, str(folder)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("marks", "code"), [("", 1), ("@pytest.mark.sm100\n", 0)])
def test_a_skip_fails_unless_it_waits_for_blackwell(tmp_path, marks, code):
    source = f"import pytest\n\n{marks}def test_skipped():\n    pytest.skip('no such device')\n"
    done = run(tmp_path, source)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("no such device" in done.stdout) == bool(code)


DEVICES = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(8))
def test_device(number):
    pathlib.Path(f"{os.environ['PYTEST_XDIST_WORKER']}.txt").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
"""


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("2,GPU-5f", {"gw0": "2", "gw1": "GPU-5f", "gw2": "2"}),
        ("7", dict.fromkeys(("gw0", "gw1", "gw2"), "7")),
        ("", dict.fromkeys(("gw0", "gw1", "gw2"), "all")),
    ],
)
def test_processes_take_the_gpus_in_turn(tmp_path, devices, expected):
    pytest.importorskip("xdist")
    done = run(tmp_path, DEVICES, "-n", "3", "-p", "no:benchmark", GEM_GPU_LANE_DEVICES=devices)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem: path.read_text() for path in tmp_path.glob("gw*.txt")} == expected
