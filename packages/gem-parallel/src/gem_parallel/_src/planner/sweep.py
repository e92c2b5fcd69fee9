"""All layouts of a cluster that keep to its tiers, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gem_parallel._src.mesh import ParallelDims
from gem_parallel._src.planner.description import ModelDescription, TableKind, Workload, check_ranks
from gem_parallel._src.planner.explain import PlanReport, explain
from gem_parallel._src.planner.hardware import Hardware
from gem_parallel._src.planner.tables import Strategy, check_rows, place_tables
from gem_parallel._src.topology import Topology

__all__ = ["layouts", "pareto_front", "sweep"]


def layouts(model: ModelDescription, topology: Topology) -> tuple[tuple[ParallelDims, ...], tuple[ParallelDims, ...]]:
    """Layouts that fit the topology: (all dense ones with tables unreplicated, all sparse ones with FSDP in a zone).

    Raises:
        ValueError: more than 65,536 GPUs.
    """
    world = topology.num_gpus
    check_ranks("layouts", world)
    experts = min((unit.num_experts for unit in model.units if unit.num_experts > 1), default=1)
    divisors = [number for number in range(1, world + 1) if world % number == 0]

    def fits(dims: ParallelDims) -> bool:
        try:
            dims.check(topology)
        except ValueError:
            return False
        return True

    dense = []
    for ep in (number for number in divisors if number <= min(experts, topology.gpus_per_host)):
        for replicas in (number for number in divisors if world % (number * ep) == 0):
            dense.append(ParallelDims.for_world(world, dp_replicate=replicas, ep=ep))
    replicas_per_zone = topology.zones
    sparse = [
        ParallelDims.for_world(world, dp_replicate=replicas_per_zone, sparse_replicate=copies)
        for copies in (number for number in divisors if number <= topology.gpus_per_host)
    ]
    return tuple(filter(fits, dense)), tuple(filter(fits, sparse if model.tables else sparse[:1]))


def sweep(
    model: ModelDescription,
    topology: Topology,
    workload: Workload,
    *,
    hardware: Hardware | None = None,
    strategies: Sequence[Strategy] = ("size", "cost"),
    kinds: Sequence[TableKind] = ("table_wise", "row_wise"),
    recompute: Sequence[float] = (0.0,),
) -> tuple[PlanReport, ...]:
    """Predict every layout of a cluster: dense x sparse x placement of tables x recomputation, fastest first.

    Args:
        model: The model.
        topology: The cluster.
        workload: Batch and precision.
        hardware: Rates; default: those of an H200.
        strategies: Placements of tables to try.
        kinds: What placement by cost may choose.
        recompute: Parts of forward to repeat in backward, to try.

    Raises:
        ValueError: more than 65,536 GPUs, or every layout is refused; the last one's reason.
    """
    hardware = hardware or Hardware.load()
    dense, sparse = layouts(model, topology)
    reports = []
    refused: ValueError | None = None
    for tables in sparse:
        for strategy in strategies if model.tables and tables.sparse_shard > 1 else strategies[:1]:
            placed = place_tables(
                model.tables,
                tables.sparse_shard,
                workload,
                hardware,
                strategy=strategy,
                kinds=kinds,
                memory_bytes=0.5 * hardware.memory_bytes.value,
                replicas=tables.sparse_replicate,
            )
            try:
                check_rows(placed, tables.sparse_shard, tables.sparse_replicate)
            except ValueError as error:
                refused = error
                continue
            for each in dense:
                for share in recompute:
                    dims = replace(each, sparse_replicate=tables.sparse_replicate, sparse_shard=tables.sparse_shard)
                    try:
                        report = explain(
                            model,
                            topology,
                            dims,
                            replace(workload, recompute=share),
                            hardware=hardware,
                            strategy=strategy,
                            kinds=kinds,
                            changes=False,
                            tables=placed,
                        )
                    except ValueError as error:
                        refused = error
                        continue
                    reports.append(report)
    if refused is not None and not reports:
        raise refused
    return tuple(sorted(reports, key=lambda report: (report.step.seconds, report.memory.peak.total)))


def pareto_front(reports: Sequence[PlanReport]) -> tuple[PlanReport, ...]:
    """Those that no other beats in both step time and peak memory, fastest first."""
    front: list[PlanReport] = []
    for report in sorted(reports, key=lambda report: (report.step.seconds, report.memory.peak.total)):
        if not front or report.memory.peak.total < front[-1].memory.peak.total:
            front.append(report)
    return tuple(front)
