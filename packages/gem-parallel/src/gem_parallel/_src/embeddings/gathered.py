"""Slices at rest, whole tables while they are read."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from gem_parallel._src.embeddings.link import Link, Transfer

__all__ = ["GatherState", "GatheredTables"]


class GatherState(Enum):
    """Where the copy of the other replicas' slices is."""

    SHARDED = "sharded"
    """Only the slice at rest exists."""
    GATHERING = "gathering"
    """The all-gather runs; nobody may read or write the slice's tables."""
    GATHERED = "gathered"
    """The slices of all replicas are here, and equal those at rest."""


class GatheredTables:
    """One group's tables of one owner, put together from its replicas' slices.

    ::

        SHARDED --begin--> GATHERING --read--> GATHERED --release or stale--> SHARDED

    An update needs no gathered copy: it acts on the slice. So the copy lives from ``begin`` to the last read of a
    lookup, or with ``keep`` until an update makes it stale, which saves a gather per lookup without one in between
    (evaluation, or several batches in flight).

    Args:
        slices: (rows, dim) views of the tables at rest.
        bases: (T + 1,) row at which each table begins in a slice, and the slice's length.
        dim: Columns.
        dtype: Of the weights.
        device: Of the tables.
        copies: The replicas.
        keep: Whether a copy outlives its lookup.
    """

    def __init__(
        self,
        *,
        slices: Sequence[Tensor],
        bases: Sequence[int],
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        copies: Link,
        keep: bool,
    ) -> None:
        self.state = GatherState.SHARDED
        self.num_gathers = 0
        self._slices, self._bases = slices, bases
        self._dim, self._dtype, self._device = dim, dtype, device
        self._copies = copies
        self._keep = keep
        self._whole: Tensor | None = None
        self._sent: Tensor | None = None
        self._work: Transfer | None = None

    def begin(self) -> None:
        """Start the all-gather, unless a copy is here or on its way."""
        if self.state is not GatherState.SHARDED:
            return
        length, replicas = self._bases[-1], self._copies.size
        self._sent = torch.empty(length, self._dim, dtype=self._dtype, device=self._device)
        for rows, base in zip(self._slices, self._bases[:-1], strict=True):
            self._sent[base : base + rows.shape[0]].copy_(rows)
        self._whole = torch.empty(replicas * length, self._dim, dtype=self._dtype, device=self._device)
        self.state = GatherState.GATHERING
        self.num_gathers += 1
        # All replicas of an owner have slices of one length, so they agree on whether there is anything to send.
        if length:
            # As bytes: not every backend knows every number format.
            self._work = self._copies.all_gather(
                self._whole.view(torch.uint8), self._sent.view(torch.uint8), what="lookup: the gather of table slices"
            )

    def read(self, positions: Tensor) -> Tensor:
        """(N, dim) float32 rows at positions replica * length + base + row."""
        assert self.state is not GatherState.SHARDED
        assert self._whole is not None
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        self.state = GatherState.GATHERED
        return self._whole.index_select(0, positions).float()

    def done(self) -> None:
        """A lookup has read all that it needs."""
        if not self._keep:
            self._release()

    def stale(self) -> None:
        """The slices have changed."""
        self._release()

    def _release(self) -> None:
        assert self.state is not GatherState.GATHERING
        self._whole = None
        self.state = GatherState.SHARDED
