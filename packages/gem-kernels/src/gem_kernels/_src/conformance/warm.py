"""Compile the kernels of given cases ahead of a job whose ranks share Triton's cache: rank 0 compiles, the others read.

A file in the cache says that the kernels of a list of cases are there. It goes when the cache goes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gem_kernels._src.conformance.cases import ConformanceCase
from gem_kernels._src.conformance.run import make_problem, run_op
from gem_kernels._version import __version__

_POLL_SECONDS = 0.2


class CompiledKernel(NamedTuple):
    """One compiled variant."""

    hash: str
    """Triton's key of it: of the source, the options, the GPU and the compiler."""
    name: str


def rank_of(environment: Mapping[str, str]) -> int:
    """Rank of this process as torchrun and most launchers give it; 0 outside a job."""
    value = environment.get("RANK", "0")
    if not value.isdigit():
        raise ValueError(f"warm: `RANK` must be a number, got {value!r}.")
    return int(value)


def marker_path(cache: Path, cases: Sequence[ConformanceCase], versions: Sequence[str]) -> Path:
    """The file that says that the kernels of ``cases`` are in the cache, for these versions and this GPU."""
    text = "\n".join([*versions, *map(repr, cases)])
    return cache / f"gem_kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.warm"


def in_turn(run: Callable[[], None], marker: Path, rank: int, *, timeout: float) -> float:
    """Run on rank 0 first, then on the others; returns the seconds that this rank waited.

    Raises:
        TimeoutError: if rank 0 has not finished after ``timeout`` seconds.
    """
    start = time.monotonic()
    while rank != 0 and not marker.exists():
        if time.monotonic() - start > timeout:
            raise TimeoutError(
                f"warm: rank {rank} waited {timeout:.0f} s for rank 0 to write {marker.name} in {marker.parent}; all "
                "ranks must share Triton's cache (TRITON_CACHE_DIR) and the list of cases."
            )
        time.sleep(_POLL_SECONDS)
    waited = time.monotonic() - start
    run()
    if rank == 0:
        marker.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place: a reader sees no file or a whole one.
        unfinished = marker.with_suffix(f".{os.getpid()}")
        unfinished.write_text("")
        unfinished.replace(marker)
    return waited


def run_cases(cases: Sequence[ConformanceCase], device: torch.device) -> None:
    """Forward and backward of every case, once."""
    for case in cases:
        run_op(case, make_problem(case, device))
    torch.cuda.synchronize(device)


def compiled_kernels() -> list[CompiledKernel]:
    """What the kernels of this package have compiled or read in this process, sorted."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("gem_kernels._src.")]
    functions = {id(x): x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)}
    found = {
        CompiledKernel(kernel.hash, function.__name__)
        for function in functions.values()
        for caches in function.device_caches.values()
        for kernel in caches[0].values()
    }
    return sorted(found, key=lambda kernel: (kernel.name, kernel.hash))


def warm(
    cases: Sequence[ConformanceCase], device: torch.device, *, rank: int, timeout: float
) -> tuple[list[CompiledKernel], float]:
    """Compile the kernels of ``cases`` or read them from the cache; what they are, and the seconds this rank waited."""
    import triton

    gpu = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    versions = (__version__, torch.__version__, triton.__version__, gpu)
    marker = marker_path(Path(triton.knobs.cache.dir), cases, versions)
    waited = in_turn(lambda: run_cases(cases, device), marker, rank, timeout=timeout)
    return compiled_kernels(), waited
