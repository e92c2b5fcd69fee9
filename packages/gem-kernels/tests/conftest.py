"""Chooses Triton's interpreter where there is no CUDA device, before anything imports triton; skips GPU tests there."""

import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# What several files of tests share, in modules beside them.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items):
    has_gpu = torch.cuda.is_available()
    has_sm100 = has_gpu and torch.cuda.get_device_capability()[0] == 10
    for item in items:
        if "sm100" in item.keywords and not has_sm100:
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 10"))
        elif "gpu" in item.keywords and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def interpreter():
    """The Triton kernels on CPU tensors; on a machine with a GPU the same cases run there, under the gpu marker."""
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU of this machine, not interpreted")


@pytest.fixture
def poisoned_empty(monkeypatch):
    """torch.empty gives NaN: a result that depends on an entry no kernel wrote shows it."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def count_variants():
    """Number of compiled variants that the Triton kernels of some modules hold, on all devices."""
    from triton.runtime.jit import JITFunction

    def count(*modules):
        kernels = [x for module in modules for x in vars(module).values() if isinstance(x, JITFunction)]
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    return count
