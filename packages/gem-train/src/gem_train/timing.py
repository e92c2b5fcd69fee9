"""Seconds spent in each phase of training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

__all__ = ["PHASES", "Phase", "PhaseTimer"]

Phase = Literal["data", "embedding", "forward", "backward", "optimizer", "checkpoint", "eval"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseTimer:
    """Accumulates seconds per phase.

    On the CPU every step is timed. On CUDA a host clock would time the launches and a synchronisation per step would
    slow the run down, so that the device phases are timed with events, in the steps for which `sample()` was called;
    the host phases (data, checkpoint, eval) are timed always.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._reported = dict(self.seconds)
        self._sampled_steps = 0
        self._cuda = device.type == "cuda"
        self._sampling = not self._cuda
        self._events: list[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = []

    def sample(self, on: bool) -> None:
        """Whether the device phases of the coming step are timed; always so on the CPU."""
        self._sampling = on or not self._cuda
        self._sampled_steps += on

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Times the block as part of a phase."""
        if self._cuda and phase not in ("data", "checkpoint", "eval"):
            if not self._sampling:
                yield
                return
            start: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            yield
            end.record()
            self._events.append((phase, start, end))
            return
        begin = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - begin

    def interval(self, steps: int) -> dict[str, float]:
        """Seconds by phase since the last call; waits for the device on CUDA, so call it at log steps only.

        Args:
            steps: Steps since the last call. On CUDA the sampled device phases are scaled up to all of them.

        Returns:
            Phase -> seconds, for the phases that occurred.
        """
        for phase, start, end in self._events:
            end.synchronize()
            self.seconds[phase] += start.elapsed_time(end) / 1000.0 * steps / max(1, self._sampled_steps)
        self._events.clear()
        self._sampled_steps = 0
        since = {phase: self.seconds[phase] - self._reported[phase] for phase in PHASES}
        self._reported = dict(self.seconds)
        return {phase: seconds for phase, seconds in since.items() if seconds > 0}
