"""torch's symmetric memory: one backend per process, and no NVLink multicast that nobody asked for."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

__all__ = ["StreamWork", "keep_multicast_off", "use_backend"]


class StreamWork:
    """Result of an operation on another stream."""

    def __init__(self, event: torch.cuda.Event, tensors: tuple[Tensor, ...]) -> None:
        self._event = event
        # Freed earlier, their memory could be used by the caller's stream while copies still run.
        self._tensors: tuple[Tensor, ...] | None = tensors

    def wait(self) -> bool:
        """The current stream waits; the host does not."""
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = None
        return True


def keep_multicast_off() -> None:
    """Before NCCL or symmetric memory is set up: multicast only where the environment turns it on."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def use_backend(name: str) -> Any:
    """Torch's symmetric memory module, set to a backend.

    Raises:
        ValueError: memory of another backend was allocated before.
    """
    keep_multicast_off()
    memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    # Where a backend is torch's choice already, torch does not list it among those that may be set.
    if memory.get_backend("cuda") == name:
        return memory
    try:
        memory.set_backend(name)
    except RuntimeError as error:
        raise ValueError(
            f"choose_collectives: `engine` must use the symmetric memory backend that this process already uses, got "
            f"{name} ({error}); use one engine per process"
        ) from error
    return memory
