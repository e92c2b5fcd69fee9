"""Sharding of dense parameters by a plan."""

from gem_parallel._src.fsdp import ParallelPlan, parallelize

__all__ = ["ParallelPlan", "parallelize"]
