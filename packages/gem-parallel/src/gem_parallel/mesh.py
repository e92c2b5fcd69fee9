"""Ranks as axes: dense (dp_replicate, dp_shard) and sparse (sparse_shard)."""

from gem_parallel._src.mesh import ParallelDims, ParallelMesh

__all__ = ["ParallelDims", "ParallelMesh"]
