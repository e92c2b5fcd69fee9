"""Norm of gradients that lie in pieces on several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from gem_parallel._src.checks import check_mesh, check_number
from gem_parallel._src.experts import is_expert_parameter
from gem_parallel._src.mesh import ParallelMesh

__all__ = ["clip_grad_norm_", "grad_norm"]


@dataclass(slots=True)
class _Gradients:
    """This rank's parts of the gradients, by who else has them. Replicas over dp_replicate are equal, never added."""

    pieces: list[Tensor] = field(default_factory=list)
    """Of this rank alone among the ranks of dp_shard x ep."""
    experts: list[Tensor] = field(default_factory=list)
    """An expert's whole gradient, equal over dp_shard."""
    whole: list[Tensor] = field(default_factory=list)
    """Equal on all ranks."""
    sparse: list[Tensor] = field(default_factory=list)
    """Rows of this rank alone among the ranks of sparse_shard."""
    sparse_values: list[Tensor] = field(default_factory=list)
    """What to scale for ``sparse``: of a sparse gradient the values as they are, duplicates not added."""

    def to_scale(self) -> list[Tensor]:
        return [*self.pieces, *self.experts, *self.whole, *self.sparse_values]


def _tensors(owner: str, argument: str, params: object) -> list[Tensor]:
    """All of them, a generator's too; a single tensor is itself, not its rows."""
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, nn.Module) or not isinstance(params, Iterable):
        raise TypeError(
            f"{owner}: `{argument}` must be a tensor or an iterable of tensors, got {type(params).__name__}; "
            "pass module.parameters()"
        )
    found = list(params)
    for index, param in enumerate(found):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"{owner}: `{argument}` must hold tensors, got {type(param).__name__} at position {index}; "
                "pass module.parameters()"
            )
    return found


def _collect(
    owner: str,
    params: Iterable[Tensor] | Tensor,
    sparse_params: Iterable[Tensor] | Tensor | None,
    mesh: ParallelMesh | None,
) -> _Gradients:
    check_mesh(owner, mesh)
    dense = _tensors(owner, "params", params)
    sparse = [] if sparse_params is None else _tensors(owner, "sparse_params", sparse_params)
    found = _Gradients()
    seen: set[int] = set()
    for index, param in enumerate(dense):
        grad = param.grad
        if grad is None or id(param) in seen:
            continue
        seen.add(id(param))
        if grad.layout != torch.strided:
            raise ValueError(
                f"{owner}: gradients of `params` must be dense, got {grad.layout} at position {index}; "
                "give it in `sparse_params`"
            )
        local, axis = _local(owner, grad, index, "params", ("dp_shard", "dp_shard_ep"), mesh)
        if axis is not None:
            found.pieces.append(local)
        elif is_expert_parameter(param):
            found.experts.append(local)
        else:
            found.whole.append(local)
    for index, param in enumerate(sparse):
        grad = param.grad
        if grad is None or id(param) in seen:
            continue
        seen.add(id(param))
        if grad.layout == torch.sparse_coo:
            # Rows that occur twice must be added before they are squared.
            found.sparse.append(grad.coalesce().values())
            found.sparse_values.append(grad._values())
            continue
        local, _ = _local(owner, grad, index, "sparse_params", ("sparse_shard",), mesh)
        found.sparse.append(local)
        found.sparse_values.append(local)
    return found


def _local(
    owner: str, grad: Tensor, index: int, argument: str, axes: tuple[str, ...], mesh: ParallelMesh | None
) -> tuple[Tensor, str | None]:
    """(this rank's part, the axis that it is cut over)."""
    if not isinstance(grad, DTensor):
        return grad, None
    if mesh is None:
        raise ValueError(
            f"{owner}: `mesh` must be given for sharded parameters, got None and a DTensor gradient; pass what "
            "ParallelDims.build_mesh returned"
        )
    cut = [axis for axis, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
    if not cut:
        return grad.to_local(), None
    names = grad.device_mesh.mesh_dim_names or ()
    name = names[cut[0]] if names else None
    if len(cut) != 1 or not isinstance(grad.placements[cut[0]], Shard) or name not in axes:
        raise ValueError(
            f"{owner}: gradients of `{argument}` must be sharded over the axis {' or '.join(axes)} only, got "
            f"placements {grad.placements} over axes {names} at position {index}; pass the mesh that cut them"
        )
    return grad.to_local(), name


def _sum_of_squares(grads: list[Tensor], device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.nn.utils.get_total_norm([grad.float() if grad.dtype.itemsize < 4 else grad for grad in grads])
    return norm.to(torch.float64).square()


def _norm(found: _Gradients, mesh: ParallelMesh | None, with_sparse: bool) -> Tensor:
    grads = (*found.pieces, *found.experts, *found.whole, *found.sparse)
    device = next((grad.device for grad in grads), torch.device(mesh.dense.device_type if mesh else "cpu"))
    total = _sum_of_squares(found.pieces, device)
    experts, sparse = _sum_of_squares(found.experts, device), _sum_of_squares(found.sparse, device)
    if mesh is None:
        total = total + experts
    else:
        # An expert that is not sharded is on every rank of dp_shard: each brings its part of the square.
        total = total + experts / mesh.dims.dp_shard
        shard = mesh.shared[(mesh.shared.mesh_dim_names or ())[1]]
        if shard.size() > 1:
            # Also with nothing here: the other ranks of the group wait.
            dist.all_reduce(total, group=shard.get_group())
        if with_sparse and mesh.dims.sparse_shard > 1:
            dist.all_reduce(sparse, group=mesh.sparse["sparse_shard"].get_group())
    return (total + sparse + _sum_of_squares(found.whole, device)).sqrt().float()


def _found_and_norm(
    owner: str,
    params: Iterable[Tensor] | Tensor,
    sparse_params: Iterable[Tensor] | Tensor | None,
    mesh: ParallelMesh | None,
) -> tuple[_Gradients, Tensor]:
    with_sparse = sparse_params is not None
    try:
        found = _collect(owner, params, sparse_params, mesh)
    except (TypeError, ValueError):
        if isinstance(mesh, ParallelMesh):
            # The other ranks wait in the same sums; a flag of its own would make every step wait for the device.
            nan = torch.full((1,), torch.nan, device=mesh.dense.device_type)
            _norm(_Gradients(pieces=[nan], sparse=[nan]), mesh, with_sparse)
        raise
    return found, _norm(found, mesh, with_sparse)


@torch.no_grad()
def grad_norm(
    params: Iterable[Tensor] | Tensor,
    mesh: ParallelMesh | None = None,
    *,
    sparse_params: Iterable[Tensor] | Tensor | None = None,
) -> Tensor:
    """2-norm over all gradients, each logical parameter counted once: shards and experts are added, replicas are not.

    Ranks call it together; it all-reduces one number over dp_shard x ep, and one over sparse_shard with
    ``sparse_params``. A gradient is

    - a piece, if it is a DTensor sharded over dp_shard (an expert's, or all there is with ep 1) or dp_shard_ep;
    - an expert's, if the parameter is in an ``ExpertParallel``: other on every rank of ep, equal over dp_shard;
    - else the same whole on every rank.

    Args:
        params: Dense parameters after backward, or one of them; those without a gradient count as zero, one given
            twice counts once.
        mesh: The mesh they were parallelized over; None in one process.
        sparse_params: Rows of embedding tables that this rank alone owns among the ranks of sparse_shard, their
            gradients summed over replicas: plain, DTensors sharded over sparse_shard, or sparse COO. Give it on all
            ranks or on none. None leaves tables out, as ``ShardedEmbeddings`` must be: its optimizer runs inside
            backward and leaves no gradient.

    Returns:
        Scalar float32, the same on every rank; accumulated over tensors in float64. NaN where another rank of the
        same sums refuses its gradients and raises, so that nobody waits for it.

    Raises:
        TypeError: ``params`` or ``sparse_params`` is a module or holds something that is no tensor, or ``mesh`` is no
            ``ParallelMesh``.
        ValueError: a gradient is sharded over another axis, is a DTensor without ``mesh``, or is sparse in ``params``.
    """
    return _found_and_norm("grad_norm", params, sparse_params, mesh)[1]


@torch.no_grad()
def clip_grad_norm_(
    params: Iterable[Tensor] | Tensor,
    max_norm: float,
    mesh: ParallelMesh | None = None,
    *,
    sparse_params: Iterable[Tensor] | Tensor | None = None,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), in place, so that their 2-norm is at most ``max_norm``.

    A norm that is not finite makes the gradients not finite; test the returned value before the optimizer's step.

    Args:
        params: As for ``grad_norm``.
        max_norm: Positive bound.
        mesh: As for ``grad_norm``.
        sparse_params: As for ``grad_norm``; what counts in the norm is scaled.

    Returns:
        The norm before clipping, scalar float32.

    Raises:
        TypeError: ``max_norm`` is no number, or as ``grad_norm``.
        ValueError: ``max_norm`` is not positive, or as ``grad_norm``.
    """
    check_number("clip_grad_norm_", "max_norm", max_norm)
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: `max_norm` must be above 0, got {max_norm}; inf clips nothing")
    found, norm = _found_and_norm("clip_grad_norm_", params, sparse_params, mesh)
    # No comparison on the host: that would wait for the device.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if grads := found.to_scale():
        torch._foreach_mul_(grads, factor)
    return norm
