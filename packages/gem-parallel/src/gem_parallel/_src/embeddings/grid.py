"""The ranks of the tables as a grid: sharding groups along one axis, replicas along the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.embeddings.link import Link
from gem_parallel._src.mesh import with_own_groups

__all__ = ["Grid", "make_grid", "needs_exchange", "shape_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """This process' place among the ranks that hold the tables; L ranks per sharding group, M replicas."""

    num_shards: int
    """L."""
    num_replicas: int
    """M."""
    shard_rank: int
    replica_rank: int
    shards: Link
    """The L ranks that hold one copy of the tables together: equal replica rank."""
    copies: Link | None
    """The M ranks that own the same part of the tables; None if M is 1."""
    everyone: Link
    """All ranks that hold tables."""
    flat: DeviceMesh
    """All ranks on one axis, rank shard_rank * M + replica_rank."""
    replicas: DeviceMesh | None
    """One axis over ``copies``."""
    columns: dict[int, DeviceMesh]
    """Number of column shards -> axes ("column",) or ("column", "replica") of the ranks that hold a table so cut."""

    def rank_of(self, shard_rank: int, replica_rank: int) -> int:
        """Rank on the flat axis."""
        return shard_rank * self.num_replicas + replica_rank

    @property
    def rank(self) -> int:
        """This process' rank on the flat axis."""
        return self.rank_of(self.shard_rank, self.replica_rank)


def needs_exchange(mesh: DeviceMesh) -> bool:
    """Whether ids travel."""
    return mesh.size() > 1


def shape_of(mesh: DeviceMesh) -> tuple[int, int]:
    """(ranks of a sharding group, replicas)."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 2 and "sparse_replicate" in names:
        replicas = mesh.size(names.index("sparse_replicate"))
        return mesh.size() // replicas, replicas
    return mesh.size(), 1


def make_grid(mesh: DeviceMesh, column_shards: Iterable[int], *, timeout_s: float | None = None) -> Grid:
    """Read a mesh with the axis sparse_shard, or with sparse_replicate and sparse_shard.

    All ranks of the mesh call it, with equal arguments: it makes process groups.

    Args:
        mesh: One axis of any name, or the two named ones, in either order.
        column_shards: The numbers of column shards that occur among the tables.
        timeout_s: Seconds that the host waits for one transfer; None is the process groups' own timeout.

    Raises:
        ValueError: other axes, or replicas of a shard that are not on consecutive ranks.
    """
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 2 and set(names) == {"sparse_replicate", "sparse_shard"}:
        table = mesh.mesh if names[0] == "sparse_shard" else mesh.mesh.t()
        shard_axis, replica_axis = mesh["sparse_shard"], mesh["sparse_replicate"]
    elif mesh.ndim == 1:
        table, shard_axis, replica_axis = mesh.mesh.unsqueeze(1), mesh, None
    else:
        raise ValueError(
            "ShardedEmbeddings: `mesh` must have one axis, or the axes sparse_replicate and sparse_shard, got "
            f"{names or mesh.ndim} of {tuple(mesh.shape)}; pass ParallelMesh.sparse"
        )
    table = table.contiguous().cpu()
    num_shards, num_replicas = table.shape
    if bool((table.flatten().diff() <= 0).any()):
        raise ValueError(
            "ShardedEmbeddings: `mesh` must have the replicas of a shard on consecutive ranks, in rising order along "
            f"both axes, got ranks {table.tolist()} (one row per shard); pass ParallelMesh.sparse"
        )
    several = replica_axis is not None and num_replicas > 1
    flat = shard_axis
    if several:
        flat = with_own_groups(DeviceMesh(mesh.device_type, table.flatten(), mesh_dim_names=("sparse",)))

    def link(axis: DeviceMesh) -> Link:
        return Link(axis.get_group(), timeout_s=timeout_s, on_device=mesh.device_type == "cuda")

    return Grid(
        num_shards=num_shards,
        num_replicas=num_replicas,
        shard_rank=shard_axis.get_local_rank(),
        replica_rank=replica_axis.get_local_rank() if replica_axis is not None else 0,
        shards=link(shard_axis),
        copies=link(replica_axis) if replica_axis is not None and several else None,
        everyone=link(flat),
        flat=flat,
        replicas=replica_axis if several else None,
        columns={parts: _column_mesh(mesh.device_type, table, parts) for parts in sorted(set(column_shards))},
    )


def _column_mesh(device_type: str, table: torch.Tensor, parts: int) -> DeviceMesh:
    num_shards, num_replicas = table.shape
    blocks = table.view(num_shards // parts, parts, num_replicas)
    if num_replicas > 1:
        return DeviceMesh(device_type, blocks, mesh_dim_names=("block", "column", "replica"))["column", "replica"]
    return DeviceMesh(device_type, blocks.squeeze(2), mesh_dim_names=("block", "column"))["column"]
