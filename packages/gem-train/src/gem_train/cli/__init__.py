"""The command `gem`."""

from gem_train.cli.main import command, main

__all__ = ["command", "main"]
