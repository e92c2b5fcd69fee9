"""Copies that several ranks hold of one tensor: compared before one of them is saved for all."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gem_train.world import World

__all__ = ["find_differing_copies"]

_CHUNK = 2**22
"""Elements looked at together: their weighted values take 32 MiB."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_differing_copies(tensors: Mapping[str, Tensor], world: World) -> list[tuple[str, int, int]]:
    """Compares what several ranks hold of one name, bit by bit up to a checksum of 64 bits. All ranks call it.

    Plain tensors of one name are copies, and so are the parts of a DTensor over an axis that replicates it. Parts that
    one rank alone holds are not read.

    Args:
        tensors: Name -> tensor or DTensor of this rank; ranks may have other names.
        world: The ranks.

    Returns:
        (name, first rank that holds it, first rank that holds something else) of each name with differing copies, the
        same on all ranks.
    """
    if world.size == 1:
        return []
    held = [
        f"{name} {part}"
        for name, tensor in tensors.items()
        if not isinstance(tensor, DTensor) or any(placement.is_replicate() for placement in tensor.placements)
        for part in (_part(tensor),)
    ]
    holders: dict[str, int] = {}
    for keys in world.gather(held):
        for key in keys:
            holders[key] = holders.get(key, 0) + 1
    shared = [key for key in held if holders[key] > 1]
    sums = [_checksum(tensors[key.rpartition(" ")[0]]) for key in shared]
    mine = dict(zip(shared, torch.stack(sums).tolist() if sums else [], strict=True))
    first: dict[str, tuple[int, int]] = {}
    found: dict[str, tuple[str, int, int]] = {}
    for rank, theirs in enumerate(world.gather(mine)):
        for key, value in theirs.items():
            holder, expected = first.setdefault(key, (rank, value))
            name = key.rpartition(" ")[0]
            if value != expected and name not in found:
                found[name] = name, holder, rank
    return list(found.values())


def _part(tensor: Tensor) -> str:
    """Which part of its tensor a rank holds, without a space; equal for copies."""
    if not isinstance(tensor, DTensor):
        return "whole"
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return "none"
    pairs = zip(tensor.placements, coordinate, strict=True)
    return ",".join(str(at) for placement, at in pairs if not placement.is_replicate()) or "whole"


def _checksum(tensor: Tensor) -> Tensor:
    """Scalar int64 of a rank's part, on the CPU; other bits, or the same ones in another order, give another one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    bits = local.contiguous().reshape(-1).view(_INTEGERS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    weights = 2 * torch.arange(min(bits.numel(), _CHUNK), device=bits.device) + 1
    for chunk in bits.split(_CHUNK) if bits.numel() else ():
        # Odd weights lose no bit of a value, in arithmetic that wraps around at 64 bits.
        total = 1_000_003 * total + (chunk * weights[: chunk.numel()]).sum()
    return total.cpu()
