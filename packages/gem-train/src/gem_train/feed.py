"""Batches on the device, one ahead, with ids already under way and all ranks agreeing on the end."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gem_train.protocols import Batch, BatchSource, EmbeddingModule
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
    copied: torch.cuda.Event | None = None
    """When the batch is on the device, where another stream than that of the model copies it."""


class Feed:
    """One pass over a source, for one phase of the run; another phase makes its own.

    `ahead` reads the next batch, copies it and sends its ids while the device computes the batch before. On CUDA that
    runs on a stream of its own. Over several ranks the host waits there for the numbers of ids, so that the time to
    call it is when the forward pass is enqueued and the backward pass is not: the host then waits for ids alone, and
    has the backward to enqueue while the device still works. The ranks agree before every batch: the feed ends on all
    of them when it ends on one.
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
        balance: Callable[[Any], Any] = lambda batch: batch,
        alike: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """Starts reading.

        Args:
            source: Gives this rank's batches.
            embeddings: Where ids are exchanged.
            world: The ranks.
            timer: Takes the times of data and exchange.
            limit: Most batches to give.
            should_stop: Asked before each batch; true on one rank ends the feed on all.
            balance: What becomes of a batch once all ranks have one; all ranks call it.
            alike: Asked before each batch: name -> value of what must be equal on all ranks.
        """
        self._source = source
        self._iterator = iter(source)
        self._embeddings = embeddings
        self._world = world
        self._timer = timer
        self._left = limit
        self._should_stop = should_stop
        self._balance = balance
        self._alike = alike
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._staged: Staged | None = None
        self._is_ahead = False
        self.stopped = False
        """The feed ended because it was asked to, and not because the data did."""
        self.dropped = 0
        """Samples read but not given, because another rank ran out of data."""

    def next(self) -> Staged | None:
        """The next batch, or None at the end; all ranks call it together.

        Raises:
            ConfigError: on all ranks, if what `alike` names differs between them.
        """
        staged = self.ahead()
        self._staged, self._is_ahead = None, False
        if staged is not None and staged.copied is not None:
            stream = torch.cuda.current_stream(self._world.device)
            stream.wait_event(staged.copied)
            for tensor in _tensors(staged.batch):
                tensor.record_stream(stream)
        return staged

    def ahead(self) -> Staged | None:
        """What `next` will give, its ids on their way; all ranks call it together."""
        if not self._is_ahead:
            self._staged, self._is_ahead = self._stage(), True
        return self._staged

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
                has_batch=host_batch is not None,
                num_samples=num_samples,
                stop=self._should_stop(),
                alike=self._alike() if self._world.size > 1 else None,
            )
            self.stopped = self.stopped or agreed.stop
            if agreed.stop or not agreed.everyone_has_batch:
                self.dropped += 0 if agreed.stop else agreed.num_samples
                self._left = 0
                return None
            assert host_batch is not None
            batch = host_batch = self._balance(host_batch)
            if self._stream is not None:
                with torch.cuda.stream(self._stream):
                    batch = host_batch.pin_memory().to(self._world.device, non_blocking=True)
        copied: torch.cuda.Event | None = None
        # The timer stands outside of the stream: it sees what the model waits for.
        with self._timer("embedding"), self._on_stream():
            pending = self._embeddings.exchange(batch.ids)
            if self._stream is not None:
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(self._stream)
        if self._left is not None:
            self._left -= 1
        return Staged(batch, host_batch, pending, agreed.num_samples, state, copied)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def _tensors(batch: Batch) -> Iterator[Tensor]:
    """Every tensor of a batch."""
    for values, offsets in batch.ids.values():
        yield from (values, offsets)
    for sequence in batch.sequences.values():
        yield from (sequence.offsets, sequence.dense, sequence.age)
    yield from (batch.dense, *batch.labels.values(), batch.sample_index)
