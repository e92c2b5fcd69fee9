"""A batch between ``exchange`` and ``lookup``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gem_parallel._src.embeddings.batch_layout import BatchLayout
from gem_parallel._src.embeddings.ids import BatchReport, GroupIds, summarise
from gem_parallel._src.embeddings.keyed_path import KeyedBatch
from gem_parallel._src.embeddings.link import Transfer
from gem_parallel._src.embeddings.transfer import DeviceVector, Flag

__all__ = ["GroupRequest", "LocalBatch", "LocalOrder", "Pending", "ReplicaRoute", "Route", "check_pending"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How one group's ids travel. U distinct valid ids of this rank, N ids received, L ranks, T tables, M replicas."""

    inverse: Tensor
    """(N_own,) int64: distinct id of each value; U for a dropped one."""
    order: Tensor
    """(N_own,) int64: values sorted by distinct id, equal ones in batch order."""
    starts: Tensor
    """(U + 1,) int64: where each distinct id, and then the dropped ones, begin in ``order``."""
    num_unique: int
    send_splits: list[int]
    """(L,) distinct ids per owner; they sum to U."""
    receive_splits: list[int]
    """(L,) ids per source; they sum to N."""
    by_table: Tensor | None
    """(N,) int64: position among the received ids of each id in order of table, then source; None if equal, or if the
    order does not matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRoute:
    """How gradients travel from this owner to the replicas that keep the rows, and the like from the others."""

    to_slices: Tensor | None
    """(N,) int64: brings what was received, by (source, table, slice), into order of slice; None if it is."""
    send_splits: list[int]
    """(M,) rows per replica's slice; they sum to N."""
    receive_splits: list[int]
    """(M,) rows of this rank's slice per replica; they sum to K."""
    from_slices: Tensor | None
    """(K,) int64: brings what the replicas sent, by (replica, source, table), into order of (table, source, replica),
    so that a row's gradients are added in order of rank."""
    counts: list[int]
    """(T,) rows of this rank's slice per table; they sum to K."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOrder:
    """The values of a replicated group by row."""

    rows: Tensor
    """(N_own,) int64: position in the tables laid one after the other; their total for a dropped id."""
    order: Tensor
    """(N_own,) int64: values sorted by ``rows``, equal ones in batch order."""
    starts: Tensor
    """(total + 1,) int64: where each row, and then the dropped ids, begin in ``order``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """What one group looks up on this rank, and for whom."""

    ids: GroupIds
    rows: Tensor
    """(N,) int64. In one process: rows in order of table. Else as received, by source and table: rows of the owner's
    table or engine, or with replicas positions in its gathered copy. Empty for a replicated group."""
    counts: Sequence[int]
    """Rows per table; they sum to N."""
    route: Route | None = None
    replicas: ReplicaRoute | None = None
    local: LocalOrder | None = None
    """Of a replicated group. All three are None in one process."""
    bags: Tensor | None = None
    """``join_bags`` of the features, over several ranks."""
    combined: bool = False
    """``rows`` are the one engine's, as received."""


@dataclass(slots=True, kw_only=True)
class LocalBatch:
    """A batch of one process, laid out (``batch_layout``); all None if it has no features."""

    layout: BatchLayout | None
    given: Tensor | None
    """(L,) as it came; until the check is read."""
    safe: Tensor | None
    """(L,) clamped and shifted."""
    values: Sequence[Tensor]
    """Of each unit, views of ``safe``."""
    bags: Sequence[Tensor | None]
    """Of each unit; None if every bag is one id."""
    flag: Flag | None
    """Number of faults; until it is read."""

    @property
    def impossible(self) -> bool:
        """A feature has values but no bags."""
        return self.layout is not None and self.layout.impossible

    def tensors(self) -> list[Tensor]:
        """All of the device."""
        return [each for each in (self.given, self.safe, *self.bags) if each is not None]


@dataclass(slots=True, kw_only=True)
class Pending:
    """Ids on their way to the ranks that own their rows. Hand it to ``ShardedEmbeddings.lookup`` once."""

    requests: tuple[GroupRequest, ...]
    works: list[Transfer]
    """Transfers that fill ``requests``."""
    summary: DeviceVector | None
    """The check's result while it is still to be read (one process)."""
    ready: torch.cuda.Event | None
    """Recorded on the stream that ran ``exchange``."""
    stream: torch.cuda.Stream | None = None
    """That stream."""
    local: LocalBatch | KeyedBatch | None = None
    """The batch of a process whose engines pool themselves; there are no ``requests`` then."""
    path: Any = None
    """``LocalPath`` or ``KeyedPath`` that made it."""
    keys: tuple[str, ...] | None = None
    """Of a batch that came joined."""
    named: dict[str, Tensor] = field(default_factory=dict)
    """Feature -> ids as given, where updates are measured."""
    owner: Any = None
    """The module that it is of."""
    started: Any = None
    """What ``start_lookup`` has begun."""

    def report(self) -> BatchReport | None:
        """Read the check's result once; None when it was read before."""
        if self.summary is None:
            return None
        vector, self.summary = self.summary, None
        return summarise(vector.read().tolist())

    def tensors(self) -> list[Tensor]:
        """All device tensors held here."""
        found: list[Tensor] = list(self.named.values())
        if self.local is not None:
            found += self.local.tensors()
        for request in self.requests:
            found += [] if request.bags is None else [request.bags]
            found += [request.rows, request.ids.values, *(feature.offsets for feature in request.ids.features)]
            if request.route is not None:
                found += [request.route.inverse, request.route.order, request.route.starts]
                found += [] if request.route.by_table is None else [request.route.by_table]
            if request.replicas is not None:
                moved = (request.replicas.to_slices, request.replicas.from_slices)
                found += [each for each in moved if each is not None]
            if request.local is not None:
                found += [request.local.rows, request.local.order, request.local.starts]
        return found


def check_pending(function: str, pending: object, owner: object) -> None:
    """Refuse what is no batch, or one of another module than ``owner``.

    Raises:
        TypeError, ValueError: that.
    """
    if not isinstance(pending, Pending):
        raise TypeError(
            f"{function}: `pending` must be a Pending, got {type(pending).__name__}; pass what exchange(ids) returns"
        )
    if pending.owner is not owner:
        raise ValueError(
            f"{function}: `pending` must come from this module's exchange, got a batch of another "
            "ShardedEmbeddings, whose tables its ids were checked against; "
            "call exchange of the module that looks it up"
        )
