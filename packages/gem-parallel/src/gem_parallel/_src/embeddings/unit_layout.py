"""One engine's part of a batch in which all features lie one after the other (``batch_layout``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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

        self._before_means = self.num_single + self.num_sums

    def sizes(self, num_values: Sequence[int], num_offsets: Sequence[int]) -> list[int]:
        """Output rows of each feature, of the numbers of all features of the batch.

        Raises:
            ValueError: more ids or bags than one lookup can take.
        """
        check_num_ids(self.dim, self.names, sum(num_values[self.first : self.end]))
        sizes = [*num_values[self.first : self.first + self.num_single]]
        if self.pooled:
            sizes += [num_offsets[feature] - 1 for feature in self.pooled]
            check_num_bags(self.dim, self.names, sum(sizes), self.max_bags)
        return sizes

    def seams(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Output row at which each pooled feature but the first begins, then the number of all; () if there is none."""
        return tuple(accumulate(sizes))[self.num_single :] if len(self.pooled) > 1 else ()

    def num_mixed(self, sizes: Sequence[int]) -> int:
        """Bags of one id beside others."""
        return sum(sizes[: self.num_single]) if self.mixed else 0

    def split(self, sizes: list[int]) -> list[list[int]]:
        """Output rows of the features that are no means, then of those that are; what is empty is left out."""
        if not self.has_means:
            return [sizes] if sizes else []
        first = self._before_means
        return [sizes[:first], sizes[first:]] if first else [sizes]

    def place(
        self, sizes: list[int], num_values: int, start: int, *, kept: Tensor | None, counting: Tensor | None
    ) -> UnitLayout:
        """The unit's layout, whose first value is ``start``."""
        num_outputs = sum(sizes)
        return UnitLayout(
            names=self.names,
            values=slice(start, start + num_values),
            num_values=num_values,
            num_offsets=num_outputs + len(self.pooled) if self.pooled else 0,
            kept=kept,
            counting=counting,
            sizes=sizes,
            num_outputs=num_outputs,
            num_before_means=sum(sizes[: self._before_means]) if self.has_means else num_outputs,
            has_means=self.has_means,
            means_only=self.has_means and not self._before_means,
        )
