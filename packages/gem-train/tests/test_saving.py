"""What a trainer makes sure of before it saves, and what saving leaves behind."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_train.checkpoint import Checkpointer
from gem_train.config import TrainerConfig
from gem_train.data import EventLog, EventSource
from gem_train.errors import NonFiniteError
from gem_train.trainer import Trainer


class NoTables:
    def state_dict(self) -> dict[str, Tensor]:
        return {}


def test_the_guard_has_seen_the_last_step_before_it_is_saved(
    toy_log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the guard reports one step late: without waiting for it, that step's weights would be published."""
    checkpointer = Checkpointer(tmp_path)
    trainer = Trainer(
        TrainerConfig(),
        model=nn.Linear(2, 1),
        embeddings=NoTables(),  # type: ignore[arg-type]
        sparse_learning_rate=0.1,
        train_source=EventSource(toy_log, global_batch_size=8),
        total_steps=9,
        tasks=("good",),
        checkpointer=checkpointer,
    )
    trainer.step = 4

    def check(step: int, *, wait: bool = False) -> None:
        if (step, wait) == (3, True):
            raise NonFiniteError("step 3 is not finite")

    monkeypatch.setattr(trainer._train_step.guard, "check", check)
    with pytest.raises(NonFiniteError):
        trainer.save()
    assert checkpointer.steps() == ()
    monkeypatch.setattr(trainer._train_step.guard, "check", lambda *_, **__: None)
    trainer.save()
    assert checkpointer.steps() == (4,)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the memory of this process from /proc")
def test_saving_again_and_again_takes_no_more_memory(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {f"model.{k}": torch.zeros(2**18) for k in range(4)}
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    saved = sum(tensor.nbytes for tensor in tensors.values())
    for step in range(4):
        checkpointer.save(step, tensors, {})
    before = resident_bytes()
    for step in range(4, 24):
        checkpointer.save(step, tensors, {})
    # One copy kept of each of the twenty would be 80 MiB.
    assert resident_bytes() - before < 4 * saved
