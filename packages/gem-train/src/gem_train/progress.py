"""What a person sees while a run trains: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import IO, Protocol

from tqdm import tqdm

__all__ = ["BarProgress", "LineProgress", "Progress", "SilentProgress", "make_progress"]


class Progress(Protocol):
    """Told of every step; decides itself when to speak."""

    def step(self, step: int) -> None:
        """A step is done."""

    def values(self, values: Mapping[str, float | None]) -> None:
        """The newest loss, NE and so on."""

    def say(self, text: str) -> None:
        """Prints a line that stays."""

    def close(self) -> None:
        """The run is over."""


class SilentProgress:
    """Says nothing: for the ranks after the first, and for tests."""

    def step(self, step: int) -> None:
        """Ignores the step."""

    def values(self, values: Mapping[str, float | None]) -> None:
        """Ignores the values."""

    def say(self, text: str) -> None:
        """Ignores the line."""

    def close(self) -> None:
        """Does nothing."""


class BarProgress:
    """A tqdm bar with the newest values, for a terminal."""

    def __init__(self, total: int, start: int, stream: IO[str]) -> None:
        self._bar = tqdm(total=total, initial=start, unit="step", file=stream, dynamic_ncols=True, mininterval=0.2)

    def step(self, step: int) -> None:
        """Moves the bar."""
        self._bar.update(step - self._bar.n)

    def values(self, values: Mapping[str, float | None]) -> None:
        """Shows the values behind the bar."""
        self._bar.set_postfix_str(_format(values), refresh=False)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._bar.write(text, file=self._bar.fp)

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()


class LineProgress:
    """A plain line every few seconds, for logs and pipes."""

    def __init__(self, total: int, start: int, stream: IO[str], seconds: float = 5.0) -> None:
        self._total, self._start, self._stream, self._seconds = total, start, stream, seconds
        self._values: dict[str, float | None] = {}
        self._begin = self._last = time.monotonic()

    def step(self, step: int) -> None:
        """Prints a line if the last one is old enough."""
        now = time.monotonic()
        if now - self._last < self._seconds and step != self._total:
            return
        self._last = now
        left = (now - self._begin) / max(1, step - self._start) * max(0, self._total - step)
        # Before the first record there are no values.
        parts = (f"step {step}/{self._total}", _format(self._values), f"ETA {int(left) // 60}:{int(left) % 60:02d}")
        self.say("  ".join(part for part in parts if part))

    def values(self, values: Mapping[str, float | None]) -> None:
        """Keeps the values for the next line."""
        self._values = dict(values)

    def say(self, text: str) -> None:
        """Prints a line now."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Does nothing."""


def make_progress(total: int, start: int = 0, stream: IO[str] | None = None) -> Progress:
    """A bar if the stream is a terminal, lines otherwise.

    Args:
        total: Steps of the whole run.
        start: Steps done already.
        stream: Defaults to standard error.
    """
    stream = stream or sys.stderr
    return BarProgress(total, start, stream) if stream.isatty() else LineProgress(total, start, stream)


def _format(values: Mapping[str, float | None]) -> str:
    parts = []
    for name, value in values.items():
        if value is not None:
            parts.append(f"{name} {value:,.0f}" if abs(value) >= 100 else f"{name} {value:.4f}")
    return "  ".join(parts)
