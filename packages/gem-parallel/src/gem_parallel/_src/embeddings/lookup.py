"""Rows to features and gradients back, as one autograd node.

One node for all features of all groups: its backward runs, with all its collectives, as soon as one output has a
gradient, so that a rank whose loss touches fewer features than its neighbours' still meets them in every exchange. Its
first input is an anchor that always requires a gradient: a rank that owns none of the batch's rows, or has no ids,
stays in the graph.

Transfers of one group run while the next group computes, in both directions; all ranks start them in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_parallel._src.embeddings.config import FeatureConfig
from gem_parallel._src.embeddings.grid import Grid
from gem_parallel._src.embeddings.ids import FeatureIds
from gem_parallel._src.embeddings.link import Transfer
from gem_parallel._src.embeddings.pending import GroupRequest
from gem_parallel._src.embeddings.segments import sum_segments
from gem_parallel._src.embeddings.stores import (
    FusedStore,
    ReplicatedStore,
    RowBlock,
    ShardedStore,
    SliceIds,
    Store,
    Update,
)
from gem_parallel._src.embeddings.wire import RowTransfer
from gem_parallel._src.optional import has_triton

__all__ = ["Flight", "Started", "by_feature", "land_flights", "start_flights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """One group's rows on their way to the rank that asked for them."""

    request: GroupRequest
    store: Store
    blocks: list[RowBlock]
    rows: list[Tensor]
    """Of each block; in the graph of the engine that updates them. Of a fused store only."""
    transfer: RowTransfer | None
    """Distinct rows from their owners; None in one process and for replicated tables."""
    found: Tensor | None
    """(N, dim) rows of a replicated group's values."""
    slice_ids: SliceIds | None

    def landed(self) -> Flight:
        """What backward needs: no rows, whose memory is the dense part's from here on."""
        return replace(self, rows=[], transfer=None, found=None)


@dataclass(slots=True, kw_only=True)
class Started:
    """A lookup that runs."""

    step: int | None
    learning_rate: float
    flights: list[Flight] | None
    """None where the engines pool themselves."""
    sums: list[Tensor] = field(default_factory=list)
    """Of a process whose engines combine their tables."""
    done: bool = False

    @classmethod
    def refused(cls) -> Started:
        """Of a batch that is not to be looked up."""
        return cls(step=None, learning_rate=0.0, flights=None, done=True)


def start_flights(
    requests: Sequence[GroupRequest],
    stores: Sequence[Store],
    *,
    step: int | None,
    grid: Grid | None,
    wire_dtype: torch.dtype,
) -> list[Flight]:
    """Read rows and start sending them; ``step`` is None where nothing will be updated."""
    begun = [
        store.begin(request, training=step is not None) if isinstance(store, ShardedStore) else None
        for request, store in zip(requests, stores, strict=True)
    ]
    flights = []
    for index, (request, store) in enumerate(zip(requests, stores, strict=True)):
        blocks: list[RowBlock] = []
        rows: list[Tensor] = []
        found = transfer = None
        if isinstance(store, FusedStore):
            for block, block_rows in store.read(index, request, step):
                blocks.append(block)
                rows.append(block_rows)
            if request.route is not None:
                found = rows[0].detach() if len(rows) == 1 else torch.cat([each.detach() for each in rows])
                if request.route.by_table is not None:
                    found = torch.empty_like(found).index_copy_(0, request.route.by_table, found)
        else:
            with torch.no_grad():
                found = store.read(request, begun[index]) if isinstance(store, ShardedStore) else store.read(request)
        if request.route is not None:
            assert grid is not None
            assert found is not None
            transfer = RowTransfer(
                found,
                send_splits=request.route.receive_splits,
                receive_splits=request.route.send_splits,
                link=grid.shards,
                wire_dtype=wire_dtype,
                what="lookup: the exchange of rows",
                # Dropped ids read a row of zeros.
                extra=1,
            )
            found = None
        flights.append(
            Flight(
                request=request,
                store=store,
                blocks=blocks,
                rows=rows,
                transfer=transfer,
                found=found,
                slice_ids=begun[index],
            )
        )
    return flights


def land_flights(
    flights: Sequence[Flight], anchor: Tensor, update: Update | None, *, grid: Grid | None, wire_dtype: torch.dtype
) -> Sequence[Tensor]:
    """Outputs of the requests' features, in their order; ``update`` is None where nothing will be updated."""
    rows = [each for flight in flights for each in flight.rows]
    with torch.set_grad_enabled(update is not None):
        outputs: Sequence[Tensor] = Assemble.apply(anchor, flights, grid, wire_dtype, update, *rows)
    return outputs


def by_feature(
    requests: Sequence[GroupRequest], outputs: Sequence[Tensor], features: Sequence[FeatureConfig]
) -> dict[str, Tensor]:
    """Outputs by name, column shards side by side; one output per feature of each request, in their order."""
    slots = [feature.slot for request in requests for feature in request.ids.features]
    by_name: dict[str, list[tuple[int, Tensor]]] = {}
    for slot, output in zip(slots, outputs, strict=True):
        by_name.setdefault(slot.config.name, []).append((slot.piece, output))
    found = {}
    for feature in features:
        parts = [output for _, output in sorted(by_name.get(feature.name, []), key=lambda part: part[0])]
        if parts:
            found[feature.name] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return found


class Assemble(torch.autograd.Function):
    """Looked-up rows (owner's side) to feature outputs (requester's side)."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        flights: Sequence[Flight],
        grid: Grid | None,
        wire_dtype: torch.dtype,
        update: Update | None,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.flights = [flight.landed() for flight in flights]
        ctx.grid, ctx.wire_dtype, ctx.update = grid, wire_dtype, update
        ctx.shapes = [block_rows.shape for block_rows in rows]
        outputs: list[Tensor] = []
        first = 0
        for flight in flights:
            blocks = list(zip(flight.blocks, rows[first : first + len(flight.blocks)], strict=True))
            first += len(flight.blocks)
            if flight.transfer is not None:
                assert flight.request.route is not None
                outputs += _joint_outputs(flight.request, flight.transfer.wait(), flight.request.route.inverse)
            elif flight.found is not None:
                outputs += _joint_outputs(flight.request, flight.found, None)
            else:
                outputs += _local_outputs(flight.request, blocks)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grid, update = ctx.grid, ctx.update
        shapes, found = list(ctx.shapes), []
        first = 0
        # Everyone's sums leave first; then, as they arrive, they go on to the slices or into the engines' backward.
        sent: list[RowTransfer | None] = []
        added: dict[int, tuple[Tensor, Transfer]] = {}
        for at, flight in enumerate(ctx.flights):
            num_features = len(flight.request.ids.features)
            mine = list(grads[first : first + num_features])
            first += num_features
            if isinstance(flight.store, ReplicatedStore):
                total = _dense_gradients(flight.request, flight.store.num_rows, mine)
                what = "backward: the sum of replicated tables' gradients"
                added[at] = total, grid.everyone.all_reduce(total, what=what)
                sent.append(None)
            elif flight.request.route is not None:
                sent.append(_send_gradients(flight.request, mine, grid, ctx.wire_dtype))
            else:
                sent.append(None)
                found += _local_gradients(flight.request, flight.blocks, shapes[: len(flight.blocks)], mine)
            shapes = shapes[len(flight.blocks) :]
        arrived: list[Tensor | None] = []
        onward: list[RowTransfer | None] = []
        for flight, transfer in zip(ctx.flights, sent, strict=True):
            received = None if transfer is None else transfer.wait()
            way = None
            if received is not None and isinstance(flight.store, FusedStore):
                found += _split_by_block(flight.request, flight.blocks, received)
            elif received is not None:
                way = flight.store.send_gradients(flight.request, received)
            arrived.append(received)
            onward.append(way)
        for at, (flight, received, way) in enumerate(zip(ctx.flights, arrived, onward, strict=True)):
            if isinstance(flight.store, ReplicatedStore):
                total, work = added[at]
                work.wait()
                flight.store.update(total, update)
            elif isinstance(flight.store, ShardedStore):
                ids = flight.request.rows if flight.slice_ids is None else flight.slice_ids.wait()
                grad = received if way is None else way.wait()
                assert grad is not None
                flight.store.update(flight.request, ids, grad, update)
        return (None, None, None, None, None, *found)


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


def _joint_outputs(request: GroupRequest, rows: Tensor, index: Tensor | None) -> list[Tensor]:
    """Outputs from ``rows[index]``, one row per value; ``index`` None is all rows in order."""
    features = request.ids.features
    sizes = [feature.num_outputs for feature in features]
    if request.bags is None:
        found = rows if index is None else _select(rows, index)
        return list(found.split(sizes)) if features else []
    sizes = [size for each in sizes for size in (each, 1)][:-1]
    if request.ids.values.numel() == 0:
        total = rows.new_zeros(sum(sizes), rows.shape[1])
    else:
        index = torch.arange(rows.shape[0], device=rows.device) if index is None else index
        total = F.embedding_bag(index, rows, request.bags, mode="sum", include_last_offset=True)
    parts = total.split(sizes)[::2]
    return [
        _scaled(part, feature, feature.offsets.diff()) if feature.slot.config.pooling == "mean" else part
        for part, feature in zip(parts, features, strict=True)
    ]


def _select(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``."""
    if not (rows.is_cuda and has_triton()):
        return rows.index_select(0, index)
    from gem_parallel._src.embeddings.row_kernel import gather_rows

    return gather_rows(rows.contiguous(), index)


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


def _sources(request: GroupRequest, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Gradients of all outputs of a batch (S, dim), and which of them each value gets (N,); None if each its own."""
    device, dim = request.ids.values.device, request.ids.group.dim
    nothing = torch.zeros(1, dim, device=device)
    sources: list[Tensor] = []
    for feature, grad in zip(request.ids.features, grads, strict=True):
        if sources and request.bags is not None:
            # Of the empty bag between two features.
            sources.append(nothing)
        if grad is None:
            grad = nothing.expand(feature.num_outputs, -1)
        elif feature.slot.config.pooling == "mean":
            grad = _scaled(grad, feature, feature.offsets.diff())
        sources.append(grad)
    if request.bags is None:
        return torch.cat(sources), None
    lengths = request.bags.diff()
    bags = torch.arange(lengths.numel(), device=device)
    return torch.cat(sources), torch.repeat_interleave(bags, lengths, output_size=request.ids.values.numel())


def _sum_sorted(request: GroupRequest, grads: Sequence[Tensor | None], order: Tensor, starts: Tensor) -> Tensor:
    """Sums of the values' gradients over runs of ``order``."""
    sources, index = _sources(request, grads)
    index = order if index is None else index.index_select(0, order)
    return sum_segments(index, sources, starts)


def _send_gradients(
    request: GroupRequest, grads: Sequence[Tensor | None], grid: Grid, wire_dtype: torch.dtype
) -> RowTransfer:
    """Sum over this rank's equal ids, then start sending each sum to the row's owner."""
    route = request.route
    assert route is not None
    if route.num_unique:
        # starts has one entry more than there are distinct ids: where the dropped ones begin, which get no gradient.
        total = _sum_sorted(request, grads, route.order, route.starts)[: route.num_unique]
    else:
        total = torch.zeros(0, request.ids.group.dim, device=request.ids.values.device)
    return RowTransfer(
        total,
        send_splits=route.send_splits,
        receive_splits=route.receive_splits,
        link=grid.shards,
        wire_dtype=wire_dtype,
        what="backward: the exchange of gradients",
    )


def _dense_gradients(request: GroupRequest, num_rows: int, grads: Sequence[Tensor | None]) -> Tensor:
    """(num_rows, dim + 1): this rank's sum per row of a replicated group, and whether it names the row."""
    local = request.local
    assert local is not None
    dim = request.ids.group.dim
    total = torch.zeros(num_rows, dim + 1, device=request.ids.values.device)
    if local.rows.numel():
        total[:, :dim] = _sum_sorted(request, grads, local.order, local.starts)[:num_rows]
        total[:, dim] = local.starts.diff() > 0
    return total


def _split_by_block(request: GroupRequest, blocks: Sequence[RowBlock], received: Tensor) -> list[Tensor]:
    route = request.route
    assert route is not None
    if route.by_table is not None:
        received = received.index_select(0, route.by_table)
    ends = [block.start for block in blocks[1:]] + [received.shape[0]]
    return [received[block.start : end] for block, end in zip(blocks, ends, strict=True)]
