"""What one training step reads: a batch of samples with their histories, as plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Sequence(NamedTuple):
    """The packed events of one history feature group. B samples, T events in all."""

    offsets: Tensor
    """(B + 1,) int64; sample b owns events offsets[b] to offsets[b + 1], oldest first."""
    max_seqlen: int
    """Longest history of the batch, in events; 0 when all are empty."""
    dense: Tensor
    """(T, num_event_dense) float32."""
    age: Tensor
    """(T,) float32, seconds between the event and the sample's own time; always > 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The samples of one rank in one step. B samples, T history events.

    A feature's ids are (values, offsets): values int64 (N,), offsets int64 (num_bags + 1,). A context feature
    has B bags; an event feature of sequence `s` is named `s.<column>` and has T bags, one per event.
    """

    num_samples: int
    """B; 0 on a rank that received nothing of a short last batch."""
    ids: Mapping[str, tuple[Tensor, Tensor]]
    """Feature name to (values, offsets)."""
    dense: Tensor
    """(B, num_dense) float32."""
    sequences: Mapping[str, Sequence]
    """Sequence name to its events."""
    labels: Mapping[str, Tensor]
    """Task name to (B,) float32 in {0, 1}."""
    sample_index: Tensor
    """(B,) int64, row of the sample in the events file: the same in every run, so that runs can be paired."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """Returns the batch on another device.

        Args:
            device: Where to.
            non_blocking: Whether copies from page-locked memory return before they are done.
        """
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Returns the batch in page-locked memory, from which copies to a GPU can overlap with compute."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        made: dict[int, Tensor] = {}

        def once(x: Tensor) -> Tensor:
            # Features with one id per event have the same offsets: one copy serves them.
            if id(x) not in made:
                made[id(x)] = function(x)
            return made[id(x)]

        return Batch(
            num_samples=self.num_samples,
            ids={name: (once(values), once(offsets)) for name, (values, offsets) in self.ids.items()},
            dense=once(self.dense),
            sequences={
                name: Sequence(once(s.offsets), s.max_seqlen, once(s.dense), once(s.age))
                for name, s in self.sequences.items()
            },
            labels={name: once(x) for name, x in self.labels.items()},
            sample_index=once(self.sample_index),
        )
