"""Floating point operations of one batch, counted from its true lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["BatchSizes", "FlopCount", "ModuleFlops"]


class ModuleFlops(NamedTuple):
    """Forward FLOPs of one module's own code; a multiply-add is 2."""

    gemm: int = 0
    """Matrix products with weights and between tokens of one sample."""
    attention: int = 0
    """Jagged attention, GDPA and block attention, over the unmasked pairs."""

    @property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return self.gemm + self.attention

    @property
    def total(self) -> int:
        """FLOPs of forward and backward: a GEMM's backward is 2 GEMMs, an attention's is 2.5 of its forward."""
        return 3 * self.gemm + 7 * self.attention // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCount:
    """Model FLOPs of one batch: no recomputation, padding, optimizer, norm, activation or lookup is counted."""

    by_module: Mapping[str, ModuleFlops]
    """Fully qualified module name -> what its own code does; no FLOP stands under two names."""

    @property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return sum(flops.forward for flops in self.by_module.values())

    @property
    def total(self) -> int:
        """FLOPs of forward and backward."""
        return sum(flops.total for flops in self.by_module.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """All that the FLOPs of a batch depend on."""

    num_samples: int
    """B."""
    lengths: Mapping[str, Tensor]
    """Sequence name -> (B,) int64 on the CPU, events of each sample."""

    def num_events(self, name: str) -> int:
        """Events of one sequence in the batch."""
        return int(self.lengths[name].sum())

    def window_pairs(self, name: str, window: int) -> int:
        """Pairs (i, j) of one sequence with |i - j| <= window."""
        n = self.lengths[name]
        return int(torch.where(n > window, n * (2 * window + 1) - window * (window + 1), n * n).sum())

    def block_pairs(self, name: str, block_size: int) -> int:
        """Pairs of one sequence that share a diagonal block."""
        n = self.lengths[name]
        rest = n % block_size
        return int(((n // block_size) * block_size**2 + rest * rest).sum())


def linear_flops(linear: nn.Linear, rows: int) -> int:
    """FLOPs of a linear layer over ``rows`` vectors."""
    return 2 * rows * linear.in_features * linear.out_features


def attention_flops(pairs: int, width: int) -> int:
    """FLOPs of q kᵀ and p v over ``pairs`` pairs, with heads of ``width`` columns in all."""
    return 4 * pairs * width


def nest(children: Mapping[str, Mapping[str, ModuleFlops]], own: ModuleFlops | None = None) -> dict[str, ModuleFlops]:
    """Join the counts of child modules under their names, with the parent's own count under ''."""
    counts = {"": own} if own is not None else {}
    for name, child in children.items():
        counts |= {f"{name}.{inner}" if inner else name: flops for inner, flops in child.items()}
    return counts
