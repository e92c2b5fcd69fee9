"""Which key sequence a query sequence reads: its own, a request's that several share, or the same seeds for all.

Index tensors are made on the device of the offsets from shapes alone, so that nothing waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pairing(NamedTuple):
    """The two sides of an attention over packed sequences as the kernels take them."""

    offsets_q: Tensor
    """(B + 1,) rows of the output and, unless ``broadcast_q``, of q; contiguous."""
    offsets_k: Tensor
    """(R + 1,) rows of k and v; contiguous."""
    max_seqlen_q: int
    """Bound on the rows of one query sequence."""
    request_index: Tensor | None
    """(B,) non-decreasing key sequence of each query sequence, contiguous; None where sequence b reads keys b."""
    broadcast_q: bool
    """q holds the rows of one sequence, which every query sequence reads."""

    @property
    def indexed(self) -> bool:
        """Whether query and key sequences are not simply pairs."""
        return self.broadcast_q or self.request_index is not None

    @property
    def num_queries(self) -> int:
        """Query sequences B."""
        return self.offsets_q.shape[0] - 1

    @property
    def num_keys(self) -> int:
        """Key sequences R."""
        return self.offsets_k.shape[0] - 1

    def request_starts(self) -> Tensor | None:
        """(R + 1,): query sequences [starts[r], starts[r + 1]) read key sequence r; None without ``request_index``."""
        return None if self.request_index is None else request_starts(self.request_index, self.num_keys)


def num_query_sequences(offsets_q: Tensor | None, offsets_k: Tensor, request_index: Tensor | None) -> int:
    """Query sequences B of a call; ``offsets_q=None`` means seeds that all of them share."""
    if request_index is not None:
        return request_index.shape[0]
    return (offsets_k if offsets_q is None else offsets_q).shape[0] - 1


def num_output_rows(q: Tensor, offsets_q: Tensor | None, offsets_k: Tensor, request_index: Tensor | None) -> int:
    """Rows of the output: those of q, or B times the seeds."""
    if offsets_q is not None:
        return q.shape[0]
    return num_query_sequences(offsets_q, offsets_k, request_index) * q.shape[0]


def request_starts(request_index: Tensor, num_requests: int) -> Tensor:
    """(R + 1,) int64 number of query sequences before those of each request; ``request_index`` must not decrease."""
    requests = torch.arange(num_requests + 1, dtype=request_index.dtype, device=request_index.device)
    return torch.searchsorted(request_index.contiguous(), requests)


def pair_sequences(
    q: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    request_index: Tensor | None,
    max_seqlen_q: int,
    left: int,
    right: int,
) -> Pairing:
    """Pairing of checked arguments.

    Without a window a query row does not depend on its position, so the adjacent query sequences of one request become
    one sequence: full tiles where each holds only a few rows, and kernels that know nothing of requests.
    """
    offsets_k = offsets_k.contiguous()
    num_queries = num_query_sequences(offsets_q, offsets_k, request_index)
    if offsets_q is None:
        seeds = q.shape[0]
        offsets = torch.arange(num_queries + 1, dtype=torch.int64, device=q.device) * seeds
        index = None if request_index is None else request_index.contiguous()
        return Pairing(offsets, offsets_k, seeds, index, True)
    if request_index is None:
        return Pairing(offsets_q.contiguous(), offsets_k, max_seqlen_q, None, False)
    if left >= 0 or right >= 0:
        return Pairing(offsets_q.contiguous(), offsets_k, max_seqlen_q, request_index.contiguous(), False)
    merged = offsets_q[request_starts(request_index, offsets_k.shape[0] - 1)]
    return Pairing(merged, offsets_k, min(q.shape[0], max_seqlen_q * num_queries), None, False)
