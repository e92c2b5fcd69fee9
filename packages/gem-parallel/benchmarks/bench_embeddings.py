"""ShardedEmbeddings in one process against fbgemm's table-batched embedding alone; JSON lines, then a table.

    python benchmarks/bench_embeddings.py [--device cpu|cuda] [--steps 20] [--batch 2048 ...] [--shape NAME]
    [--optimizer KIND] [--profile]

Each row is one (shape, provider): milliseconds of exchange + lookup (forward) and of backward with the fused optimizer,
median and 20th / 80th percentile over interleaved steps, and the ratios of the medians to both providers of fbgemm.
The dense model between the two is a node that hands over gradients made before; it is not timed.

- `tbe` is one SplitTableBatchedEmbeddingBagsCodegen over all features, ids already concatenated and unchecked, pooling
  inside the kernel (unpooled for the shape `history`), one output for all features: a lower bound that does less work.
- `tbe_inputs` is the same module as one uses it: it starts from each feature's own tensors, has fbgemm's own check of
  ids (which wants no wait, moves bad ids to row 0 and takes -1 for valid), and gives each feature's rows.
- `gem` starts from each feature's own tensors, too, checks every id and offset exactly, and raises.

Steps go round eight batches. All batches of a shape have the same sizes, but for `ragged`, where bags have 0 to 39 ids.
The tables of `dims` have 16, 64 and 128 columns in turn, which is one lookup for fbgemm and three for gem.
`--profile` adds what a step does: launches and waits of the host, and time on the device (CUDA).
"""

from __future__ import annotations

import argparse
import itertools
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
    dims: tuple[int, ...]
    """Of the tables in turn."""
    ids_per_bag: int
    bags_per_sample: int = 1
    pooling: str = "sum"
    ragged: bool = False

    @property
    def table_dims(self) -> list[int]:
        return [self.dims[index % len(self.dims)] for index in range(self.num_tables)]


SHAPES = [
    Shape(name="context", num_tables=26, num_rows=100_000, dims=(64,), ids_per_bag=1),
    Shape(name="multivalued", num_tables=8, num_rows=200_000, dims=(64,), ids_per_bag=20),
    Shape(
        name="history", num_tables=3, num_rows=200_000, dims=(64,), ids_per_bag=1, bags_per_sample=50, pooling="none"
    ),
    Shape(name="dims", num_tables=26, num_rows=100_000, dims=(16, 64, 128), ids_per_bag=1),
    Shape(name="ragged", num_tables=8, num_rows=200_000, dims=(64,), ids_per_bag=20, ragged=True),
]
NUM_BATCHES = 8
Inputs = list[tuple[torch.Tensor, torch.Tensor]]
Forward = Callable[[int], list[torch.Tensor]]
"""Number of the batch -> outputs."""


def make_inputs(shape: Shape, batch: int, device: str, seed: int) -> Inputs:
    """Per table (values, offsets); ids follow a power law, as ids do."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    num_bags = batch * shape.bags_per_sample
    for _ in range(shape.num_tables):
        lengths = torch.full((num_bags,), shape.ids_per_bag)
        if shape.ragged:
            lengths = torch.randint(0, 2 * shape.ids_per_bag, (num_bags,), generator=generator)
        uniform = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
        values = ((shape.num_rows**uniform - 1).long()).clamp(0, shape.num_rows - 1)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        found.append((values.to(device), offsets.to(device)))
    return found


class Dense(torch.autograd.Function):
    """In place of the dense model: takes all outputs, gives back gradients that were made before."""

    @staticmethod
    def forward(ctx, grads: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.grads


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Step:
    """Times forward and backward of one provider."""

    def __init__(self, device: str, forward: Forward) -> None:
        self.device, self.forward = device, forward
        self.grads: dict[int, list[torch.Tensor]] = {}

    def __call__(self, number: int) -> tuple[float, float]:
        synchronise(self.device)
        start = time.perf_counter()
        outputs = self.forward(number)
        synchronise(self.device)
        forward = time.perf_counter() - start
        if number not in self.grads:
            self.grads[number] = [torch.ones_like(each) for each in outputs]
        loss = Dense.apply(self.grads[number], *outputs)
        synchronise(self.device)
        start = time.perf_counter()
        loss.backward()
        synchronise(self.device)
        return forward * 1e3, (time.perf_counter() - start) * 1e3


def gem_forward(shape: Shape, batches: list[Inputs], device: str, kind: str) -> Forward:
    names = [f"t{index}" for index in range(shape.num_tables)]
    module = ShardedEmbeddings(
        [TableConfig(name=n, num_rows=shape.num_rows, dim=dim) for n, dim in zip(names, shape.table_dims, strict=True)],
        [FeatureConfig(name=name, table=name, pooling=shape.pooling) for name in names],
        optimizer=SparseOptimizerConfig(kind=kind),
        device=device,
    )
    ids = [dict(zip(names, each, strict=True)) for each in batches]
    return lambda number: list(module.lookup(module.exchange(ids[number])).values())


def make_tbe(shape: Shape, device: str, kind: str, *, checked: bool) -> torch.nn.Module:
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
        [(shape.num_rows, dim, *place) for dim in shape.table_dims],
        optimizer=kinds[kind],
        learning_rate=0.01,
        pooling_mode=PoolingMode.NONE if shape.pooling == "none" else PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.WARNING if checked else BoundsCheckMode.NONE,
        device=torch.device(device),
    )
    for weight in tbe.split_embedding_weights():
        weight.normal_(std=weight.shape[1] ** -0.5)
    return tbe


def joined(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and offsets of all features in fbgemm's format."""
    offsets, start = [inputs[0][1][:1]], 0
    for values, each in inputs:
        offsets.append(each[1:] + start)
        start += values.numel()
    return torch.cat([values for values, _ in inputs]), torch.cat(offsets)


def tbe_forward(shape: Shape, batches: list[Inputs], device: str, kind: str) -> Forward:
    tbe = make_tbe(shape, device, kind, checked=False)
    ready = [joined(each) for each in batches]
    return lambda number: [tbe(*ready[number])]


def tbe_inputs_forward(shape: Shape, batches: list[Inputs], device: str, kind: str) -> Forward:
    tbe = make_tbe(shape, device, kind, checked=True)

    def forward(number: int) -> list[torch.Tensor]:
        rows = tbe(*joined(batches[number]))
        if shape.pooling == "none":
            return list(rows.split([values.numel() for values, _ in batches[number]]))
        return list(rows.split(shape.table_dims, dim=1))

    return forward


PROVIDERS = {"tbe": tbe_forward, "tbe_inputs": tbe_inputs_forward, "gem": gem_forward}


def profiled(step: Step, count: int = 8) -> dict[str, float]:
    """Per step: launches and copies, waits, and microseconds on the device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for index in range(count):
            step(index % NUM_BATCHES)
    found = {"launches": 0.0, "waits": 0.0, "device_us": 0.0}
    for event in profile.key_averages():
        # Operators of fbgemm are charged with their kernels' time once more.
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found["device_us"] += event.self_device_time_total / count
        if event.key.startswith(("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")):
            found["launches"] += event.count / count
        # The benchmark's own waits are cudaDeviceSynchronize.
        if event.key in ("cudaStreamSynchronize", "cudaEventSynchronize"):
            found["waits"] += event.count / count
    return found


def spread(samples: list[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(samples, n=5)
    return {"median": statistics.median(samples), "p20": quantiles[0], "p80": quantiles[3]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, nargs="+", default=[2048], help="samples per step")
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], action="append")
    parser.add_argument("--optimizer", choices=["sgd", "adagrad", "rowwise_adagrad", "adam"], default="rowwise_adagrad")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    table = []
    for batch, shape in itertools.product(options.batch, SHAPES):
        if options.shape and shape.name not in options.shape:
            continue
        batches = [make_inputs(shape, batch, options.device, seed) for seed in range(NUM_BATCHES)]
        steps = {
            provider: Step(options.device, make(shape, batches, options.device, options.optimizer))
            for provider, make in PROVIDERS.items()
        }
        times: dict[str, list[tuple[float, float]]] = {provider: [] for provider in steps}
        for index in range(options.steps + NUM_BATCHES):
            for provider, step in steps.items():
                measured = step(index % NUM_BATCHES)
                if index >= NUM_BATCHES:
                    times[provider].append(measured)
        parts_of = {
            provider: {
                "forward": spread([forward for forward, _ in measured]),
                "backward": spread([backward for _, backward in measured]),
                "total": spread([sum(each) for each in measured]),
            }
            for provider, measured in times.items()
        }
        medians = {
            provider: {part: values["median"] for part, values in parts.items()} for provider, parts in parts_of.items()
        }
        for provider, parts in parts_of.items():
            row = {
                "op": "embeddings",
                "provider": provider,
                "shape": shape.name,
                "optimizer": options.optimizer,
                "batch": batch,
                "ids": sum(values.numel() for inputs in batches for values, _ in inputs) / NUM_BATCHES,
                "ms": parts,
                "ratio_to_tbe": medians[provider]["total"] / medians["tbe"]["total"],
                "ratio_to_tbe_inputs": medians[provider]["total"] / medians["tbe_inputs"]["total"],
                "device": name,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
            if options.profile:
                row["profile"] = profiled(steps[provider])
            print(json.dumps(row), flush=True)
            ratios = row["ratio_to_tbe"], row["ratio_to_tbe_inputs"]
            table.append((shape.name, batch, provider, *medians[provider].values(), *ratios))
    heads = ("forward ms", "backward ms", "total ms", "to tbe", "to tbe_inputs")
    print(f"\n{'shape':<14}{'batch':>7}  {'provider':<12}" + "".join(f"{head:>14}" for head in heads))
    for shape_name, batch, provider, *numbers in table:
        print(f"{shape_name:<14}{batch:>7}  {provider:<12}" + "".join(f"{number:>14.3f}" for number in numbers))


if __name__ == "__main__":
    main()
