"""A batch between ``exchange`` and ``lookup``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gem_parallel._src.embeddings.ids import BatchReport, GroupIds, summarise
from gem_parallel._src.embeddings.transfer import DeviceVector

__all__ = ["GroupRequest", "Pending", "Route"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How one group's ids travel. U distinct valid ids of this rank, M ids received, R ranks, T tables."""

    inverse: Tensor
    """(N,) int64: distinct id of each value; U for a dropped one."""
    order: Tensor
    """(N,) int64: values sorted by distinct id, equal ones in batch order."""
    starts: Tensor
    """(U + 1,) int64: where each distinct id, and then the dropped ones, begin in ``order``."""
    num_unique: int
    send_splits: list[int]
    """(R,) distinct ids per owner; they sum to U."""
    receive_splits: list[int]
    """(R,) ids per source; they sum to M."""
    by_table: Tensor | None
    """(M,) int64: position among the received ids of each id in order of table, then source; None if equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """What one group looks up on this rank, and for whom."""

    ids: GroupIds
    rows: Tensor
    """(M,) int64 local rows: in order of table in one process, else as received, by source and table."""
    counts: Sequence[int]
    """Rows per table; they sum to M."""
    route: Route | None
    """None in one process."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """Ids on their way to the ranks that own their rows. Hand it to ``ShardedEmbeddings.lookup`` once."""

    requests: tuple[GroupRequest, ...]
    works: list[dist.Work]
    """Transfers that fill ``requests``."""
    summary: DeviceVector | None
    """The check's result while it is still to be read (one process)."""
    ready: torch.cuda.Event | None
    """Recorded on the stream that ran ``exchange``."""

    def report(self) -> BatchReport | None:
        """Read the check's result once; None when it was read before."""
        if self.summary is None:
            return None
        vector, self.summary = self.summary, None
        return summarise(vector.read())

    def tensors(self) -> list[Tensor]:
        """All device tensors held here."""
        found = []
        for request in self.requests:
            found += [request.rows, request.ids.values, *(feature.offsets for feature in request.ids.features)]
            if request.route is not None:
                found += [request.route.inverse, request.route.order, request.route.starts]
                found += [] if request.route.by_table is None else [request.route.by_table]
        return found
