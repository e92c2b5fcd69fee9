"""Bytes on one rank over the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gem_parallel._src.mesh import ParallelDims
from gem_parallel._src.planner.description import ModelDescription, Workload
from gem_parallel._src.planner.tables import TablePlan, rows_of
from gem_parallel._src.planner.traffic import dense_groups, shard_elements

__all__ = ["MemoryMoment", "MemoryPlan", "plan_memory"]

CATEGORIES = (
    "dense weights",
    "dense optimizer",
    "dense gradients",
    "tables",
    "table optimizer",
    "table caches",
    "table copies",
    "gathered parameters",
    "activations",
    "embedding rows",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMoment:
    """One point of the step."""

    when: str
    bytes: tuple[float, ...]
    """By category, in order of ``CATEGORIES``."""

    @property
    def total(self) -> float:
        return sum(self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The heaviest rank's memory; without the allocator's fragments, CUDA's context and NCCL's buffers."""

    moments: tuple[MemoryMoment, ...]
    peak: MemoryMoment
    capacity: float
    """Of the device."""
    lightest_tables: float
    """Weights, caches and state of tables on the device of the rank that has least; the heaviest is in ``peak``."""
    host_bytes: float
    """Host memory of the heaviest rank's tables: weights, and moments that are not one number per row."""
    host_capacity: float
    """Of the host, per device."""

    @property
    def fits(self) -> bool:
        """At most 0.9 of the device and of its part of the host: the rest is for what is not counted."""
        return self.peak.total <= 0.9 * self.capacity and self.host_fits

    @property
    def host_fits(self) -> bool:
        """At most 0.9 of the host memory per device."""
        return self.host_bytes <= 0.9 * self.host_capacity


def plan_memory(
    model: ModelDescription,
    plan: TablePlan,
    dims: ParallelDims,
    workload: Workload,
    capacity: float,
    host_capacity: float,
) -> MemoryPlan:
    """Follow one step: forward saves activations, backward frees them; parameters come and go unit by unit."""
    sharded = [dense_groups(unit, dims)[0].degree > 1 for unit in model.units]
    elements = [shard_elements(unit, dims) for unit in model.units]
    wholes = [
        count * dense_groups(unit, dims)[0].degree if cut else 0
        for unit, count, cut in zip(model.units, elements, sharded, strict=True)
    ]
    samples = workload.samples_per_rank
    saved = [unit.activation_bytes * samples for unit in model.units]
    kept = [each * (1 - workload.recompute) for each in saved]
    replicas = dims.sparse_replicate
    device = [
        (rest - host_rest, state - host_state, cache)
        for rest, host_rest, state, host_state, cache in zip(
            plan.rest_bytes,
            plan.host_rest_bytes,
            plan.state_bytes,
            plan.host_state_bytes,
            plan.cache_bytes,
            strict=True,
        )
    ]
    tables = [max(each) / replicas for each in zip(*device, strict=True)]
    # What is sent is a copy of the slice at rest, and what arrives holds all slices.
    gathers = replicas > 1 and workload.table_gather == "tables"
    copies = max(plan.gathered_bytes, default=0.0) * (1 + 1 / replicas) if gathers else 0.0
    requested = plan.requested_bytes * workload.row_bytes / 4
    served = max(plan.served_bytes, default=0.0) * workload.row_bytes / 4 if dims.sparse_shard > 1 else 0.0
    outputs = sum(table.outputs_per_sample * table.dim * 4 for table in model.tables) * samples
    ids = sum(rows_of(table, samples) * 8 for table in model.tables)
    weights = 4.0 * sum(elements)
    moments: list[MemoryMoment] = []

    def note(
        when: str, *, gradients: float = 0.0, copied: float = 0.0, gathered: float = 0.0, acts: float = 0.0, rows: float
    ) -> None:
        optimizer = float(workload.dense_state_bytes * sum(elements))
        fixed = (weights, optimizer, gradients, *tables)
        moments.append(MemoryMoment(when=when, bytes=(*fixed, copied, gathered, acts, rows)))

    def resident(keep: Sequence[int]) -> float:
        stays = {at for at, unit in enumerate(model.units) if not unit.reshard_after_forward}
        return float(sum(wholes[at] for at in stays | set(keep)) * workload.gather_bytes)

    last = len(model.units) - 1
    note("lookup", copied=copies, rows=served + requested + ids, gathered=resident([0]))
    rows = outputs + 2 * ids
    running = 0.0
    for at, unit in enumerate(model.units):
        running += kept[at]
        note(
            f"forward {unit.name or '(root)'}",
            gathered=resident([at, min(at + 1, last)]),
            acts=running + saved[at] - kept[at],
            rows=rows,
        )
    done = 0.0
    for at in range(last, -1, -1):
        whole_gradient = wholes[at] * (workload.gather_bytes + workload.reduce_bytes)
        note(
            f"backward {model.units[at].name or '(root)'}",
            gradients=done + whole_gradient + (0 if sharded[at] else 4.0 * elements[at]),
            gathered=resident([at, max(at - 1, 0)]),
            acts=running + saved[at] - kept[at],
            rows=rows + outputs,
        )
        done += 4.0 * elements[at]
        running -= kept[at]
    note("table update", gradients=done, rows=2 * outputs + requested + served * (2 if replicas > 1 else 1) + 2 * ids)
    note("optimizer", gradients=done, rows=ids)
    peak = max(moments, key=lambda moment: moment.total)
    host = max((a + b for a, b in zip(plan.host_rest_bytes, plan.host_state_bytes, strict=True)), default=0.0)
    return MemoryPlan(
        moments=tuple(moments),
        peak=peak,
        capacity=capacity,
        lightest_tables=min(map(sum, device)) / replicas,
        host_bytes=host / replicas,
        host_capacity=host_capacity,
    )
