"""The ranks as axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["ParallelDims", "ParallelMesh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelMesh:
    """The process' place in the dense and in the sparse mesh."""

    dims: ParallelDims
    dense: DeviceMesh
    """Axes ("dp_replicate", "dp_shard"): dense parameters are sharded over the second, replicated over the first."""
    sparse: DeviceMesh
    """Axis ("sparse_shard",): embedding tables are sharded over all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """Degrees of the axes. Dense and sparse axes cut the same ranks in two ways."""

    dp_replicate: int = 1
    """Ranks that hold equal copies of a dense shard (HSDP's outer axis; may cross hosts with a slow link)."""
    dp_shard: int = 1
    """Ranks that share the dense parameters, gradients and optimizer state."""
    sparse_shard: int = 1
    """Ranks that share the embedding tables: all of them."""

    def __post_init__(self) -> None:
        for axis in ("dp_replicate", "dp_shard", "sparse_shard"):
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool):
                raise TypeError(f"ParallelDims: `{axis}` must be an int, got {type(degree).__name__}")
            if degree < 1:
                raise ValueError(f"ParallelDims: `{axis}` must be at least 1, got {degree}")
        if self.sparse_shard != self.world_size:
            raise ValueError(
                "ParallelDims: `sparse_shard` must equal dp_replicate * dp_shard, as tables are sharded over all ranks "
                f"({self.dp_replicate} * {self.dp_shard} = {self.world_size}), got {self.sparse_shard}; "
                f"pass sparse_shard={self.world_size}, or use ParallelDims.for_world"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def for_world(cls, world_size: int, *, dp_replicate: int = 1) -> ParallelDims:
        """Shard everything over ``world_size`` ranks, dense parameters in ``dp_replicate`` copies.

        Raises:
            ValueError: ``world_size`` is not a positive multiple of ``dp_replicate``.
        """
        if dp_replicate < 1 or world_size < 1 or world_size % dp_replicate != 0:
            raise ValueError(
                "ParallelDims.for_world: `world_size` must be a positive multiple of dp_replicate "
                f"({dp_replicate}), got {world_size}"
            )
        return cls(dp_replicate=dp_replicate, dp_shard=world_size // dp_replicate, sparse_shard=world_size)

    def build_mesh(self, device_type: str) -> ParallelMesh:
        """Make the process groups; every rank calls this once, after ``torch.distributed.init_process_group``.

        Consecutive ranks share a dense shard group, so with dp_shard equal to the GPUs of a host, gathers stay on it.

        Args:
            device_type: "cpu" or "cuda".

        Raises:
            RuntimeError: torch.distributed is not initialised.
            ValueError: the degrees do not multiply to the number of ranks, or an unknown device type.
        """
        if device_type not in ("cpu", "cuda"):
            raise ValueError(f"build_mesh: `device_type` must be 'cpu' or 'cuda', got {device_type!r}")
        if device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError("build_mesh: `device_type` must be 'cpu' where torch sees no CUDA device, got 'cuda'")
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "build_mesh: torch.distributed must be initialised; call init_process_group, or start with torchrun"
            )
        ranks = dist.get_world_size()
        if ranks != self.world_size:
            raise ValueError(
                f"build_mesh: dp_replicate * dp_shard = {self.dp_replicate} * {self.dp_shard} must equal the number of "
                f"ranks, got {ranks} ranks; ParallelDims.for_world({ranks}) fits"
            )
        dense = init_device_mesh(
            device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )
        sparse = init_device_mesh(device_type, (self.sparse_shard,), mesh_dim_names=("sparse_shard",))
        return ParallelMesh(dims=self, dense=dense, sparse=sparse)
