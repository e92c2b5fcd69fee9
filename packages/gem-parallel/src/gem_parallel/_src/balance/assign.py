"""Samples to ranks, so that the ranks' costs are near each other. Pure functions: equal input, equal output."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Literal, get_args

__all__ = ["METHODS", "Method", "assign"]

Method = Literal["karmarkar_karp", "greedy", "none"]
METHODS: tuple[Method, ...] = get_args(Method)
SWAPS_PER_PART = 32
"""Bound of the search after largest differencing with equal counts."""


def assign(costs: Sequence[float], counts: Sequence[int], method: Method, *, equal_counts: bool) -> list[int]:
    """The rank of each sample.

    Args:
        costs: Of all samples, those of rank 0 first; at least 0.
        counts: Samples that each rank has now.
        method: As ``balance_samples``.
        equal_counts: Ranks get numbers of samples that differ by at most one.

    Returns:
        Rank of each sample.
    """
    if method == "none":
        return [rank for rank, count in enumerate(counts) for _ in range(count)]
    parts = (
        _greedy(costs, len(counts), equal_counts) if method == "greedy" else _differ(costs, len(counts), equal_counts)
    )
    ranks = [0] * len(costs)
    for rank, part in enumerate(_stay(parts, costs, counts)):
        for sample in part:
            ranks[sample] = rank
    return ranks


def _descending(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda sample: (-costs[sample], sample))


def _greedy(costs: Sequence[float], num_parts: int, equal_counts: bool) -> list[list[int]]:
    """The dearest sample left goes to the cheapest part (with room): longest processing time first."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    least, more = divmod(len(costs), num_parts)
    heap = [(0.0, part) for part in range(num_parts)]
    for sample in _descending(costs):
        total, part = heapq.heappop(heap)
        parts[part].append(sample)
        size = len(parts[part])
        if not equal_counts or size < least or (size == least and more > 0):
            heapq.heappush(heap, (total + costs[sample], part))
        elif size > least:
            more -= 1
            if more == 0:
                # The last part with one sample more than `least` is taken: others that stand at `least` are full.
                heap = [entry for entry in heap if len(parts[entry[1]]) < least]
                heapq.heapify(heap)
    return parts


def _differ(costs: Sequence[float], num_parts: int, equal_counts: bool) -> list[list[int]]:
    """Largest differencing method of Karmarkar and Karp (1982) for any number of parts.

    A state divides some of the samples into parts, dearest part first. The two states with the largest differences
    between their dearest and cheapest part are merged, dearest part to cheapest, until one is left. With equal counts
    the first states are runs of ``num_parts`` samples of near costs, one in each part, so that every merge keeps counts
    equal; samples of no cost fill up the last run. Where few samples hold most of the cost, that leaves much to gain:
    swaps follow.
    """
    # A part is (cost, tree of samples); a tree is a sample, None or a pair of trees.
    order: list[int | None] = list(_descending(costs))
    if equal_counts:
        order += [None] * (-len(order) % num_parts)
        runs = [order[start : start + num_parts] for start in range(0, len(order), num_parts)]
    else:
        runs = [[sample] for sample in order]
    states: list[tuple[float, int, list[tuple[float, Any]]]] = []
    for turn, run in enumerate(runs):
        parts = [(0.0 if sample is None else float(costs[sample]), sample) for sample in run]
        parts += [(0.0, None)] * (num_parts - len(run))
        states.append((parts[-1][0] - parts[0][0], turn, parts))
    if not states:
        return [[] for _ in range(num_parts)]
    heapq.heapify(states)
    turn = len(states)
    while len(states) > 1:
        _, _, first = heapq.heappop(states)
        _, _, second = heapq.heappop(states)
        merged = [
            (one + two, left if right is None else right if left is None else (left, right))
            for (one, left), (two, right) in zip(first, reversed(second), strict=True)
        ]
        # Stable: what is equal keeps its place.
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(states, (merged[-1][0] - merged[0][0], turn, merged))
        turn += 1
    found = [_samples(tree) for _, tree in states[0][2]]
    if equal_counts:
        _swap(found, costs)
    return found


def _swap(parts: list[list[int]], costs: Sequence[float]) -> None:
    """Exchange single samples between the dearest part and cheap ones, in place, while that brings them nearer."""
    totals = [sum(costs[sample] for sample in part) for part in parts]
    ordered = [sorted((costs[sample], sample) for sample in part) for part in parts]
    for _ in range(SWAPS_PER_PART * len(parts)):
        by_cost = sorted(range(len(parts)), key=lambda part: (totals[part], part))
        high = by_cost.pop()
        for low in by_cost:
            best = _best_swap(ordered[high], ordered[low], totals[high] - totals[low])
            if best is not None:
                break
        else:
            break
        dear, cheap = ordered[high].pop(best[0]), ordered[low].pop(best[1])
        insort(ordered[high], cheap)
        insort(ordered[low], dear)
        totals[high] -= dear[0] - cheap[0]
        totals[low] += dear[0] - cheap[0]
    for index, entries in enumerate(ordered):
        parts[index] = sorted(sample for _, sample in entries)


def _best_swap(high: list[tuple[float, int]], low: list[tuple[float, int]], gap: float) -> tuple[int, int] | None:
    """Positions whose costs differ by nearest to half the gap, in parts sorted by cost; None if no swap narrows it."""
    best: tuple[float, int, int] | None = None
    for dear, entry in enumerate(high):
        near = bisect_left(low, (entry[0] - gap / 2, -1))
        for cheap in (near - 1, near):
            if 0 <= cheap < len(low):
                moved = entry[0] - low[cheap][0]
                off = abs(moved - gap / 2)
                if 0 < moved < gap and (best is None or off < best[0]):
                    best = (off, dear, cheap)
    return None if best is None else best[1:]


def _samples(tree: Any) -> list[int]:
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack += node
        elif node is not None:
            found.append(node)
    return sorted(found)


def _stay(parts: list[list[int]], costs: Sequence[float], counts: Sequence[int]) -> list[list[int]]:
    """Which rank takes which part: the ranks, in order, the free part with most cost that they hold already."""
    owner = [rank for rank, count in enumerate(counts) for _ in range(count)]
    held = [[0.0] * len(parts) for _ in counts]
    for index, part in enumerate(parts):
        for sample in part:
            held[owner[sample]][index] += costs[sample]
    free = list(range(len(parts)))
    found = []
    for here in held:
        best = max(free, key=lambda index: (here[index], -index))
        free.remove(best)
        found.append(parts[best])
    return found
