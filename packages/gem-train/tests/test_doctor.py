from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_train import doctor
from gem_train.cli import main
from gem_train.doctor import Diagnosis, Finding, examine, format_diagnosis, versions


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return examine()


def by_feature(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.feature: finding for finding in diagnosis.findings}


def test_everything_a_cpu_run_needs_is_looked_at(diagnosis: Diagnosis) -> None:
    found = by_feature(diagnosis)
    assert {finding.feature for finding in diagnosis.findings if finding.needed} == {
        "gem-kernels", "gem-precision", "gem-parallel", "gem-model", "gem-train", "fbgemm", "embeddings_cpu", "gloo",
        "training step, CPU",
    }  # fmt: skip
    assert diagnosis.works
    assert found["training step, CPU"].reason.startswith("loss 0.")
    assert all(finding.available or finding.reason for finding in diagnosis.findings)


def test_what_a_gpu_would_need_is_said_without_one(diagnosis: Diagnosis) -> None:
    if torch.cuda.is_available():
        assert len(diagnosis.devices) == torch.cuda.device_count()
        assert by_feature(diagnosis)["training step, GPU"].available
        # No GPU changes that this version emulates it.
        assert "emulated" in by_feature(diagnosis)["mxfp8, native"].reason
    else:
        assert diagnosis.devices == ()
        for feature in ("training step, GPU", "kernels, GPU", "mxfp8, native"):
            finding = by_feature(diagnosis)[feature]
            assert not finding.available
            assert "CUDA" in finding.reason
            assert finding.remedy


def test_the_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    doctor._training_step(torch.device("cpu"))
    assert torch.equal(torch.rand(2), expected)


def test_text_names_the_remedy(diagnosis: Diagnosis) -> None:
    broken = Finding(feature="fbgemm", available=False, reason="not installed", remedy="pip install it", needed=True)
    text = format_diagnosis(dataclasses.replace(diagnosis, findings=(*diagnosis.findings, broken)))
    assert "NO  fbgemm" in text
    assert "-> pip install it" in text
    assert "does NOT work" in text
    assert "a run on the CPU works" in format_diagnosis(diagnosis)
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", text, re.MULTILINE)


def test_the_assembler_is_among_the_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It compiles what Triton wrote, and some of its releases compile it wrongly: a run must say which one it was."""
    if "triton" in versions():
        bundled = versions()["ptxas"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", bundled)
        own = tmp_path / "ptxas"
        own.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
        own.chmod(0o755)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(own))
        assert versions()["ptxas"] == "12.8.93"
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "none"))
        # As Triton does, which then takes its own.
        assert versions()["ptxas"] == bundled
    else:
        assert "ptxas" not in versions()


def test_a_gpu_that_the_build_has_no_code_for_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(device: torch.device) -> str:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "_training_step", step)
    finding = doctor._gpu()
    assert not finding.available
    assert finding.reason == "RuntimeError: CUDA error: no kernel image is available for execution on the device"


def test_long_names_keep_the_columns() -> None:
    findings = tuple(Finding(feature=name, available=False, reason="why", remedy="how") for name in ("a", "b" * 40))
    lines = format_diagnosis(Diagnosis(versions={"c": "1", "d" * 40: "1"}, devices=(), findings=findings)).splitlines()
    for text in ("  1", "  why", "  -> how"):
        columns = {line.index(text, 6) for line in lines if line.endswith(text)}
        assert len(columns) == 1, text


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'gem_model'"), OSError("undefined symbol: x")])
def test_a_package_that_does_not_load_is_a_finding(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.import_module

    def load(name: str, *rest: Any) -> Any:
        if name == "gem_model":
            raise error
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", load)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "NO  gem-model" in out
    assert str(error) in out
    assert "pip install 'gem-train[recipes]'" in out
    assert "gem-model" not in versions()


@pytest.mark.parametrize(
    ("found", "available"),
    [
        ({"torch": "2.13.0+cpu", "triton": "3.9.0", "fbgemm-gpu-cpu": "1.8.0"}, True),
        ({"torch": "2.11.0+cu130", "triton": "3.6.0", "fbgemm-gpu": "1.6.0"}, True),
        ({"torch": "2.13.0", "triton": "3.9.0", "fbgemm-gpu": "1.6.0"}, False),
        ({"torch": "2.13.0", "triton": "3.9.0"}, False),
        ({"torch": "2.1.0", "triton": "3.9.0", "fbgemm-gpu": "1.8.0"}, False),
    ],
)
def test_tested_combinations(found: dict[str, str], available: bool) -> None:
    finding = doctor._tested_together(found)
    assert finding.available is available
    if not available:
        assert "no test ran on it" in finding.reason
        assert "torch 2.13 + triton 3.9 + fbgemm 1.8" in finding.remedy
