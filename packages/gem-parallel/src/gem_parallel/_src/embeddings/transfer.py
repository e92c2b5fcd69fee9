"""Small integers between host and device, without a wait."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

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
        on_cuda = device.type == "cuda"
        self._host = torch.empty((), dtype=torch.int64, pin_memory=on_cuda)
        self.event = torch.cuda.Event() if on_cuda else None

    def send(self, number: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Start the copy of an int64 scalar on the current stream, which is ``stream``; ``event`` follows it."""
        self._host.copy_(number, non_blocking=True)
        if self.event is not None:
            self.event.record(stream)

    def read(self) -> int:
        """Wait for the copy."""
        if self.event is not None:
            self.event.synchronize()
        return int(self._host)
