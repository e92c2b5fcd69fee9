"""Skips GPU tests without a CUDA device, and runs a function of a test file on several gloo ranks."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

# Under importlib mode a test file's neighbours are not importable by themselves.
sys.path.insert(0, str(Path(__file__).parent))

WORKER = Path(__file__).with_name("rank_worker.py")
TIMEOUT_S = 240
# Imported once by the process that all ranks are forked from.
PRELOAD = ["torch.distributed.fsdp", "gem_parallel", "fbgemm_gpu.split_table_batched_embeddings_ops_training"]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def run_ranks(path: Path, function: str, world_size: int, folder: Path, backend: str = "gloo", **arguments):
    """Run `function(rank, world_size, folder, **arguments)` of the file `path` on `world_size` ranks; their results."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A process that was forked from one that has imported torch's CUDA parts cannot use CUDA.
    context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
    if backend == "gloo":
        context.set_forkserver_preload(PRELOAD)
    folder.mkdir(parents=True, exist_ok=True)
    run = folder / f"{function}-{world_size}-{time.monotonic_ns()}"
    run.mkdir()
    processes = []
    for rank in range(world_size):
        task = {
            "path": str(path),
            "function": function,
            "backend": backend,
            "rank": rank,
            "world_size": world_size,
            "run": str(run),
            "folder": str(folder),
            "arguments": arguments,
        }
        process = context.Process(
            target=runpy.run_path, args=(str(WORKER),), kwargs={"init_globals": {"TASK": task}, "run_name": "rank"}
        )
        process.start()
        processes.append(process)
    deadline = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.terminate()
            process.join()
    results = []
    for rank in range(world_size):
        error = run / f"{rank}.error"
        if error.exists():
            pytest.fail(f"rank {rank} of {world_size}: {error.read_text()}")
    assert not hung, f"ranks {hung} of {world_size} did not end within {TIMEOUT_S} s"
    for rank in range(world_size):
        results.append(torch.load(run / f"{rank}.pt", weights_only=False))
    return results


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """`ranks(function, world_size, **arguments)`: results of a function of this test file, one per rank."""
    folder = tmp_path_factory.mktemp("ranks")

    def run(function: str, world_size: int, **arguments):
        return run_ranks(request.path, function, world_size, folder, **arguments)

    return run
