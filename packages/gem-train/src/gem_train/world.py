"""The processes of a run, and what they agree on."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gem_train.errors import ConfigError

__all__ = ["Agreement", "World"]


T = TypeVar("T")


class Agreement(NamedTuple):
    """What all ranks know after one small all-reduce."""

    everyone_has_batch: bool
    """No rank has run out of data."""
    someone_has_batch: bool
    """At least one rank still has data."""
    num_samples: int
    """Samples of the coming step over all ranks."""
    stop: bool
    """Some rank asked to stop."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class World:
    """This process among the processes of the run.

    Small control messages go through `control`, a gloo group on host memory: they never wait for the device.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: dist.ProcessGroup | None = None
    """None with one process, where nothing is communicated."""

    @classmethod
    def from_process_group(cls, device: torch.device) -> "World":
        """The world of the initialised default process group, or one process without it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(device=device)
        return cls(
            rank=dist.get_rank(), size=dist.get_world_size(), device=device, control=dist.new_group(backend="gloo")
        )

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def agree(
        self, *, has_batch: bool, num_samples: int, stop: bool = False, alike: Mapping[str, object] | None = None
    ) -> Agreement:
        """Sums what each rank knows about the coming step.

        Args:
            has_batch: This rank's reader gave a batch.
            num_samples: Samples of this rank's batch.
            stop: This rank wants to end the run after the step before.
            alike: Name -> value of what must be equal on all ranks for the step to mean anything.

        Returns:
            The same values on all ranks.

        Raises:
            ConfigError: on all ranks, if a value of `alike` differs; names it, the values and the ranks.
        """
        if self.control is None:
            return Agreement(has_batch, has_batch, num_samples, stop)
        # All are equal just where the sum of squares, times the ranks, is the square of the sum. So the values travel
        # with the sums; 24 bits keep the squares of thousands of ranks inside of 64.
        digest = zlib.crc32(repr(sorted((alike or {}).items())).encode()) & 0xFFFFFF
        message = torch.tensor([int(has_batch), num_samples, int(stop), digest, digest**2], dtype=torch.int64)
        dist.all_reduce(message, group=self.control)
        ranks_with_batch, total, stops, digests, squares = message.tolist()
        if self.size * squares != digests**2:
            self.check_alike("Trainer", alike or {})
        return Agreement(ranks_with_batch == self.size, ranks_with_batch > 0, total, stops > 0)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the ranks, on the host and in double precision."""
        total = value.detach().to("cpu", torch.float64, copy=True)
        if self.control is not None:
            dist.all_reduce(total, group=self.control)
        return total

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on all ranks."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def check_alike(self, owner: str, values: Mapping[str, object]) -> None:
        """Refuses, on all ranks, values that differ between them. All ranks call it, with the same names.

        Args:
            owner: Whose values they are, for the error.
            values: Name -> value, compared and shown by its `repr`.

        Raises:
            ConfigError: names all that differ, with the values and their ranks.
        """
        gathered = self.gather({name: repr(value) for name, value in values.items()})
        differing = []
        for name in values:
            ranks_of: dict[str, list[int]] = {}
            for rank, theirs in enumerate(gathered):
                ranks_of.setdefault(theirs.get(name, "none"), []).append(rank)
            if len(ranks_of) > 1:
                shown = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
                differing.append(f"`{name}` must be equal on all ranks, got {shown}")
        if differing:
            raise ConfigError(f"{owner}: {'; '.join(differing)}; set the same on every rank")

    def on_all(self, action: Callable[[], T]) -> T:
        """Runs an action on every rank; if one refuses, all do. All ranks call it.

        Args:
            action: What makes no collective, so that no rank waits inside for one that refuses.

        Returns:
            What this rank's action returned.

        Raises:
            ConfigError: on the ranks whose own action succeeded, with the error of the first that refuses; that one
                raises its own.
        """
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        messages = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise ConfigError(f"rank {rank}: {message}")
        return result

    def on_first(self, action: Callable[[], object]) -> None:
        """Runs an action on the first rank while the others wait; if it fails there, it fails everywhere.

        Args:
            action: What to do once.

        Raises:
            ConfigError: on the other ranks, with the message of the first; the first raises its own error.
        """
        error: Exception | None = None
        if self.is_first:
            try:
                action()
            except Exception as caught:
                error = caught
        message = self.gather(None if error is None else str(error))[0]
        if error is not None:
            raise error
        if message is not None:
            raise ConfigError(message)

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        if self.control is not None:
            dist.barrier(group=self.control)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
