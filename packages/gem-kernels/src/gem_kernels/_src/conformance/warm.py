"""Tune and compile the kernels of given cases ahead of a job whose ranks share Triton's cache: rank 0, others read.

A file in the cache, the marker, says that the kernels of a list of cases are there, and which choices of
configurations they are of. It goes when the cache goes.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gem_kernels._src.conformance.cases import ConformanceCase
from gem_kernels._src.conformance.ranks import compare, forget_digests, number_in
from gem_kernels._src.conformance.run import make_problem, run_op
from gem_kernels._src.conformance.tune import tune_in_a_process
from gem_kernels._src.tuning.choices import Choice, MadeFor, StaleError, digest, read, write_whole
from gem_kernels._src.tuning.state import asking, forget, made_for, table, tuning_path
from gem_kernels._version import __version__

DEFAULTS = "default configurations"
"""What a marker says where nothing is tuned."""
_POLL_SECONDS = 0.2


class CompiledKernel(NamedTuple):
    """One compiled variant."""

    hash: str
    """Triton's key of it: of the source, the options, the GPU and the compiler."""
    name: str


class Warmed(NamedTuple):
    """What a rank has after warming."""

    kernels: list[CompiledKernel]
    choices: list[Choice]
    """Of those kernels, from the tuning file."""
    waited: float
    """Seconds for rank 0."""
    digest: str
    """Hash of the kernels and of the choices in the file: equal on all ranks."""


def marker_path(cache: Path, cases: Sequence[ConformanceCase], versions: Sequence[str]) -> Path:
    """The file that says that the kernels of ``cases`` are in the cache, for these versions and this GPU."""
    text = "\n".join([*versions, *map(repr, cases)])
    return cache / f"gem_kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.warm"


def in_turn(
    run: Callable[[], None],
    marker: Path,
    rank: int,
    *,
    timeout: float,
    state: Callable[[], str | None] = lambda: "",
) -> float:
    """Run on rank 0 first, then on the others; returns the seconds that this rank waited.

    ``state`` says what the kernels depend on. A marker with another state is an old one, and where it says None there
    can be no marker yet.

    Raises:
        TimeoutError: if rank 0 has not finished after ``timeout`` seconds.
    """
    start = time.monotonic()
    while rank != 0 and not is_ready(marker, state, rank):
        if time.monotonic() - start > timeout:
            raise TimeoutError(
                f"warm: rank {rank} waited {timeout:.0f} s for rank 0 to write {marker.name} in {marker.parent}; all "
                "ranks must share Triton's cache (TRITON_CACHE_DIR), GEM_KERNELS_TUNING and the list of cases."
            )
        time.sleep(_POLL_SECONDS)
    waited = time.monotonic() - start
    run()
    if rank == 0:
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_whole(marker, state() or "")
    return waited


def is_ready(marker: Path, state: Callable[[], str | None], rank: int) -> bool:
    """Whether there is a marker of the present state.

    A rank that takes the defaults has no state to wait for: if rank 0 tunes, comparing the digests says so.
    """
    # First: a damaged tuning file ends the waiting too.
    expected = state()
    try:
        text = marker.read_text()
    except FileNotFoundError:
        return False
    return text == expected or (rank != 0 and expected == DEFAULTS)


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


def choices_state(path: Path | None, here: MadeFor, *, tunes: bool) -> str | None:
    """What the marker says of the choices: none, or their hash; None where rank 0 is yet to write them."""
    if path is None:
        return DEFAULTS
    try:
        if path.exists():
            return f"choices {digest(read(path, here))}"
    except StaleError:
        pass
    return None if tunes else DEFAULTS


def warm(
    cases: Sequence[ConformanceCase],
    device: torch.device,
    *,
    rank: int,
    timeout: float,
    environment: Mapping[str, str],
    tunes: bool = True,
) -> Warmed:
    """Tune and compile the kernels of ``cases`` or read them from the cache; compare what the ranks have.

    Without ``tunes`` choices that are there still hold.

    Raises:
        RanksDifferError: if a rank has other kernels or choices than rank 0.
        TimeoutError: if a rank waited in vain.
        TuningError: if tuning fails.
        ValueError: if the tuning file is damaged.
    """
    import triton

    torch.cuda.set_device(device)
    here = made_for(device)
    marker = marker_path(Path(triton.knobs.cache.dir), cases, (__version__, torch.__version__, *map(str, here)))
    path = tuning_path()

    def state() -> str | None:
        return choices_state(path, here, tunes=tunes)

    choices: list[Choice] = []
    forget_digests(marker, str(rank))

    def run() -> None:
        if rank == 0 and not is_ready(marker, state, rank):
            # The others wait for the marker: what they have written is of an earlier job.
            forget_digests(marker, "*")
            if tunes and path is not None:
                tune_in_a_process(path, cases, device)
        forget()
        with asking() as asked:
            run_cases(cases, device)
        choices.extend(table()[key] for key in sorted(asked) if key in table())

    waited = in_turn(run, marker, rank, timeout=timeout, state=state)
    kernels = compiled_kernels()
    text = digest(table()) + "".join(kernel.hash for kernel in kernels)
    total = hashlib.sha256(text.encode()).hexdigest()[:16]
    compare(total, marker, rank, world_size=number_in(environment, "WORLD_SIZE"), timeout=timeout)
    return Warmed(kernels, choices, waited, total)
