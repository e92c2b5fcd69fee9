"""A packed sequence on its way through the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Jagged(NamedTuple):
    """Tokens of B sequences, packed. The layout is made once per batch and handed on."""

    values: Tensor
    """(T, d)."""
    offsets: Tensor
    """(B + 1,) int64."""
    max_seqlen: int
    """Upper bound of the lengths."""


def fixed_offsets(num_samples: int, length: int, device: torch.device) -> Tensor:
    """Offsets (B + 1,) of sequences that all have ``length`` tokens."""
    return torch.arange(0, num_samples * length + 1, length, device=device)
