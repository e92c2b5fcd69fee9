"""Length-aware assignment of a global batch to ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def deal_by_length(lengths: npt.NDArray[np.int64], world_size: int) -> npt.NDArray[np.int64]:
    """Orders a global batch so that the ranks' contiguous slices hold about equally many events.

    The samples are sorted by length and dealt in turns, forwards and backwards: the heaviest with the lightest, the
    idea of base batch shuffling (Meta, "GEM Training", 2026). It needs no communication, since every rank knows all
    lengths.

    Args:
        lengths: (n,) history lengths of the global batch.
        world_size: Ranks; rank r owns n * r // world_size up to n * (r + 1) // world_size of the result.

    Returns:
        (n,) a permutation of 0..n-1.
    """
    n = len(lengths)
    order = np.argsort(-lengths, kind="stable")
    rounds = n // world_size
    hands = order[: rounds * world_size].reshape(rounds, world_size).copy()
    hands[1::2] = hands[1::2, ::-1]
    rest = iter(order[rounds * world_size :])
    sizes = np.diff(np.arange(world_size + 1) * n // world_size)
    slices = [
        np.append(hands[:, rank], next(rest)) if size > rounds else hands[:, rank] for rank, size in enumerate(sizes)
    ]
    return np.concatenate(slices).astype(np.int64)
