"""Rows to features and gradients back, as one autograd node.

One node for all features of all groups: its backward runs, with all its collectives, as soon as one output has a
gradient, so that a rank whose loss touches fewer features than its neighbours' still meets them in every exchange. Its
first input is an anchor that always requires a gradient: a rank that owns none of the batch's rows, or has no ids,
stays in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_parallel._src.embeddings.exchange import exchange_rows
from gem_parallel._src.embeddings.ids import FeatureIds
from gem_parallel._src.embeddings.pending import GroupRequest

__all__ = ["Assemble", "RowBlock"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Rows that one engine looked up, for tables ``first_table`` up to ``first_table + num_tables``."""

    group: int
    first_table: int
    num_tables: int
    start: int
    """Position of the block's first row among its group's rows in order of table."""


class Assemble(torch.autograd.Function):
    """Looked-up rows (owner's side) to feature outputs (requester's side)."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        requests: Sequence[GroupRequest],
        blocks: Sequence[RowBlock],
        process_group: dist.ProcessGroup | None,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.requests, ctx.blocks, ctx.process_group = requests, blocks, process_group
        ctx.shapes = [block_rows.shape for block_rows in rows]
        outputs: list[Tensor] = []
        for index, request in enumerate(requests):
            mine = [(block, rows[at]) for at, block in enumerate(blocks) if block.group == index]
            if request.route is None:
                outputs += _local_outputs(request, mine)
            else:
                assert process_group is not None
                outputs += _routed_outputs(request, [each for _, each in mine], process_group)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(ctx.blocks)
        first = 0
        for index, request in enumerate(ctx.requests):
            features = request.ids.features
            mine = list(grads[first : first + len(features)])
            first += len(features)
            places = [at for at, block in enumerate(ctx.blocks) if block.group == index]
            blocks = [ctx.blocks[at] for at in places]
            if request.route is None:
                parts = _local_gradients(request, blocks, [ctx.shapes[at] for at in places], mine)
            else:
                parts = _routed_gradients(request, blocks, mine, ctx.process_group)
            for at, part in zip(places, parts, strict=True):
                found[at] = part
        return (None, None, None, None, *found)


def _pool(rows: Tensor, index: Tensor, feature: FeatureIds) -> Tensor:
    """Sum or mean of ``rows[index]`` over the feature's bags."""
    if index.numel() == 0:
        return rows.new_zeros(feature.num_bags, rows.shape[1])
    total = F.embedding_bag(index, rows, feature.offsets, mode="sum", include_last_offset=True)
    return _scaled(total, feature, feature.offsets.diff())


def _local_outputs(request: GroupRequest, blocks: Sequence[tuple[RowBlock, Tensor]]) -> list[Tensor]:
    outputs = []
    for feature in request.ids.features:
        block, rows = next(pair for pair in blocks if _covers(pair[0], feature))
        part = rows[feature.start - block.start : feature.end - block.start]
        if feature.slot.config.pooling == "none":
            # A copy, unless it is the whole block: autograd forbids two outputs that share memory with an input.
            outputs.append(part.clone())
        else:
            outputs.append(_pool(part, torch.arange(part.shape[0], device=part.device), feature))
    return outputs


def _covers(block: RowBlock, feature: FeatureIds) -> bool:
    return block.first_table <= feature.slot.table < block.first_table + block.num_tables


def _routed_outputs(request: GroupRequest, rows: Sequence[Tensor], process_group: dist.ProcessGroup) -> list[Tensor]:
    route = request.route
    assert route is not None
    found = rows[0] if len(rows) == 1 else torch.cat(list(rows))
    if route.by_table is not None:
        found = torch.empty_like(found).index_copy_(0, route.by_table, found)
    distinct = exchange_rows(
        found,
        send_splits=route.receive_splits,
        receive_splits=route.send_splits,
        process_group=process_group,
        extra=1,
    )
    outputs = []
    for feature in request.ids.features:
        index = route.inverse[feature.start : feature.end]
        if feature.slot.config.pooling == "none":
            outputs.append(distinct.index_select(0, index))
        else:
            outputs.append(_pool(distinct, index, feature))
    return outputs


def _bag_of_value(feature: FeatureIds) -> tuple[Tensor, Tensor]:
    lengths = feature.offsets.diff()
    bags = torch.arange(feature.num_bags, device=lengths.device)
    return lengths, torch.repeat_interleave(bags, lengths, output_size=feature.end - feature.start)


def _scaled(value: Tensor, feature: FeatureIds, lengths: Tensor) -> Tensor:
    """A mean's share of a bag's sum, and of its gradient."""
    if feature.slot.config.pooling == "sum":
        return value
    return value / lengths.clamp(min=1).unsqueeze(1)


def _local_gradients(
    request: GroupRequest,
    blocks: Sequence[RowBlock],
    shapes: Sequence[torch.Size],
    grads: Sequence[Tensor | None],
) -> list[Tensor]:
    """Gradient of each block's rows, one per id: the engines sum over equal ids themselves."""
    device = request.rows.device
    found = [torch.empty(shape, device=device) for shape in shapes]
    for feature, grad in zip(request.ids.features, grads, strict=True):
        at = next(at for at, block in enumerate(blocks) if _covers(block, feature))
        part = found[at][feature.start - blocks[at].start : feature.end - blocks[at].start]
        if grad is None:
            part.zero_()
        elif feature.slot.config.pooling == "none":
            part.copy_(grad)
        else:
            lengths, bag = _bag_of_value(feature)
            torch.index_select(_scaled(grad, feature, lengths).contiguous(), 0, bag, out=part)
    return found


def _routed_gradients(
    request: GroupRequest,
    blocks: Sequence[RowBlock],
    grads: Sequence[Tensor | None],
    process_group: dist.ProcessGroup,
) -> list[Tensor]:
    """Sum over this rank's equal ids, then send each sum to the row's owner."""
    route, features = request.route, request.ids.features
    assert route is not None
    device, dim = request.rows.device, request.ids.group.dim
    sources, index, base = [], [], 0
    for feature, grad in zip(features, grads, strict=True):
        num_ids = feature.end - feature.start
        pooled = feature.slot.config.pooling != "none"
        size = feature.num_bags if pooled else num_ids
        if pooled:
            lengths, bag = _bag_of_value(feature)
            index.append(bag + base)
            sources.append(torch.zeros(size, dim, device=device) if grad is None else _scaled(grad, feature, lengths))
        else:
            index.append(torch.arange(base, base + num_ids, device=device))
            sources.append(torch.zeros(size, dim, device=device) if grad is None else grad)
        base += size
    if route.num_unique:
        # starts has one entry more than there are distinct ids: where the dropped ones begin, which get no gradient.
        in_order = torch.cat(index).index_select(0, route.order)
        total = F.embedding_bag(in_order, torch.cat(sources), route.starts, mode="sum", include_last_offset=False)[
            : route.num_unique
        ]
    else:
        total = torch.zeros(0, dim, device=device)
    received = exchange_rows(
        total,
        send_splits=route.send_splits,
        receive_splits=route.receive_splits,
        process_group=process_group,
        extra=0,
    )
    if route.by_table is not None:
        received = received.index_select(0, route.by_table)
    ends = [block.start for block in blocks[1:]] + [received.shape[0]]
    return [received[block.start : end] for block, end in zip(blocks, ends, strict=True)]
