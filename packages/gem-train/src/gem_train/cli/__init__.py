"""The command `gem`."""

from gem_train.interrupt import ends_at_once

with ends_at_once():
    from gem_train.cli.main import command, main

__all__ = ["command", "main"]
