"""Runner of the benchmarks: providers timed in turn on a cold cache, one JSON row each.

A benchmark names providers (functions that do the same work), what the work costs, and calls ``compare``. Ratios within
one call are what to quote: providers alternate, so a clock that drifts or a power limit meets all of them alike.
"""

from __future__ import annotations

import datetime
import functools
import json
import platform
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """Other work that is timed in turn with the providers, so that rates can be quoted as ratios to its rate."""

    name: str
    function: Callable[[], object]
    flops: int


def matmul_base(device: torch.device, size: int = 8192) -> Base:
    """The library's bfloat16 matmul of ``size`` cubed: what the device reaches under its power limit."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return Base(name=f"matmul bfloat16 {size}", function=lambda: a @ b, flops=2 * size**3)


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


def compare(
    work: Work,
    providers: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    warmup: int = 3,
    repeats: int = 30,
    base: Base | str | None = None,
    **extra: Any,
) -> list[dict[str, Any]]:
    """Time the providers of one piece of work and write one JSON line each to stdout; returns the rows.

    ``ratio`` of a row is how many times as fast it is as ``ratio_to``: its GB/s over those of a device copy, or over
    ``base``, which is other work (TFLOP/s over its TFLOP/s) or the name of a provider.
    """
    rows = []
    functions = dict(providers) | ({base.name: base.function} if isinstance(base, Base) else {})
    timings = measure(functions, device=device, warmup=warmup, repeats=repeats)
    name_of_base, ratio = _base(work, timings, base, device)
    where = environment(device)
    for name, timing in timings.items():
        row = {
            "op": work.op,
            "direction": work.direction,
            "shape": work.shape,
            "provider": name,
            "dtype": str(work.dtype).removeprefix("torch."),
            "ms": round(timing.median, 4),
            "tflops": round(work.flops / timing.median / 1e9, 4),
            "gbps": round(work.num_bytes / timing.median / 1e6, 1),
            "ratio": round(ratio(timing), 4),
            "ratio_to": name_of_base,
            "gpu": where["device"],
            "torch": where["torch"],
            "triton": where["triton"],
            "commit": where["commit"],
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "driver": where["driver"],
            "ms_p20": round(timing.p20, 4),
            "ms_p80": round(timing.p80, 4),
            "peak_mib": None if timing.peak_mib is None else round(timing.peak_mib, 1),
            **extra,
        }
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        rows.append(row)
    return rows
