"""Samples to other ranks: every tensor of the batch in one all-to-all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Samples", "move_samples"]

ALIGNMENT = 16
"""Bytes at which each tensor's part of a message starts, so that it can be viewed in its dtype."""


class Samples(NamedTuple):
    """Samples of one rank."""

    rows: dict[str, Tensor]
    """Name -> (B, ...): one row for each sample."""
    jagged: dict[str, tuple[Tensor, Tensor]]
    """Name -> (values (T, ...), offsets (B + 1,) int64)."""


class _Layout(NamedTuple):
    """One tensor of the batch, its items sorted by destination."""

    name: str
    items: Tensor
    """(n, ...): rows or tokens, in the order in which they leave."""
    sent: list[int]
    """Items for each rank."""
    received: list[int]
    """Items from each rank."""

    def item_bytes(self) -> int:
        return self.items.shape[1:].numel() * self.items.element_size()

    def message_bytes(self, counts: Sequence[int]) -> list[int]:
        """Bytes in the message of each rank, with padding."""
        return [-(-count * self.item_bytes() // ALIGNMENT) * ALIGNMENT for count in counts]


def move_samples(
    destination: Tensor,
    sources: Sequence[Sequence[int]],
    lengths: Mapping[str, Sequence[Sequence[int]]],
    rows: Mapping[str, Tensor],
    jagged: Mapping[str, tuple[Tensor, Tensor]],
    group: dist.ProcessGroup,
) -> Samples:
    """Send each sample to its rank.

    Args:
        destination: (B,) int64 on the host: where each sample of this rank goes.
        sources: Per rank, the positions in its batch of the samples that come here.
        lengths: Jagged name -> per rank, the lengths of the samples that come here.
        rows: Tensors with one row for each sample.
        jagged: Values and offsets.
        group: The ranks.

    Returns:
        The samples in order of their rank and then of their position there.
    """
    ranks = len(sources)
    device = next((each.device for each in rows.values()), None) or next(iter(jagged.values()))[0].device
    order = torch.argsort(destination, stable=True)
    leaving = torch.bincount(destination, minlength=ranks).tolist()
    layouts = []
    for name, tensor in sorted(rows.items()):
        items = tensor.index_select(0, order.to(device))
        layouts.append(_Layout(name, items, leaving, [len(each) for each in sources]))
    tables: dict[str, Tensor] = {}
    for name, (values, offsets) in sorted(jagged.items()):
        starts, sizes = offsets[:-1].cpu()[order], torch.diff(offsets.cpu())[order]
        ends = sizes.cumsum(0)
        index = torch.repeat_interleave(starts - ends + sizes, sizes) + torch.arange(int(sizes.sum()))
        sent = torch.zeros(ranks, dtype=torch.int64).index_add(0, destination[order], sizes).tolist()
        received = [sum(each) for each in lengths[name]]
        layouts.append(_Layout(name, values.index_select(0, index.to(device)), sent, received))
        tables[name] = torch.tensor([0, *(length for each in lengths[name] for length in each)]).cumsum(0).to(device)
    moved = _all_to_all(layouts, device, group)
    return Samples(
        {name: moved[position] for position, name in enumerate(sorted(rows))},
        {name: (moved[len(rows) + position], tables[name]) for position, name in enumerate(sorted(jagged))},
    )


def _all_to_all(layouts: list[_Layout], device: torch.device, group: dist.ProcessGroup) -> list[Tensor]:
    sent = [layout.message_bytes(layout.sent) for layout in layouts]
    received = [layout.message_bytes(layout.received) for layout in layouts]
    ranks = len(layouts[0].sent)
    send = torch.empty(sum(map(sum, sent)), dtype=torch.uint8, device=device)
    position = 0
    pieces = [layout.items.split(layout.sent) for layout in layouts]
    for rank in range(ranks):
        for sizes, parts in zip(sent, pieces, strict=True):
            flat = parts[rank].contiguous().view(-1).view(torch.uint8)
            send[position : position + len(flat)] = flat
            # Padding is sent, so it is written.
            send[position + len(flat) : position + sizes[rank]] = 0
            position += sizes[rank]
    arrived = torch.empty(sum(map(sum, received)), dtype=torch.uint8, device=device)
    out_sizes = [sum(sizes[rank] for sizes in sent) for rank in range(ranks)]
    in_sizes = [sum(sizes[rank] for sizes in received) for rank in range(ranks)]
    dist.all_to_all_single(arrived, send, in_sizes, out_sizes, group=group)
    found: list[list[Tensor]] = [[] for _ in layouts]
    position = 0
    for rank in range(ranks):
        for layout, sizes, parts in zip(layouts, received, found, strict=True):
            count = layout.received[rank]
            flat = arrived[position : position + count * layout.item_bytes()]
            parts.append(flat.view(layout.items.dtype).view(count, *layout.items.shape[1:]))
            position += sizes[rank]
    return [torch.cat(parts) for parts in found]
