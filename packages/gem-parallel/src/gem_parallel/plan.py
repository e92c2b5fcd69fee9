"""Sharding of dense parameters by a plan."""

from gem_parallel._src.fsdp import ParallelPlan, defer_all_reduce, parallelize

__all__ = ["ParallelPlan", "defer_all_reduce", "parallelize"]
