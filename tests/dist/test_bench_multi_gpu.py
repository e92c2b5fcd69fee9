"""The benchmark of several GPUs runs on two gloo processes, every part of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_multi_gpu.py"
LIMIT_S = 300


def test_all_parts_on_two_gloo_processes(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["ranks"] for row in rows} == {2}
    compared = [row for row in rows if row["part"] == "correctness"]
    assert [row["name"] for row in compared] == ["fsdp", "hsdp", "ep", "sparse 2d", "all axes"]
    for row in compared:
        assert row["status"] == "pass"
        # Sums in another order leave something: an error of exactly zero would be one rank compared with itself.
        assert 0 < row["weight_error"] <= row["weight_bound"] < 1e-4
    measured = {(row["name"], row["engine"]) for row in rows if row["part"] == "collectives" and row["status"] == "ok"}
    assert measured == {(op, "default") for op in ("all_gather", "reduce_scatter", "all_to_all")}
    missing = [row for row in rows if row["status"] == "unavailable"]
    assert len(missing) == 6
    assert all("no CUDA device" in row["reason"] for row in missing)
    steps = {(row["workload"], row["name"]): row for row in rows if row["part"] == "scaling"}
    plain, experts = "tiny", "tiny, 8 experts"
    switches = ("no overlap", "rows in bf16", "parameters in bf16", "parameters in mxfp8", "balanced batches")
    names = {*((plain, name) for name in switches), (experts, "ep 2")}
    both = ("dense model, one GPU", "one GPU", "base", "base again")
    assert names | {(workload, name) for workload in (plain, experts) for name in both} <= steps.keys()
    assert all(row["status"] == "ok" and row["samples_per_second"] > 0 for row in steps.values())
    predicted = {(row["workload"], row["name"]): row for row in rows if row["part"] == "prediction"}
    assert names - {(plain, "no overlap")} <= predicted.keys() < steps.keys()
    for name, row in predicted.items():
        assert row["measured_ms"] == steps[name]["step_ms"]
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
    # Rows of half the bytes cannot take longer, nor can the experts of a rank that has half of them.
    assert 0 < predicted[plain, "rows in bf16"]["predicted_ms"] <= predicted[plain, "base"]["predicted_ms"]
    assert predicted[experts, "ep 2"]["predicted_peak_gib"] < predicted[experts, "base"]["predicted_peak_gib"]
    assert steps[plain, "balanced batches"]["imbalance"] < steps[plain, "base"]["imbalance"]
    wires = [row for row in rows if row["part"] == "wires"]
    assert [row["status"] for row in wires] == ["ok"] * 9
    # A byte an element and one for 32, against two and against four.
    sent = {(row["name"], row["dtype"]): row["sent_mib"] for row in wires if "dtype" in row}
    assert sent["mxfp8", "bfloat16"] == sent["none", "bfloat16"] * 33 / 64
    assert sent["mxfp8", "float32"] == sent["none", "float32"] * 33 / 128


def test_a_wrong_weight_is_far_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import torch
    from multi_gpu.correctness import CEILING, Run, deviation

    right = Run([0.7, 0.6], {"w": torch.ones(100), "model.v": torch.ones(4)})
    wrong = Run([0.7, 0.6], {"w": torch.ones(100), "model.v": torch.tensor([1.0, 1.0, 1.0, 1.01])})
    assert deviation(right, right) == (0.0, 0.0, "")
    loss, weight, where = deviation(wrong, right)
    assert (loss, where) == (0.0, "model.v")
    assert weight > CEILING
    nan = Run([float("nan"), 0.6], {"w": torch.full((100,), float("nan")), "model.v": torch.ones(4)})
    assert deviation(nan, right)[:2] == (float("inf"), float("inf"))
