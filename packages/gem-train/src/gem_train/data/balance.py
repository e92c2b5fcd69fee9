"""Length-aware assignment of a global batch to ranks."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt


def deal_by_length(lengths: npt.NDArray[np.int64], world_size: int) -> npt.NDArray[np.int64]:
    """Orders a global batch so that the ranks' contiguous slices hold about equally many events.

    From the longest to the shortest, each sample goes to the rank with the fewest events so far that has room: a rank
    with heavy samples is filled up with light ones, the idea of base batch shuffling (Meta, "GEM Training", 2026). It
    needs no communication, since every rank knows all lengths. It costs about a microsecond per sample.

    Args:
        lengths: (n,) history lengths of the global batch.
        world_size: Ranks; rank r owns n * r // world_size up to n * (r + 1) // world_size of the result.

    Returns:
        (n,) a permutation of 0..n-1.
    """
    n = len(lengths)
    order = np.argsort(-lengths, kind="stable")
    begins = (np.arange(world_size + 1) * n // world_size).tolist()
    out = np.empty(n, dtype=np.int64)
    heap = [(0, rank, begins[rank]) for rank in range(world_size) if begins[rank] < begins[rank + 1]]
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        load, rank, slot = heap[0]
        out[slot] = sample
        if slot + 1 < begins[rank + 1]:
            heapq.heapreplace(heap, (load + length, rank, slot + 1))
        else:
            heapq.heappop(heap)
    return out
