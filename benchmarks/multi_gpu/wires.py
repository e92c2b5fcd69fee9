"""Parameters on the wire: what FSDP's all-gather takes with and without one, what it carries, and a training step.

A unit of square matrices is gathered alone, with nothing beside it: cast of the shard, encode, all-gather, decode. The
same bits must lie on every rank, and be those of one process that rounds the whole matrix.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gem_parallel import ParallelDims, ParallelMesh, ParallelPlan, parallelize
from gem_parallel.collectives import choose_collectives
from gem_precision import MXFP8Wire
from multi_gpu.launch import Rank
from multi_gpu.scaling import Bench, Variant
from multi_gpu.workload import Rows

__all__ = ["run"]

WIRES = {"none": None, "mxfp8": MXFP8Wire(), "mxfp8 32x32": MXFP8Wire(block_shape=(32, 32))}
WARM_UP, REPEATS = 3, 12


def run(rank: Rank, mib: Sequence[float], columns: int, model: dict[str, Any]) -> None:
    """Measure gathers, then steps.

    Args:
        rank: This process.
        mib: Sizes of a unit's parameters in bfloat16.
        columns: Width of its square matrices.
        model: Arguments of ``scaling.run``.
    """
    mesh = ParallelDims.for_world(rank.size).build_mesh(rank.device.type)
    for dtype in (torch.bfloat16, torch.float32):
        for size in mib:
            for name in WIRES:
                about = {"name": name, "mib": size, "dtype": str(dtype).removeprefix("torch.")}
                rank.attempt(partial(_gather, rank, mesh, size, columns, dtype, about), **about)
    bench: list[Bench] = []
    model = {**model, "rows": Rows(item=model["item_rows"])}
    for name in ("item_rows", "every", "only", "captured", "trace"):
        model.pop(name, None)
    rank.attempt(lambda: bench.append(Bench(rank, **model)), name="step")
    for name, variant in {"base": Variant(), "mxfp8": Variant(param_wire="mxfp8"), "base again": Variant()}.items():
        if bench and rank.has_seconds(5.0):
            rank.attempt(partial(bench[0].several, f"step, {name}", variant), name=f"step, {name}")


class _Unit(nn.Module):
    def __init__(self, num: int, columns: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        with device:
            self.layers = nn.ModuleList([nn.Linear(columns, columns, bias=False) for _ in range(num)])


def _gather(
    rank: Rank, mesh: ParallelMesh, mib: float, columns: int, dtype: torch.dtype, about: dict[str, Any]
) -> None:
    """A row for one form and size."""
    wire = WIRES[about["name"]]
    unit = _Unit(max(1, round(mib * 2**19 / columns**2)), columns, rank.device)
    whole = [layer.weight.detach().to(dtype, copy=True) for layer in unit.layers]
    elements = sum(each.numel() for each in whole)
    parallelize(unit, ParallelPlan(shard_units=(), param_dtype=dtype, param_wire=wire), mesh)
    unit.unshard()
    read = [layer.weight.detach().clone() for layer in unit.layers]
    unit.reshard()
    expected = whole if wire is None else [wire.round(each) for each in whole]
    equal = all(torch.equal(*pair) for pair in zip(read, expected, strict=True))
    # The operators that define the format, on the CPU.
    first = whole[0].cpu()
    equal_cpu = torch.equal(read[0].cpu(), first if wire is None else wire.round(first))
    sums = [float(each.view(torch.uint8).to(torch.int64).sum()) for each in read]
    same = rank.reduce(*sums) == rank.reduce(*sums, op=dist.ReduceOp.MIN)
    del read, expected

    def gather() -> None:
        unit.unshard()
        unit.reshard()

    # The parts, each alone.
    shard = torch.cat(whole)[: elements // columns // rank.size].float()
    cast = shard.to(dtype)
    sent = cast if wire is None else wire.encode(cast)
    received = sent.new_empty(rank.size * sent.shape[0], sent.shape[1])
    group = mesh.fsdp.get_group()
    engine = choose_collectives(group, "default")
    parts: dict[str, Callable[[], object]] = {
        "cast_ms": lambda: shard.to(dtype),
        "all_gather_ms": lambda: engine.all_gather(received.view(-1), sent.view(-1), group),
    }
    del whole
    if wire is not None:
        parts["encode_ms"] = lambda: wire.encode(cast)
        parts["decode_ms"] = lambda: wire.decode(received, columns, dtype)
    times = {"gather_ms": _time(rank, gather), **{part: _time(rank, call) for part, call in parts.items()}}
    values = {"sent_mib": sent.numel() * sent.element_size() / 2**20, "ranks_equal": same}
    values |= {"equal_to_one_process": bool(rank.reduce(float(equal), op=dist.ReduceOp.MIN)[0])}
    values |= {"equal_to_the_cpu": bool(rank.reduce(float(equal_cpu), op=dist.ReduceOp.MIN)[0])}
    good = same and values["equal_to_one_process"] and values["equal_to_the_cpu"]
    rank.row(status="ok" if good else "fail", elements=elements, **about, **times, **values)
    shown = ", ".join(f"{part} {ms:.3f}" for part, ms in times.items())
    rank.say(f"{about}: {'equal' if good else 'NOT EQUAL'}, {values['sent_mib']:.1f} MiB sent, {shown}")


def _time(rank: Rank, call: Callable[[], object]) -> float:
    """Median milliseconds; the slowest rank's."""
    for _ in range(WARM_UP):
        call()
    rank.barrier()
    if rank.device.type != "cuda":
        return 0.0
    found = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        found.append((begin, end))
    rank.synchronize()
    return rank.reduce(statistics.median(begin.elapsed_time(end) for begin, end in found))[0]
