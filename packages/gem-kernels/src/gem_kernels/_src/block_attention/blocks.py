"""Where the blocks of a batch lie, and how many pairs they hold."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def num_slots(total: int, num_sequences: int, block_size: int) -> int:
    """Upper bound of the number of blocks, from sizes that the host knows.

    Sequence b owns the slots from ``offsets[b] // block_size + b`` on: at least ``length // block_size + 1`` of them,
    enough for its blocks, whatever the other lengths are.
    """
    return total // block_size + num_sequences


def block_offsets(offsets: Tensor, total: int, block_size: int) -> Tensor:
    """Offsets (num_slots + 1,) int64 of the blocks cut from each sequence's own start; unused slots are empty.

    Runs on the device of ``offsets`` and does not wait for it.
    """
    num_sequences = offsets.shape[0] - 1
    offsets = offsets.to(torch.int64)
    first_slot = offsets // block_size + torch.arange(num_sequences + 1, device=offsets.device)
    slots = torch.arange(num_slots(total, num_sequences, block_size), device=offsets.device)
    sequence = torch.searchsorted(first_slot[1:].contiguous(), slots, right=True)
    starts = offsets[sequence] + (slots - first_slot[sequence]) * block_size
    return torch.cat([torch.minimum(starts, offsets[sequence + 1]), offsets[-1:]])


def num_pairs(offsets: Tensor, total: int, block_size: int) -> int:
    """(query, key) pairs of all blocks, the sum of their squared lengths; waits for the device of the offsets.

    Offsets without data (fake or meta tensors) are taken as equal lengths.
    """
    num_sequences = offsets.shape[0] - 1
    if isinstance(offsets, FakeTensor) or offsets.is_meta:
        if num_sequences == 0:
            return 0
        full, rest = divmod(total // num_sequences, block_size)
        return num_sequences * (full * block_size**2 + rest**2)
    lengths = torch.diff(offsets.to(device="cpu", dtype=torch.int64))
    blocks = lengths // block_size
    return int((blocks * block_size**2 + (lengths - blocks * block_size) ** 2).sum())
