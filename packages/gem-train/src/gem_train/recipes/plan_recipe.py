"""Recipes that can be planned but not run: a model, a cluster and a layout as numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from gem_parallel import ParallelDims, Topology
from gem_parallel.planner import ModelDescription, Workload

__all__ = ["PlanRecipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecipe:
    """What `gem plan` needs of a run that this machine cannot start."""

    name: str
    """Name on the command line."""
    summary: str
    """One sentence."""
    describe: Callable[[], ModelDescription]
    """The model and its tables."""
    topology: Topology
    """The cluster."""
    dims: ParallelDims
    """The layout, of as many ranks as the cluster has GPUs."""
    workload: Workload
    """Batch and precision."""
