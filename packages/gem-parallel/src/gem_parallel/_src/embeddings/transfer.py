"""Small integers between host and device, without a wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DeviceVector", "Flag", "to_device"]


def to_device(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """int64 numbers of the host on ``device``; the host does not wait for the copy."""
    host = torch.as_tensor(numbers, dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class DeviceVector:
    """A small int64 vector on its way to the host; the copy does not block."""

    def __init__(self, vector: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if vector.device.type == "cpu":
            self._host = vector
            return
        self._host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        self._host.copy_(vector, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self, timeout_s: float | None = None) -> Tensor:
        """Wait for the copy and return the numbers, on the host.

        Raises:
            TimeoutError: the device did not come to the copy within ``timeout_s`` seconds.
        """
        if self._event is None:
            return self._host
        if timeout_s is None:
            self._event.synchronize()
        else:
            deadline = time.monotonic() + timeout_s
            while not self._event.query():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the device did not answer within {timeout_s:g} s")
                time.sleep(1e-4)
        return self._host


class Flag:
    """One number on its way to the host, again and again; the memory and the event are kept."""

    def __init__(self, device: torch.device) -> None:
        self._under_way = False
        self._pinned = device.type == "cuda"
        self.number = torch.zeros((), dtype=torch.int64, pin_memory=self._pinned)
        """In the host's memory, which a kernel may write, too."""
        self._shown = self.number.numpy()
        self._staged: tuple[Tensor, NDArray[np.int64]] | None = None
        self.event = torch.cuda.Event() if self._pinned else None

    def __del__(self) -> None:
        # Of a batch that nobody looked up: a kernel may still write.
        if self._under_way and self.event is not None:
            self.event.synchronize()

    def stage(self, count: int) -> tuple[Tensor, NDArray[np.int64]]:
        """Memory of the host that a kernel may read, and its first ``count`` int64; free once the number is read."""
        if self._staged is None or len(self._staged[1]) < count:
            tensor = torch.empty(2 * count, dtype=torch.int64, pin_memory=self._pinned)
            self._staged = tensor, tensor.numpy()
        tensor, numbers = self._staged
        return tensor, numbers[:count]

    def clear(self) -> None:
        """Set the number to 0."""
        self._shown[()] = 0

    def send(self, number: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Start the copy of an int64 scalar on the current stream, which is ``stream``; ``event`` follows it."""
        self.number.copy_(number, non_blocking=True)
        self.record(stream)

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """What writes the number was started on the current stream, which is ``stream``."""
        if self.event is not None:
            self.event.record(stream)
            self._under_way = True

    def read(self) -> int:
        """Wait for what was started."""
        if self.event is not None:
            self.event.synchronize()
            self._under_way = False
        return int(self._shown)
