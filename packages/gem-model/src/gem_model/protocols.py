"""What the model asks of a batch. Nothing is inherited from: an object with these attributes is a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

__all__ = ["RankingBatch", "SequenceView"]


class SequenceView(Protocol):
    """One jagged history of every sample. B samples, T events."""

    @property
    def offsets(self) -> Tensor:
        """(B + 1,) int64; sample b owns events ``offsets[b]:offsets[b + 1]``, oldest first."""

    @property
    def max_seqlen(self) -> int:
        """Longest history, in events; an upper bound is allowed."""

    @property
    def dense(self) -> Tensor:
        """(T, num_event_dense) float32."""

    @property
    def age(self) -> Tensor:
        """(T,) float32, seconds between the event and the sample's own time, >= 0."""


class RankingBatch(Protocol):
    """The samples of one step; there may be none."""

    @property
    def num_samples(self) -> int:
        """B."""

    @property
    def dense(self) -> Tensor:
        """(B, num_dense) float32."""

    @property
    def sequences(self) -> Mapping[str, SequenceView]:
        """Sequence name -> its events."""

    @property
    def labels(self) -> Mapping[str, Tensor]:
        """Task name -> (B,) float32 in {0, 1}."""
