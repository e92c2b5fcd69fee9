"""Checks of an argument's kind, each on its own rank."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.mesh import ParallelMesh

__all__ = ["check_group", "check_mesh", "check_number"]


def check_number(owner: str, argument: str, value: object) -> None:
    """Refuse what is neither int nor float: other numbers may fail later, in JSON, torch or fbgemm."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: `{argument}` must be a number, got {type(value).__name__} {value!r}; pass a float")


def check_mesh(owner: str, mesh: object, *, optional: bool = True) -> None:
    """Refuse what is no ``ParallelMesh``."""
    if isinstance(mesh, ParallelMesh) or (mesh is None and optional):
        return
    raise TypeError(
        f"{owner}: `mesh` must be a ParallelMesh{' or None' if optional else ''}, got {type(mesh).__name__}; pass what "
        "ParallelDims.build_mesh returned, whole"
    )


def check_group(owner: str, group: object, *, remedy: str = "mesh.ep_group") -> None:
    """Refuse what is neither a process group nor a mesh of one axis nor None."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{owner}: `group` must be a mesh of one axis, got {group.ndim} axes; pass {remedy}")
        return
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    raise TypeError(
        f"{owner}: `group` must be a process group, a mesh of one axis or None, got {type(group).__name__}; "
        f"pass {remedy}"
    )
