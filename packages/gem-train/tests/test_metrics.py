"""Mergeable metrics against exact ones over all samples."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gem_train.metrics import BinaryMetrics


def exact_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """By ranks, ties counted half (Mann-Whitney)."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = labels.sum()
    return float((ranks[labels == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives)))


def sample(n: int = 20_000, bias: float = 0.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=generator, dtype=torch.float64) * 1.5 + bias
    labels = (torch.rand(n, generator=generator) < torch.sigmoid(logits * 0.7)).float()
    return logits, labels


@pytest.mark.parametrize("bias", [0.0, -6.0, 4.0], ids=["balanced", "rare", "frequent"])
def test_against_exact(bias: float) -> None:
    logits, labels = sample(bias=bias)
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    got = metrics.compute()
    p = torch.sigmoid(logits)
    loss = torch.nn.functional.binary_cross_entropy(p, labels.double())
    rate = labels.double().mean()
    entropy = torch.nn.functional.binary_cross_entropy(rate.expand(len(p)), labels.double())
    assert got["count"] == len(p)
    assert got["base_rate"] == pytest.approx(float(rate), rel=1e-12)
    assert got["logloss"] == pytest.approx(float(loss), rel=1e-12)
    assert got["ne"] == pytest.approx(float(loss / entropy), rel=1e-12)
    assert got["calibration"] == pytest.approx(float(p.sum() / labels.double().sum()), rel=1e-12)
    auc = exact_auc(logits.numpy(), labels.numpy())
    assert abs(got["auc"] - auc) <= got["auc_error_bound"] + 1e-12
    assert got["auc_error_bound"] < 1e-4


def test_constant_prediction_is_ne_one_and_auc_half() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.full((8,), 0.25), torch.tensor([1.0, 0, 0, 0] * 2), from_logits=False)
    got = metrics.compute()
    assert got["ne"] == pytest.approx(1.0, abs=1e-12)
    assert got["auc"] == 0.5
    assert got["calibration"] == 1.0


def test_perfect_and_inverted_ranking() -> None:
    for sign in (1.0, -1.0):
        metrics = BinaryMetrics()
        metrics.update(sign * torch.tensor([2.0, -1.0, 3.0, -20.0]), torch.tensor([1, 0, 1, 0]))
        assert metrics.compute()["auc"] == (1.0 if sign > 0 else 0.0)


def test_logits_and_probabilities_agree() -> None:
    logits, labels = sample(1_000)
    a, b = BinaryMetrics(), BinaryMetrics()
    a.update(logits, labels)
    b.update(torch.sigmoid(logits), labels, from_logits=False)
    x, y = a.compute(), b.compute()
    assert x["logloss"] == pytest.approx(y["logloss"], rel=1e-9)
    assert x["auc"] == pytest.approx(y["auc"], abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_input_dtypes(dtype: torch.dtype) -> None:
    logits, labels = sample(2_000)
    rounded = logits.to(dtype)
    a, b = BinaryMetrics(), BinaryMetrics()
    a.update(rounded, labels.to(torch.int64))
    b.update(rounded.double(), labels.bool())
    assert a.compute() == b.compute()


def test_merge_of_uneven_parts_equals_one() -> None:
    """One of five ranks sees nothing; counts and AUC are exact, sums differ by rounding."""
    logits, labels = sample(9_999)
    one = BinaryMetrics()
    one.update(logits, labels)
    total = BinaryMetrics()
    for a, b in ((0, 1), (1, 1), (1, 4_000), (4_000, 4_007), (4_007, 9_999)):
        part = BinaryMetrics()
        part.update(logits[a:b], labels[a:b])
        total.merge(part)
    mine, whole = total.compute(curve_points=10), one.compute(curve_points=10)
    for key in ("count", "base_rate", "auc", "auc_error_bound", "curve"):
        assert mine[key] == whole[key], key
    for key in ("logloss", "ne", "calibration", "mean_prediction"):
        assert mine[key] == pytest.approx(whole[key], rel=1e-13), key


def test_mean_of_batch_values_is_another_number() -> None:
    """The trap that merging avoids: AUC and NE averaged over batches."""
    metrics, parts = BinaryMetrics(), []
    for k, bias in enumerate((-4.0, 3.0)):
        logits, labels = sample(5_000, bias=bias, seed=k)
        metrics.update(logits, labels)
        part = BinaryMetrics()
        part.update(logits, labels)
        parts.append(part.compute())
    got = metrics.compute()
    assert abs(got["auc"] - np.mean([p["auc"] for p in parts])) > 0.05
    assert abs(got["ne"] - np.mean([p["ne"] for p in parts])) > 0.05


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class(label: float) -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.tensor([0.1, -2.0]), torch.full((2,), label))
    got = metrics.compute(curve_points=4)
    assert got["auc"] is None
    assert got["auc_error_bound"] is None
    assert got["ne"] is None
    assert (got["calibration"] is None) == (label == 0)
    assert got["logloss"] > 0
    assert got["base_rate"] == label


def test_no_samples() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.empty(0), torch.empty(0))
    got = metrics.compute(curve_points=4)
    assert got.pop("count") == 0
    assert got.pop("curve") == []
    assert set(got.values()) == {None}


def test_extreme_logits_stay_finite() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.tensor([1e4, -1e4, 1e4, -1e4]), torch.tensor([1.0, 0.0, 0.0, 1.0]))
    got = metrics.compute()
    assert got["logloss"] == 5_000
    assert got["auc"] == 0.5


@pytest.mark.parametrize(
    ("predictions", "labels", "match"),
    [
        ([0.1, math.nan], [0, 1], "first at sample 1: nan"),
        ([math.inf, 0.1], [0, 1], "first at sample 0: inf"),
        ([0.1, 0.2], [0, 0.5], "labels must be 0 or 1, got 1 others, first at sample 1: 0.5"),
        ([0.1, 0.2], [math.nan, 1], "labels must be 0 or 1"),
        ([0.1], [0, 1], r"one shape \(B,\), got \(1,\) and \(2,\)"),
    ],
)
def test_refused(predictions: list[float], labels: list[float], match: str) -> None:
    metrics = BinaryMetrics()
    with pytest.raises(ValueError, match=match):
        metrics.update(torch.tensor(predictions), torch.tensor(labels))
    assert metrics.compute()["count"] == 0


def test_probabilities_out_of_range_and_types() -> None:
    with pytest.raises(ValueError, match=r"lie in \[0, 1\], got 1 that are not, first at sample 0: 1.5"):
        BinaryMetrics().update(torch.tensor([1.5, 0.5]), torch.tensor([0, 1]), from_logits=False)
    with pytest.raises(TypeError, match=r"must be floating point, got torch\.int64"):
        BinaryMetrics().update(torch.tensor([1]), torch.tensor([1]))


def test_curve_is_calibrated_and_complete() -> None:
    logits, _ = sample(50_000)
    labels = (torch.rand(50_000, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(logits)).float()
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    curve = metrics.compute(curve_points=20)["curve"]
    assert len(curve) == 20
    assert sum(point["count"] for point in curve) == 50_000
    assert all(abs(point["count"] - 2_500) < 50 for point in curve)
    predictions = [point["prediction"] for point in curve]
    assert predictions == sorted(predictions)
    for point in curve:  # five standard errors of a mean of 2,500 draws
        p = point["prediction"]
        assert abs(point["label"] - p) < 5 * math.sqrt(p * (1 - p) / point["count"])


def test_state_dict_and_reset() -> None:
    logits, labels = sample(500)
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    other = BinaryMetrics()
    other.load_state_dict({k: v.clone() for k, v in metrics.state_dict().items()})
    assert other.compute() == metrics.compute()
    other.reset()
    assert other.compute()["count"] == 0
    assert metrics.compute()["count"] == 500
    with pytest.raises(ValueError, match=r"counts must have shape \(4,\), got nothing"):
        other.load_state_dict({"histogram": metrics.histogram})


RANK_SCRIPT = """
import sys, torch, torch.distributed as dist
from gem_train.launch import exit_worker
from gem_train.metrics import BinaryMetrics
rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
g = torch.Generator().manual_seed(0)
logits = torch.randn(1000, generator=g)
labels = (torch.rand(1000, generator=g) < torch.sigmoid(logits)).float()
one = BinaryMetrics(); one.update(logits, labels)
mine = BinaryMetrics()
bounds = [0, 0, 400, 1000]  # the first rank has no sample
a, b = bounds[rank], bounds[rank + 1]
mine.update(logits[a:b], labels[a:b])
mine.all_reduce()
x, y = mine.compute(), one.compute()
assert x["count"] == y["count"] == 1000 and x["auc"] == y["auc"], (x, y)
assert abs(x["ne"] - y["ne"]) < 1e-13 and abs(x["calibration"] - y["calibration"]) < 1e-13
mine.update(logits, labels)  # the reduced state is an ordinary one
assert mine.compute()["count"] == 2000
dist.destroy_process_group()
exit_worker(0)
"""


@pytest.mark.dist
def test_three_ranks_equal_one(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT, str(rank), "3", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(outputs)


def test_all_reduce_without_processes_keeps_the_state() -> None:
    logits, labels = sample(100)
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    before = metrics.compute()
    metrics.all_reduce()
    assert metrics.compute() == before


@pytest.mark.gpu
def test_gpu_equals_cpu_and_reports_nan_late() -> None:
    logits, labels = sample(50_000)
    cpu, gpu = BinaryMetrics(), BinaryMetrics("cuda")
    cpu.update(logits, labels)
    gpu.update(logits.cuda(), labels.cuda())
    a, b = cpu.compute(curve_points=5), gpu.compute(curve_points=5)
    assert a["count"] == b["count"]
    assert a["auc"] == pytest.approx(b["auc"], abs=1e-6)  # a logit on a bin's edge may round to either side
    assert a["ne"] == pytest.approx(b["ne"], rel=1e-12)
    gpu.update(torch.tensor([math.nan], device="cuda"), torch.ones(1, device="cuda"))
    with pytest.raises(ValueError, match="got 1 that are not"):
        gpu.compute()
