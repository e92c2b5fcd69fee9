"""The reader: shuffled, sharded, resumable batches of an event log."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from gem_train.data.arguments import check_flag, check_integer, check_kind
from gem_train.data.balance import deal_by_length
from gem_train.data.batch import Batch
from gem_train.data.collate import collate, history_lengths
from gem_train.data.log import EventLog, Split, check_split
from gem_train.data.prefetch import PINNING, prefetch

STATE_VERSION = 1


class EventSource:
    """Batches of one split for one rank; satisfies `gem_train.protocols.BatchSource`.

    Epoch e visits the samples in a permutation drawn from (seed, e), or in time order without `shuffle`. Consecutive
    runs of `global_batch_size` samples are the global batches, the last of an epoch may be smaller, and a rank reads
    its contiguous slice of each, which may be empty. So all ranks see the same number of batches, and the position is
    one number, (epoch, next_sample), that does not depend on the world size.

    Iterating starts at the position of `state_dict()`: at the beginning, where a broken-off iteration stopped, or where
    `load_state_dict` put it. After a pass has run to its end, the next `iter()` begins a new one. A state saved after
    the last batch and loaded again yields nothing: that run is complete.
    """

    def __init__(
        self,
        log: EventLog,
        split: Split = "train",
        *,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        max_history: int | None = None,
        epochs: int = 1,
        balance_lengths: bool = False,
        prefetch_batches: int = 0,
        pin_memory: bool = False,
    ) -> None:
        """Creates the source.

        Args:
            log: The events.
            split: Which samples.
            global_batch_size: Samples of all ranks in one step.
            rank: This rank.
            world_size: Ranks.
            seed: Of the permutations.
            shuffle: Defaults to True for the training split and False for the others.
            max_history: Latest events kept of a history; defaults to the schema's.
            epochs: Passes over the samples.
            balance_lengths: Deal a global batch to the ranks so that their histories are about equally long.
                Which samples form a global batch does not change.
            prefetch_batches: Batches that a background thread prepares ahead; 0 for none.
            pin_memory: Build batches in page-locked memory, from which copies to a GPU do not wait; needs a GPU.

        Raises:
            ValueError: if a number is out of range.
            TypeError: if an argument has another type.
        """
        check_kind("EventSource", "log", log, EventLog, "make one with load_events or generate")
        check_split("EventSource", split)
        _check_at_least(1, global_batch_size=global_batch_size, world_size=world_size, epochs=epochs)
        _check_at_least(0, rank=rank, prefetch_batches=prefetch_batches, seed=seed)
        check_flag("EventSource", "balance_lengths", balance_lengths)
        check_flag("EventSource", "pin_memory", pin_memory)
        if shuffle is not None:
            check_flag("EventSource", "shuffle", shuffle)
        if rank >= world_size:
            raise ValueError(f"EventSource: `rank` must be < world_size = {world_size}, got {rank}; count ranks from 0")
        self._log = log
        self._samples = log.samples(split)
        self.split = split
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = split == "train" if shuffle is None else shuffle
        self.max_history = log.schema.max_history if max_history is None else max_history
        _check_at_least(1, max_history=self.max_history)
        self.epochs = epochs
        self.balance_lengths = balance_lengths
        self._prefetch_batches = prefetch_batches
        self._pin_memory = pin_memory
        self._epoch = 0
        self._next_sample = 0
        self._complete = False
        self._iteration = 0

    @property
    def num_samples(self) -> int:
        """Samples of one epoch, of all ranks."""
        return len(self._samples)

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of one epoch."""
        return math.ceil(self.num_samples / self.global_batch_size)

    @property
    def num_batches(self) -> int:
        """Global batches of all epochs."""
        return self.batches_per_epoch * self.epochs

    def reset(self) -> None:
        """Goes back to the first sample of the first epoch. Iterators made before become invalid."""
        self._epoch, self._next_sample, self._complete = 0, 0, False
        self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch; prefetched batches do not count."""
        return {
            "version": STATE_VERSION,
            "split": self.split,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "next_sample": self._next_sample,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the global sample order of another source of the same log, of any world size and batch size.

        Args:
            state: From `state_dict`.

        Raises:
            ValueError: if the state is of another order of samples.
        """
        expected = self.state_dict()
        check_kind("EventSource.load_state_dict", "state", state, dict, "load what state_dict returned")
        if state.keys() != expected.keys():
            raise ValueError(
                f"EventSource.load_state_dict: `state` must have keys {sorted(expected)}, got {sorted(state)}; "
                "load a state made by this version"
            )
        for key in ("version", "split", "num_samples", "seed", "shuffle"):
            if state[key] != expected[key]:
                raise ValueError(
                    f"EventSource.load_state_dict: `{key}` must be {expected[key]!r} as here, got {state[key]!r}; "
                    "resume with the data and options of the saved run"
                )
        for key in ("epoch", "next_sample"):
            check_integer("EventSource.load_state_dict", key, state[key])
        epoch, next_sample = int(state["epoch"]), int(state["next_sample"])
        if epoch < 0 or not 0 <= next_sample <= self.num_samples:
            raise ValueError(
                f"EventSource.load_state_dict: `epoch` and `next_sample` must be >= 0 and in 0..{self.num_samples}, "
                f"got ({epoch}, {next_sample}); the state is damaged, load another"
            )
        self._epoch, self._next_sample, self._complete = epoch, next_sample, False
        self._iteration += 1

    def __iter__(self) -> Iterator[Batch]:
        """Yields this rank's batches from the current position to the end of the last epoch.

        Raises:
            RuntimeError: from an iterator that a later `iter()`, `reset` or `load_state_dict` has replaced.
        """
        if self._complete:
            self.reset()
        self._iteration += 1
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Batch]:
        produced = self._produce(self._epoch, self._next_sample)
        if self._prefetch_batches:
            produced = prefetch(produced, self._prefetch_batches)
        try:
            for epoch, next_sample, batch in produced:
                self._check_current(iteration)
                self._epoch, self._next_sample = epoch, next_sample
                yield batch
                self._check_current(iteration)
        finally:
            produced.close()
        self._complete = True

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError(
                "EventSource: this iterator was replaced by a later iter(), reset() or load_state_dict(); "
                "use one iterator at a time, or one source per loop"
            )

    def _produce(self, epoch: int, next_sample: int) -> Generator[tuple[int, int, Batch], None, None]:
        """Yields (epoch, next_sample) after each batch, and the batch."""
        while epoch < self.epochs:
            order = self._order(epoch) if next_sample < self.num_samples else None
            while next_sample < self.num_samples:
                assert order is not None
                positions = order[next_sample : next_sample + self.global_batch_size]
                next_sample += len(positions)
                # The end of an epoch is the beginning of the next: one spelling of one position.
                after = (epoch, next_sample) if next_sample < self.num_samples else (epoch + 1, 0)
                with PINNING if self._pin_memory else nullcontext():
                    batch = collate(self._log, self._local(positions), self.max_history, pin_memory=self._pin_memory)
                yield *after, batch
            epoch, next_sample = epoch + 1, 0

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return self._samples
        return self._samples[np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)]

    def _local(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self.balance_lengths and self.world_size > 1:
            positions = positions[
                deal_by_length(history_lengths(self._log, positions, self.max_history), self.world_size)
            ]
        begin = len(positions) * self.rank // self.world_size
        return positions[begin : len(positions) * (self.rank + 1) // self.world_size]


def _check_at_least(minimum: int, **arguments: int) -> None:
    for name, value in arguments.items():
        check_integer("EventSource", name, value, minimum)
