"""The benchmark runner: order of calls, rates, rows."""

import json

import pytest
import torch

from gem_kernels.testing import bench

CPU = torch.device("cpu")


def test_providers_are_warmed_up_and_then_alternate():
    calls = []
    timings = bench.measure(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, device=CPU, warmup=2, repeats=3
    )
    assert "".join(calls) == "aabb" + "ababab"
    for timing in timings.values():
        assert 0 < timing.p20 <= timing.median <= timing.p80
        assert timing.peak_mib is None


def test_rows_hold_rates_and_the_environment(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_time_once", lambda function, flush: 2.0)
    monkeypatch.setattr(bench, "copy_gb_per_s", lambda device: 100.0)
    work = bench.Work(op="f", direction="forward", shape="s", dtype=torch.float32, flops=6 * 10**9, num_bytes=4 * 10**7)
    bench.compare(work, {"ours": lambda: None}, device=CPU, repeats=2, note="x")
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert row["ms"] == 2.0
    assert row["tflop_per_s"] == 3.0
    assert row["gb_per_s"] == 20.0
    assert row["of_copy_rate"] == pytest.approx(0.2)
    assert (row["op"], row["provider"], row["dtype"], row["note"]) == ("f", "ours", "float32", "x")
    assert row["torch"] == torch.__version__
    assert row["device"]
