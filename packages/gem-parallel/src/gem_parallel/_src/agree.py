"""Numbers of every rank, and no rank that refuses while the others wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gem_parallel._src.collectives.base import DefaultCollectives

__all__ = ["agree", "group_device", "runs_on_host"]

_FIRST = 24
"""Numbers that travel with the first word; what is more follows once the ranks know how many it is."""


def runs_on_host(group: dist.ProcessGroup) -> bool:
    """All of the group's collectives run on the CPU, so that a small one more waits for no GPU."""
    return "nccl" not in dist.get_backend_config(group)


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where small numbers travel: on the CPU where the group can, so that no GPU is waited for."""
    if "gloo" in dist.get_backend_config(group) or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def agree(
    owner: str, what: str, group: dist.ProcessGroup | None, refusal: Exception | None, values: Sequence[int]
) -> list[list[int]]:
    """Numbers of every rank of the group, or an error on all of them if one refuses. All ranks of the group call it.

    Args:
        owner: Function, for the error.
        what: What is refused, for the error on the other ranks.
        group: The ranks; None is one process.
        refusal: This rank's own error, raised after the others were told.
        values: This rank's numbers; as many as it has, also beside a refusal.

    Returns:
        Per rank of the group, its numbers.

    Raises:
        RuntimeError: another rank refuses; names it.
    """
    if group is None:
        if refusal is not None:
            raise refusal
        return [list(values)]
    first = [int(refusal is not None), len(values), *values[:_FIRST]]
    found = _all_gather(first + [0] * (_FIRST + 2 - len(first)), group)
    longest = max(each[1] for each in found)
    rest: list[list[int]] = [[] for _ in found]
    if longest > _FIRST:
        rest = _all_gather([*values[_FIRST:], *[0] * (longest - max(_FIRST, len(values)))], group)
    if refusal is not None:
        raise refusal
    refused = [rank for rank, each in enumerate(found) if each[0]]
    if refused:
        raise RuntimeError(
            f"{owner}: {what} must be right on every rank of the group, and ranks {refused} refused theirs and raised "
            f"their own error; rank {dist.get_rank(group)} stops with them, see their logs"
        )
    return [(each[2:] + more)[: each[1]] for each, more in zip(found, rest, strict=True)]


def _all_gather(mine: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    device = group_device(group)
    table = torch.empty((dist.get_world_size(group), len(mine)), dtype=torch.int64, device=device)
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    DefaultCollectives().all_gather(table.view(-1), sent, group)
    found: list[list[int]] = table.tolist()
    return found
