"""A bounded background thread around an iterator."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

PINNING = threading.Lock()
"""Held while a reader allocates page-locked memory, which CUDA forbids while graphs are captured: whoever captures
holds it, too."""


def prefetch(source: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Yields what `source` yields, made ahead by a thread.

    An exception of `source` is raised here, after the items that came before it. Closing the generator, or dropping
    it, stops the thread and waits for it.

    Args:
        source: What to run in the thread.
        depth: Items that may wait, at least 1.

    Yields:
        The items, in order.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(entry: tuple[T | None, BaseException | None, bool]) -> None:
        while not stop.is_set():
            try:
                ready.put(entry, timeout=0.1)  # wakes up to see `stop`: nobody may be taking any more
            except queue.Full:
                continue
            return

    def work() -> None:
        try:
            for item in source:
                put((item, None, False))
                if stop.is_set():
                    return
        except BaseException as error:  # reported where the items are consumed
            put((None, error, True))
        else:
            put((None, None, True))
        finally:
            source.close()

    thread = threading.Thread(target=work, name="gem-train-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error, is_last = ready.get()
            if error is not None:
                raise error
            if is_last:
                return
            yield item  # type: ignore[misc]  # an item of T; None only beside an error or the end
    finally:
        stop.set()
        thread.join()
