"""A sharded step of ShardedEmbeddings over several ranks, by grid, placement and wire; JSON lines, then a table.

    torchrun --nproc-per-node=4 benchmarks/bench_embeddings_ranks.py [--device cpu|cuda] [--steps 20] [--batch 2048]

Each row is one layout: milliseconds of exchange, lookup and backward with the fused optimizer, median and 20th / 80th
percentile over interleaved steps of the slowest rank in each step; bytes that rank 0 put into collectives in one step;
peak memory of rank 0 (CUDA). The ratio is to one copy, tables by rows, float32 on the wire.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from gem_parallel import FeatureConfig, ParallelDims, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

warnings.simplefilter("ignore")

NUM_TABLES, NUM_ROWS, DIM, IDS_PER_BAG = 8, 100_000, 64, 10


@dataclass(frozen=True, kw_only=True)
class Layout:
    name: str
    replicas: int = 1
    placement: str = "row_wise"
    wire_dtype: torch.dtype = torch.float32
    gather: str = "tables"


def layouts(world_size: int) -> list[Layout]:
    found = [Layout(name="rows")]
    found += [Layout(name=f"rows, {dtype}".replace("torch.", ""), wire_dtype=dtype) for dtype in NARROW]
    found += [Layout(name=placement, placement=placement) for placement in ("table_wise", "column_wise", "replicated")]
    replicas = 2
    while world_size % replicas == 0 and replicas <= world_size:
        found.append(Layout(name=f"rows, {replicas} copies", replicas=replicas))
        found.append(Layout(name=f"rows, {replicas} copies by row", replicas=replicas, gather="rows"))
        replicas *= 2
    return found


NARROW = (torch.bfloat16, torch.float8_e4m3fn)


def make_ids(rank: int, batch: int, device: torch.device) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """This rank's samples; ids follow a power law, as ids do."""
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for index in range(NUM_TABLES):
        uniform = torch.rand(batch * IDS_PER_BAG, generator=generator, dtype=torch.float64)
        values = (NUM_ROWS**uniform - 1).long().clamp(0, NUM_ROWS - 1)
        found[f"t{index}"] = (values.to(device), (torch.arange(batch + 1) * IDS_PER_BAG).to(device))
    return found


class SentBytes:
    """Adds up what this rank puts into collectives."""

    NAMES = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")

    def __enter__(self) -> SentBytes:
        self.total = 0
        self._originals = {name: getattr(dist, name) for name in self.NAMES}
        for name, original in self._originals.items():
            setattr(dist, name, self._counted(name, original))
        return self

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensor = arguments[0] if name == "all_reduce" else arguments[1]
            self.total += tensor.numel() * tensor.element_size()
            return original(*arguments, **options)

        return call

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)


def make_step(layout: Layout, batch: int, device: torch.device) -> Callable[[], list[float]]:
    dims = ParallelDims.for_world(dist.get_world_size(), sparse_replicate=layout.replicas)
    names = [f"t{index}" for index in range(NUM_TABLES)]
    module = ShardedEmbeddings(
        [TableConfig(name=name, num_rows=NUM_ROWS, dim=DIM, placement=layout.placement) for name in names],
        [FeatureConfig(name=name, table=name) for name in names],
        optimizer=SparseOptimizerConfig(),
        mesh=dims.build_mesh(device.type).sparse,
        device=device,
        wire_dtype=layout.wire_dtype,
        gather=layout.gather,
    )
    ids = make_ids(dist.get_rank(), batch, device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    def step() -> list[float]:
        dist.barrier()
        times = [now()]
        pending = module.exchange(ids)
        times.append(now())
        outputs = list(module.lookup(pending).values())
        times.append(now())
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        times.append(now())
        return [end - start for start, end in pairwise(times)]

    return step


def spread(samples: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(samples, n=5)
    return {"median": statistics.median(samples), "p20": quantiles[0], "p80": quantiles[3]}


def measure(layout: Layout, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = make_step(layout, options.batch, device)
    for _ in range(2):
        step()
    with SentBytes() as sent:
        step()
    samples = torch.tensor([step() for _ in range(options.steps)], dtype=torch.float64, device=device)
    dist.all_reduce(samples, op=dist.ReduceOp.MAX)
    columns = dict(zip(("exchange", "lookup", "backward"), samples.cpu().t().tolist(), strict=True))
    columns["total"] = samples.sum(1).tolist()
    return {
        "op": "embeddings_ranks",
        "layout": layout.name,
        "ranks": dist.get_world_size(),
        "batch": options.batch,
        "ids": options.batch * IDS_PER_BAG * NUM_TABLES,
        "ms": {name: spread(values) for name, values in columns.items()},
        "bytes_sent": sent.total,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2048, help="samples per rank and step")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rows = [measure(layout, options, device) for layout in layouts(dist.get_world_size())]
    if dist.get_rank() == 0:
        base = rows[0]["ms"]["total"]["median"]
        for row in rows:
            print(json.dumps({**row, "ratio": row["ms"]["total"]["median"] / base}))
        print(
            f"\n{'layout':<24}{'exchange':>10}{'lookup':>10}{'backward':>10}{'total ms':>10}{'MB sent':>9}{'ratio':>7}"
        )
        for row in rows:
            medians = [row["ms"][part]["median"] for part in ("exchange", "lookup", "backward", "total")]
            text = "".join(f"{value:>10.2f}" for value in medians)
            print(f"{row['layout']:<24}{text}{row['bytes_sent'] / 1e6:>9.1f}{medians[3] / base:>7.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
