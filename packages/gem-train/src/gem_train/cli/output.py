"""Where the command line writes: results to standard output, everything else to standard error."""

import os
import signal
import sys

__all__ = ["complain", "say"]


def say(text: str) -> None:
    """Writes a result.

    Args:
        text: One or more lines.
    """
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. What the interpreter flushes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def complain(text: str) -> None:
    """Writes an error or a note.

    Args:
        text: One or more lines.
    """
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
