"""The collectives of one step, in the sizes that the runtime sends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gem_parallel._src.embeddings.exchange import HEAD, NUM_FLAGS
from gem_parallel._src.mesh import ParallelDims
from gem_parallel._src.param_wire import travels_encoded
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

__all__ = [
    "SparseTraffic",
    "UnitTraffic",
    "dense_groups",
    "gathered_bytes",
    "shard_elements",
    "sparse_traffic",
    "unit_traffic",
]

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


def gathered_bytes(unit: DenseUnit, dims: ParallelDims, workload: Workload) -> tuple[int, int]:
    """(bytes of a unit that one rank brings to a gather, elements of them that travel encoded)."""
    degree, wire = dense_groups(unit, dims)[0].degree, workload.param_wire
    total = encoded = 0
    for shape in unit.shapes:
        rows = -(-shape[0] // degree) * math.prod(shape[1:-1])
        columns = shape[-1] if len(shape) > 1 else 1
        if wire is not None and wire.covers(shape) and travels_encoded(wire, shape, degree):
            total += rows * wire.row_bytes(columns)
            encoded += rows * columns
        else:
            total += rows * columns * workload.gather_bytes
    count = local_experts(unit, dims)
    return total * count, encoded * count


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
            gathered = gathered_bytes(unit, dims, workload)[0] * shard.degree
            gathers[0] = all_gather(f"{name} parameters", "forward", shard, gathered, topology)
            if unit.reshard_after_forward:
                gathers[1] = all_gather(f"{name} parameters", "backward", shard, gathered, topology)
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
    """Collectives of the tables; None where nothing is sent.

    Those of sparse_shard carry ids, rows and gradients between the ranks of one copy. Those of sparse_replicate put the
    slices that the replicas keep at rest together for a lookup, or fetch the batch's rows of them, and bring ids and
    gradients to the slice they change.
    """

    counts: Collective | None
    copy_counts: Collective | None
    ids: Collective | None
    slices: Collective | None
    slice_ids: Collective | None
    slice_rows: Collective | None
    rows: Collective | None
    gradients: Collective | None
    slice_gradients: Collective | None
    replicated: Collective | None

    def all(self) -> tuple[Collective, ...]:
        """Those that are sent."""
        found = (
            self.counts,
            self.copy_counts,
            self.ids,
            self.slices,
            self.slice_ids,
            self.slice_rows,
            self.rows,
            self.gradients,
            self.slice_gradients,
            self.replicated,
        )
        return tuple(each for each in found if each is not None)


def sparse_traffic(
    model: ModelDescription, plan: TablePlan, dims: ParallelDims, workload: Workload, topology: Topology
) -> SparseTraffic:
    """What ``ShardedEmbeddings`` sends: counts, distinct ids, their rows, the gradients of these rows.

    Not counted: the norms that column-wise tables under row-wise AdaGrad exchange, and scales of float16 rows.
    """
    group = Group(axis="sparse_shard", degree=dims.sparse_shard, stride=dims.sparse_replicate)
    copies = Group(axis="sparse_replicate", degree=dims.sparse_replicate)
    found: dict[str, Collective | None] = dict.fromkeys(SparseTraffic.__slots__)
    if plan.num_columns and dims.world_size > 1:
        scale = workload.row_bytes / 4
        ids = (plan.requested_ids * ID_BYTES, max(plan.served_ids) * ID_BYTES)
        rows = (plan.requested_bytes * scale, max(plan.served_bytes) * scale)

        def exchange(name: str, when: str, over: Group, sizes: tuple[float, float], times: int) -> Collective | None:
            if over.degree == 1:
                return None
            return all_to_all(name, when, over, sizes[0], topology, heaviest=sizes[1], times=times)

        counted = group.degree * (NUM_FLAGS + plan.num_columns * copies.degree) * ID_BYTES
        told = copies.degree * (HEAD + plan.num_columns * group.degree) * ID_BYTES
        times = plan.num_dims
        found["counts"] = exchange("counts", "exchange", group, (counted, counted), 1)
        found["copy_counts"] = exchange("counts between copies", "exchange", copies, (told, told), 1)
        found["ids"] = exchange("ids", "exchange", group, ids, times)
        found["rows"] = exchange("rows", "forward", group, rows, times)
        found["gradients"] = exchange("row gradients", "backward", group, rows, times)
        if copies.degree > 1:
            if workload.table_gather == "tables":
                found["slices"] = all_gather("table slices", "forward", copies, max(plan.gathered_bytes), topology)
            else:
                found["slice_rows"] = exchange("rows between copies", "forward", copies, rows, times)
            found["slice_ids"] = exchange("ids between copies", "forward", copies, ids, times)
            found["slice_gradients"] = exchange("row gradients between copies", "backward", copies, rows, times)
    if plan.replicated_bytes and dims.world_size > 1:
        everyone = Group(axis="world", degree=dims.world_size)
        found["replicated"] = all_reduce("replicated tables", "backward", everyone, plan.replicated_bytes, topology)
    return SparseTraffic(**found)
