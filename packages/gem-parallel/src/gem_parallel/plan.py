"""Sharding of dense parameters by a plan."""

from gem_parallel._src.fsdp import ParallelPlan, defer_all_reduce, parallelize
from gem_parallel._src.param_wire import ParamWire

__all__ = ["ParallelPlan", "ParamWire", "defer_all_reduce", "parallelize"]
