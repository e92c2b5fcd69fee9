"""The query and key rows of a group of sequences as the CPU kernels read and write them."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.attention.batching import Group, PackedOutput, Rows, plan_groups
from gem_kernels._src.attention.pairing import Pairing


class Sides:
    """The query and key rows of one group, whichever key sequences its query sequences read."""

    def __init__(self, pairing: Pairing, group: Group) -> None:
        sequences = group.sequences
        keys = sequences if pairing.request_index is None else pairing.request_index.long()[sequences]
        self._broadcast = pairing.broadcast_q
        self.group = group
        self.rows_q = Rows(pairing.offsets_q, group, group.len_q, group.min_q)
        self.rows_k = Rows(pairing.offsets_k, group, group.len_k, group.min_k, sequences=keys)

    def gather_q(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """(n * H, len_q, D) fresh copy."""
        if not self._broadcast:
            return self.rows_q.gather(q, dtype)
        return q.to(dtype).transpose(0, 1).repeat(self.group.sequences.numel(), 1, 1)

    def add_dq(self, dq: PackedOutput, dq_g: Tensor) -> None:
        """Write dq_g (n * H, len_q, D), or add it where all sequences share the rows."""
        if self._broadcast:
            seeds = dq_g.view(self.group.sequences.numel(), dq.num_heads, self.group.len_q, -1).sum(0)
            dq.packed().add_(seeds.transpose(0, 1))
        else:
            self.rows_q.scatter(dq, dq_g)


def plan_pairing(pairing: Pairing, num_heads: int) -> list[Group]:
    """``plan_groups`` of the query sequences, each with the length of the key sequence that it reads."""
    lengths_k = torch.diff(pairing.offsets_k)
    if pairing.request_index is not None:
        lengths_k = lengths_k[pairing.request_index.long()]
    return plan_groups(torch.diff(pairing.offsets_q), lengths_k, num_heads)
