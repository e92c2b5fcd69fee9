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
    offsets = lengths_to_offsets(lengths)
    out = np.repeat(starts - offsets[:-1], lengths)
    out += np.arange(offsets[-1])
    return out
