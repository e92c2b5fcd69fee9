"""Where the command line writes: results to standard output, everything else to standard error."""

import os
import signal
import sys
from pathlib import Path

__all__ = ["complain", "say", "unwritable"]


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


def unwritable(path: Path) -> str | None:
    """Why a file cannot be written, before the work that it is to hold; None if it can.

    Args:
        path: The file. One that exists stays as it is, and none is left where none was.
    """
    try:
        # Opened, as permissions do not tell: nobody, root included, makes a file in /proc.
        new = not os.path.lexists(path)
        if not new and not path.is_file():
            return "it is there and no file"
        with path.open("xb" if new else "ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None
