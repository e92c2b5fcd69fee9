"""Whether a run's steps take parts of the model from CUDA graphs, and the first batch that they are captured on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gem_model import RankingModel, capture_segments
from gem_train.data.prefetch import PINNING
from gem_train.errors import ConfigError
from gem_train.recipes.recipe import RunConfig

__all__ = ["SegmentCapture", "capture_obstacle", "check_capture", "make_capture"]


def capture_obstacle(config: RunConfig, device: torch.device, num_processes: int) -> str | None:
    """Why no part of the model can be in CUDA graphs; None if parts can.

    Args:
        config: The settings.
        device: Of the processes.
        num_processes: Of the run.
    """
    if device.type != "cuda":
        return "they need a CUDA device, and the device is the CPU"
    if num_processes > 1:
        return (
            f"over {num_processes} processes dense parameters are gathered anew in every step, and a graph reads them "
            "at one address"
        )
    if config.parallel.dense_wire != "param_dtype":
        return (
            f"with parallel.dense_wire={config.parallel.dense_wire} dense parameters are gathered anew in every step, "
            "and a graph reads them at one address"
        )
    return None


def check_capture(config: RunConfig, device: torch.device, num_processes: int) -> None:
    """Refuses a run that must use CUDA graphs and cannot.

    Args:
        config: The settings.
        device: Of the processes.
        num_processes: Of the run.

    Raises:
        ConfigError: with the reason.
    """
    obstacle = capture_obstacle(config, device, num_processes)
    if config.trainer.capture == "on" and obstacle is not None:
        raise ConfigError(
            f"--set trainer.capture=on: CUDA graphs are not possible here: {obstacle}; set trainer.capture=auto, "
            "which uses them where they are"
        )


class SegmentCapture:
    """Captures the model's parts over samples in CUDA graphs, on the first batch of the size of a full step."""

    def __init__(self, model: RankingModel, num_samples: int) -> None:
        """Binds the model; nothing is captured yet.

        Args:
            model: On one GPU, converted, not sharded.
            num_samples: Of a full step. Smaller batches, such as the last of an epoch, run without graphs.
        """
        self._model = model
        self._num_samples = num_samples
        self._is_done = False

    def __call__(self, batch: Any, embeddings: Mapping[str, Tensor]) -> None:
        """What a `Trainer` calls before the model in every training step.

        Args:
            batch: Of the step, on the device.
            embeddings: Its looked-up rows.

        Raises:
            ConfigError: if the device has no memory for the graphs.
        """
        if self._is_done or batch.num_samples != self._num_samples:
            return
        try:
            # A page-locked allocation of the reader's thread would break the capture, and be refused itself.
            with PINNING:
                capture_segments(self._model, batch, embeddings)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "trainer.capture: the device must have memory for the graphs, which keep the activations of their "
                f"parts between steps, got out of memory ({str(error).partition('. ')[0]}); --set trainer.capture=off "
                "trains without, a smaller data.global_batch_size with less"
            ) from error
        self._is_done = True


def make_capture(
    config: RunConfig, model: nn.Module, device: torch.device, num_processes: int, num_samples: int
) -> tuple[SegmentCapture | None, str]:
    """What captures, if anything does, and whether steps use CUDA graphs, or why not, in one phrase.

    Args:
        config: The settings.
        model: On its device, converted.
        device: Of the processes.
        num_processes: Of the run.
        num_samples: Of a full step.

    Raises:
        ConfigError: as `check_capture`.
    """
    check_capture(config, device, num_processes)
    if config.trainer.capture == "off":
        return None, "off: trainer.capture=off"
    obstacle = capture_obstacle(config, device, num_processes)
    if obstacle is not None:
        return None, f"off: {obstacle}"
    assert isinstance(model, RankingModel)
    return SegmentCapture(model, num_samples), f"on, in training steps of {num_samples:,} samples"
