"""The peak table and the arithmetic of MFU."""

from __future__ import annotations

import pytest

from gem_train import mfu

# Dense bf16 TFLOP/s, half of what the vendors print in large type.
KNOWN = {
    "NVIDIA H200": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA H20": 148,
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_devices(name: str) -> None:
    peak = mfu.device_peak(name)
    assert peak is not None
    assert peak.flops_per_second == KNOWN[name] * 1e12
    assert peak.source


@pytest.mark.parametrize(
    "name",
    ["", "cpu", "H100", "nvidia h100 80gb hbm3", "NVIDIA H100", "NVIDIA H2000", "NVIDIA GB300", "NVIDIA B300",
     "NVIDIA H200 MIG 1g.18gb", "NVIDIA A100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
)  # fmt: skip
def test_unknown_device_has_no_peak(name: str) -> None:
    """Part of a name, another case or a slice of a device is not the device."""
    assert mfu.device_peak(name) is None


def test_value() -> None:
    assert mfu.mfu(989e12 * 8 * 2, 10.0, 8, 989e12) == pytest.approx(0.2, rel=1e-12)
    assert mfu.mfu(0.0, 1.0, 1, 1e12) == 0.0


def test_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be <= 1, got 1.520"):
        mfu.mfu(1.52e12, 1.0, 1, 1e12)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((1.0, 0.0, 1, 1.0), "seconds"), ((1.0, 1.0, 0, 1.0), "num_devices"), ((1.0, 1.0, 1, float("nan")), "peak"),
     ((-1.0, 1.0, 1, 1.0), "flops"), ((1.0, float("inf"), 1, 1.0), "seconds")],
)  # fmt: skip
def test_bad_arguments(arguments: tuple[float, float, int, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"mfu: {name} must be finite"):
        mfu.mfu(*arguments)


def test_account_says_why_there_is_none() -> None:
    none = mfu.account(1e12, 1.0, 1, "Some CPU")
    assert none.mfu is None
    assert none.peak_flops_per_second is None
    assert "'Some CPU' is not in the table" in none.explanation


def test_account_names_peak_and_source() -> None:
    known = mfu.account(98.9e12, 1.0, 1, "NVIDIA H200")
    assert known.mfu == pytest.approx(0.1)
    assert known.explanation.startswith("989 TFLOP/s dense bf16 per device (NVIDIA H200")
    stated = mfu.account(1e11, 1.0, 1, "Some CPU", peak=1e12)
    assert stated.mfu == pytest.approx(0.1)
    assert "stated by the user" in stated.explanation
