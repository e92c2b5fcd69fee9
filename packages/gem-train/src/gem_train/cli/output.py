"""Where the command line writes: results to standard output, everything else to standard error."""

import sys

__all__ = ["complain", "say"]


def say(text: str) -> None:
    """Writes a result.

    Args:
        text: One or more lines.
    """
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Writes an error or a note.

    Args:
        text: One or more lines.
    """
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
