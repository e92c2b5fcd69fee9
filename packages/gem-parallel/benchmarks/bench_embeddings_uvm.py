"""Tables in host memory against tables on the device, on one GPU.

    python benchmarks/bench_embeddings_uvm.py [--rows 2000000] [--batch 8192] [--steps 12] [--optimizer KIND]

Four tables of dim 128, 20 ids per bag, summed. Each row is one (memory, ids): milliseconds of exchange + lookup and of
backward with the fused optimizer, medians over the second half of the steps, when the cache is warm; the ratio of their
sums to tables on the device; and the memory that the module takes there. Skewed ids follow a power law, even ones fall
on any row alike, which no cache can help. Every step has a batch of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings

import torch

import gem_parallel._src.embeddings.module as embeddings_module
from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

warnings.simplefilter("ignore")

NUM_TABLES, DIM, IDS_PER_BAG = 4, 128, 20
MEMORIES: dict[str, dict[str, object]] = {
    "device": {},
    "uvm_caching 0.2 lru": {"location": "uvm_caching", "cache_load_factor": 0.2},
    "uvm_caching 0.2 lfu": {"location": "uvm_caching", "cache_load_factor": 0.2, "cache_algorithm": "lfu"},
    "uvm_caching 0.05 lru": {"location": "uvm_caching", "cache_load_factor": 0.05},
    "uvm": {"location": "uvm"},
}
Batch = dict[str, tuple[torch.Tensor, torch.Tensor]]


def make_batch(ids: str, num_rows: int, batch: int, step: int) -> Batch:
    generator = torch.Generator(device="cuda").manual_seed(step)
    found = {}
    for table in range(NUM_TABLES):
        count = batch * IDS_PER_BAG
        if ids == "even":
            values = torch.randint(0, num_rows, (count,), generator=generator, device="cuda")
        else:
            uniform = torch.rand(count, generator=generator, device="cuda", dtype=torch.float64)
            values = (num_rows**uniform - 1).long().clamp_(0, num_rows - 1)
        found[f"t{table}"] = (values, torch.arange(0, count + 1, IDS_PER_BAG, device="cuda"))
    return found


def measure(module: ShardedEmbeddings, batches: list[Batch]) -> tuple[float, float]:
    """Median milliseconds of (lookup, backward) over the second half."""
    times = []
    for batch in batches:
        torch.cuda.synchronize()
        start = time.perf_counter()
        rows = module.lookup(module.exchange(batch))
        torch.cuda.synchronize()
        middle = time.perf_counter()
        torch.autograd.backward(list(rows.values()), [torch.ones_like(each) for each in rows.values()])
        torch.cuda.synchronize()
        times.append(((middle - start) * 1e3, (time.perf_counter() - middle) * 1e3))
    warm = times[len(times) // 2 :]
    return statistics.median(each[0] for each in warm), statistics.median(each[1] for each in warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows per table")
    parser.add_argument("--batch", type=int, default=8192, help="bags per table and step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--optimizer", choices=["sgd", "adagrad", "rowwise_adagrad", "adam"], action="append")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_embeddings_uvm: needs a CUDA device, as tables of the CPU lie in host memory", file=sys.stderr)
        return
    logging.disable(logging.WARNING)
    # Weights stay zero: drawing them on the CPU takes longer than all that is measured.
    embeddings_module.fill_initial = lambda *arguments: None
    names = [f"t{table}" for table in range(NUM_TABLES)]
    for optimizer in options.optimizer or ["rowwise_adagrad", "adam"]:
        device: dict[str, float] = {}
        for provider, memory in MEMORIES.items():
            before = torch.cuda.memory_allocated()
            module = ShardedEmbeddings(
                [TableConfig(name=name, num_rows=options.rows, dim=DIM, **memory) for name in names],  # type: ignore[arg-type]
                [FeatureConfig(name=name, table=name) for name in names],
                optimizer=SparseOptimizerConfig(kind=optimizer),
                device="cuda",
            )
            used = torch.cuda.memory_allocated() - before
            for ids in ("skewed", "even"):
                batches = [make_batch(ids, options.rows, options.batch, step) for step in range(options.steps)]
                lookup, backward = measure(module, batches)
                device.setdefault(ids, lookup + backward)
                row = {
                    "op": "embeddings",
                    "provider": provider,
                    "ids": ids,
                    "optimizer": optimizer,
                    "tables": NUM_TABLES,
                    "rows": options.rows,
                    "dim": DIM,
                    "batch_ids": NUM_TABLES * options.batch * IDS_PER_BAG,
                    "distinct": sum(values.unique().numel() for values, _ in batches[-1].values()),
                    "ms": {"lookup": round(lookup, 3), "backward": round(backward, 3)},
                    "ratio_to_device": round((lookup + backward) / device[ids], 3),
                    "device_bytes": used,
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                }
                print(json.dumps(row), flush=True)
            del module
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
