"""Ranks as axes: dense (dp_replicate, dp_shard, ep) and sparse (sparse_replicate, sparse_shard)."""

from gem_parallel._src.mesh import AxisPlacement, ParallelDims, ParallelMesh

__all__ = ["AxisPlacement", "ParallelDims", "ParallelMesh"]
