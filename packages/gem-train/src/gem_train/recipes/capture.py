"""Whether a run's steps take parts of the model from CUDA graphs, and the first batch that they are captured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    def __init__(self, model: RankingModel, num_samples: int, *, required: bool = False) -> None:
        """Binds the model; nothing is captured yet.

        Args:
            model: On one GPU, converted, not sharded.
            num_samples: Of a full step. Smaller batches, such as the last of an epoch, run without graphs.
            required: Refuse to train without graphs where the device has no memory for them.
        """
        self.say: Callable[[str], object] = print
        """Told if the device has no memory for the graphs and the run goes on without."""
        self._model = model
        self._num_samples = num_samples
        self._required = required
        self._is_done = False

    def __call__(self, batch: Any, embeddings: Mapping[str, Tensor]) -> None:
        """What a `Trainer` calls before the model in every training step.

        Args:
            batch: Of the step, on the device.
            embeddings: Its looked-up rows.

        Raises:
            ConfigError: if graphs are required and the device has no memory for them.
        """
        if self._is_done or batch.num_samples != self._num_samples:
            return
        self._is_done = True
        try:
            # A page-locked allocation of the reader's thread would break the capture, and be refused itself.
            with PINNING:
                capture_segments(self._model, batch, embeddings)
            return
        except torch.OutOfMemoryError as error:
            if self._required:
                raise ConfigError(
                    "--set trainer.capture=on: the device must have memory for the graphs, which keep the activations "
                    "of their parts between steps, and ran out of it; set trainer.capture=off, or a smaller "
                    "data.global_batch_size"
                ) from error
        # Here the error holds no tensor any more.
        torch.cuda.empty_cache()
        self.say(
            "CUDA graphs: off: the device ran out of memory for them; steps run without, as with trainer.capture=off"
        )


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
    capture = SegmentCapture(model, num_samples, required=config.trainer.capture == "on")
    return capture, f"on, in training steps of {num_samples:,} samples"
