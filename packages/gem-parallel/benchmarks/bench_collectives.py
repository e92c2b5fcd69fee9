"""Engines of collectives: bandwidth by size, and what a matmul beside them loses; JSON lines, then a table.

    torchrun --nproc-per-node N benchmarks/bench_collectives.py [--engine NAME ...] [--mib 1 16 256] [--steps 20]
    [--matmul 4096]

On CUDA with NCCL, one GPU per rank; without CUDA a smoke test on gloo with tiny sizes. `default` is always measured and
the others in the same run, interleaved; symmetric memory allows one of the two other engines per process, so run twice.

Each row is one (operation, engine, size): size is that of the whole tensor, output of an all-gather or input of a
reduce-scatter. Milliseconds are the median and 20th / 80th percentile over steps, of the slowest rank for the median;
GB/s is size * (ranks - 1) / ranks / time, what a rank must receive. `slowdown` is the time of the bf16 matmuls while
the collective runs again and again on another stream, over their time alone: 1.0 is a collective that takes no SM;
`ms_beside` is what one of those collectives takes.
NVLink multicast is off unless NCCL_NVLS_ENABLE and TORCH_SYMM_MEM_DISABLE_MULTICAST say otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gem_parallel.collectives import Collectives, choose_collectives, group_status, zero_cta_options

ENGINES = ("default", "nccl_zero_cta", "symm_mem_low_contention")
NUM_ROUNDS = 40
"""About how many collectives run beside the matmuls."""


class Clock:
    """Times work of the current stream, on CUDA by events."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def ms(self, function: Callable[[], object]) -> float:
        if not self.cuda:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)


def make_call(
    op: str, engine: Collectives, group: dist.ProcessGroup, num_bytes: int, device: torch.device
) -> Callable[[bool], Any]:
    """One collective on prepared bf16 buffers; the argument is async_op."""
    ranks = dist.get_world_size(group)
    part = max(num_bytes // 2 // ranks, 1)
    if op == "all_gather":
        tensor = torch.ones(part, dtype=torch.bfloat16, device=device)
        output = engine.allocate((ranks * part,), dtype=torch.bfloat16, device=device)
        return lambda async_op: engine.all_gather(output, tensor, group, async_op=async_op)
    tensor = torch.ones(ranks * part, dtype=torch.bfloat16, device=device)
    output = torch.empty(part, dtype=torch.bfloat16, device=device)
    return lambda async_op: engine.reduce_scatter(output, tensor, group, async_op=async_op)


def beside(call: Callable[[bool], Any], matmuls: Callable[[], None], rounds: int, clock: Clock) -> tuple[float, float]:
    """Milliseconds of the matmuls while collectives run all the time, and of one collective meanwhile."""
    if not clock.cuda:
        start = time.perf_counter()
        works = [call(True) for _ in range(min(rounds, 4))]
        found = clock.ms(matmuls)
        for work in works:
            work.wait()
        return found, (time.perf_counter() - start) * 1e3 / len(works)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    # Both streams start when the host has queued everything: it may need longer for a small collective than the GPU.
    torch.cuda.synchronize()
    host = time.perf_counter()
    call(False)
    host = time.perf_counter() - host
    torch.cuda._sleep(int(2e9 * (2 * rounds * host + 1e-3)))
    gate = main.record_event()
    side.wait_event(gate)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        first.record()
        for _ in range(rounds):
            call(False)
        last.record()
    found = clock.ms(matmuls)
    torch.cuda.synchronize()
    return found, first.elapsed_time(last) / rounds


def spread(samples: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(samples, n=5)
    return {"median": statistics.median(samples), "p20": quantiles[0], "p80": quantiles[3]}


def slowest(value: float, device: torch.device) -> float:
    number = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number)


def measure(
    names: Sequence[str], sizes: Sequence[int], steps: int, matmul: int, device: torch.device
) -> list[dict[str, Any]]:
    """Rows of all engines, operations and sizes; all ranks call it.

    Args:
        names: Engines besides the default.
        sizes: Bytes of the whole tensor.
        steps: Repetitions of each.
        matmul: Width of the square bf16 matmul.
        device: Of this rank.
    """
    clock = Clock(device)
    groups = dict.fromkeys(("default", *names), dist.group.WORLD)
    if "nccl_zero_cta" in groups:
        groups["nccl_zero_cta"] = dist.new_group(pg_options=zero_cta_options())
    engines = {name: choose_collectives(group, name) for name, group in groups.items()}
    left, right = (torch.randn(matmul, matmul, dtype=torch.bfloat16, device=device) for _ in range(2))

    def matmuls(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right)

    for _ in range(3):
        one = slowest(clock.ms(lambda: matmuls(1)), device)
    ranks, rows = dist.get_world_size(), []
    for op in ("all_gather", "reduce_scatter"):
        for size in sizes:
            calls = {name: make_call(op, engine, groups[name], size, device) for name, engine in engines.items()}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for step in range(steps + 3):
                for name, call in calls.items():
                    dist.barrier()
                    found = clock.ms(lambda call=call: call(False))
                    if step >= 3:
                        times[name].append(found)
            alone: dict[str, list[float]] = {name: [] for name in calls}
            together: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
            for name, call in calls.items():
                # From the slowest rank, so that all ranks do the same number of each.
                each = slowest(statistics.median(times[name]), device)
                count = min(max(round(NUM_ROUNDS * each / one), 1), 1000)
                rounds = math.ceil(1.5 * count * one / each) + 1
                for step in range(max(steps // 4, 2) + 1):
                    dist.barrier()
                    base = clock.ms(lambda count=count: matmuls(count))
                    dist.barrier()
                    found = beside(call, lambda count=count: matmuls(count), rounds, clock)
                    if step:
                        alone[name].append(base)
                        together[name].append(found)
            for name in calls:
                ms = spread(times[name])
                ms["median"] = slowest(ms["median"], device)
                rows.append(
                    {
                        "op": op,
                        "engine": name,
                        "bytes": size,
                        "ranks": ranks,
                        "ms": ms,
                        "gb_per_s": size * (ranks - 1) / ranks / ms["median"] / 1e6,
                        "matmul": matmul,
                        "matmul_ms": statistics.median(alone[name]),
                        "slowdown": statistics.median(found for found, _ in together[name])
                        / statistics.median(alone[name]),
                        "ms_beside": statistics.median(each for _, each in together[name]),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--engine", choices=ENGINES[1:], action="append", default=[], help="besides the default")
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 256] if cuda else [0.01, 0.1])
    parser.add_argument("--steps", type=int, default=20 if cuda else 4)
    parser.add_argument("--matmul", type=int, default=4096 if cuda else 128)
    options = parser.parse_args()
    if len(options.engine) > 1:
        parser.error("symmetric memory serves one engine per process; give --engine once and run again")
    # Multicast belongs to all users of a host's NVLink switch: only by an explicit setting.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    status = group_status(dist.group.WORLD)
    rows = measure(options.engine, [int(size * 2**20) for size in options.mib], options.steps, options.matmul, device)
    if dist.get_rank() == 0:
        about = {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        }
        for row in rows:
            print(json.dumps(row | about))
        for each in status.values():
            print(f"{each.feature}: {'can be used' if each.available else 'cannot be used'}, {each.reason}")
        print(f"\n{'op':<16}{'engine':<26}{'MiB':>9}{'ms':>10}{'GB/s':>9}{'slowdown':>10}")
        for row in rows:
            print(
                f"{row['op']:<16}{row['engine']:<26}{row['bytes'] / 2**20:>9.2f}{row['ms']['median']:>10.3f}"
                f"{row['gb_per_s']:>9.2f}{row['slowdown']:>10.3f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
