"""What need not be installed."""

from __future__ import annotations

import functools
import importlib.util

__all__ = ["has_triton"]


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed, which only Linux has; torch's operators do without it, with more launches."""
    return importlib.util.find_spec("triton") is not None
