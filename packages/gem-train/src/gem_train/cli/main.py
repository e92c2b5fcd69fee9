"""Arguments of the command `gem`, and how its errors are shown."""

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from gem_train._version import __version__
from gem_train.cli.output import complain
from gem_train.cli.parser import Parser
from gem_train.cli.plan_arguments import add_plan
from gem_train.config import PRECISIONS
from gem_train.errors import CheckpointError, NonFiniteError
from gem_train.interrupt import INTERRUPTED
from gem_train.launch import exit_worker, is_worker, joined, report_worker_error, select_device

__all__ = ["build_parser", "command", "main"]

USER_ERROR = 2
"""Exit code when the user can correct something."""
FAILURE = 1
"""Exit code when the run itself failed."""


def command() -> NoReturn:
    """The program `gem`: `main` with the arguments of the process, and the end of the process."""
    code = main()
    if is_worker() or joined():
        exit_worker(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; those of the process if not given.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 something to correct, 124 a step did not end, 130
        interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with_traceback = "--traceback" in arguments
    # Told to those who load a log in Python; `gem train` says it in a line of its own.
    warnings.filterwarnings("ignore", message="all .* training labels of", category=UserWarning)
    try:
        args = build_parser().parse_args(arguments)
        args.argv = arguments
        if argv is None:
            _wait_passively(args)
        return int(args.run(args))
    except KeyboardInterrupt:
        # The first of several processes writes where the launcher does, and the others to files.
        complain("gem: error: interrupted" + ("\n" + traceback.format_exc() if with_traceback else ""))
        return INTERRUPTED
    except ModuleNotFoundError as error:
        remedy = "pip install 'gem-train[recipes]'" if (error.name or "").startswith("gem_") else "run `gem doctor`"
        return _fail(f"the package {error.name} is not installed; {remedy}", USER_ERROR, with_traceback)
    except NonFiniteError as error:
        return _fail(str(error), FAILURE, with_traceback)
    except (ValueError, CheckpointError, OSError) as error:
        return _fail(str(error), USER_ERROR, with_traceback)
    except Exception as error:
        if report_worker_error(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"):
            return FAILURE
        raise


def _wait_passively(args: argparse.Namespace) -> None:
    """Starts this process anew with OMP_WAIT_POLICY=PASSIVE, for commands that compute on the CPU (Linux).

    GNU OpenMP's threads spin while they wait. On cores shared with other programs, as on most CI machines, each
    parallel region then waits for a time slice of a spinning thread, and a step takes up to a hundred times as long.
    The library reads the variable when it is loaded, before this line can run.
    """
    computes = getattr(args, "device", None) is not None and getattr(args, "nproc", 1) == 1
    if sys.platform != "linux" or not computes or is_worker() or "OMP_WAIT_POLICY" in os.environ:
        return
    if select_device(args.device).type == "cpu":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})


def _fail(message: str, code: int, with_traceback: bool) -> int:
    if with_traceback:
        message += "\n" + traceback.format_exc()
    if not report_worker_error(message):
        complain(f"gem: error: {message}")
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all sub-commands."""
    parser: argparse.ArgumentParser = Parser(prog="gem", description="Train and evaluate ranking models.")
    parser.add_argument("--version", action="version", version=f"gem-train {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)
    _add_report(commands)
    _add_recipes(commands)
    _add_doctor(commands)
    add_plan(commands)
    return parser


Commands = argparse._SubParsersAction  # the type has no public name


def _command(
    commands: "Commands[argparse.ArgumentParser]", name: str, text: str, details: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=f"{text}\n\n{details}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    return parser


def _add_train(commands: "Commands[argparse.ArgumentParser]") -> None:
    from gem_train.cli.train import run

    parser = _command(
        commands,
        "train",
        "Train a recipe; scores, checkpoints and a report go to the run's directory.",
        "examples:\n"
        "  gem train synthetic\n"
        "  gem train ml-latest-small --out runs/demo\n"
        "  gem train ml-latest-small --precision mxfp8 --compare runs/demo\n"
        "  gem train ml-latest-small --set trainer.learning_rate=1e-3 --set model.num_layers=1 \\\n"
        "      --set model.sequences.history.self_attention=window\n"
        "  gem train ml-latest-small --nproc 2          (or: torchrun --nproc-per-node 2 -m gem_train.cli train ...)\n"
        "  gem train ml-latest-small --nproc 8 --dp-replicate 2 --ep 2 --sparse-replicate 2 \\\n"
        "      --set model.num_experts=2\n"
        "  gem train ml-latest-small --out runs/demo --resume",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe; `gem recipes` lists them")
    parser.add_argument("--data", metavar="DIR", help="directory of the data (default: that of the recipe)")
    parser.add_argument("--out", metavar="DIR", help="directory of the run (default: runs/RECIPE[-PRECISION])")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="precision of the dense layers (default: fp32)",
    )
    _add_layout(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    parser.add_argument("--steps", type=int, metavar="N", help="stop after N steps; same as trainer.max_steps")
    parser.add_argument("--seed", type=int, metavar="S", help="same as trainer.seed")
    parser.add_argument(
        "--compare",
        metavar="RUN_DIR",
        help="print another run's scores beside (default, below fp32: a finished fp32 run of the recipe with the same "
        "data and settings, in runs/RECIPE or beside --out; one of as many steps comes first)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="assignments",
        help="change a field of the recipe; `gem recipes RECIPE` lists them",
    )
    parser.set_defaults(run=run)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Processes, and how the run is spread over them."""
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="processes to start here (default: 1)")
    layout = parser.add_argument_group(
        "layout",
        "dp-replicate * dp-shard * ep and sparse-replicate * sparse-shard both are the number of processes; what is "
        "left out takes the rest",
    )
    for option, what in (
        ("--dp-replicate", "groups that hold equal copies of the dense parameters"),
        ("--dp-shard", "processes that share the dense parameters"),
        ("--ep", "processes that hold different experts (model.num_experts)"),
        ("--sparse-replicate", "copies of the tables"),
        ("--sparse-shard", "processes that share a copy of the tables"),
    ):
        layout.add_argument(option, type=int, metavar="N", help=what)


def _add_eval(commands: "Commands[argparse.ArgumentParser]") -> None:
    from gem_train.cli.evaluate import run

    parser = _command(commands, "eval", "Score the checkpoint of a run, on any number of processes.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="(default: test)")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    parser.add_argument("--data", metavar="DIR", help="directory of the data (default: that of the run)")
    _add_layout(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    parser.add_argument("--json", action="store_true", help="print the scores as one line of JSON")
    parser.set_defaults(run=run)


def _add_report(commands: "Commands[argparse.ArgumentParser]") -> None:
    from gem_train.cli.info import run_report

    parser = _command(commands, "report", "Write report.html of a run again, one self-contained page.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    parser.add_argument(
        "--compare", metavar="RUN_DIR", action="append", default=[], help="set another run beside; may be repeated"
    )
    parser.set_defaults(run=run_report)


def _add_recipes(commands: "Commands[argparse.ArgumentParser]") -> None:
    from gem_train.cli.info import run_recipes

    parser = _command(commands, "recipes", "List the recipes, or the fields of one.")
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="name of a recipe")
    parser.add_argument("--data", metavar="DIR", help="directory of its data (default: that of the recipe)")
    parser.set_defaults(run=run_recipes)


def _add_doctor(commands: "Commands[argparse.ArgumentParser]") -> None:
    from gem_train.cli.info import run_doctor

    parser = _command(
        commands, "doctor", "Say what works here, what does not and why.", "exit code: 0 if a run on the CPU works."
    )
    parser.set_defaults(run=run_doctor)
