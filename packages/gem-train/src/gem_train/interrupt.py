"""Ctrl-C while modules are imported, which takes seconds: one line, and no traceback through other packages."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["INTERRUPTED", "ends_at_once"]

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


@contextmanager
def ends_at_once() -> Iterator[None]:
    """SIGINT within ends the process, which has done nothing yet: modules can turn an exception into another error."""
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as of a script's background job
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"gem: error: interrupted\n")
    os._exit(INTERRUPTED)
