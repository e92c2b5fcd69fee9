"""A plan as JSON values, with stable names."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from gem_parallel._src.planner.explain import PlanReport
from gem_parallel._src.planner.hardware import Rate
from gem_parallel._src.planner.memory import CATEGORIES
from gem_parallel._src.planner.network import Collective
from gem_parallel._src.topology import TIERS

__all__ = ["SCHEMA", "plan_record"]

SCHEMA = 2
"""Version of the record; a field that goes or changes its meaning raises it, a new field does not."""


def plan_record(report: PlanReport) -> dict[str, Any]:
    """JSON values of a plan. Times in seconds, sizes in bytes, FLOPs as counted by the model.

    Args:
        report: From ``explain``.
    """
    plan, memory, step = report.tables, report.memory, report.step
    wire = report.workload.param_wire
    return {
        "schema": SCHEMA,
        "model": {
            "name": report.model.name,
            "dense_parameters": report.model.num_dense_parameters,
            "sparse_parameters": report.model.num_sparse_parameters,
            "flops_per_sample": report.model.model_flops,
        },
        "ranks": report.dims.world_size,
        "dims": asdict(report.dims),
        "placement": {axis: asdict(place) for axis, place in report.dims.placement(report.topology).items()},
        "topology": asdict(report.topology),
        "workload": asdict(replace(report.workload, param_wire=None)) | {"param_wire": wire.name if wire else None},
        "hardware": _rates(report),
        "tables": {
            "strategy": report.strategy,
            "balance": plan.balance,
            "rest_bytes": {"max": max(plan.rest_bytes), "mean": sum(plan.rest_bytes) / len(plan.rest_bytes)},
            "served_bytes": {"max": max(plan.served_bytes), "mean": sum(plan.served_bytes) / len(plan.served_bytes)},
            "placed": [
                {
                    "name": each.table.name,
                    "kind": each.kind,
                    "location": each.table.memory.location,
                    "cache_load_factor": each.table.memory.cache_load_factor or None,
                    "owners": list(each.owners) if each.kind in ("table_wise", "column_wise") else None,
                    "num_owners": each.num_owners,
                    "num_rows": each.table.num_rows,
                    "dim": each.table.dim,
                }
                for each in plan.placed
            ],
        },
        "memory": {
            "peak_bytes": memory.peak.total,
            "peak_when": memory.peak.when,
            "capacity_bytes": memory.capacity,
            "host_bytes": memory.host_bytes,
            "host_capacity_bytes": memory.host_capacity,
            "fits": memory.fits,
            "moments": [
                {"when": moment.when, **dict(zip(CATEGORIES, moment.bytes, strict=True))} for moment in memory.moments
            ],
        },
        "collectives": [_collective(each, report) for each in report.collectives],
        "step": {
            "seconds": step.seconds,
            "balanced_seconds": report.balanced_seconds,
            "compute_seconds": step.compute,
            "exposed_seconds": dict(step.exposed),
            "losses": report.losses(),
            "samples_per_second": report.samples_per_second,
            "timeline": [asdict(each) for each in step.intervals],
        },
        "mfu": {"end_to_end": report.mfu, "local": report.local_mfu, "scaling_ratio": report.scaling_ratio},
        "limiting": [asdict(term) for term in report.terms],
        "changes": [asdict(change) for change in report.changes],
    }


def _rates(report: PlanReport) -> dict[str, Any]:
    hardware = report.hardware
    found: dict[str, Any] = {"name": hardware.name}
    for name in hardware.__dataclass_fields__:
        value = getattr(hardware, name)
        if isinstance(value, Rate):
            found[name] = asdict(value)
        elif isinstance(value, tuple):
            found[name] = [{"width": width, **asdict(rate)} for width, rate in value]
    return found


def _collective(each: Collective, report: PlanReport) -> dict[str, Any]:
    return {
        "name": each.name,
        "kind": each.kind,
        "axis": each.axis,
        "ranks": each.degree,
        "when": each.when,
        "tier": each.tier,
        "bytes": each.payload,
        "tier_bytes": dict(zip(TIERS, each.tier_bytes, strict=True)),
        "tier_messages": dict(zip(TIERS, each.tier_messages, strict=True)),
        "seconds": each.seconds(report.topology),
    }
