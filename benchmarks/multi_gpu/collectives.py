"""Bandwidth of all-gather, reduce-scatter and all-to-all by size, and what a bf16 matmul beside each loses."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gem_parallel.collectives import Collectives, choose_collectives, group_status
from multi_gpu.launch import Rank

__all__ = ["run"]

OPS = ("all_gather", "reduce_scatter", "all_to_all")
Call = Callable[[bool], Any]
"""Start a collective. The argument is async_op: without it the current stream waits, with it the result has a wait."""
NUM_MATMULS = 8
REPEATS = 3
COVER = 4.0
"""Time of the collectives beside matmuls over that of the matmuls, so that they end last."""


def run(rank: Rank, engines: Sequence[str], mib: Sequence[float], beside_mib: Sequence[float], matmul: int) -> None:
    """Measure engines one after the other; a row for each engine, operation and size.

    Args:
        rank: This process.
        engines: Names as of ``choose_collectives``, the one to be trusted first.
        mib: Sizes of the whole tensor: what an all-gather gives, and what the two others take.
        beside_mib: Those of them at which the matmul is measured, too.
        matmul: Width of the square matmul.
    """
    group = dist.new_group(backend="nccl" if rank.device.type == "cuda" else "gloo")
    status = group_status(group)
    left, right = (torch.randn(matmul, matmul, dtype=torch.bfloat16, device=rank.device) for _ in range(2))
    output = torch.empty_like(left)

    def matmuls() -> None:
        for _ in range(NUM_MATMULS):
            torch.mm(left, right, out=output)

    for name in engines:
        if not status[name].available:
            for op in OPS:
                rank.row(name=op, engine=name, status="unavailable", reason=f"{name}: {status[name].reason}")
            rank.say(f"{name}: {status[name].reason}")
            continue
        engine = choose_collectives(group, name)  # type: ignore[arg-type]
        for op in OPS:
            if op == "all_to_all" and name == "symm_mem_low_contention":
                rank.row(name=op, engine=name, status="unavailable", reason=f"{name} has no all-to-all")
                continue
            for size in mib:
                if not rank.has_seconds(5.0):
                    rank.row(name=op, engine=name, mib=size, status="skipped", reason="the part's time is over")
                    continue
                beside = matmuls if size in beside_mib else None
                if not rank.attempt(
                    partial(_keep, rank, group, engine, op, size, beside), name=op, engine=name, mib=size
                ):
                    break


def _keep(
    rank: Rank, group: dist.ProcessGroup, engine: Collectives, op: str, mib: float, matmuls: Callable[[], None] | None
) -> None:
    """Measure, and write the row."""
    values = _measure(rank, group, engine, op, mib, matmuls)
    rank.row(name=op, engine=engine.name, mib=mib, status="ok", **values)
    slowdown = f", matmul {values['matmul_slowdown']:.3f}x" if matmuls is not None else ""
    rank.say(f"{engine.name} {op} {mib:g} MiB: {values['bus_gb_per_s']:.1f} GB/s{slowdown}")


def _measure(
    rank: Rank, group: dist.ProcessGroup, engine: Collectives, op: str, mib: float, matmuls: Callable[[], None] | None
) -> dict[str, Any]:
    num_bytes = int(mib * 2**20) // (2 * rank.size) * 2 * rank.size
    call = _make_call(rank, group, engine, op, num_bytes // 2)
    calls = 20 if mib <= 8 else 10 if mib <= 64 else 5
    for _ in range(2):
        call(False)
    found = []
    for _ in range(REPEATS):
        rank.barrier()
        found.append(_milliseconds(rank, lambda: [call(False) for _ in range(calls)]) / calls)
    each = rank.reduce(statistics.median(found))[0]
    rate = num_bytes / each / 1e6
    values: dict[str, Any] = {
        "ms": each,
        "algorithm_gb_per_s": rate,
        # What a rank must send or receive: its own part stays.
        "bus_gb_per_s": rate * (rank.size - 1) / rank.size,
    }
    if matmuls is None:
        return values
    _milliseconds(rank, matmuls)
    alone, beside, covered = [], [], True
    for _ in range(REPEATS):
        rank.barrier()
        alone.append(_milliseconds(rank, matmuls))
        rounds = min(2000, math.ceil(COVER * rank.reduce(alone[-1])[0] / each) + 1)
        rank.barrier()
        spent, over = _beside(rank, call, matmuls, rounds)
        beside.append(spent)
        covered = covered and over
    slowdown = statistics.median(beside) / statistics.median(alone)
    return values | {
        "matmul_ms": statistics.median(alone) / NUM_MATMULS,
        "matmul_slowdown": rank.reduce(slowdown)[0],
        "covered": rank.reduce(float(covered), op=dist.ReduceOp.MIN)[0] == 1.0,
    }


def _make_call(rank: Rank, group: dist.ProcessGroup, engine: Collectives, op: str, elements: int) -> Call:
    """A collective on buffers of its own; ``elements`` in the whole tensor."""
    part = elements // rank.size
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": rank.device}
    if op == "all_gather":
        sent = torch.ones(part, **options)
        received = engine.allocate((elements,), **options)
        return lambda async_op: engine.all_gather(received, sent, group, async_op=async_op)
    if op == "reduce_scatter":
        sent, received = torch.ones(elements, **options), torch.empty(part, **options)
        return lambda async_op: engine.reduce_scatter(received, sent, group, async_op=async_op)
    sent, received = engine.allocate((elements,), **options), engine.allocate((elements,), **options)
    sent.fill_(1.0)
    if engine.name == "nccl_zero_cta":
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        for buffer in (sent, received):
            memory.rendezvous(buffer, group.group_name)

    def exchange(async_op: bool) -> Any:
        # On NCCL's own stream: copy engines do not serve the default stream.
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        assert work is not None
        return work if async_op else work.wait()

    return exchange


def _milliseconds(rank: Rank, function: Callable[[], Any]) -> float:
    if rank.device.type != "cuda":
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    torch.cuda.synchronize(rank.device)
    return float(first.elapsed_time(last))


def _beside(rank: Rank, call: Call, matmuls: Callable[[], None], rounds: int) -> tuple[float, bool]:
    """(milliseconds of the matmuls while the collective runs again and again, it ran until their end)."""
    if rank.device.type != "cuda":
        works = [call(True) for _ in range(rounds)]
        spent = _milliseconds(rank, matmuls)
        covered = not works[-1].is_completed()
        for work in works:
            work.wait()
        return spent, covered
    side = torch.cuda.Stream(rank.device)
    side.wait_stream(torch.cuda.current_stream(rank.device))
    first, last, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    with torch.cuda.stream(side):
        for _ in range(rounds):
            call(False)
        end.record()
    first.record()
    matmuls()
    last.record()
    torch.cuda.synchronize(rank.device)
    return float(first.elapsed_time(last)), last.elapsed_time(end) >= 0
