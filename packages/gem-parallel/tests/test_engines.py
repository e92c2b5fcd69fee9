"""The report, and what happens without fbgemm."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gem_parallel
from gem_parallel import engine_report
from gem_parallel._src import engine_report as source

FEATURES = [
    "fbgemm",
    "torch_fbgemm_pair",
    "embeddings_cpu",
    "embeddings_cuda",
    "batch_layout_kernel",
    "adam_cpu",
    "rowwise_adagrad_weight_decay_cpu",
    "nccl",
    "gloo",
    "collectives_default",
    "collectives_nccl_zero_cta",
    "collectives_symm_mem_low_contention",
]


def test_report_here():
    report = engine_report()
    assert list(report) == FEATURES
    for name in ("fbgemm", "torch_fbgemm_pair", "embeddings_cpu", "adam_cpu", "gloo"):
        assert report[name].available, report[name]
    for name, status in report.items():
        assert status.feature == name
        assert status.reason
        assert bool(status.remedy) != status.available, status


BLOCKED = """
import sys
sys.modules["fbgemm_gpu"] = None
import gem_parallel
report = gem_parallel.engine_report()
assert not report["fbgemm"].available and not report["embeddings_cpu"].available
table = gem_parallel.TableConfig(name="t", num_rows=4, dim=8)
try:
    gem_parallel.ShardedEmbeddings([table], [], optimizer=gem_parallel.SparseOptimizerConfig())
except ImportError as error:
    print(error)
"""


def test_import_works_without_fbgemm_and_construction_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True)
    assert "ShardedEmbeddings: needs fbgemm-gpu" in done.stdout
    assert "'fbgemm-gpu" in done.stdout.partition("pip install ")[2]


def test_importing_the_package_does_not_import_fbgemm():
    code = "import sys, gem_parallel; print('fbgemm_gpu' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("torch_version", "found", "available", "remedy"),
    [
        ("2.13.0+cpu", ("fbgemm-gpu-cpu", "1.8.0"), True, ""),
        ("2.11.0+cu130", ("fbgemm-gpu", "1.6.0"), True, ""),
        ("2.14.1+cu130", ("fbgemm-gpu-cpu", "1.9.0"), False, "pip install 'torch==2.13.*' 'fbgemm-gpu-cpu==1.8.*'"),
        ("2.11.0", ("fbgemm-gpu-cpu", "1.8.0"), False, "pip install 'torch==2.13.*' 'fbgemm-gpu-cpu==1.8.*'"),
        ("2.13.0", ("fbgemm-gpu", "1.8.0"), False, "pip install 'fbgemm-gpu-cpu==1.8.*'"),
        ("2.13.0", None, False, "pip install 'fbgemm-gpu-cpu==1.8.*'"),
    ],
)
def test_pairs(monkeypatch, torch_version, found, available, remedy):
    monkeypatch.setattr(source.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(source.torch, "__version__", torch_version)
    monkeypatch.setattr(source, "installed_fbgemm", lambda: found)
    status = engine_report()["torch_fbgemm_pair"]
    assert status.available == available
    assert remedy in status.remedy
    assert bool(status.remedy) != available


@pytest.mark.parametrize(
    ("gpu", "torch_version", "remedy"),
    [
        (False, "2.13.0+cu130", "pip install 'fbgemm-gpu-cpu==1.8.*'"),
        (False, "2.14.1+cu130", "pip install 'torch==2.13.*' 'fbgemm-gpu-cpu==1.8.*'"),
        (True, "2.11.0+cu130", "pip install 'fbgemm-gpu==1.6.*'"),
        (True, "2.14.1+cu130", "pip install 'torch==2.11.*' 'fbgemm-gpu==1.6.*'"),
    ],
)
def test_missing_fbgemm_is_asked_for_by_the_device(monkeypatch, gpu, torch_version, remedy):
    monkeypatch.setattr(source.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(source.torch, "__version__", torch_version)
    monkeypatch.setattr(source, "installed_fbgemm", lambda: None)
    monkeypatch.setattr(source, "_import_problem", lambda: "ModuleNotFoundError: No module named 'fbgemm_gpu'")
    report = engine_report()
    build = "fbgemm-gpu" if gpu else "fbgemm-gpu-cpu"
    for name in ("fbgemm", "torch_fbgemm_pair", "embeddings_cpu"):
        assert report[name].reason == f"{build} is not installed"
        assert report[name].remedy == remedy
    assert (report["embeddings_cuda"].remedy == remedy) == gpu
    assert gpu or report["embeddings_cuda"].reason == "torch sees no CUDA device"


def test_extras_install_the_tested_pairs():
    table = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for extra, build in (("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")):
        torch_release, fbgemm_release = source.KNOWN_PAIRS[build]
        assert f"torch=={torch_release}.*" in table["optional-dependencies"][extra]
        assert f"{build}=={fbgemm_release}.*" in table["optional-dependencies"][extra]


def test_public_module_is_the_same():
    assert gem_parallel.engines.engine_report is engine_report
