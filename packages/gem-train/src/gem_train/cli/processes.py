"""What `gem train` and `gem eval` share: starting processes, and the layout over them."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from gem_train.cli.output import complain
from gem_train.errors import ConfigError
from gem_train.interrupt import INTERRUPTED
from gem_train.launch import is_worker, run_workers

if TYPE_CHECKING:
    from gem_parallel import ParallelDims

__all__ = ["describe_layout", "layout_assignments", "num_processes", "start"]

LAYOUT = ("dp_replicate", "dp_shard", "ep", "sparse_replicate", "sparse_shard")


def num_processes(args: argparse.Namespace) -> int:
    """Processes of the run that this process starts or belongs to.

    Args:
        args: Parsed arguments.

    Raises:
        ConfigError: if --nproc < 1.
    """
    if args.nproc < 1:
        raise ConfigError(f"--nproc: must be >= 1, got {args.nproc}; give a number of processes")
    return int(os.environ["WORLD_SIZE"]) if is_worker() else int(args.nproc)


def layout_assignments(args: argparse.Namespace) -> dict[str, str]:
    """Field of the recipe -> text, of the degrees that the user gave.

    Args:
        args: Parsed arguments.
    """
    given = ((f"parallel.{name}", getattr(args, name)) for name in LAYOUT)
    return {name: str(degree) for name, degree in given if degree is not None}


def start(args: argparse.Namespace) -> int:
    """Runs the command as several processes, which find themselves to be workers.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    error = run_workers([sys.executable, "-m", "gem_train.cli", *args.argv], args.nproc)
    if error is None:
        return 0
    if error.exit_code != INTERRUPTED:
        complain(f"gem: error: {error.message}")
    return error.exit_code


def describe_layout(dims: "ParallelDims") -> str:
    """The axes in one line.

    Args:
        dims: The degrees.
    """
    return ", ".join(f"{name} {getattr(dims, name)}" for name in LAYOUT)
