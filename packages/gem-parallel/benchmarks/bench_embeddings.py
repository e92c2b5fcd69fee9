"""ShardedEmbeddings in one process against fbgemm's table-batched embedding alone; JSON lines, then a table.

    python benchmarks/bench_embeddings.py [--device cpu|cuda] [--steps 20] [--batch 2048] [--shape NAME] [--optimizer
    KIND]

Each row is one (shape, provider): milliseconds of exchange + lookup (forward) and of backward with the fused optimizer,
median and 20th / 80th percentile over interleaved steps, and the ratio of the medians to provider `tbe`.
`tbe` is one SplitTableBatchedEmbeddingBagsCodegen over all features, ids already concatenated and unchecked, pooling
inside the kernel (unpooled for the shape `history`): a lower bound that does less work, as `gem` checks every id,
takes features as separate tensors and returns them so.
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

import torch

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

warnings.simplefilter("ignore")


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    num_tables: int
    num_rows: int
    dim: int
    ids_per_bag: int
    bags_per_sample: int = 1
    pooling: str = "sum"


SHAPES = [
    Shape(name="context", num_tables=26, num_rows=100_000, dim=64, ids_per_bag=1),
    Shape(name="multivalued", num_tables=8, num_rows=200_000, dim=64, ids_per_bag=20),
    Shape(name="history", num_tables=3, num_rows=200_000, dim=64, ids_per_bag=1, bags_per_sample=50, pooling="none"),
]
Step = Callable[[], tuple[float, float]]


def make_inputs(shape: Shape, batch: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per table (values, offsets); ids follow a power law, as ids do."""
    generator = torch.Generator().manual_seed(0)
    found = []
    num_bags = batch * shape.bags_per_sample
    for _ in range(shape.num_tables):
        uniform = torch.rand(num_bags * shape.ids_per_bag, generator=generator, dtype=torch.float64)
        values = ((shape.num_rows**uniform - 1).long()).clamp(0, shape.num_rows - 1)
        offsets = torch.arange(num_bags + 1) * shape.ids_per_bag
        found.append((values.to(device), offsets.to(device)))
    return found


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, forward: Callable[[], list[torch.Tensor]]) -> tuple[float, float]:
    synchronise(device)
    start = time.perf_counter()
    outputs = forward()
    synchronise(device)
    middle = time.perf_counter()
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    synchronise(device)
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def gem_step(shape: Shape, batch: int, device: str, kind: str) -> Step:
    names = [f"t{index}" for index in range(shape.num_tables)]
    module = ShardedEmbeddings(
        [TableConfig(name=name, num_rows=shape.num_rows, dim=shape.dim) for name in names],
        [FeatureConfig(name=name, table=name, pooling=shape.pooling) for name in names],
        optimizer=SparseOptimizerConfig(kind=kind),
        device=device,
    )
    ids = dict(zip(names, make_inputs(shape, batch, device), strict=True))
    return lambda: timed(device, lambda: list(module.lookup(module.exchange(ids)).values()))


def tbe_step(shape: Shape, batch: int, device: str, kind: str) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    kinds = {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adam": EmbOptimType.ADAM,
    }
    place = (
        (EmbeddingLocation.HOST, ComputeDevice.CPU)
        if device == "cpu"
        else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    )
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(shape.num_rows, shape.dim, *place)] * shape.num_tables,
        optimizer=kinds[kind],
        learning_rate=0.01,
        pooling_mode=PoolingMode.NONE if shape.pooling == "none" else PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=torch.device(device),
    )
    for weight in tbe.split_embedding_weights():
        weight.normal_(std=shape.dim**-0.5)
    inputs = make_inputs(shape, batch, device)
    values = torch.cat([each for each, _ in inputs])
    size = inputs[0][0].numel()
    offsets = torch.cat([inputs[0][1][:1], *[offsets[1:] + index * size for index, (_, offsets) in enumerate(inputs)]])
    return lambda: timed(device, lambda: [tbe(values, offsets)])


PROVIDERS = {"tbe": tbe_step, "gem": gem_step}


def spread(samples: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(samples, n=5)
    return {"median": statistics.median(samples), "p20": quantiles[0], "p80": quantiles[3]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2048, help="samples per step")
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], action="append")
    parser.add_argument("--optimizer", choices=["sgd", "adagrad", "rowwise_adagrad", "adam"], default="rowwise_adagrad")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    table = []
    for shape in SHAPES:
        if options.shape and shape.name not in options.shape:
            continue
        steps = {
            provider: make(shape, options.batch, options.device, options.optimizer)
            for provider, make in PROVIDERS.items()
        }
        times: dict[str, list[tuple[float, float]]] = {provider: [] for provider in steps}
        for index in range(options.steps + 3):
            for provider, step in steps.items():
                measured = step()
                if index >= 3:
                    times[provider].append(measured)
        medians = {}
        for provider, measured in times.items():
            parts = {
                "forward": spread([forward for forward, _ in measured]),
                "backward": spread([backward for _, backward in measured]),
                "total": spread([sum(each) for each in measured]),
            }
            medians[provider] = {part: values["median"] for part, values in parts.items()}
            row = {
                "op": "embeddings",
                "provider": provider,
                "shape": shape.name,
                "optimizer": options.optimizer,
                "batch": options.batch,
                "ids": options.batch * shape.bags_per_sample * shape.ids_per_bag * shape.num_tables,
                "ms": parts,
                "ratio_to_tbe": medians[provider]["total"] / medians["tbe"]["total"],
                "device": name,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
            print(json.dumps(row))
            table.append((shape.name, provider, *medians[provider].values(), row["ratio_to_tbe"]))
    print(f"\n{'shape':<14}{'provider':<10}{'forward ms':>12}{'backward ms':>13}{'total ms':>10}{'ratio':>8}")
    for shape_name, provider, forward, backward, total, ratio in table:
        print(f"{shape_name:<14}{provider:<10}{forward:>12.2f}{backward:>13.2f}{total:>10.2f}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
