"""Embedding tables against torchrec's on the CPU, on the same tables and batches, in one process and on gloo ranks.

    nox -s torchrec -- [--ranks 1 2] [--steps 20] [--batch 2048] [--shape NAME] [--placement NAME] [--optimizer KIND]
                       [--output ROWS.jsonl]

Each row is one (shape, placement, ranks, provider): milliseconds of forward (exchange of ids, lookup, rows home) and of
backward with the fused optimizer, on rank 0, median, 20th / 80th percentile and least over interleaved steps, and the
ratios of the medians and of the least to torchrec's: on a busy machine the least says more. Both get what their reader
would hand over, prepared outside the timed part: gem-parallel ids and offsets per feature, which it checks; torchrec
one KeyedJaggedTensor, which it does not. Ids follow a power law. torchrec's tables are its fused ones
(`compute_kernel="fused"`), one thread per process; that both give the same results is what tests/torchrec checks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torchrec_tables import KINDS, PROVIDERS, Bags, Case, start_rank

WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_tables: int
    num_rows: int
    dim: int
    ids_per_bag: int
    bags_per_sample: int = 1
    pooling: str = "sum"


SHAPES = {
    "context": Shape(num_tables=26, num_rows=100_000, dim=64, ids_per_bag=1),
    "multivalued": Shape(num_tables=8, num_rows=200_000, dim=64, ids_per_bag=20),
    "history": Shape(num_tables=3, num_rows=200_000, dim=64, ids_per_bag=1, bags_per_sample=50, pooling="none"),
}


def make_batch(case: Case, shape: Shape, samples: int, seed: int) -> dict[str, Bags]:
    generator = torch.Generator().manual_seed(seed)
    num_bags = samples * shape.bags_per_sample
    batch = {}
    for name in case.names:
        uniform = torch.rand(num_bags * shape.ids_per_bag, generator=generator, dtype=torch.float64)
        ids = (shape.num_rows**uniform - 1).long().clamp(0, shape.num_rows - 1)
        batch[name] = (ids, torch.full((num_bags,), shape.ids_per_bag))
    return batch


def measure(rank: int, ranks: int, folder: Path, cases: dict[tuple[str, str], Case], steps: int, batch: int) -> None:
    """Times of all cases; rank 0 writes them to ``folder``."""
    start_rank(rank, ranks, folder)
    found = {}
    for (shape_name, placement), case in cases.items():
        tables = {provider: make(case, ranks) for provider, make in PROVIDERS.items()}
        times: dict[str, list[tuple[float, float]]] = {provider: [] for provider in tables}
        for step in range(steps + WARMUP):
            given = make_batch(case, SHAPES[shape_name], batch, step * ranks + rank)
            for provider, module in tables.items():
                prepared = module.prepare(given)
                dist.barrier()
                start = time.perf_counter()
                outputs: list[Tensor] = list(module.forward(prepared).values())
                middle = time.perf_counter()
                torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
                if step >= WARMUP:
                    times[provider].append(((middle - start) * 1e3, (time.perf_counter() - middle) * 1e3))
        found[shape_name, placement] = times
        del tables
    if rank == 0:
        torch.save(found, folder / "times.pt")
    dist.barrier()
    dist.destroy_process_group()


def spread(samples: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(samples, n=5)
    found = {"median": statistics.median(samples), "p20": quantiles[0], "p80": quantiles[3], "least": min(samples)}
    return {name: round(value, 3) for name, value in found.items()}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2048, help="samples per step and rank")
    parser.add_argument("--shape", choices=list(SHAPES), action="append")
    parser.add_argument("--placement", choices=["table_wise", "row_wise"], action="append")
    parser.add_argument("--optimizer", choices=KINDS, default="rowwise_adagrad")
    parser.add_argument("--output", type=Path, help="file that rows are appended to")
    options = parser.parse_args()
    cases = {}
    for name in options.shape or SHAPES:
        shape = SHAPES[name]
        for placement in options.placement or ["table_wise", "row_wise"]:
            cases[name, placement] = Case(
                rows=(shape.num_rows,) * shape.num_tables,
                dims=(shape.dim,) * shape.num_tables,
                poolings=(shape.pooling,) * shape.num_tables,
                placement=placement,
                kind=options.optimizer,
            )
    versions = {name: importlib.metadata.version(name) for name in ("torch", "fbgemm-gpu-cpu", "torchrec")}
    rows = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="bench-torchrec-") as folder:
            mp.spawn(measure, (ranks, Path(folder), cases, options.steps, options.batch), nprocs=ranks)
            found = torch.load(Path(folder) / "times.pt", weights_only=False)
        for (shape_name, placement), times in found.items():
            shape = SHAPES[shape_name]
            totals = {name: spread([sum(pair) for pair in each]) for name, each in times.items()}
            for provider, each in times.items():
                row = {
                    "op": "embeddings",
                    "provider": provider,
                    "shape": shape_name,
                    "placement": placement,
                    "ranks": ranks,
                    "optimizer": options.optimizer,
                    "batch": options.batch,
                    "ids": options.batch * shape.bags_per_sample * shape.ids_per_bag * shape.num_tables,
                    "steps": options.steps,
                    "ms": {
                        "forward": spread([forward for forward, _ in each]),
                        "backward": spread([backward for _, backward in each]),
                        "total": totals[provider],
                    },
                    "ratio_to_torchrec": round(totals[provider]["median"] / totals["torchrec"]["median"], 3),
                    "ratio_of_least": round(totals[provider]["least"] / totals["torchrec"]["least"], 3),
                    "device": cpu_name(),
                    "threads": 1,
                    "python": platform.python_version(),
                    **versions,
                    "commit": commit(),
                    "date": datetime.now(UTC).date().isoformat(),
                }
                print(json.dumps(row), flush=True)
                rows.append(row)
    if options.output is not None:
        with options.output.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    header = ("gem ms", "torchrec ms", "ratio", "of least")
    print(f"\n{'shape':<13}{'placement':<12}{'ranks':>5}" + "".join(f"{each:>13}" for each in header))
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        medians = (each["ms"]["total"]["median"] for each in (ours, theirs))
        values = (*medians, ours["ratio_to_torchrec"], ours["ratio_of_least"])
        place = f"{ours['shape']:<13}{ours['placement']:<12}{ours['ranks']:>5}"
        print(place + "".join(f"{each:>13.2f}" for each in values))


if __name__ == "__main__":
    main()
