"""The example trains on 1 and on 8 processes, on all five axes at once, to the same curve and the same weights."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gem_train import Checkpointer

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "same_curve.py"
STEPS = 4
LIMIT_S = 240


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("same_curve", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of its four runs."""
    out = tmp_path_factory.mktemp("example") / "runs"
    command = [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("from 1-process, bound 1e-06") == 3
    return out


def records(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "train"]


def weights(run: Path) -> dict[str, Tensor]:
    """Dense parameters, tables and moments at the end, read by one process."""
    checkpointer = Checkpointer(run / "checkpoints")
    metadata = FileSystemReader(checkpointer.path(STEPS)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checkpointer.load(STEPS, tensors)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("model.", "embeddings."))}


def test_eight_processes_follow_the_curve_of_one_and_take_over_from_it(example: Path) -> None:
    losses = {
        name: {r["step"]: r["loss"] for r in records(example / name)}
        for name in ("1-process", "8-processes", "8-then-1", "1-then-8")
    }
    reference = losses["1-process"]
    assert list(reference) == [1, 2, 3, 4]
    assert len(set(reference.values())) == STEPS
    assert losses["8-processes"] == pytest.approx(reference, rel=1e-6)
    second_half = {step: loss for step, loss in reference.items() if step > STEPS // 2}
    for name in ("8-then-1", "1-then-8"):
        assert losses[name] == pytest.approx(second_half, rel=1e-6)
    assert (example / "curves.svg").stat().st_size > 5_000


def test_the_weights_are_the_same_experts_and_tables_included(example: Path) -> None:
    ours, theirs = weights(example / "8-processes"), weights(example / "1-process")
    assert ours.keys() == theirs.keys()
    experts = {name.split(".experts.")[1].split(".")[0] for name in ours if ".experts." in name}
    assert experts == {"0", "1"}
    assert any(name.startswith("embeddings.tables.item.") for name in ours)
    differs = 0
    for name, expected in theirs.items():
        assert ours[name].shape == expected.shape, name
        distance = (ours[name].double() - expected.double()).norm()
        # Biases whose gradient is zero up to rounding have no scale of their own.
        assert distance <= 2e-6 * expected.double().norm() + 1e-8, name
        differs += int(distance > 0)
    assert differs, "sums in another order leave something: equal bits would be one run compared with itself"


def test_the_records_say_how_even_the_ranks_are(example: Path) -> None:
    for record in records(example / "8-processes"):
        balance = record["balance"]
        assert balance["mode"] == "exchange"
        assert 1.0 <= balance["ratio"] < balance["ratio_as_read"]
        assert 0 <= balance["heaviest_rank"] < 8
        assert balance["dearest"][0]["lengths"]["history"] > 0
    assert all(record["balance"] is None for record in records(example / "1-process"))


def test_a_lost_sample_is_far_above_the_bound() -> None:
    example = load_example()
    right = {1: 0.7, 2: 0.69}
    assert example.difference(right, right) == 0.0
    assert example.difference({2: 0.69 * (1 - 1 / 64)}, right) > 1000 * example.BOUND
    with pytest.raises(ValueError, match="must have the same steps, got"):
        example.difference({1: 0.7}, right)
