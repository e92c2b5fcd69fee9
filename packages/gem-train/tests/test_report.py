"""The metrics file and the report page."""

from __future__ import annotations

import functools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_train.data import SCOREBOARD
from gem_train.metrics import BinaryMetrics
from gem_train.metrics_log import FILE_NAME, MetricsLog, read_metrics
from gem_train.report import write_report
from gem_train.report.figures import Curve, Level, calibration, curves, si, wilson
from gem_train.report.run import Bar, load_run
from gem_train.report.sections import verdict


@functools.cache
def task_metrics(noise: float, seed: int, curve_points: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    truth = 1.4 * torch.randn(4_000, generator=generator) - 0.5
    labels = (torch.rand(4_000, generator=generator) < torch.sigmoid(truth)).float()
    metrics = BinaryMetrics()
    metrics.update(truth + noise * torch.randn(4_000, generator=generator), labels)
    return metrics.compute(curve_points=curve_points)


def write_run(
    run_dir: Path,
    *,
    noise: float = 0.2,
    device_peak: float | None = 989e12,
    balance: str | None = "exchange",
    **config: Any,
) -> Path:
    """Twenty logging intervals, five validations and a test, with every kind of key."""
    base = {
        "run": run_dir.name,
        "recipe": "movielens",
        "dataset": "ml-latest-small",
        "precision": "mxfp8",
        "world_size": 2,
        "num_devices": 2,
        "device": "NVIDIA H200",
        "device_peak_flops": device_peak,
        "parameters": {"dense": 1_234_567, "sparse": 9_876_543},
        "parallel": {"dp_replicate": 1, "dp_shard": 2, "sparse_shard": 2},
        "seed": 3,
        "reference": [bar._asdict() for bar in SCOREBOARD["ml-latest-small"].scores],
        "reference_task": "like",
        "layers": [
            {
                "fqn": "towers.0.linear",
                "kind": "Linear",
                "precision": "mxfp8",
                "backend": "emulated",
                "reason": "no sm_100",
            },
            {"fqn": "heads.like", "kind": "Linear", "precision": "bf16", "backend": "torch", "reason": "N < 32 & last"},
        ],
        "versions": {"torch": "2.11.0", "gem-train": "0.1.0"},
        "start_step": 0,
    }
    with MetricsLog(run_dir) as log:
        log.write("config", **{**base, **config})
        for k in range(1, 21):
            spread = noise + 3.0 / k
            flops = 2.0e9 * 1_024 * 50
            log.write(
                "train", step=50 * k, samples=51_200 * k, seconds=2.0, loss=0.5 + 0.4 / k, samples_per_second=25_600.0,
                flops_per_second=flops / 2.0, flops_per_sample=2.0e9, mfu=0.1, learning_rate=1e-3, grad_norm=1.0,
                tasks={"like": task_metrics(spread, k), "favourite": task_metrics(spread, 100 + k)},
                time={"data": 0.1, "embedding": 0.2, "forward": 0.5, "backward": 0.9, "optimizer": 0.2, "eval": 0.05},
                flops={"towers.history": 3e9, "interaction": 1e9, "heads": 1e7}, memory_bytes=3 * 2**30,
                balance=balance and {
                    "mode": balance, "ratio": 1.01 + 0.001 * (k == 7), "ratio_as_read": 1.25, "moved": 20,
                    "heaviest_rank": 1, "heaviest_samples": 9,
                    "dearest": [{"lengths": {"history": 2698}, "share": 0.5}],
                },
            )  # fmt: skip
            if k % 4 == 0:
                log.write(
                    "validation", step=50 * k, samples=51_200 * k, seconds=1.0, num_samples=4_000, loss=0.52 + 0.4 / k,
                    tasks={t: task_metrics(spread, 200 + k, 20) for t in ("like", "favourite")},
                )  # fmt: skip
        log.write("checkpoint", step=1_000, seconds=0.4, bytes=44_000_000)
        log.write("end", step=1_000, samples=1_024_000, seconds=47.0, reason="finished")
        log.write(
            "test", step=1_000, samples=1_024_000, seconds=1.0, num_samples=4_000, loss=0.55,
            tasks={t: task_metrics(noise, 300, 20) for t in ("like", "favourite")},
        )  # fmt: skip
    return run_dir


class Page(HTMLParser):
    """Text of a page, its headings and whether its tags balance."""

    VOID = frozenset({"meta", "link", "img", "br", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        assert self.open == [], "unclosed tags"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)


def test_full_report(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo")
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    run = load_run(run_dir)
    assert run.result_split == "test"
    result = run.result("like")
    for value in (f"{result['ne']:.4f}", f"{result['auc']:.4f}", f"{result['calibration']:.3f}"):
        assert value in page.text
    for part in (
        "LightGBM, streaming features", "0.6320", "user CTR, streaming", "better than", "behind", "989 TFLOP/s × 2",
        "dp_shard", "towers.0.linear", "no sm_100", "N < 32 & last", "1,234,567", "2 GFLOP", "3.00 GiB", "44 MB",
        "2 × NVIDIA H200", "towers.history",
    ):  # fmt: skip
        assert part in page.text, part
    # 20 intervals of 2 s with 1024 * 50 samples of 2 GFLOP, on two devices of 989 TFLOP/s.
    assert f"{100 * 2e9 * 1_024 * 50 / 2 / (2 * 989e12):.2f} %" in page.text
    assert page.headings == [
        "Result", "Against reference predictors (task like, test)", "Learning", "Calibration", "Throughput",
        "Where the time went", "Where the model's FLOPs are", "Model and layout", "Precision", "Balance of the ranks",
        "Details",
    ]  # fmt: skip
    assert html.count("<svg") == 5, "loss, NE, AUC and a calibration plot per task"


@pytest.mark.parametrize(
    ("mode", "words"),
    [("exchange", "moved between the ranks"), ("reader", "dealt by length"), ("none", "as they come")],
)
def test_the_heaviest_rank_is_named_with_the_reason(tmp_path: Path, mode: str, words: str) -> None:
    page = Page(write_report(write_run(tmp_path / "demo", balance=mode)).read_text(encoding="utf-8"))
    for part in (words, "step 350: 1.011", "rank 1 with 9 samples", "history of 2,698 events: 50"):
        assert part in page.text, part
    assert ("the same without moving 1.250" in page.text) == (mode == "exchange")


def test_one_rank_has_no_balance(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "demo", balance=None)).read_text(encoding="utf-8"))
    assert "Balance of the ranks" not in page.headings


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "demo")).read_text(encoding="utf-8")
    page = Page(html)
    assert not page.tags & {"script", "link", "img", "iframe", "object"}
    assert all(address.startswith("#") for address in page.addresses)
    assert re.search(r"https?:|//\w|url\((?!#)|@import", html) is None


def test_page_is_reproducible(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo")
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir, output=tmp_path / "again.html").read_bytes() == first
    assert not list(tmp_path.rglob("*.tmp"))


def test_names_are_escaped(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "demo", run="<b>a&b</b>", recipe="<script>alert(1)</script>")
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert "<b>a&b</b>" in page.text


def test_comparison(tmp_path: Path) -> None:
    a = write_run(tmp_path / "fp32", noise=0.2, precision="fp32")
    b = write_run(tmp_path / "mxfp8", noise=0.25)
    page = Page(write_report(a, compare=[b]).read_text(encoding="utf-8"))
    ratio = load_run(b).result("like")["ne"] / load_run(a).result("like")["ne"] - 1
    assert f"{100 * ratio:+.2f} %" in page.text
    assert "Comparison" in page.headings
    assert "mxfp8 validation" in page.text, "the legend names both runs"


def test_without_peak_says_why(tmp_path: Path) -> None:
    why = "no MFU: the bf16 peak of 'cpu' is not in the table"
    run_dir = write_run(tmp_path / "demo", device_peak=None, device="cpu", mfu_reason=why, num_devices=1)
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert why in page.text
    assert "MFU, end to end" not in page.text
    assert "peak of one device" not in page.text


SETTINGS = {"trainer.learning_rate": 0.05, "data.global_batch_size": 256, "data.epochs": 1, "trainer.keep_last": 2,
            "model.tasks": ["like", "favourite"], "trainer.max_steps": None}  # fmt: skip


def test_settings_dates_and_commit_are_shown(tmp_path: Path) -> None:
    changed = {"trainer.learning_rate": 0.002}
    first = {"begun": "2026-11-30T07:30:12+00:00", "commit": "0123456789ab, changed since"}
    run_dir = write_run(tmp_path / "demo", settings=SETTINGS, changed=changed, **first)
    with MetricsLog(run_dir) as log:
        log.write("config", run="demo", start_step=1000, begun="2026-12-01T08:00:00+00:00")
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    for part in (
        "setting this run recipe trainer.learning_rate 0.05 0.002 All 6 settings", "data.global_batch_size 256",
        "model.tasks like, favourite", "trainer.max_steps none", "begun 2026-11-30 07:30 UTC",
        "resumed at step 1,000, last 2026-12-01 08:00 UTC", "commit 0123456789ab, changed since",
    ):  # fmt: skip
        assert part in page.text, part
    plain = write_run(tmp_path / "plain", settings=SETTINGS, changed={})
    assert "All settings are the recipe's." in Page(write_report(plain).read_text(encoding="utf-8")).text


def test_a_comparison_names_the_settings_that_differ(tmp_path: Path) -> None:
    ours = write_run(tmp_path / "bf16", settings=SETTINGS)
    theirs = {
        "same": SETTINGS | {"trainer.keep_last": 9},
        "other": SETTINGS | {"trainer.learning_rate": 0.002},
        "old": None,
    }
    others = [write_run(tmp_path / name, settings=values) for name, values in theirs.items()]
    page = Page(write_report(ours, compare=others).read_text(encoding="utf-8"))
    for part in (
        "same has the same settings, length, layout", "settings that differ other this run trainer.learning_rate "
        "0.002 0.05", "Whether old has other settings was not recorded.",
    ):  # fmt: skip
        assert part in page.text, part


def test_a_narrow_screen_scrolls_tables_and_not_the_page(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "demo")).read_text(encoding="utf-8")
    assert html.count("<table>") == html.count("<div class=wide><table>") > 5
    assert ".wide { overflow-x: auto; }" in html


def test_labels_of_close_levels_do_not_lie_on_each_other() -> None:
    line = Curve("validation", [0.0, 1.0], [0.7, 0.9], "#000000", marked=True)
    levels = [Level("the first (test)", 0.861), Level("the second (test)", 0.865)]
    svg = curves("AUC", [line], ylabel="AUC", levels=levels, alt="")
    heights = [float(y) for y in re.findall(r'<text [^>]* y="([\d.]+)"[^>]*>the (?:first|second) \(test\)', svg)]
    assert abs(heights[0] - heights[1]) > 8, "points, of letters that are 8 high"


def test_windows_of_few_steps_are_left_out_of_the_curves(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write("config", run="short end")
        for step, loss in ((5, 0.5), (10, 0.4), (15, 0.4), (17, 0.9)):
            log.write("train", step=step, samples=8 * step, seconds=0.5, loss=loss)
    run = load_run(tmp_path)
    assert [line["step"] for line in run.windows] == [5, 10, 15]
    assert run.step == 17
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert "training from 0.5 to 0.4" in html
    assert "Windows of fewer steps than most, as the last one may be, are left out." in Page(html).text
    assert "Windows of fewer" not in write_report(write_run(tmp_path / "even")).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("losses", "starts", "top"),
    [([0.9, 0.8, *[0.7 - 0.01 * k for k in range(18)]], "", 0.9), ([9.0, 0.8] + [0.5] * 18, " (from 9)", 0.5)],
)
def test_a_curve_is_cut_at_its_start_only_where_that_dwarfs_the_rest(
    losses: list[float], starts: str, top: float
) -> None:
    svg = curves("Loss", [Curve("training", list(range(20)), losses, "#000000", marked=False)], ylabel="loss", alt="")
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", svg)
    assert (f"training{starts}" in texts) == bool(starts)
    ticks = [float(text) for text in texts[texts.index("samples trained") + 1 :] if re.fullmatch(r"[\d.]+", text)]
    assert max(ticks) == pytest.approx(top, abs=0.06)


@pytest.mark.parametrize("rate", [0.5, 0.02])
def test_calibration_of_narrow_predictions_fills_the_plot(rate: float) -> None:
    points = [{"count": 100, "prediction": rate * (1 + 0.002 * k), "label": rate * (1 + k % 3)} for k in range(-10, 10)]
    svg = calibration("narrow", [p for p in points if p["label"] <= 1], alt="")
    texts = re.findall(r'<text [^>]*?([\d.]+)\)"[^>]*>([^<]*)</text>', svg)
    numbers = [float(text) for _, text in texts if re.fullmatch(r"[\d.]+", text)]
    assert sum(0.97 * rate < number < 1.03 * rate for number in numbers) >= 3, "of the axis of predictions"
    heights = {text: float(y) for y, text in texts}
    assert heights["observed"] > heights["mean prediction"], "the legend is below the plots"


def test_young_run(tmp_path: Path) -> None:
    """One interval, no evaluation, one class so far: no NE, no AUC, and still a page."""
    with MetricsLog(tmp_path) as log:
        log.write("config", run="young", world_size=1, start_step=0)
        log.write("train", step=1, samples=8, seconds=0.5, loss=0.7, tasks={"click": {"ne": None, "auc": math.nan}})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "No evaluation has been done yet" in page.text
    assert "has not ended" in page.text
    assert "nan" not in page.text.lower()


def test_rare_labels_and_interrupted_run(tmp_path: Path) -> None:
    """A calibration plot over two decades, points without a positive, a run that was stopped."""
    logits = torch.linspace(-9.0, -4.0, 5_000)
    labels = (torch.rand(5_000, generator=torch.Generator().manual_seed(0)) < torch.sigmoid(logits)).float()
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    result = metrics.compute(curve_points=10)
    assert any(point["label"] == 0 for point in result["curve"])
    with MetricsLog(tmp_path) as log:
        log.write("config", run="rare")
        alike = BinaryMetrics()
        alike.update(logits, torch.zeros_like(labels))
        tasks = {"click": result, "buy": alike.compute(curve_points=10)}
        log.write("validation", step=1, samples=8, seconds=0.5, loss=0.7, tasks=tasks)
        log.write("end", step=1, samples=8, seconds=0.5, reason="interrupted")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "which do not exist where all labels are alike: validation, buy." in page.text
    assert "ended early: interrupted" in page.text
    assert "Calibration" in page.headings


def test_report_refuses_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold metrics\.jsonl"):
        write_report(tmp_path)
    with MetricsLog(tmp_path) as log:
        log.write("config", run="empty")
    with pytest.raises(ValueError, match="must hold a train or evaluation line, got 1 lines without"):
        write_report(tmp_path)


BARS = (Bar("best", 0.6, 0.9), Bar("middle", 0.7, 0.8), Bar("worst", 1.0, None))


@pytest.mark.parametrize(
    ("ne", "bars", "expected"),
    [
        (0.55, BARS, "Test NE 0.5500 beats all 3 reference predictors; the best of them is best (0.6)."),
        (0.66, BARS, "Test NE 0.6600 is better than middle (0.7) and 10.0 % behind best (0.6)."),
        (0.7, BARS, "Test NE 0.7000 is better than worst (1) and 0.0 % behind middle (0.7)."),
        (1.1, BARS, "Test NE 1.1000 is worse than all 3 reference predictors: 10.0 % behind worst (1)."),
        (0.8, (), "Test NE 0.8000: 20.0 % below the entropy of the base rate."),
        (1.2, (), "Test NE 1.2000: 20.0 % above the entropy of the base rate."),
    ],
)
def test_verdict(ne: float, bars: tuple[Bar, ...], expected: str) -> None:
    assert verdict(ne, bars, "test") == expected


@pytest.mark.parametrize(
    ("ne", "error", "expected"),
    [
        (0.59, 0.02, "level with best (0.6); better than 2 of 3 reference predictors, the best of them middle (0.7)"),
        (
            0.62,
            0.05,
            "level with best (0.6) and 1 more; better than 1 of 3 reference predictors, the best of them worst (1)",
        ),
        (0.8, 0.01, "14.3 % behind middle (0.7); better than 1 of 3 reference predictors, the best of them worst (1)"),
        (0.5, 0.01, "better than 3 of 3 reference predictors, the best of them best (0.6)"),
        (1.2, 0.01, "20.0 % behind worst (1)"),
        (0.7, 0.2, "level with best (0.6) and 2 more"),
    ],
)
def test_a_verdict_within_two_standard_errors_is_level(ne: float, error: float, expected: str) -> None:
    start = f"Test NE {ne:.4f} with a standard error of {error:g}: "
    assert verdict(ne, BARS, "test", error) == f"{start}{expected}. Level is a difference within two standard errors."


def test_the_report_shows_the_standard_error_or_why_there_are_no_bars(tmp_path: Path) -> None:
    with_error = Page(write_report(write_run(tmp_path / "a", reference_standard_error=0.085)).read_text())
    assert "with a standard error of 0.085: " in with_error.text
    assert "The standard error of an NE on this split is 0.085: a predictor within 0.17" in with_error.text
    without = Page(write_report(write_run(tmp_path / "b", reference=[], reference_note="Other data.")).read_text())
    assert "Other data." in without.text
    assert "LightGBM" not in without.text


def test_bars_of_the_test_split_are_not_set_beside_a_validation(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write("config", reference=[bar._asdict() for bar in BARS], reference_task="like")
        log.write("validation", step=1, samples=8, tasks={"like": task_metrics(0.2, 1)})
    page = Page(write_report(tmp_path).read_text())
    assert "of the base rate" in page.text
    assert "middle" not in page.text


def test_numbers() -> None:
    assert [si(x) for x in (0.5, 999.0, 1_200.0, 2.5e6, 9.89e14)] == ["0.5", "999", "1.2 k", "2.5 M", "989 T"]
    low, high = wilson(0, 100)
    assert low == 0.0
    assert high == pytest.approx(0.0370, abs=1e-4)
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_log_appends_flushes_and_turns_nan_into_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "a" / "b")
    log.write("train", step=1, loss=float("nan"), tasks={"t": {"auc": float("inf"), "points": (1.0, float("nan"))}})
    text = (tmp_path / "a" / "b" / FILE_NAME).read_text()  # before close
    assert json.loads(text) == {
        "phase": "train", "step": 1, "loss": None, "tasks": {"t": {"auc": None, "points": [1.0, None]}},
    }  # fmt: skip
    log.close()
    with MetricsLog(tmp_path / "a" / "b") as again:
        again.write("end", step=1)
    assert [line["phase"] for line in read_metrics(tmp_path / "a" / "b")] == ["train", "end"]


def test_resume_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write("config", run="a")
        for step in (10, 20, 30):
            log.write("train", step=step)
        log.write("validation", step=20)
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"phase": "train", "st')  # killed while writing
    assert len(read_metrics(tmp_path)) == 5
    with MetricsLog(tmp_path, resume_step=20) as log:
        log.write("config", start_step=20)
    assert [(line["phase"], line.get("step")) for line in read_metrics(tmp_path)] == [
        ("config", None), ("train", 10), ("train", 20), ("validation", 20), ("config", None),
    ]  # fmt: skip
    assert load_run(tmp_path).starts == (0, 20)


def test_damaged_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text('{"phase": "train", "step": 1}\nnot json\n{"phase": "end"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .* must be JSON"):
        read_metrics(tmp_path)
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of .* must be an object with a phase"):
        read_metrics(tmp_path)
