"""Whether the ops are right on this machine, and their kernels tuned and compiled before a job needs them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from gem_kernels._src.conformance.cases import ConformanceCase, default_cases, load_cases
from gem_kernels._src.conformance.ranks import RanksDifferError, number_in
from gem_kernels._src.conformance.run import measure
from gem_kernels._src.conformance.tune import TuningError
from gem_kernels._src.conformance.warm import warm
from gem_kernels._src.tuning.choices import Choice
from gem_kernels._version import __version__

_HEADER = f"{'op':17} {'dtype':9} {'sizes':45} {'tensor':14} {'error':>9} {'allowed':>9}"


_CHOICES_HEADER = (
    f"{'op':17} {'kernel':14} {'dtype':9} {'sizes':12} {'lengths':11} default ms  chosen ms   gain  chosen"
)


class _Parser(argparse.ArgumentParser):
    """Errors show the usage of the command that they are of, and end with what to do."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, which leaves what a command does not know to the parser of all commands."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End the program with an error of its arguments."""
        self.refuse(f"{message}; `{self.prog} --help` lists what there is")

    def refuse(self, message: str) -> NoReturn:
        """End the program with an error that says what to do."""
        super().error(message)


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _compiler() -> str:
    """Versions of Triton and of the assembler that it runs: both have had releases that compute wrong numbers."""
    import triton

    from gem_kernels._src.attention.hopper.launch import has_tested_gluon

    own = ""
    if torch.cuda.get_device_capability() == (9, 0):
        own = ", Hopper's own kernels" if has_tested_gluon() else ", portable kernels: Hopper's need Triton 3.6"
    return f", Triton {triton.__version__}, ptxas {triton.knobs.nvidia.ptxas.version}{own}"


def run_check(cases: Sequence[ConformanceCase], device: torch.device) -> int:
    """Run the cases, write a row per tensor, return how many tensors were wrong or could not be computed."""
    on_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_cuda else "CPU kernels"
    _write(f"gem_kernels {__version__} on {name}, torch {torch.__version__}{_compiler() if on_cuda else ''}\n{_HEADER}")
    failed = total = 0
    for case in cases:
        head = f"{case.op:17} {case.dtype:9} {case.label:45}"
        try:
            rows = measure(case, device)
        except (RuntimeError, TypeError, ValueError) as error:
            failed, total = failed + 1, total + 1
            _write(f"{head} FAILED {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        for row in rows:
            failed, total = failed + (not row.passed), total + 1
            verdict = "" if row.passed else "  FAILED"
            _write(f"{head} {row.tensor:14} {row.error:9.2e} {row.bound:9.2e}{verdict}")
    _write(f"{total - failed} of {total} tensors within their bounds")
    return failed


def choice_row(choice: Choice) -> str:
    """What was chosen for a kernel, in a row of the table."""
    key = choice.key
    is_default = dict(choice.config) == dict(choice.default)
    config = "default" if is_default else ", ".join(f"{name} {value}" for name, value in choice.config.items())
    gain = 1 - choice.ms / choice.default_ms if choice.default_ms > 0 else 0.0
    head = f"{key.op:17} {key.kernel:14} {key.dtype:9} {key.sizes:12} {key.shape:11}"
    return f"{head} {choice.default_ms:10.4f} {choice.ms:10.4f} {gain:6.1%}  {config}"


def run_warm(cases: Sequence[ConformanceCase], timeout: float, *, tunes: bool) -> None:
    """Warm Triton's cache for this process's GPU; rank 0 writes what was chosen and every kernel, all their hash."""
    rank = number_in(os.environ, "RANK") or 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    warmed = warm(cases, device, rank=rank, timeout=timeout, environment=os.environ, tunes=tunes)
    if rank == 0:
        if warmed.choices:
            _write(_CHOICES_HEADER)
        for choice in warmed.choices:
            _write(choice_row(choice))
        for kernel in warmed.kernels:
            _write(f"{kernel.hash} {kernel.name}")
    _write(
        f"rank {rank}: {len(warmed.kernels)} kernels, {len(warmed.choices)} choices, digest {warmed.digest}, "
        f"waited {warmed.waited:.1f} s"
    )


def _parser() -> _Parser:
    parser = _Parser(prog="python -m gem_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check", help="every attention op and linear layer, with gradients, against the float64 reference"
    )
    check.add_argument("--shapes", type=Path, metavar="FILE", help="JSON list of cases in place of the built-in one")
    check.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: the GPU if there is one",
    )
    ahead = commands.add_parser(
        "warm",
        help="time configurations of the kernels of some cases, choose, and compile into Triton's cache: rank 0 does, "
        "the others wait and read",
    )
    ahead.add_argument("--shapes", type=Path, metavar="FILE", required=True, help="JSON list of cases, as of `check`")
    ahead.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of a rank that waits")
    ahead.add_argument(
        "--no-tune", action="store_true", help="only compile: with choices that are there, or the defaults"
    )
    for command in (check, ahead):
        command.set_defaults(parser=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if a result is wrong, a rank waited in vain or ranks differ; 2 for wrong arguments."""
    parsed = _parser().parse_args(arguments)
    parser: _Parser = parsed.parser
    on_gpu = parsed.command == "warm" or parsed.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        what = "warm" if parsed.command == "warm" else "check --device cuda"
        parser.refuse(f"{what} needs a CUDA device, found none; check --device cpu runs without one")
    try:
        cases = load_cases(parsed.shapes) if parsed.shapes else default_cases(torch.device(parsed.device))
    except ValueError as error:
        parser.refuse(str(error))
    if parsed.command == "check":
        return 1 if run_check(cases, torch.device(parsed.device)) else 0
    try:
        run_warm(cases, parsed.timeout, tunes=not parsed.no_tune)
    except (TimeoutError, RanksDifferError, TuningError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
