"""Error measures and the skip of GPU tests where there is no CUDA device."""

import sys
from pathlib import Path

import pytest
import torch

# Under importlib mode a test file's neighbours are not importable by themselves.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
