"""The command `gem`."""

from gem_train.cli.main import main

__all__ = ["main"]
