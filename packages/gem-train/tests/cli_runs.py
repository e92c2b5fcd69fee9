"""What the tests of the command line share: a quick run of the recipe `synthetic`, and how a run is read back."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gem_train.checkpoint import Checkpointer
from gem_train.cli import main
from gem_train.metrics_log import read_metrics

QUICK = (
    "--device", "cpu", "--set", "data.global_batch_size=32", "--set", "data.max_history=8",
    "--set", "data.eval_batch_size=4096", "--set", "trainer.log_interval=2",
)  # fmt: skip


def train(out: Path, *arguments: str, recipe: str = "synthetic", steps: int = 4) -> int:
    return main(["train", recipe, "--out", str(out), *QUICK, "--steps", str(steps), *arguments])


def read_checkpoint(directory: Path, step: int | None = None) -> dict[str, Tensor]:
    checkpointer = Checkpointer(directory / "checkpoints")
    step = checkpointer.latest() if step is None else step
    assert step is not None
    metadata = FileSystemReader(checkpointer.path(step)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checkpointer.load(step, tensors)
    return tensors


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(theirs[name])), name


def curve(directory: Path) -> list[dict[str, Any]]:
    """The records without what depends on the clock."""
    timed = ("seconds", "samples_per_second", "flops_per_second", "time", "mfu")
    records = [r for r in read_metrics(directory) if r["phase"] in ("train", "validation", "test")]
    return [{name: value for name, value in record.items() if name not in timed} for record in records]


def fingerprint(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
