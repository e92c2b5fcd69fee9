"""Whether the ops are right on this machine, and their kernels compiled before a job needs them."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from gem_kernels._src.conformance.cases import ConformanceCase, default_cases, load_cases
from gem_kernels._src.conformance.run import measure
from gem_kernels._src.conformance.warm import rank_of, warm

_HEADER = f"{'op':17} {'dtype':9} {'sizes':45} {'tensor':12} {'error':>9} {'allowed':>9}"


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_check(cases: Sequence[ConformanceCase], device: torch.device) -> int:
    """Run the cases, write a row per tensor, return how many tensors were wrong or could not be computed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU kernels"
    _write(f"gem_kernels on {name}, torch {torch.__version__}\n{_HEADER}")
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
            _write(f"{head} {row.tensor:12} {row.error:9.2e} {row.bound:9.2e}{verdict}")
    _write(f"{total - failed} of {total} tensors within their bounds")
    return failed


def run_warm(cases: Sequence[ConformanceCase], timeout: float) -> None:
    """Warm Triton's cache for this process's current GPU and write the hash and name of every kernel."""
    rank = rank_of(os.environ)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    kernels, waited = warm(cases, device, rank=rank, timeout=timeout)
    digest = hashlib.sha256("".join(kernel.hash for kernel in kernels).encode()).hexdigest()[:16]
    if rank == 0:
        for kernel in kernels:
            _write(f"{kernel.hash} {kernel.name}")
    _write(f"rank {rank}: {len(kernels)} kernels, digest {digest}, waited {waited:.1f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gem_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
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
        "warm", help="compile the kernels of some cases into Triton's cache: rank 0 compiles, other ranks wait and read"
    )
    ahead.add_argument("--shapes", type=Path, metavar="FILE", required=True, help="JSON list of cases, as of `check`")
    ahead.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of a rank that waits")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 if a result is wrong or a rank waited in vain; argparse exits with 2 for wrong arguments."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    on_gpu = parsed.command == "warm" or parsed.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        what = "warm" if parsed.command == "warm" else "check --device cuda"
        parser.error(f"{what} needs a CUDA device, found none; check --device cpu runs without one")
    try:
        cases = load_cases(parsed.shapes) if parsed.shapes else default_cases(torch.device(parsed.device))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if parsed.command == "check":
        return 1 if run_check(cases, torch.device(parsed.device)) else 0
    try:
        run_warm(cases, parsed.timeout)
    except TimeoutError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
