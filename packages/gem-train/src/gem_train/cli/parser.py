"""The parser of `gem` and of each sub-command."""

import argparse
import difflib
from typing import Any, NoReturn

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """Errors show the usage of the sub-command that they are of, and end with what to do."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but a sub-command refuses what it does not know; argparse leaves that to `gem`.

        Args:
            args: The arguments.
            namespace: Where they go.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            nearest = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, 0.75)
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean {nearest[0]}" if nearest else "")
            )
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the program with an error.

        Args:
            message: What is wrong.
        """
        super().error(f"{message}; `{self.prog} --help` lists what there is")
