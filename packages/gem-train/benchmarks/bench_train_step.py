"""Step time, samples/s and MFU of whole training steps of the presets, on one device.

One step is what the trainer does: ids exchanged and looked up in the tables, forward, backward with the fused sparse
update, gradient guard, clipping, AdamW. Batches are random and stand on the device, so that no reader is measured.
Histories are skewed (exponential, cut at the maximum), FLOPs are the model's own, at true lengths.

    python bench_train_step.py                     # one JSON line per preset and precision
    python bench_train_step.py --preset small --precision bf16 --profile trace.json
    python bench_train_step.py --preset small --samples 1024   # where the host is the limit
    python bench_train_step.py --preset small --precision bf16_activations --captured   # with CUDA graphs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from gem_kernels.testing.bench import environment
from gem_model import RankingConfig, RankingModel, capture_segments, presets, random_batch
from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig, clip_grad_norm_
from gem_precision import convert, get_recipe, recipe_names
from gem_train import mfu
from gem_train.config import TrainerConfig
from gem_train.feed import Staged
from gem_train.optimizer import build_adamw
from gem_train.schedule import LearningRateSchedule
from gem_train.step import TrainStep
from gem_train.timing import PhaseTimer

ITEM_ROWS = 1_000_000
OTHER_ROWS = 1_000
NUM_BATCHES = 4
SIZES = {"tiny": (8192, 120.0, 512), "small": (4096, 256.0, 512), "large": (2048, 256.0, 512)}
"""Preset -> samples of a step, mean of the exponential before the cut, longest history."""


def make_config(preset: str) -> RankingConfig:
    """A preset that reads a candidate, its category, and a history of items, categories and ratings."""
    build = {"tiny": presets.tiny, "small": presets.small, "large": presets.large}[preset]
    return build(
        context_features=("item", "category"),
        num_dense=6,
        event_features=("history.item", "history.category", "history.rating"),
        num_event_dense=1,
        tasks=("like", "favourite"),
    )


def make_embeddings(config: RankingConfig, device: torch.device) -> ShardedEmbeddings:
    """An item table of a million rows and two small ones."""
    rows = {"item": ITEM_ROWS, "category": OTHER_ROWS, "rating": OTHER_ROWS}
    tables = [TableConfig(name=name, num_rows=n, dim=config.embedding_dim) for name, n in rows.items()]
    names = (*config.context_features, *config.sequences[0].event_features)
    features = [FeatureConfig(name=name, table=name.split(".")[-1], pooling="none") for name in names]
    optimizer = SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.02)
    return ShardedEmbeddings(tables, features, optimizer=optimizer, device=device)


def make_batch(config: RankingConfig, preset: str, num_samples: int, device: torch.device, seed: int):
    """A random batch on the device, and its ids, Zipf-like over the items."""
    _, mean_length, max_length = SIZES[preset]
    # Embeddings come from the tables: those that are drawn with the batch may be narrow.
    narrow = dataclasses.replace(config, embedding_dim=1)
    batch, _ = random_batch(narrow, num_samples, mean_length=mean_length, max_length=max_length, seed=seed)
    num_events = int(batch.sequences[config.sequences[0].name].offsets[-1])
    generator = torch.Generator().manual_seed(seed)
    ids = {}
    for name in (*config.context_features, *config.sequences[0].event_features):
        count = num_events if "." in name else num_samples
        rows = ITEM_ROWS if name.endswith("item") else OTHER_ROWS
        values = (rows * torch.rand(count, generator=generator).pow(4.0)).long().clamp_max(rows - 1)
        ids[name] = (values.to(device), torch.arange(count + 1, device=device))
    return batch, batch.to(device), ids, num_events


def measure(
    preset: str,
    precision: str,
    device: torch.device,
    steps: int,
    profile: Path | None,
    num_samples: int | None = None,
    captured: bool = False,
) -> dict[str, object]:
    """Times `steps` whole steps after a warm-up; mean over steps, the host's share in enqueue_ms."""
    torch.manual_seed(0)
    config = make_config(preset)
    embeddings = make_embeddings(config, device)
    model = RankingModel(config).to(device)
    if precision != "fp32":
        model = convert(model, get_recipe(precision))
    settings = TrainerConfig()
    timer = PhaseTimer(device)
    step = TrainStep(
        settings,
        model=model,
        embeddings=embeddings,
        sparse_learning_rate=0.02,
        optimizer=build_adamw(model, settings),
        schedule=LearningRateSchedule.from_config(settings, 1000),
        clip=lambda parameters, max_norm: clip_grad_norm_(parameters, max_norm, None),
        device=device,
        timer=timer,
    )
    num_samples = num_samples or SIZES[preset][0]
    batches = [make_batch(config, preset, num_samples, device, seed) for seed in range(NUM_BATCHES)]
    flops = [model.flops(host).total for host, _, _, _ in batches]
    if captured:
        _, batch, ids, _ = batches[0]
        rows = {
            name: torch.randn(len(values), config.embedding_dim, device=device) for name, (values, _) in ids.items()
        }
        capture_segments(model, batch, {name: x.requires_grad_() for name, x in rows.items()})

    def run(index: int) -> None:
        _, batch, ids, _ = batches[index % NUM_BATCHES]
        step(index, Staged(batch, batch, embeddings.exchange(ids), batch.num_samples, {}))

    warm_up = 3 * NUM_BATCHES
    for index in range(warm_up):
        run(index)
    seconds, cuda = [], device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    for index in range(warm_up, warm_up + steps):
        start = time.perf_counter()
        run(index)
        if not cuda:
            seconds.append(time.perf_counter() - start)
    enqueued = (time.perf_counter() - begin) / steps
    if cuda:
        torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) / steps
    timer.interval(steps)
    before = dict(timer.seconds)
    for index in range(steps):
        timer.sample(True)
        run(warm_up + steps + index)
    timer.interval(steps)
    phases = {phase: 1e3 * (timer.seconds[phase] - before[phase]) / steps for phase in timer.seconds}
    if profile is not None:
        with torch.profiler.profile() as trace:
            for index in range(NUM_BATCHES):
                run(warm_up + 2 * steps + index)
        trace.export_chrome_trace(str(profile))
        print(
            trace.key_averages().table(sort_by="self_cuda_time_total" if cuda else "self_cpu_time_total", row_limit=25)
        )
    mean_flops = statistics.fmean(flops[index % NUM_BATCHES] for index in range(steps))
    account = mfu.account(mean_flops, wall, 1, str(environment(device)["device"]))
    return {
        "bench": "train_step",
        "preset": preset,
        "precision": precision,
        "captured": captured,
        "samples_per_step": num_samples,
        "events_per_step": round(statistics.fmean(b[3] for b in batches)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": 1e3 * wall,
        "enqueue_ms": 1e3 * enqueued,
        "samples_per_second": num_samples / wall,
        "mflop_per_sample_forward_backward": mean_flops / num_samples / 1e6,
        "tflops": mean_flops / wall / 1e12,
        "mfu": account.mfu,
        "mfu_of": account.explanation,
        "phases_ms": {phase: round(value, 4) for phase, value in phases.items() if value > 0},
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        **environment(device),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="*", default=["tiny", "small"], choices=list(SIZES))
    parser.add_argument("--precision", nargs="*", default=["fp32", "bf16"], choices=recipe_names())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20, help="measured steps after the warm-up (default 20)")
    parser.add_argument("--samples", type=int, help="of a step, in place of the preset's own number")
    parser.add_argument("--captured", action="store_true", help="segments of the model from CUDA graphs")
    parser.add_argument("--profile", type=Path, help="write a trace of a few steps of each variant here")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    for preset in arguments.preset:
        for precision in arguments.precision:
            device = torch.device(arguments.device)
            row = json.dumps(
                measure(
                    preset,
                    precision,
                    device,
                    arguments.steps,
                    arguments.profile,
                    arguments.samples,
                    arguments.captured,
                )
            )
            print(row, flush=True)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                with arguments.output.open("a") as file:
                    file.write(row + "\n")


if __name__ == "__main__":
    main()
