"""Correctness, collectives, scaling and prediction on all GPUs of this host, in one command.

    python benchmarks/bench_multi_gpu.py --output multi-gpu.jsonl
    python benchmarks/bench_multi_gpu.py --device cpu    # two gloo processes, tiny sizes: the script's own check
    python benchmarks/bench_multi_gpu.py --parts correctness
    python benchmarks/bench_multi_gpu.py --parts prediction --measured multi-gpu.jsonl   # of steps timed before

Each part runs in processes of its own with a time budget. What fails or hangs becomes a row with status "error", the
other parts still run, and the exit code is 1. Binds to the loopback device only.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The checkout's own packages, installed or not; the ranks inherit the path.
sys.path[:0] = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]

import torch  # noqa: E402
from multi_gpu.launch import Launch, Task, announce, run_launch  # noqa: E402
from multi_gpu.tables import print_tables  # noqa: E402

PARTS = ("correctness", "collectives", "scaling", "wires", "prediction")
ENGINES = ("symm_mem_low_contention", "nccl_zero_cta")
"""Beside the default, each in processes of its own, as symmetric memory has one backend per process."""
BAD = ("fail", "error")
LEAST_S = 25.0
"""No launch is begun with less time left."""


def describe_environment(device: str) -> dict[str, Any]:
    """What the rows were measured on, found without making a CUDA context here."""

    def output(*command: str) -> str | None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return None
        lines = done.stdout.strip().splitlines()
        return lines[0] if lines else None

    def version(name: str) -> str | None:
        try:
            return str(__import__(name).__version__)
        except ImportError:
            return None

    cuda = device == "cuda"
    query = ("nvidia-smi", "--format=csv,noheader")
    return {
        "device": output(*query, "--query-gpu=name") if cuda else "cpu",
        "driver": output(*query, "--query-gpu=driver_version") if cuda else None,
        "torch": torch.__version__,
        "triton": version("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "commit": output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def make_models(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Arguments of ``scaling.run`` for each workload: the largest preset, a smaller one, the largest with experts."""
    if arguments.device != "cuda":
        tiny: dict[str, Any] = {"preset": "tiny", "num_samples": 8, "max_length": 16, "item_rows": 1_000, "steps": 2}
        tiny["precision"] = "bf16_activations"
        return [tiny, {**tiny, "num_experts": 8}]
    about = {"max_length": 512, "item_rows": 1_000_000, "precision": "bf16_activations", "only": arguments.only}
    if arguments.trace is not None:
        about["trace"] = str(arguments.trace.absolute())
    large = {"preset": "large", "num_samples": 2048, "steps": 6, **about}
    small = {"preset": "small", "num_samples": 8192, "steps": 12, "every": False, "captured": True, **about}
    models = [large, small, {**large, "num_experts": 8}]
    return [model for model in models if arguments.presets is None or model["preset"] in arguments.presets]


def make_launches(parts: list[str], size: int, device: str, models: list[dict[str, Any]]) -> list[Launch]:
    """All launches, what is most wanted first; the prediction comes afterwards and needs no ranks."""
    cuda = device == "cuda"
    correct = {"num_samples": 67, "max_length": 40} if cuda else {"num_samples": 19, "max_length": 12}
    wire: dict[str, Any] = {"mib": [1, 8, 64, 512], "beside_mib": [64, 512], "matmul": 8192}
    gathers: dict[str, Any] = {"mib": [64, 512], "columns": 2048}
    if not cuda:
        wire = {"mib": [0.0625, 0.5], "beside_mib": [0.5], "matmul": 128}
        gathers = {"mib": [0.0625], "columns": 64}
    launches = []

    def add(name: str, budget_s: float, *tasks: Task, **variables: str) -> None:
        chosen = tuple(
            task for task in tasks if task.part in parts and (size > 1 or task.part not in ("collectives", "wires"))
        )
        if chosen:
            launch = Launch(name=name, tasks=chosen, size=size, device=device, budget_s=budget_s, environment=variables)
            launches.append(launch)

    def collectives(*engines: str) -> Task:
        return Task(part="collectives", module="collectives", arguments={"engines": engines, **wire})

    correctness = Task(part="correctness", module="correctness", arguments=correct)
    scaling = [Task(part="scaling", module="scaling", arguments=model) for model in models]
    wires = Task(part="wires", module="wires", arguments={**gathers, "model": models[0]})
    if not cuda:
        add("all parts", 420, correctness, collectives("default", *ENGINES), *scaling, wires)
        return launches
    add("scaling", 300, *scaling)
    add("correctness", 120, correctness)
    for engine in ENGINES if size > 1 else ():
        # Default first, before anything else can fail.
        engines = ("default", engine) if engine == ENGINES[0] else (engine,)
        steps = replace(scaling[0], arguments={**models[0], "engine": engine, "trace": None})
        variables = {"NCCL_CTA_POLICY": "2"} if engine == "nccl_zero_cta" else {}
        add(engine, 120, steps, collectives(*engines), **variables)
    add("wires", 75, wires)
    return launches


def predicted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the prediction, or one with status "error"."""
    try:
        # Here and not at the top: the ranks import this file, too, and do not need it.
        from multi_gpu.prediction import predict

        return list(predict(rows))
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"[:400]
        return [{"part": "prediction", "name": "all", "status": "error", "reason": reason}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, help="processes; default: all visible GPUs, or 2 on the CPU")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--presets", nargs="+", choices=("large", "small"), help="of the scaling; default: both")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="of the scaling's layouts, such as base; default: all"
    )
    parser.add_argument("--output", type=Path, help="append the rows to this file as JSON lines")
    parser.add_argument("--measured", type=Path, help="rows of an earlier run, for the prediction")
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces of two steps of each workload's base")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin and end all launches within this time")
    arguments = parser.parse_args()
    size = arguments.ranks or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    if size < 1 or (arguments.device == "cuda" and size > torch.cuda.device_count()):
        parser.error(f"--ranks: must be from 1 to the {torch.cuda.device_count()} visible GPUs, got {size}")
    environment = describe_environment(arguments.device)
    announce(f"{size} x {environment['device']}, torch {environment['torch']}, commit {environment['commit']}")
    rows: list[dict[str, Any]] = []
    measured = [json.loads(line) for line in arguments.measured.read_text().splitlines()] if arguments.measured else []

    def keep(new: list[dict[str, Any]]) -> None:
        new = [{"bench": "multi_gpu", **row, "ranks": size, **environment} for row in new]
        rows.extend(new)
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            with arguments.output.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)

    end = time.monotonic() + arguments.seconds
    models = make_models(arguments)
    for launch in make_launches(arguments.parts, size, arguments.device, models):
        left = end - time.monotonic()
        if left > LEAST_S:
            run_launch(replace(launch, budget_s=min(left, launch.budget_s)), keep)
            continue
        parts = dict.fromkeys(task.part for task in launch.tasks)
        reason = f"--seconds {arguments.seconds:g} are over"
        keep([{"part": part, "name": launch.name, "status": "skipped", "reason": reason} for part in parts])
    if "prediction" in arguments.parts:
        keep(predicted([*measured, *rows]))
    print_tables(rows)
    bad = [row for row in rows if row["status"] in BAD]
    announce(f"{len(rows)} rows, {len(bad)} failed" + "".join(f"\n  {row['part']}, {row['name']}" for row in bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
