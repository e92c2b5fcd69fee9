"""The random state of a rank as tensors, so that a checkpoint holds it without pickling."""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["capture", "restore", "seed_all"]


def seed_all(seed: int) -> None:
    """Seeds torch (all devices), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture(device: torch.device) -> dict[str, Tensor]:
    """State of every generator that this process uses.

    Args:
        device: The training device; its generator is included when it is a GPU.

    Returns:
        Name -> tensor on the host.
    """
    _, numpy_key, numpy_position, numpy_has_gauss, numpy_gauss = np.random.get_state(legacy=True)
    _, python_key, python_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(numpy_key).astype(np.int64)),
        "numpy_position": torch.tensor([int(numpy_position), int(numpy_has_gauss)], dtype=torch.int64),
        "numpy_gauss": torch.tensor(float(numpy_gauss), dtype=torch.float64),
        "python": torch.tensor(python_key, dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if python_gauss is None else python_gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts the generators back where `capture` found them.

    Args:
        state: From `capture`, on the same kind of device.
        device: The training device.
    """
    torch.set_rng_state(state["torch"])
    position, has_gauss = state["numpy_position"].tolist()
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, float(state["numpy_gauss"])))
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
