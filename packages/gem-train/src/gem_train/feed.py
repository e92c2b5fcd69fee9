"""Batches on the device, one ahead, with ids already under way and all ranks agreeing on the end."""

from collections.abc import Callable
from typing import Any, NamedTuple

from gem_train.protocols import BatchSource, EmbeddingModule
from gem_train.timing import PhaseTimer
from gem_train.world import World

__all__ = ["Feed", "Staged"]


class Staged(NamedTuple):
    """A batch that is ready to be looked up."""

    batch: Any
    """This rank's samples, on the device."""
    host_batch: Any
    """The same samples where the reader made them; lengths can be read there without waiting for the device."""
    pending: Any
    """Its ids, on their way to the ranks that own their rows."""
    num_samples: int
    """Samples of this step over all ranks."""
    source_state: dict[str, Any]
    """Reader position after this batch: what a checkpoint of this step saves, however far the reader is ahead."""


class Feed:
    """One pass over a source, for one phase of the run; another phase makes its own.

    When a batch is taken, the next one is read, copied and its ids sent, so that they travel under the compute of the
    batch before. The ranks agree before every batch: the feed ends on all of them when it ends on one.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        embeddings: EmbeddingModule,
        world: World,
        timer: PhaseTimer,
        limit: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts reading.

        Args:
            source: Gives this rank's batches.
            embeddings: Where ids are exchanged.
            world: The ranks.
            timer: Takes the times of data and exchange.
            limit: Most batches to give.
            should_stop: Asked before each batch; true on one rank ends the feed on all.
        """
        self._source = source
        self._iterator = iter(source)
        self._embeddings = embeddings
        self._world = world
        self._timer = timer
        self._left = limit
        self._should_stop = should_stop
        self._staged: Staged | None = None
        self.stopped = False
        """The feed ended because it was asked to, and not because the data did."""
        self.dropped = 0
        """Samples read but not given, because another rank ran out of data."""
        self._begun = False

    def next(self) -> Staged | None:
        """The next batch, or None at the end; all ranks call it together."""
        current = self._staged if self._begun else self._stage()
        self._begun = True
        self._staged = self._stage() if current is not None else None
        return current

    def close(self) -> None:
        """Stops the reader's background work, if it has any."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _stage(self) -> Staged | None:
        if self._left == 0:
            return None
        with self._timer("data"):
            host_batch = next(self._iterator, None)
            state = self._source.state_dict()
            num_samples = 0 if host_batch is None else host_batch.num_samples
            agreed = self._world.agree(
                has_batch=host_batch is not None, num_samples=num_samples, stop=self._should_stop()
            )
            self.stopped = self.stopped or agreed.stop
            if agreed.stop or not agreed.everyone_has_batch:
                self.dropped += 0 if agreed.stop else agreed.num_samples
                self._left = 0
                return None
            assert host_batch is not None
            batch = host_batch
            if self._world.device.type == "cuda":
                batch = host_batch.pin_memory().to(self._world.device, non_blocking=True)
        with self._timer("embedding"):
            pending = self._embeddings.exchange(batch.ids)
        if self._left is not None:
            self._left -= 1
        return Staged(batch, host_batch, pending, agreed.num_samples, state)
