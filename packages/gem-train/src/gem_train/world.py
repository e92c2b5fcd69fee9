"""The processes of a run, and what they agree on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gem_train.errors import ConfigError

__all__ = ["Agreement", "World"]


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

    def agree(self, *, has_batch: bool, num_samples: int, stop: bool = False) -> Agreement:
        """Sums what each rank knows about the coming step.

        Args:
            has_batch: This rank's reader gave a batch.
            num_samples: Samples of this rank's batch.
            stop: This rank wants to end the run after the step before.

        Returns:
            The same values on all ranks.
        """
        if self.control is None:
            return Agreement(has_batch, has_batch, num_samples, stop)
        message = torch.tensor([int(has_batch), num_samples, int(stop)], dtype=torch.int64)
        dist.all_reduce(message, group=self.control)
        ranks_with_batch, total, stops = message.tolist()
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
