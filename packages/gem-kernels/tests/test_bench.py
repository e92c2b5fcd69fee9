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
    assert (row["tflops"], row["gbps"]) == (3.0, 20.0)
    assert (row["ratio"], row["ratio_to"]) == (pytest.approx(0.2), "device copy")
    assert (row["op"], row["provider"], row["dtype"], row["note"]) == ("f", "ours", "float32", "x")
    assert row["torch"] == torch.__version__
    assert row["gpu"]


def test_ratios_are_speeds_relative_to_other_work_or_to_a_provider(capsys, monkeypatch):
    milliseconds = {"ours": 2.0, "other": 4.0, "matmul": 1.0}
    timings = {name: bench.Timing(median=ms, p20=ms, p80=ms, peak_mib=None) for name, ms in milliseconds.items()}
    monkeypatch.setattr(bench, "measure", lambda functions, **_: {name: timings[name] for name in functions})
    work = bench.Work(op="f", direction="forward", shape="s", dtype=torch.float32, flops=6 * 10**9, num_bytes=4)
    providers = {"ours": lambda: None, "other": lambda: None}
    matmul = bench.Base(name="matmul", function=lambda: None, flops=12 * 10**9)
    for base, ratios in ((matmul, [0.25, 0.125]), ("other", [2.0, 1.0])):
        rows = bench.compare(work, providers, device=CPU, base=base)
        assert [row["ratio"] for row in rows] == ratios
        assert {row["ratio_to"] for row in rows} == {base if isinstance(base, str) else "matmul"}
