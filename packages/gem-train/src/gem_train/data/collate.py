"""Batches out of an event log: numpy gathers over ranges, without a loop over samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gem_train.data.batch import Batch, Sequence
from gem_train.data.log import EventLog
from gem_train.data.ranges import expand_ranges, lengths_to_offsets, repeat_each

Int64Array = npt.NDArray[np.int64]


def history_lengths(log: EventLog, positions: Int64Array, max_history: int) -> Int64Array:
    """Events in the history of each sample.

    Args:
        log: The log.
        positions: (B,) positions of the samples in the log.
        max_history: A history keeps this many of its latest events.

    Returns:
        (B,) int64.
    """
    lengths: Int64Array = log.history_end[positions] - log.history_start[positions]
    return np.minimum(lengths, max_history)


def collate(log: EventLog, positions: Int64Array, max_history: int, *, pin_memory: bool = False) -> Batch:
    """Builds the batch of the given samples, histories point-in-time.

    Args:
        log: The log.
        positions: (B,) positions of the samples in the log; may be empty.
        max_history: A history keeps this many of its latest events.
        pin_memory: Build it in page-locked memory.

    Returns:
        The batch, on the CPU.
    """
    new = _Memory(pin_memory)
    lengths = history_lengths(log, positions, max_history)
    starts = log.history_end[positions] - lengths
    events = expand_ranges(starts, lengths)
    age = repeat_each(log.timestamp[positions], lengths)
    age -= log.timestamp.take(events)
    ids: dict[str, tuple[Tensor, Tensor]] = {}
    one_per_sample = new.copy(np.arange(len(positions) + 1))
    one_per_event = new.copy(np.arange(len(events) + 1))
    for name in log.schema.candidate_features:
        feature = log.encoded[name]
        if feature.offsets is None:
            ids[name] = (new.rows(feature.ids, positions), one_per_sample)
        else:
            first = feature.offsets[positions]
            counts = feature.offsets[positions + 1] - first
            ids[name] = (
                new.rows(feature.ids, expand_ranges(first, counts)),
                new.copy(lengths_to_offsets(counts)),
            )
    for name in log.schema.history_features:
        feature = log.encoded[name]
        values = f"{log.schema.history}.{name}"
        if feature.offsets is None:
            ids[values] = (new.rows(feature.ids, events), one_per_event)
            if feature.delay_seconds:
                ids[values][0].numpy()[age < feature.delay_seconds] = 0
        else:
            ids[values] = _bags_of_ranges(feature.ids, feature.offsets, starts, lengths, events, new)
    sequence = Sequence(
        offsets=new.copy(lengths_to_offsets(lengths)),
        max_seqlen=int(lengths.max(initial=0)),
        dense=new.rows(log.event_dense, events),
        age=new.copy(age, np.float32),
    )
    return Batch(
        num_samples=len(positions),
        ids=ids,
        dense=new.rows(log.dense, positions),
        sequences={log.schema.history: sequence},
        labels={task: new.rows(values, positions) for task, values in log.labels.items()},
        sample_index=new.rows(log.row, positions),
    )


def _bags_of_ranges(
    ids: Int64Array, offsets: Int64Array, starts: Int64Array, lengths: Int64Array, events: Int64Array, new: _Memory
) -> tuple[Tensor, Tensor]:
    """Ids, and offsets of a bag for each event."""
    # A history is one range of events, so its bags are one range of ids: B ranges, not T.
    first = offsets[starts]
    counts = offsets[starts + lengths] - first
    ends = new.empty((len(events) + 1,), np.int64)
    ends[0] = 0
    bags = ends.numpy()[1:]
    np.take(offsets[1:], events, out=bags, mode="clip")
    bags += repeat_each(lengths_to_offsets(counts)[:-1] - first, lengths)
    return new.rows(ids, expand_ranges(first, counts)), ends


class _Memory:
    """Makes the tensors of a batch. Memory that is page-locked from the start needs no copy that pins it."""

    def __init__(self, pin_memory: bool) -> None:
        self._pin_memory = pin_memory

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.empty(shape, dtype=kind, pin_memory=self._pin_memory)

    def rows(self, source: npt.NDArray[np.generic], index: Int64Array) -> Tensor:
        """Rows of an array, at positions that are in range."""
        out = self.empty((len(index), *source.shape[1:]), source.dtype)
        # Clipping never happens: it is the one mode in which numpy writes to `out` itself and not to a copy first.
        np.take(source, index, axis=0, out=out.numpy(), mode="clip")
        return out

    def copy(self, source: npt.NDArray[np.generic], dtype: npt.DTypeLike = np.int64) -> Tensor:
        out = self.empty(source.shape, dtype)
        np.copyto(out.numpy(), source, casting="same_kind")
        return out
