"""Numbers of every rank, and no rank that refuses while the others wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
    owner: str,
    what: str,
    group: dist.ProcessGroup | DeviceMesh | None,
    refusal: Exception | None,
    values: Sequence[int],
) -> list[list[int]]:
    """Numbers of every rank of the group, or an error on all of them if one refuses. All ranks of the group call it.

    Args:
        owner: Function, for the error.
        what: What is refused, for the error on the other ranks.
        group: The ranks, as a group or as a mesh of any number of axes; None is one process.
        refusal: This rank's own error, raised after the others were told.
        values: This rank's numbers; as many as it has, also beside a refusal.

    Returns:
        Per rank of the group, its numbers; of a mesh, in the order of ``mesh.mesh.flatten()``.

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
    if any(each[0] for each in found):
        if isinstance(group, DeviceMesh):
            ranks, mine = group.mesh.flatten().tolist(), dist.get_rank()
        else:
            ranks, mine = list(range(len(found))), dist.get_rank(group)
        refused = [rank for rank, each in zip(ranks, found, strict=True) if each[0]]
        raise RuntimeError(
            f"{owner}: {what} must be right on every rank of the group, and ranks {refused} refused theirs and raised "
            f"their own error; rank {mine} stops with them, see their logs"
        )
    return [(each[2:] + more)[: each[1]] for each, more in zip(found, rest, strict=True)]


def _all_gather(mine: list[int], group: dist.ProcessGroup | DeviceMesh) -> list[list[int]]:
    # Axis by axis, the last first: the numbers then lie as the ranks do in the mesh.
    axes = [group] if not isinstance(group, DeviceMesh) else group.get_all_groups()[::-1]
    found = torch.tensor(mine, dtype=torch.int64, device=group_device(axes[0]))
    for axis in axes:
        whole = found.new_empty(dist.get_world_size(axis) * found.numel())
        DefaultCollectives().all_gather(whole, found, axis)
        found = whole
    rows: list[list[int]] = found.view(-1, len(mine)).tolist()
    return rows
