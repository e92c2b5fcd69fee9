"""Norm of gradients that lie in pieces on several ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from gem_parallel._src.mesh import ParallelMesh

__all__ = ["clip_grad_norm_", "grad_norm"]


def _local_gradients(
    owner: str, params: Iterable[Tensor], mesh: ParallelMesh | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Local parts of the gradients: (those sharded over dp_shard, those that every rank holds whole)."""
    sharded, whole = [], []
    for index, param in enumerate(params):
        grad = param.grad
        if grad is None:
            continue
        if not isinstance(grad, DTensor):
            whole.append(grad)
            continue
        if mesh is None:
            raise ValueError(f"{owner}: `mesh` must be given for sharded parameters, got None and a DTensor gradient")
        cut = [axis for axis, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
        if not cut:
            whole.append(grad.to_local())
            continue
        names = grad.device_mesh.mesh_dim_names or ()
        axis = cut[0]
        if len(cut) != 1 or not isinstance(grad.placements[axis], Shard) or names[axis : axis + 1] != ("dp_shard",):
            raise ValueError(
                f"{owner}: gradients must be sharded over the axis dp_shard only, got placements "
                f"{grad.placements} over axes {names} at position {index} of `params`"
            )
        sharded.append(grad.to_local())
    return sharded, whole


def _sum_of_squares(grads: list[Tensor], device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.nn.utils.get_total_norm([grad.float() if grad.dtype.itemsize < 4 else grad for grad in grads])
    return norm.to(torch.float64).square()


def _norm(sharded: list[Tensor], whole: list[Tensor], mesh: ParallelMesh | None) -> Tensor:
    device = next((grad.device for grad in (*sharded, *whole)), torch.device(mesh.dense.device_type if mesh else "cpu"))
    total = _sum_of_squares(sharded, device)
    if mesh is not None and mesh.dense["dp_shard"].size() > 1:
        # Also with nothing here: the other ranks of the group wait.
        dist.all_reduce(total, group=mesh.dense["dp_shard"].get_group())
    return (total + _sum_of_squares(whole, device)).sqrt().float()


@torch.no_grad()
def grad_norm(params: Iterable[Tensor], mesh: ParallelMesh | None = None) -> Tensor:
    """2-norm over all gradients, each logical parameter counted once: shards are added up, replicas are not.

    Ranks call it together. Gradients that are plain tensors count as replicated: every rank holds the whole.

    Args:
        params: Parameters after backward; those without a gradient count as zero.
        mesh: The mesh they were parallelized over; None in one process.

    Returns:
        Scalar float32, the same on every rank; accumulated over tensors in float64.

    Raises:
        ValueError: a gradient is sharded over another axis than dp_shard.
    """
    return _norm(*_local_gradients("grad_norm", params, mesh), mesh)


@torch.no_grad()
def clip_grad_norm_(params: Iterable[Tensor], max_norm: float, mesh: ParallelMesh | None = None) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place, so that their 2-norm is at most ``max_norm``.

    A norm that is not finite makes the gradients not finite; test the returned value before the optimizer's step.

    Args:
        params: As for ``grad_norm``.
        max_norm: Positive bound.
        mesh: As for ``grad_norm``.

    Returns:
        The norm before clipping, scalar float32.

    Raises:
        ValueError: ``max_norm`` is not positive, or as ``grad_norm``.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: `max_norm` must be above 0, got {max_norm}")
    sharded, whole = _local_gradients("clip_grad_norm_", params, mesh)
    norm = _norm(sharded, whole, mesh)
    # No comparison on the host: that would wait for the device.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if sharded or whole:
        torch._foreach_mul_([*sharded, *whole], factor)
    return norm
