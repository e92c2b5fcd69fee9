"""Runner of the benchmarks: providers timed in turn, one JSON row each.

A benchmark names providers (functions that do the same work), what the work costs, and calls ``compare``. Ratios within
one call are what to quote: providers alternate, so a clock that drifts or a power limit meets all of them alike.

Two ways of timing. ``measure``: single calls on a cold cache, with a pause before each: what a call costs by itself.
``measure_rounds``: no pause anywhere: what a GPU keeps up under its power limit, and no time of the host.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FLUSH_BYTES = 256 * 2**20
"""Written between two timed calls: more than the L2 cache of any GPU."""
_FLUSHES = 8
"""Half a millisecond on an H200: the host enqueues a call meanwhile, so that the device's time alone is measured."""
_COPY_BYTES = 2**30
_REST_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one call of every provider does."""

    op: str
    direction: str
    """"forward" or "backward"."""
    shape: str
    """Name of the shape, as in the benchmark's list."""
    dtype: torch.dtype
    flops: int
    """Floating point operations, from true lengths; 0 if not a matmul."""
    num_bytes: int
    """Bytes that must be read and written at least once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Milliseconds of one call."""

    median: float
    p20: float
    p80: float
    peak_mib: float | None
    """Largest memory allocated during a call, inputs included; None on the CPU."""
    mhz: float | None = None
    """Median clock of the multiprocessors meanwhile; None on the CPU and where it was not read."""
    captured: bool = False
    """Whether the calls were replayed from a CUDA graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Other work that is timed in turn with the providers, so that rates can be quoted as ratios to its rate."""

    name: str
    function: Callable[[], object]
    flops: int
    num_bytes: int = 0


def matmul_base(device: torch.device, size: int = 8192) -> Base:
    """The library's bfloat16 matmul of ``size`` cubed: what the device reaches under its power limit."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return Base(name=f"matmul bfloat16 {size}", function=lambda: a @ b, flops=2 * size**3, num_bytes=3 * 2 * size**2)


def _time_once(function: Callable[[], object], flush: torch.Tensor | None) -> float:
    """Milliseconds of one call, by events on CUDA and by the wall clock on the CPU."""
    if flush is None:
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_FLUSHES):
        flush.zero_()
    first.record()
    function()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def _peak_mib(function: Callable[[], object]) -> float:
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def measure(
    providers: Mapping[str, Callable[[], object]], *, device: torch.device, warmup: int = 3, repeats: int = 30
) -> dict[str, Timing]:
    """Time every provider ``repeats`` times, in turn."""
    on_cuda = device.type == "cuda"
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if on_cuda else None
    peaks = {}
    for name, function in providers.items():
        for _ in range(warmup):
            function()
        peaks[name] = _peak_mib(function) if on_cuda else None
    times: dict[str, list[float]] = {name: [] for name in providers}
    for _ in range(repeats):
        for name, function in providers.items():
            times[name].append(_time_once(function, flush))
    result = {}
    for name, values in times.items():
        ordered = sorted(values)
        low, high = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
        result[name] = Timing(median=statistics.median(ordered), p20=low, p80=high, peak_mib=peaks[name])
    return result


def _capture(function: Callable[[], object], calls: int = 1) -> torch.cuda.CUDAGraph | None:
    """A graph of some calls; None where they cannot be captured, which is printed, or on the default stream."""
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin()
        try:
            for _ in range(calls):
                function()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        sys.stdout.write(f"# not captured: {str(error).splitlines()[0]}\n")
        return None
    return graph


class _Slice:
    """The calls of one provider in one round: as many launches, of some calls each."""

    def __init__(self, function: Callable[[], object], launches: int, calls: int, device: torch.device) -> None:
        self.calls = launches * calls
        if device.type != "cuda":
            start = time.perf_counter()
            for _ in range(launches):
                function()
            self._seconds = time.perf_counter() - start
            return
        # Imported here: Triton is absent where only the CPU kernels are used.
        from gem_kernels.testing.clock import stamp

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = stamp(device)
        first.record()
        for _ in range(launches):
            function()
        last.record()
        self._events, self._stamps = (first, last), (before, stamp(device))

    def read(self, device: torch.device) -> tuple[float, float | None]:
        """Milliseconds of a call, and the clock; the device has been waited for."""
        if device.type != "cuda":
            return 1e3 * self._seconds / self.calls, None
        from gem_kernels.testing.clock import megahertz

        return self._events[0].elapsed_time(self._events[1]) / self.calls, megahertz(*self._stamps)


def measure_rounds(
    providers: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    warmup: int = 2,
    repeats: int = 9,
    slice_ms: float = 5.0,
    seed: int = 0,
) -> dict[str, Timing]:
    """Time the providers in ``repeats`` rounds without a pause, each round in another random order.

    In a round, a provider is called again and again for about ``slice_ms``, once at least. On CUDA the calls are one
    graph where they can be captured and the current stream is not the default one, so that none waits for the launch
    of another; the caches are cold where the work is larger than they are.
    """
    on_cuda = device.type == "cuda"
    functions, launches, peaks = {}, {}, {}
    calls_of_launch = dict.fromkeys(providers, 1)
    for name, function in providers.items():
        for _ in range(warmup):
            function()
        peaks[name] = _peak_mib(function) if on_cuda else None
        graph = _capture(function) if on_cuda else None
        functions[name] = function if graph is None else graph.replay
        once = _time_once(functions[name], torch.empty(1, device=device) if on_cuda else None)
        launches[name] = max(1, round(slice_ms / once))
        whole = None if graph is None or launches[name] == 1 else _capture(function, launches[name])
        if whole is not None:
            functions[name], calls_of_launch[name], launches[name] = whole.replay, launches[name], 1
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in providers}
    for i in range(repeats):
        order = list(functions)
        random.Random(seed + i).shuffle(order)
        # Not timed: the device is busy while the host issues what follows.
        functions[order[-1]]()
        slices = {name: _Slice(functions[name], launches[name], calls_of_launch[name], device) for name in order}
        if on_cuda:
            torch.cuda.synchronize()
        for name, piece in slices.items():
            found[name].append(piece.read(device))
    result = {}
    for name, pieces in found.items():
        ordered = sorted(ms for ms, _ in pieces)
        clocks = [mhz for _, mhz in pieces if mhz is not None]
        result[name] = Timing(
            median=statistics.median(ordered),
            p20=ordered[len(ordered) // 5],
            p80=ordered[-1 - len(ordered) // 5],
            peak_mib=peaks[name],
            mhz=statistics.median(clocks) if clocks else None,
            captured=functions[name] is not providers[name],
        )
    return result


@functools.cache
def time_alone(base: Base, device: torch.device) -> float:
    """Milliseconds of one call of other work on a device that has rested: its fastest clock."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    _time_once(base.function, flush)
    times = []
    for _ in range(3):
        time.sleep(_REST_SECONDS)
        times.append(_time_once(base.function, flush))
    return min(times)


@functools.cache
def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read plus bytes written per second of a large device copy, in GB/s: the base of memory-bound ops."""
    num_bytes = _COPY_BYTES if device.type == "cuda" else _COPY_BYTES // 16
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure({"copy": lambda: target.copy_(source)}, device=device, repeats=10)["copy"]
    return 2 * num_bytes / timing.median / 1e6


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


@functools.cache
def environment(device: torch.device) -> dict[str, str | None]:
    """What a row was measured on."""
    on_cuda = device.type == "cuda"
    try:
        import triton
    except ImportError:
        triton_version = None
    else:
        triton_version = triton.__version__
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else platform.processor() or platform.machine(),
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_cuda else None,
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": _output_of("git", "rev-parse", "--short", "HEAD"),
    }


def _base(
    work: Work, timings: dict[str, Timing], base: Base | str | None, device: torch.device
) -> tuple[str, Callable[[Timing], float]]:
    """What rows are compared with, and the ratio of a timing to it; other work leaves ``timings``."""
    if base is None:
        rate = copy_gb_per_s(device)
        return "device copy", lambda timing: work.num_bytes / timing.median / 1e6 / rate
    if isinstance(base, str):
        milliseconds = timings[base].median
        return base, lambda timing: milliseconds / timing.median
    rate = base.flops / timings.pop(base.name).median
    return base.name, lambda timing: work.flops / timing.median / rate


def _row(
    work: Work, provider: str, timing: Timing, ratio: float, ratio_to: str, device: torch.device
) -> dict[str, Any]:
    where = environment(device)
    clock = {} if timing.mhz is None else {"mhz": round(timing.mhz), "captured": timing.captured}
    return {
        "op": work.op,
        "direction": work.direction,
        "shape": work.shape,
        "provider": provider,
        "dtype": str(work.dtype).removeprefix("torch."),
        "ms": round(timing.median, 4),
        "tflops": round(work.flops / timing.median / 1e9, 4),
        "gbps": round(work.num_bytes / timing.median / 1e6, 1),
        "ratio": round(ratio, 4),
        "ratio_to": ratio_to,
        "gpu": where["device"],
        "torch": where["torch"],
        "triton": where["triton"],
        "commit": where["commit"],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "driver": where["driver"],
        "ms_p20": round(timing.p20, 4),
        "ms_p80": round(timing.p80, 4),
        "peak_mib": None if timing.peak_mib is None else round(timing.peak_mib, 1),
        **clock,
    }


def _base_rows(work: Work, base: Base, timing: Timing, alone: float, device: torch.device) -> list[dict[str, Any]]:
    """Rows of the other work itself: between the providers, and alone."""
    itself = dataclasses.replace(work, flops=base.flops, num_bytes=base.num_bytes)
    rested = Timing(median=alone, p20=alone, p80=alone, peak_mib=None)
    return [
        _row(itself, base.name, timing, 1.0, base.name, device),
        _row(itself, f"{base.name}, alone", rested, timing.median / alone, base.name, device),
    ]


def compare(
    work: Work,
    providers: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    warmup: int = 3,
    repeats: int = 30,
    base: Base | str | None = None,
    in_rounds: bool = False,
    **extra: Any,
) -> list[dict[str, Any]]:
    """Time the providers of one piece of work and write one JSON line each to stdout; returns the rows.

    ``ratio`` of a row is how many times as fast it is as ``ratio_to``: its GB/s over those of a device copy, or over
    ``base``, which is other work (TFLOP/s over its TFLOP/s) or the name of a provider. ``in_rounds`` takes
    ``measure_rounds`` in place of ``measure``, and other work then has two rows of its own: in the rounds, and alone
    on a device that has rested before.
    """
    functions = dict(providers) | ({base.name: base.function} if isinstance(base, Base) else {})
    alone = time_alone(base, device) if in_rounds and isinstance(base, Base) else None
    timings = (measure_rounds if in_rounds else measure)(functions, device=device, warmup=warmup, repeats=repeats)
    of_base = timings.get(base.name) if isinstance(base, Base) else None
    name_of_base, ratio = _base(work, timings, base, device)
    rows = [_row(work, name, timing, ratio(timing), name_of_base, device) for name, timing in timings.items()]
    if isinstance(base, Base) and of_base is not None and alone is not None:
        rows += _base_rows(work, base, of_base, alone, device)
    for row in rows:
        row.update(extra)
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    return rows
