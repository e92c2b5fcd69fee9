"""The collectives of one step, in the sizes that the runtime sends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gem_parallel._src.embeddings.exchange import NUM_FLAGS
from gem_parallel._src.mesh import ParallelDims
from gem_parallel._src.planner.description import DenseUnit, ModelDescription, Workload
from gem_parallel._src.planner.network import (
    Collective,
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from gem_parallel._src.planner.tables import TablePlan
from gem_parallel._src.topology import Topology

__all__ = ["UnitTraffic", "dense_groups", "shard_elements", "sparse_traffic", "unit_traffic"]

ID_BYTES = 8
"""Ids and counts travel as int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTraffic:
    """Collectives of one dense unit; None where its group has one rank or nothing is sent."""

    forward_gather: Collective | None
    backward_gather: Collective | None
    reduce: Collective | None
    replicate: Collective | None
    expert_forward: tuple[Collective, Collective] | None
    """Activations in, outputs back."""
    expert_backward: tuple[Collective, Collective] | None
    """Gradients of outputs in, gradients of inputs back."""

    def all(self) -> tuple[Collective, ...]:
        """In no particular order."""
        single = (self.forward_gather, self.backward_gather, self.reduce, self.replicate)
        pairs = (*(self.expert_forward or ()), *(self.expert_backward or ()))
        return (*(each for each in single if each is not None), *pairs)


def dense_groups(unit: DenseUnit, dims: ParallelDims) -> tuple[Group, Group]:
    """(ranks that share a unit's parameters, ranks that hold copies)."""
    shard = dims.dp_shard if unit.num_experts > 1 else dims.dp_shard * dims.ep
    stride = dims.ep if unit.num_experts > 1 else 1
    axis = "dp_shard" if unit.num_experts > 1 or dims.ep == 1 else "dp_shard_ep"
    return (
        Group(axis=axis, degree=shard, stride=stride),
        Group(axis="dp_replicate", degree=dims.dp_replicate, stride=dims.dp_shard * dims.ep),
    )


def local_experts(unit: DenseUnit, dims: ParallelDims) -> int:
    """Experts on the rank that holds most."""
    return -(-unit.num_experts // dims.ep) if unit.num_experts > 1 else 1


def shard_elements(unit: DenseUnit, dims: ParallelDims) -> int:
    """Elements of a unit on one rank, padded as FSDP2 pads: dim 0 of every parameter to a multiple of the shards."""
    degree = dense_groups(unit, dims)[0].degree
    one = sum(-(-shape[0] // degree) * math.prod(shape[1:]) for shape in unit.shapes)
    return one * local_experts(unit, dims)


def unit_traffic(unit: DenseUnit, dims: ParallelDims, workload: Workload, topology: Topology) -> UnitTraffic:
    """What FSDP2 and expert parallelism send for one unit."""
    shard, replicas = dense_groups(unit, dims)
    elements = shard_elements(unit, dims)
    name = unit.name or "(root)"
    gathers: list[Collective | None] = [None, None]
    reduce = replicate = None
    if dims.world_size > 1 and elements:
        # FSDP2 leaves the collectives out of a group of one.
        if shard.degree > 1:
            whole = elements * shard.degree
            gathers[0] = all_gather(f"{name} parameters", "forward", shard, whole * workload.gather_bytes, topology)
            if unit.reshard_after_forward:
                gathers[1] = all_gather(
                    f"{name} parameters", "backward", shard, whole * workload.gather_bytes, topology
                )
            reduce = reduce_scatter(f"{name} gradients", "backward", shard, whole * workload.reduce_bytes, topology)
        if replicas.degree > 1:
            replicate = all_reduce(
                f"{name} gradients of replicas", "backward", replicas, elements * workload.reduce_bytes, topology
            )
    forward = backward = None
    if unit.num_experts > 1 and dims.ep > 1:
        ep = Group(axis="ep", degree=dims.ep)
        rows_in = unit.expert_input_bytes * workload.samples_per_rank * dims.ep
        rows_out = unit.expert_output_bytes * workload.samples_per_rank * dims.ep
        forward = (
            all_gather(f"{name} expert inputs", "forward", ep, rows_in, topology),
            reduce_scatter(f"{name} expert outputs", "forward", ep, rows_out, topology),
        )
        backward = (
            all_gather(f"{name} expert output gradients", "backward", ep, rows_out, topology),
            reduce_scatter(f"{name} expert input gradients", "backward", ep, rows_in, topology),
        )
    return UnitTraffic(
        forward_gather=gathers[0],
        backward_gather=gathers[1],
        reduce=reduce,
        replicate=replicate,
        expert_forward=forward,
        expert_backward=backward,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseTraffic:
    """Collectives of the tables; None on one rank."""

    counts: Collective | None
    ids: Collective | None
    rows: Collective | None
    gradients: Collective | None
    gather_forward: Collective | None
    """The replicas' slices of the tables, put together before the lookup."""
    gather_backward: Collective | None
    scatter: Collective | None
    """The updated slices, averaged."""
    replicated: Collective | None

    def all(self) -> tuple[Collective, ...]:
        """Those that are sent."""
        found = (
            self.counts,
            self.ids,
            self.rows,
            self.gradients,
            self.gather_forward,
            self.gather_backward,
            self.scatter,
            self.replicated,
        )
        return tuple(each for each in found if each is not None)


def sparse_traffic(
    model: ModelDescription, plan: TablePlan, dims: ParallelDims, workload: Workload, topology: Topology
) -> SparseTraffic:
    """What ``ShardedEmbeddings`` sends: counts, distinct ids, their rows, the gradients of these rows."""
    group = Group(axis="sparse_shard", degree=dims.sparse_shard, stride=dims.sparse_replicate)
    copies = Group(axis="sparse_replicate", degree=dims.sparse_replicate)
    counts = ids = rows = gradients = replicated = None
    if model.tables and group.degree > 1 and plan.num_columns:
        counted = group.degree * (NUM_FLAGS + plan.num_columns) * ID_BYTES
        scale = workload.row_bytes / 4
        heaviest = max(plan.served_bytes) * scale
        asked = plan.requested_bytes * scale
        counts = all_to_all("counts", "exchange", group, counted, topology)
        ids = all_to_all(
            "ids",
            "exchange",
            group,
            plan.requested_ids * ID_BYTES,
            topology,
            heaviest=max(plan.served_ids) * ID_BYTES,
            times=plan.num_dims,
        )
        rows = all_to_all("rows", "forward", group, asked, topology, heaviest=heaviest, times=plan.num_dims)
        gradients = all_to_all(
            "row gradients", "backward", group, asked, topology, heaviest=heaviest, times=plan.num_dims
        )
    if plan.replicated_bytes and dims.world_size > 1:
        everyone = Group(axis="world", degree=dims.world_size)
        replicated = all_reduce("replicated tables", "backward", everyone, plan.replicated_bytes, topology)
    gathers: list[Collective | None] = [None, None, None]
    if model.tables and copies.degree > 1:
        held = max(plan.rest_bytes)
        gathers = [
            all_gather("table slices", "exchange", copies, held, topology),
            all_gather("table slices", "backward", copies, held, topology),
            reduce_scatter("updated tables", "update", copies, held, topology),
        ]
    return SparseTraffic(
        counts=counts,
        ids=ids,
        rows=rows,
        gradients=gradients,
        gather_forward=gathers[0],
        gather_backward=gathers[1],
        scatter=gathers[2],
        replicated=replicated,
    )
