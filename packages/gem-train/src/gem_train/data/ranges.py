"""Index arithmetic on many ranges at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def lengths_to_offsets(lengths: Int64Array) -> Int64Array:
    """Offsets (B + 1,) of B packed pieces.

    Args:
        lengths: (B,) lengths.

    Returns:
        (B + 1,) int64, from 0 to the sum.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def expand_ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """The indices start, start + 1, ... of every range, one range after the other.

    Args:
        starts: (B,) first index of each range.
        lengths: (B,) length of each range; may be 0.

    Returns:
        (sum of lengths,) int64.
    """
    held = np.flatnonzero(lengths)
    starts, ends = starts[held], starts[held] + lengths[held]
    jumps = starts - np.concatenate((_ZERO, ends[:-1] - 1))
    return _running_sum(1, jumps, held, lengths)


def repeat_each(values: Int64Array, lengths: Int64Array) -> Int64Array:
    """Each value as often as its range is long, as numpy.repeat, which lets no other Python thread run meanwhile.

    Args:
        values: (B,).
        lengths: (B,) length of each range; may be 0.

    Returns:
        (sum of lengths,) int64.
    """
    held = np.flatnonzero(lengths)
    return _running_sum(0, np.diff(values[held], prepend=0), held, lengths)


_ZERO = np.zeros(1, dtype=np.int64)


def _running_sum(step: int, jumps: Int64Array, held: Int64Array, lengths: Int64Array) -> Int64Array:
    """Sums of a sequence of steps, with a jump in place of one at the beginning of each range that is not empty."""
    offsets = lengths_to_offsets(lengths)
    out = np.full(offsets[-1], step, dtype=np.int64)
    out[offsets[held]] = jumps
    return np.cumsum(out, out=out)
