"""One engine's part of a batch in which all features lie one after the other (``batch_layout``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gem_parallel._src.embeddings.layout import FeatureSlot
from gem_parallel._src.embeddings.limits import MAX_BAGS, check_num_bags, check_num_ids

__all__ = ["Unit", "UnitLayout", "UnitPart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What one engine looks up."""

    slots: tuple[FeatureSlot, ...]
    """Unpooled ones, then sums, then means."""
    num_rows: tuple[int, ...]
    """Rows of each slot's table."""
    bases: tuple[int, ...]
    """Row of the engine at which each slot's table begins."""
    tables: tuple[int, ...]
    """Number of each slot's table."""
    dim: int
    sums: bool
    """Whether it sums over bags; if not, the order of the slots is free, and offsets are checked only."""
    max_bags: int = MAX_BAGS
    """Of one lookup."""


@dataclass(kw_only=True, slots=True)
class UnitLayout:
    """One engine's part of a batch."""

    names: list[str]
    """Features that the batch has, in order of slot."""
    values: slice
    """Of the batch's tensor."""
    num_values: int
    num_offsets: int
    """Offsets of its bags, which follow those of the units before; 0 if every bag is one id."""
    kept: Tensor | None
    """(num_outputs + 1,) int64: which of these offsets are bags'; None if all are."""
    counting: Tensor | None
    """0, 1, ...: the offsets of unpooled features, if there are pooled ones, too."""
    sizes: list[int]
    """Output rows of each feature."""
    num_outputs: int
    num_before_means: int
    """Output rows that are no means; they come first."""
    has_means: bool
    means_only: bool


class UnitPart:
    """One unit's features that a batch has."""

    def __init__(self, unit: Unit, present: Sequence[bool], first: int) -> None:
        slots = [slot for slot, here in zip(unit.slots, present, strict=True) if here]
        self.names = [slot.config.name for slot in slots]
        self.first, self.end = first, first + len(slots)
        poolings = [slot.config.pooling if unit.sums else "none" for slot in slots]
        self.num_single = poolings.count("none")
        self.num_sums = poolings.count("sum")
        self.has_means = self.num_single + self.num_sums < len(slots)
        self.mixed = 0 < self.num_single < len(slots)
        self.pooled = range(self.first + self.num_single, self.end)
        self.dim, self.max_bags, self.sums = unit.dim, unit.max_bags, unit.sums

    def check(self, num_values: Sequence[int], num_offsets: Sequence[int]) -> None:
        """Raise if these are more ids or bags than one lookup can take; of all features of the batch."""
        check_num_ids(self.dim, self.names, sum(num_values[self.first : self.end]))
        pooled = [num_offsets[feature] - 1 for feature in self.pooled]
        single = sum(num_values[self.first : self.first + self.num_single]) if pooled else 0
        check_num_bags(self.dim, self.names, single + sum(pooled), self.max_bags)

    def seams(self, num_values: Sequence[int], num_offsets: Sequence[int]) -> list[int]:
        """Output row at which each pooled feature but the first begins, then the number of all; [] if there is none."""
        if len(self.pooled) < 2:
            return []
        sizes = [sum(num_values[self.first : self.first + self.num_single])]
        sizes += [num_offsets[feature] - 1 for feature in self.pooled]
        return list(accumulate(sizes))[1:]

    def place(
        self,
        num_values: Sequence[int],
        num_offsets: Sequence[int],
        start: int,
        kept: Tensor | None,
        device: torch.device,
    ) -> UnitLayout:
        """The unit's layout, whose first value is ``start``."""
        count = sum(num_values[self.first : self.end])
        sizes = list(num_values[self.first : self.first + self.num_single])
        single = sum(sizes) if self.mixed else 0
        sizes += [num_offsets[feature] - 1 for feature in self.pooled]
        return UnitLayout(
            names=self.names,
            values=slice(start, start + count),
            num_values=count,
            num_offsets=single + sum([num_offsets[feature] for feature in self.pooled]),
            kept=kept,
            counting=torch.arange(single, device=device) if single else None,
            sizes=sizes,
            num_outputs=sum(sizes),
            num_before_means=sum(sizes[: self.num_single + self.num_sums]),
            has_means=self.has_means,
            means_only=self.has_means and self.num_single + self.num_sums == 0,
        )

    def sizes(self, layout: UnitLayout) -> list[list[int]]:
        """Output rows of the features that are no means, then of those that are; what is empty is left out."""
        first = self.num_single + self.num_sums
        return [sizes for sizes in (layout.sizes[:first], layout.sizes[first:]) if sizes]
