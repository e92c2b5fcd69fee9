"""Plans: what a layout costs in memory, bytes and time, computed from numbers alone."""

from gem_parallel._src.planner.description import (
    MAX_RANKS,
    MAX_SAMPLES,
    DenseUnit,
    ModelDescription,
    SparseTable,
    TableKind,
    TableLocation,
    Workload,
)
from gem_parallel._src.planner.explain import Change, PlanReport, Term, explain
from gem_parallel._src.planner.hardware import Hardware, Rate
from gem_parallel._src.planner.memory import CATEGORIES, MemoryMoment, MemoryPlan
from gem_parallel._src.planner.network import Collective, Group
from gem_parallel._src.planner.record import SCHEMA, plan_record
from gem_parallel._src.planner.sweep import layouts, pareto_front, sweep
from gem_parallel._src.planner.tables import PlacedTable, TablePlan, place_tables
from gem_parallel._src.planner.timeline import ComputeSeconds, Interval, StepPlan
from gem_parallel._src.planner.traffic import SparseTraffic, UnitTraffic

__all__ = [
    "CATEGORIES",
    "MAX_RANKS",
    "MAX_SAMPLES",
    "SCHEMA",
    "Change",
    "Collective",
    "ComputeSeconds",
    "DenseUnit",
    "Group",
    "Hardware",
    "Interval",
    "MemoryMoment",
    "MemoryPlan",
    "ModelDescription",
    "PlacedTable",
    "PlanReport",
    "Rate",
    "SparseTable",
    "SparseTraffic",
    "StepPlan",
    "TableKind",
    "TableLocation",
    "TablePlan",
    "Term",
    "UnitTraffic",
    "Workload",
    "explain",
    "layouts",
    "pareto_front",
    "place_tables",
    "plan_record",
    "sweep",
]
