"""Samples and FLOPs per second of a preset, forward and backward, on random histories.

    python bench_model.py --preset tiny
    python bench_model.py --preset small --device cuda --dtype bfloat16 --num-samples 1024

Prints one JSON line for each pass: median and quartiles of the time, samples/s, TFLOP/s from the true lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gem_model import RankingConfig, RankingModel, presets, random_batch

PRESETS: dict[str, Callable[..., RankingConfig]] = {
    "tiny": presets.tiny,
    "small": presets.small,
    "large": presets.large,
}


def make_config(preset: str) -> RankingConfig:
    return PRESETS[preset](
        context_features=("item", "genres", "year"),
        num_dense=7,
        event_features=("history.item", "history.genres", "history.year", "history.rating"),
        num_event_dense=3,
        tasks=("like", "favourite"),
    )


def seconds(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Wall time of each call after two warm-up calls; on a GPU, of the device's work."""
    taken = []
    for index in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index >= 2:
            taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 is autocast")
    parser.add_argument("--num-samples", type=int, default=256)
    parser.add_argument("--mean-length", type=float, default=120.0)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device(arguments.device)
    config = make_config(arguments.preset)
    model = RankingModel(config).to(device)
    host_batch, host_embeddings = random_batch(
        config, arguments.num_samples, mean_length=arguments.mean_length, max_length=arguments.max_length
    )
    flops = model.flops(host_batch)
    batch = host_batch.to(device)
    embeddings = {name: x.detach().to(device).requires_grad_() for name, x in host_embeddings.items()}

    def forward() -> Tensor:
        autocast = torch.autocast(device.type, torch.bfloat16)
        with autocast if arguments.dtype == "bfloat16" else contextlib.nullcontext():
            return model.loss(model(batch, embeddings), batch).total

    def forward_and_backward() -> None:
        for tensor in [*model.parameters(), *embeddings.values()]:
            tensor.grad = None
        forward().backward()

    for name, function, count in (
        ("forward", forward, flops.forward),
        ("forward+backward", forward_and_backward, flops.total),
    ):
        taken = seconds(function, device, arguments.repeats)
        median = statistics.median(taken)
        quartiles = statistics.quantiles(taken, n=4)
        row = {
            "model": arguments.preset,
            "pass": name,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "dtype": arguments.dtype,
            "num_samples": arguments.num_samples,
            "num_events": {key: int(s.offsets[-1]) for key, s in host_batch.sequences.items()},
            "ms": round(median * 1e3, 3),
            "ms_quartiles": [round(quartiles[0] * 1e3, 3), round(quartiles[2] * 1e3, 3)],
            "samples_per_s": round(arguments.num_samples / median, 1),
            "tflops_per_s": round(count / median / 1e12, 4),
            "torch": torch.__version__,
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
