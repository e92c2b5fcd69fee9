"""Dense parameters over the dense mesh: FSDP2, with summed gradients."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gem_parallel._src.mesh import ParallelMesh

__all__ = ["ParallelPlan", "parallelize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """How a model wants to be cut; the model's author writes it, ``parallelize`` applies it."""

    shard_units: tuple[str, ...]
    """Glob patterns over the fully qualified names of modules, as of ``named_modules()``; ``*`` also crosses dots. Each
    match is one unit: its parameters are gathered and its gradients reduced together. What no unit holds belongs to the
    root."""
    param_dtype: torch.dtype | None = None
    """dtype of gathered parameters and so of compute; None keeps the parameters' own. Sharded ones keep theirs."""
    reduce_dtype: torch.dtype | None = None
    """dtype in which gradients are reduced; None is that of compute."""

    def __post_init__(self) -> None:
        if isinstance(self.shard_units, str) or not isinstance(self.shard_units, tuple):
            raise TypeError(
                f"ParallelPlan: `shard_units` must be a tuple of patterns, got {type(self.shard_units).__name__}"
            )
        for pattern in self.shard_units:
            if not isinstance(pattern, str):
                raise TypeError(f"ParallelPlan: `shard_units` must hold str, got {type(pattern).__name__}")
            if not pattern:
                raise ValueError("ParallelPlan: `shard_units` must not hold '': the root is always a unit")
        for argument in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, argument)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"ParallelPlan: `{argument}` must be a floating point dtype or None, got {dtype}")


def select_units(module: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Names of the modules that a pattern matches, inner ones before those that hold them.

    Raises:
        ValueError: a pattern matches no module.
    """
    names = [name for name, _ in module.named_modules() if name]
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(
                f"parallelize: every pattern of `plan.shard_units` must match a module, got {pattern!r}, which matches "
                f"none of {len(names)} modules ({shown or 'the module has no children'})"
            )
        chosen.update(found)
    return sorted(chosen, key=lambda name: (-name.count("."), names.index(name)))


def parallelize(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh) -> nn.Module:
    """Shard a module's parameters over ``mesh.dense``, in place.

    With dp_replicate 1 this is FSDP over dp_shard and ep, else HSDP. Gradients are summed over all ranks, never
    divided: divide the loss by the global number of samples. Build the optimizer afterwards, from the sharded
    parameters. On a mesh of one rank the module comes back as it is, its patterns checked.

    Every rank must use the same parameters in every backward: a unit without a gradient on one rank skips its reduction
    there while the others wait.

    Args:
        module: Parameters on the mesh's device type, or on meta.
        plan: Units and dtypes.
        mesh: From ``ParallelDims.build_mesh``.

    Returns:
        ``module``, now also an FSDPModule.

    Raises:
        ValueError: a pattern that matches no module.
    """
    units = select_units(module, plan.shard_units)
    if mesh.dense.size() == 1:
        return module
    axes = mesh.fsdp
    policy = MixedPrecisionPolicy(param_dtype=plan.param_dtype, reduce_dtype=plan.reduce_dtype)
    for name in units:
        _shard(module.get_submodule(name), axes, policy)
    _shard(module, axes, policy)
    return module


def _shard(unit: nn.Module, axes: object, policy: MixedPrecisionPolicy) -> None:
    fully_shard(unit, mesh=axes, mp_policy=policy)  # type: ignore[call-overload]
    assert isinstance(unit, FSDPModule)
    # Sum: a factor of one, and only SUM on the wire. A factor alone becomes a pre-multiplied sum, which gloo lacks.
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
