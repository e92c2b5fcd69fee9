"""Batches out of an event log: numpy gathers over ranges, without a loop over samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gem_train.data.batch import Batch, Sequence
from gem_train.data.log import EncodedFeature, EventLog
from gem_train.data.ranges import expand_ranges, lengths_to_offsets

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


def collate(log: EventLog, positions: Int64Array, max_history: int) -> Batch:
    """Builds the batch of the given samples, histories point-in-time.

    Args:
        log: The log.
        positions: (B,) positions of the samples in the log; may be empty.
        max_history: A history keeps this many of its latest events.

    Returns:
        The batch, on the CPU.
    """
    lengths = history_lengths(log, positions, max_history)
    offsets = lengths_to_offsets(lengths)
    starts = log.history_end[positions] - lengths
    events = expand_ranges(starts, lengths)
    age = np.repeat(log.timestamp[positions], lengths)
    age -= log.timestamp[events]
    ids: dict[str, tuple[Tensor, Tensor]] = {}
    one_per_sample = torch.arange(len(positions) + 1)
    one_per_event = torch.arange(len(events) + 1)
    for name in log.schema.candidate_features:
        feature = log.encoded[name]
        if feature.offsets is None:
            ids[name] = (torch.from_numpy(feature.ids[positions]), one_per_sample)
        else:
            bag_starts = feature.offsets[positions]
            bag_lengths = feature.offsets[positions + 1] - bag_starts
            values = feature.ids[expand_ranges(bag_starts, bag_lengths)]
            ids[name] = (torch.from_numpy(values), torch.from_numpy(lengths_to_offsets(bag_lengths)))
    for name in log.schema.history_features:
        values, bag_offsets = _event_ids(log.encoded[name], starts, lengths, events, age)
        ids[f"{log.schema.history}.{name}"] = (
            torch.from_numpy(values),
            one_per_event if bag_offsets is None else torch.from_numpy(bag_offsets),
        )
    sequence = Sequence(
        offsets=torch.from_numpy(offsets),
        max_seqlen=int(lengths.max(initial=0)),
        dense=torch.from_numpy(log.event_dense[events]),
        age=torch.from_numpy(age.astype(np.float32)),
    )
    return Batch(
        num_samples=len(positions),
        ids=ids,
        dense=torch.from_numpy(log.dense[positions]),
        sequences={log.schema.history: sequence},
        labels={task: torch.from_numpy(values[positions]) for task, values in log.labels.items()},
        sample_index=torch.from_numpy(log.row[positions]),
    )


def _event_ids(
    feature: EncodedFeature, starts: Int64Array, lengths: Int64Array, events: Int64Array, age: Int64Array
) -> tuple[Int64Array, Int64Array | None]:
    if feature.offsets is None:
        values = feature.ids[events]
        if feature.delay_seconds:
            values[age < feature.delay_seconds] = 0
        return values, None
    # A history is one range of events, so its bags are one range of ids: B ranges, not T.
    first = feature.offsets[starts]
    values = feature.ids[expand_ranges(first, feature.offsets[starts + lengths] - first)]
    return values, lengths_to_offsets(feature.offsets[events + 1] - feature.offsets[events])
