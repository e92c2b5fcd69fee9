"""ShardedEmbeddings in one process against fbgemm's table-batched embedding alone; JSON lines, then a table.

    python benchmarks/bench_embeddings.py [--device cpu|cuda] [--steps 20] [--batch 2048 ...] [--shape NAME]
    [--optimizer KIND] [--profile]

Each row is one (shape, batch, provider). `ms` are milliseconds of exchange + lookup (forward) and of backward with the
fused optimizer, with a wait for the device after each, median and 20th / 80th percentile over interleaved steps. `loop`
is milliseconds per step of a loop without such waits, as training runs; the median over rounds. Providers take turns in
random order. Ratios of both, to every provider of fbgemm, follow. The dense model between forward and backward is a
node that hands over gradients made before; it is not timed in `ms`, and costs one operator in `loop`.

Providers of fbgemm are one SplitTableBatchedEmbeddingBagsCodegen over all features, pooling inside the kernel (unpooled
for the shape `history`):

- `tbe`: ids already concatenated and unchecked, one output for all features, whose gradient comes as one tensor: a
  lower bound that does less work than any model's step.
- `tbe_features`: the same work as gem's but for the check: from each feature's own tensors, unchecked, to each
  feature's rows, whose gradients come one by one.
- `tbe_inputs`: that with fbgemm's own check of ids, which wants no wait, moves bad ids to row 0 and takes -1 for valid.
- `tbe_raises`: that, and the count of bad ids is read before the rows are handed on, so that it can raise as gem does.

`gem_joined` has the inputs and outputs of `tbe`, by `KeyedJaggedIds` and `lookup_joined`, but checks every id and
offset exactly and raises. `gem` does so from each feature's own tensors to each feature's rows. `joined_ahead`,
`gem_ahead`: the same with `exchange` a batch ahead, as a pipelined step calls it.

Steps go round eight batches. All batches of a shape have the same sizes, but for `ragged`, where bags have 0 to 39 ids.
The tables of `dims` have 16, 64 and 128 columns in turn, which is one lookup for fbgemm and three for gem.
`--profile` adds what a step does: launches and waits of the host, and time on the device (CUDA).
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gem_parallel import (
    FeatureConfig,
    KeyedJaggedIds,
    Pending,
    ShardedEmbeddings,
    SparseOptimizerConfig,
    TableConfig,
)

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
NUM_ROUNDS = 6
Inputs = list[tuple[torch.Tensor, torch.Tensor]]
Forward = Callable[[int], list[torch.Tensor]]
"""Number of the batch -> outputs."""
Provider = Callable[[list[Inputs]], Forward]
"""Batches -> lookups of them, in tables that stay."""


def make_inputs(shape: Shape, batch: int, device: str, seed: int) -> Inputs:
    """Per table (values, offsets); ids follow a power law, as ids do."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    found = []
    num_bags = batch * shape.bags_per_sample
    for _ in range(shape.num_tables):
        lengths = torch.full((num_bags,), shape.ids_per_bag, device=device)
        if shape.ragged:
            lengths = torch.randint(0, 2 * shape.ids_per_bag, (num_bags,), **options)
        uniform = torch.rand(int(lengths.sum()), dtype=torch.float64, **options)
        values = ((shape.num_rows**uniform - 1).long()).clamp(0, shape.num_rows - 1)
        found.append((values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])))
    return found


class Dense(torch.autograd.Function):
    """In place of the dense model: takes all outputs, gives back gradients that were made before."""

    @staticmethod
    def forward(ctx, grads: list[torch.Tensor], zero: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return zero.view(())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.grads


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Step:
    """Forward and backward of one provider."""

    def __init__(self, device: str, forward: Forward) -> None:
        self.device, self.forward = device, forward
        self.grads: dict[tuple[torch.Size, ...], list[torch.Tensor]] = {}
        self.zero = torch.zeros((), device=device)
        self.one = torch.ones((), device=device)

    def dense(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        shapes = tuple(each.shape for each in outputs)
        if shapes not in self.grads:
            self.grads[shapes] = [torch.full_like(each, 1e-3) for each in outputs]
        return Dense.apply(self.grads[shapes], self.zero, *outputs)

    def __call__(self, number: int) -> tuple[float, float]:
        """Milliseconds of forward and of backward."""
        synchronise(self.device)
        start = time.perf_counter()
        outputs = self.forward(number)
        synchronise(self.device)
        forward = time.perf_counter() - start
        loss = self.dense(outputs)
        synchronise(self.device)
        start = time.perf_counter()
        loss.backward(self.one)
        synchronise(self.device)
        return forward * 1e3, (time.perf_counter() - start) * 1e3

    def loop(self, count: int) -> float:
        """Milliseconds per step of so many without a wait between them."""
        synchronise(self.device)
        start = time.perf_counter()
        for index in range(count):
            self.dense(self.forward(index % NUM_BATCHES)).backward(self.one)
        synchronise(self.device)
        return (time.perf_counter() - start) * 1e3 / count


def gem(shape: Shape, device: str, kind: str, *, ahead: bool = False, join: bool = False) -> Provider:
    names = [f"t{index}" for index in range(shape.num_tables)]
    module = ShardedEmbeddings(
        [TableConfig(name=n, num_rows=shape.num_rows, dim=dim) for n, dim in zip(names, shape.table_dims, strict=True)],
        [FeatureConfig(name=name, table=name, pooling=shape.pooling) for name in names],
        optimizer=SparseOptimizerConfig(kind=kind),
        device=device,
    )

    def provide(batches: list[Inputs]) -> Forward:
        ids = [dict(zip(names, each, strict=True)) for each in batches]
        ready = [joined(each) for each in batches]
        pending: dict[int, Pending] = {}

        def exchange(number: int) -> Pending:
            if not join:
                return module.exchange(ids[number])
            values, offsets = ready[number]
            return module.exchange(KeyedJaggedIds(names, values, offsets=offsets))

        def look_up(mine: Pending) -> list[torch.Tensor]:
            return [module.lookup_joined(mine)] if join else list(module.lookup(mine).values())

        def forward(number: int) -> list[torch.Tensor]:
            # Every call but the first finds its batch.
            rows = look_up(pending.pop(number, None) or exchange(number))
            pending.clear()
            pending[(number + 1) % NUM_BATCHES] = exchange((number + 1) % NUM_BATCHES)
            return rows

        if not ahead:
            return lambda number: look_up(exchange(number))

        return forward

    return provide


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
    """Values and offsets of all features in fbgemm's format, by as few operators as equally many bags allow."""
    offsets = torch.cat([offsets for _, offsets in inputs]).view(len(inputs), -1)
    ends = offsets[:, -1]
    starts = ends.cumsum(0) - ends
    whole = torch.cat([(offsets[:, :-1] + starts.unsqueeze(1)).flatten(), starts[-1:] + ends[-1:]])
    return torch.cat([values for values, _ in inputs]), whole


def tbe(shape: Shape, device: str, kind: str) -> Provider:
    module = make_tbe(shape, device, kind, checked=False)

    def provide(batches: list[Inputs]) -> Forward:
        ready = [joined(each) for each in batches]
        return lambda number: [module(*ready[number])]

    return provide


def tbe_features(shape: Shape, device: str, kind: str, *, checked: bool = False, raises: bool = False) -> Provider:
    module = make_tbe(shape, device, kind, checked=checked)

    def provide(batches: list[Inputs]) -> Forward:
        def forward(number: int) -> list[torch.Tensor]:
            rows = module(*joined(batches[number]))
            if raises and int(module.bounds_check_warning):
                raise IndexError("ids out of range")
            if shape.pooling == "none":
                return list(rows.split([values.numel() for values, _ in batches[number]]))
            return list(rows.split(shape.table_dims, dim=1))

        return forward

    return provide


PROVIDERS = {
    "tbe": tbe,
    "tbe_features": tbe_features,
    "tbe_inputs": partial(tbe_features, checked=True),
    "tbe_raises": partial(tbe_features, checked=True, raises=True),
    "gem_joined": partial(gem, join=True),
    "joined_ahead": partial(gem, join=True, ahead=True),
    "gem": gem,
    "gem_ahead": partial(gem, ahead=True),
}
BASES = [name for name in PROVIDERS if name.startswith("tbe")]


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


def measure(steps: dict[str, Step], count: int) -> dict[str, dict[str, dict[str, float]]]:
    """Provider -> what -> milliseconds."""
    times: dict[str, list[tuple[float, float]]] = {provider: [] for provider in steps}
    # In no fixed order, so that none always follows the same other.
    order = random.Random(0)
    for index in range(count + NUM_BATCHES):
        for provider, step in order.sample(list(steps.items()), len(steps)):
            measured = step(index % NUM_BATCHES)
            if index >= NUM_BATCHES:
                times[provider].append(measured)
    loops: dict[str, list[float]] = {provider: [] for provider in steps}
    for _ in range(NUM_ROUNDS):
        for provider, step in order.sample(list(steps.items()), len(steps)):
            loops[provider].append(step.loop(2 * NUM_BATCHES))
    return {
        provider: {
            "forward": spread([forward for forward, _ in measured]),
            "backward": spread([backward for _, backward in measured]),
            "total": spread([sum(each) for each in measured]),
            "loop": spread(loops[provider]),
        }
        for provider, measured in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, nargs="+", default=[2048], help="samples per step")
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], action="append")
    parser.add_argument("--provider", choices=list(PROVIDERS), action="append", help="`tbe` is always measured")
    parser.add_argument("--optimizer", choices=["sgd", "adagrad", "rowwise_adagrad", "adam"], default="rowwise_adagrad")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    table = []
    for shape in SHAPES:
        if options.shape and shape.name not in options.shape:
            continue
        providers = {
            provider: make(shape, options.device, options.optimizer)
            for provider, make in PROVIDERS.items()
            if not options.provider or provider in ("tbe", *options.provider)
        }
        for batch in options.batch:
            batches = [make_inputs(shape, batch, options.device, seed) for seed in range(NUM_BATCHES)]
            steps = {provider: Step(options.device, provide(batches)) for provider, provide in providers.items()}
            found = measure(steps, options.steps)
            medians = {
                provider: {part: values["median"] for part, values in parts.items()}
                for provider, parts in found.items()
            }
            for provider, parts in found.items():
                mine = medians[provider]
                ratios = {
                    part: {base: mine[part] / medians[base][part] for base in BASES if base in medians}
                    for part in ("total", "loop")
                }
                row = {
                    "op": "embeddings",
                    "provider": provider,
                    "shape": shape.name,
                    "optimizer": options.optimizer,
                    "batch": batch,
                    "ids": sum(values.numel() for inputs in batches for values, _ in inputs) / NUM_BATCHES,
                    "ms": parts,
                    "ratios": ratios,
                    "device": name,
                    "threads": torch.get_num_threads(),
                    "torch": torch.__version__,
                }
                if options.profile:
                    row["profile"] = profiled(steps[provider])
                print(json.dumps(row), flush=True)
                table.append((shape.name, batch, provider, mine, ratios))
    print("\nmilliseconds, and ratios of `total` and `loop` to each of fbgemm's")
    heads = ("forward", "backward", "total", "loop", *(f"/{base}" for base in BASES))
    print(f"{'shape':<12}{'batch':>6} {'provider':<13}" + "".join(f"{head:>14}" for head in heads))
    for shape_name, batch, provider, mine, ratios in table:
        cells = [f"{number:.3f}" for number in mine.values()]
        cells += [f"{ratios['total'].get(base, 0):.2f} {ratios['loop'].get(base, 0):.2f}" for base in BASES]
        print(f"{shape_name:<12}{batch:>6} {provider:<13}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
