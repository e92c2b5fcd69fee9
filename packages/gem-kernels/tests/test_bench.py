"""The benchmark runner: order of calls, rates, rows."""

import importlib.util
import itertools
import json
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from gem_kernels.testing import bench

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


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


def test_rounds_time_every_provider_and_a_short_one_often():
    calls = []

    def short():
        calls.append("a")

    def long():
        time.sleep(0.003)
        calls.append("b")

    timings = bench.measure_rounds({"a": short, "b": long}, device=CPU, warmup=0, repeats=8, slice_ms=0.5)
    assert timings["b"].median > 3.0 > timings["a"].median
    for timing in timings.values():
        assert 0 < timing.p20 <= timing.median <= timing.p80
        assert timing.mhz is None
        assert not timing.captured
    runs = [(name, len(list(group))) for name, group in itertools.groupby(calls)]
    # The long one is called once in a round, and the short one often: half a millisecond of it.
    assert sum(name == "b" for name in calls) in range(9, 9 + 8 + 1)
    assert max(count for name, count in runs if name == "a") > 10


def test_rounds_have_rows_of_the_other_work_between_the_providers_and_alone(capsys, monkeypatch):
    monkeypatch.setattr(
        bench,
        "measure_rounds",
        lambda functions, **_: {n: bench.Timing(median=2.0, p20=2.0, p80=2.0, peak_mib=None) for n in functions},
    )
    monkeypatch.setattr(bench, "_time_once", lambda function, flush: 1.6)
    work = bench.Work(op="f", direction="forward", shape="s", dtype=torch.float32, flops=6 * 10**9, num_bytes=4)
    matmul = bench.Base(name="matmul", function=lambda: None, flops=12 * 10**9, num_bytes=10**6)
    rows = bench.compare(work, {"ours": lambda: None}, device=CPU, base=matmul, in_rounds=True)
    assert [(row["provider"], row["ratio"]) for row in rows] == [
        ("ours", 0.5),
        ("matmul", 1.0),
        ("matmul, alone", 1.25),
    ]
    assert [row["tflops"] for row in rows] == [3.0, 6.0, 7.5]
    assert {row["ratio_to"] for row in rows} == {"matmul"}


@pytest.fixture
def plot():
    spec = importlib.util.spec_from_file_location("plot", BENCHMARKS / "plot.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chart_rows(ratios, commit="a", date="2026-01-01"):
    where = {"gpu": "G", "torch": "2", "triton": "3", "dtype": "bfloat16", "commit": commit, "date": date}
    common = {"op": "jagged_attention", "direction": "backward", "shape": "B1152-uniform1024", "ratio_to": "matmul"}
    return [common | where | {"provider": name, "ratio": ratio} for name, ratio in ratios.items()]


def test_a_chart_has_a_bar_per_provider_and_a_line_at_the_aim(plot):
    ratios = {
        "gem_kernels.jagged_attention": 0.4,
        "torch sdpa cudnn, padded": 0.1,
        "torch varlen_attn": 0.2,
        "matmul bfloat16 8192": 1.0,
        "matmul bfloat16 8192, alone": 1.1,
    }
    rows = chart_rows(ratios)
    root = ElementTree.fromstring(plot.Chart("jagged_attention", rows).draw())
    bars = {
        float(x.get("width")): x.get("fill")
        for x in root.iter("{http://www.w3.org/2000/svg}rect")
        if x.get("height") == "10" and x.get("width") != "10"
    }
    # 1.6 times varlen_attn, 0.32, is more than 2.5 times padded cuDNN and less than ours, the longest bar.
    assert sorted(bars) == pytest.approx([330 / 4, 330 / 2, 330], rel=1e-3)
    assert bars[330.0] == plot.OURS[0]
    assert plot.aim_of("jagged_attention", "backward", "B1152-uniform1024", rows) == pytest.approx(0.32)
    assert plot.aim_of("jagged_attention", "backward", "B1152-uniform1024", rows[:2]) is None
    lines = [x.get("d") for x in root.iter("{http://www.w3.org/2000/svg}path") if x.get("stroke") == "#000"]
    assert any(line.startswith(f"M{118 + 330 * 0.8:.4g} ") for line in lines)


def test_a_chart_shows_what_was_measured_last_of_each_provider(plot):
    new = chart_rows({"ours": 0.5}, commit="b", date="2026-01-02")
    old = chart_rows({"ours": 0.4, "other": 0.3})
    assert plot.newest([*new, *old]) == [*new, old[1]]
    new[0]["ratio_to"] = "something else"
    assert plot.newest([*new, *old]) == new


@pytest.mark.gpu
def test_rounds_replay_a_graph_and_read_the_clock():
    device = torch.device("cuda")
    x = torch.zeros(2**24, device=device)

    def add():
        x.add_(1)

    eager = bench.measure_rounds({"add": add}, device=device, repeats=3, slice_ms=1.0)["add"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        replayed = bench.measure_rounds({"add": add}, device=device, repeats=3, slice_ms=1.0)["add"]
    torch.cuda.synchronize()
    assert (eager.captured, replayed.captured) == (False, True)
    assert float(x.min()) == float(x.max()) > 6
    for timing in (eager, replayed):
        assert timing.median > 0
        assert 200 < timing.mhz < 5000
