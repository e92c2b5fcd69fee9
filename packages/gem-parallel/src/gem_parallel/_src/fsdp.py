"""Dense parameters over the dense mesh: FSDP2, with summed gradients."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gem_parallel._src.checks import check_mesh
from gem_parallel._src.collectives.base import Collectives
from gem_parallel._src.collectives.fully_shard import set_fully_shard_collectives
from gem_parallel._src.experts import ExpertParallel
from gem_parallel._src.mesh import ParallelMesh
from gem_parallel._src.param_wire import ParamWire, check_parameters, check_wire, comparable_wire
from gem_parallel._src.same_settings import check_agreement

__all__ = ["ParallelPlan", "defer_all_reduce", "parallelize"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """How a model wants to be cut; the model's author writes it, ``parallelize`` applies it."""

    shard_units: tuple[str, ...]
    """Glob patterns over the fully qualified names of modules, as of ``named_modules()``; ``*`` also crosses dots. Each
    match is one unit: its parameters are gathered and its gradients reduced together. What no unit holds belongs to the
    root. Prefetch takes the patterns, and inside one the modules as registered, for the order in which units run; a
    wrong order costs memory and overlap, not correctness."""
    param_dtype: torch.dtype | None = None
    """dtype of gathered parameters and so of compute; None keeps the parameters' own. Sharded ones keep theirs. What
    goes into a unit is cast to it, too: leave it None where layers choose their dtypes, as gem_precision's do."""
    reduce_dtype: torch.dtype | None = None
    """dtype in which gradients are reduced; None is that of compute."""
    reshard_after_forward: bool | int | None = None
    """Whether a unit frees its gathered parameters between forward and backward, and gathers them again. True saves
    memory, False one all-gather per step; None is True for units and False for the root, which backward needs at once.
    A number of ranks, between 1 and the shard group's and dividing it, keeps each unit gathered to that many
    consecutive ranks, so that backward gathers inside a host; experts, whose groups are smaller, then take True."""
    forward_prefetch: int = 0
    """Units whose parameters are gathered while one computes in forward; 0 gathers each when it is reached."""
    backward_prefetch: int = 0
    """The same in backward, explicit; 0 leaves it to FSDP, which gathers the unit that ran before, one ahead."""
    param_wire: ParamWire | None = None
    """Form in which parameters travel when they are gathered, such as ``gem_precision.MXFP8Wire()``; None is
    ``param_dtype``. Compute reads what the form keeps of them, on any number of ranks, one included. The sharded
    parameters, their gradients and optimizer states stay as they are."""

    def __post_init__(self) -> None:
        if isinstance(self.shard_units, str) or not isinstance(self.shard_units, tuple):
            raise TypeError(
                f"ParallelPlan: `shard_units` must be a tuple of patterns, got {type(self.shard_units).__name__}; put "
                "the patterns in a tuple"
            )
        for pattern in self.shard_units:
            if not isinstance(pattern, str):
                raise TypeError(
                    f"ParallelPlan: `shard_units` must hold str, got {type(pattern).__name__}; name modules"
                )
            if not pattern:
                raise ValueError(
                    "ParallelPlan: `shard_units` must name modules below the root, got ''; it is one anyway"
                )
        for argument in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, argument)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"ParallelPlan: `{argument}` must be a floating point dtype or None, got {dtype}; name one such as "
                    "torch.bfloat16"
                )
        for argument in ("forward_prefetch", "backward_prefetch"):
            number = getattr(self, argument)
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"ParallelPlan: `{argument}` must be an int, got {type(number).__name__}; pass int(x)")
            if number < 0:
                raise ValueError(f"ParallelPlan: `{argument}` must be at least 0, got {number}; 0 prefetches nothing")
        reshard = self.reshard_after_forward
        if reshard is not None and not isinstance(reshard, int):
            raise TypeError(
                f"ParallelPlan: `reshard_after_forward` must be a bool, an int or None, got {type(reshard).__name__}; "
                "leave it out for the default"
            )
        if reshard is not None and not isinstance(reshard, bool) and reshard < 2:
            raise ValueError(
                f"ParallelPlan: `reshard_after_forward` must be at least 2 ranks, got {reshard}; False keeps "
                "parameters gathered on every rank, True on none"
            )
        if self.param_wire is not None:
            check_wire("ParallelPlan", self.param_wire)
            if reshard is not None and not isinstance(reshard, bool):
                raise ValueError(
                    "ParallelPlan: `reshard_after_forward` must be a bool or None with a `param_wire`, as FSDP2 keeps "
                    f"on a few ranks only what traveled in the dtype of compute, got {reshard}; pass True"
                )


def running_order(module: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Names of the modules that a pattern matches: by pattern, then as registered, each once.

    Raises:
        ValueError: a pattern matches no module.
    """
    names = [name for name, _ in module.named_modules() if name]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(
                f"parallelize: every pattern of `plan.shard_units` must match a module, got {pattern!r}, which matches "
                f"none of {len(names)} modules ({shown or 'the module has no children'}); correct or drop it"
            )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def inner_first(module: nn.Module, names: list[str]) -> list[str]:
    """The same names, each before those that hold it."""
    registered = {name: position for position, (name, _) in enumerate(module.named_modules())}
    return sorted(names, key=lambda name: (-name.count("."), registered[name]))


def _with_experts(module: nn.Module, units: list[str], mesh: ParallelMesh) -> tuple[list[str], dict[str, bool]]:
    """(units, with each ExpertParallel as one; name of every module -> it is an expert's or holds only experts)."""
    registered = [name for name, _ in module.named_modules()]
    roots = []
    for name, child in module.named_modules():
        if not isinstance(child, ExpertParallel):
            continue
        if child.degree not in (1, mesh.dims.ep):
            raise ValueError(
                f"parallelize: `mesh` must have the ep degree of the module's ExpertParallel layers, got ep "
                f"{mesh.dims.ep} and {child.degree} in {name or 'the root'}; build the layer with mesh.ep_group"
            )
        if child.degree > 1:
            roots.append(name)
    expert = {
        name: any(name == root or name.startswith(f"{root}.") or not root for root in roots) for name in registered
    }
    units = list(units)
    for root in roots:
        if root and root not in units:
            # It runs after what was registered before it.
            before = [units.index(name) for name in units if registered.index(name) < registered.index(root)]
            units.insert(max(before, default=-1) + 1, root)
    return units, expert


def _checked_units(module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh) -> tuple[list[str], dict[str, bool]]:
    """``_with_experts`` of the plan's units.

    Raises:
        ValueError, RuntimeError: as ``parallelize``.
    """
    units = running_order(module, plan.shard_units)
    units, expert = _with_experts(module, units, mesh)
    if plan.param_wire is not None:
        load_wire_hooks("parallelize")
        check_parameters("parallelize", module, plan.param_wire, plan.param_dtype)
    elif mesh.dense.size() == 1:
        return units, expert
    for name in ("", *units):
        if isinstance(module.get_submodule(name), FSDPModule):
            raise ValueError(
                f"parallelize: `module` must not be sharded yet, got {repr(name) if name else 'a module'} that is; "
                "parallelize a module once"
            )
    num_shards, reshard = mesh.dims.dp_shard * mesh.dims.ep, plan.reshard_after_forward
    if reshard is not None and not isinstance(reshard, bool) and (num_shards % reshard or reshard >= num_shards):
        fit = [str(ranks) for ranks in range(2, num_shards) if num_shards % ranks == 0]
        raise ValueError(
            f"parallelize: `plan.reshard_after_forward` must divide the {num_shards} ranks of a shard group and be "
            f"fewer, got {reshard}; "
            + (f"pass {' or '.join(fit)}, or " if fit else "no number of ranks does, pass ")
            + "True, False or None"
        )
    return units, expert


def parallelize(
    module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, *, collectives: Collectives | None = None
) -> nn.Module:
    """Shard a module's parameters over ``mesh.dense``, in place.

    With dp_replicate 1 this is FSDP over dp_shard x ep, else HSDP. With ep, each ``ExpertParallel`` is a unit, whose
    parameters are sharded over dp_shard only: the other ranks of ep hold other experts. Gradients are summed over all
    ranks that used the parameter, never divided: divide the loss by the global number of samples. Build the optimizer
    afterwards, from the sharded parameters. On a mesh of one rank the module comes back as it is, its patterns checked,
    unless ``plan.param_wire`` rounds what compute reads.

    All ranks of the mesh call it together: they compare their plans, and where one refuses all do. Every rank must use
    the same parameters in every backward: a unit without a gradient on one rank skips its reduction there while the
    others wait.

    Args:
        module: Parameters on the mesh's device type, or on meta.
        plan: Units and dtypes.
        mesh: From ``ParallelDims.build_mesh``.
        collectives: Engine that gathers parameters and reduces gradients, fit for every group that shards them;
            default: the groups' backend.

    Returns:
        ``module``, now also an FSDPModule.

    Raises:
        TypeError: an argument of another kind.
        ValueError: a pattern that matches no module, ``reshard_after_forward`` ranks that do not divide the shard
            group, an ``ExpertParallel`` of another degree than ep, a unit that is sharded already, a
            ``plan.param_wire`` that covers no parameter or one of a dtype that it does not take, or a plan that differs
            between ranks.
        RuntimeError: a ``plan.param_wire`` with a torch whose FSDP2 it does not fit; another rank refuses.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize: `module` must be an nn.Module, got {type(module).__name__}; pass the model")
    if not isinstance(plan, ParallelPlan):
        raise TypeError(
            f"parallelize: `plan` must be a ParallelPlan, got {type(plan).__name__}; "
            "pass ParallelPlan(shard_units=(...))"
        )
    check_mesh("parallelize", mesh, optional=False)
    if collectives is not None and not isinstance(collectives, Collectives):
        raise TypeError(
            f"parallelize: `collectives` must be an engine or None, got {type(collectives).__name__} {collectives!r}; "
            "pass choose_collectives(group, name)"
        )
    refusal: Exception | None = None
    try:
        units, expert = _checked_units(module, plan, mesh)
    except (RuntimeError, ValueError) as error:
        refusal = error
    if mesh.dense.size() > 1:
        settings = {f"plan.{each.name}": getattr(plan, each.name) for each in fields(plan)}
        settings["plan.param_wire"] = comparable_wire(plan.param_wire)
        check_agreement(
            "parallelize",
            mesh.dense,
            settings,
            remedy="make the plan from the same values on every rank",
            what="`module` and `plan`",
            refusal=refusal,
        )
    elif refusal is not None:
        raise refusal
    elif plan.param_wire is None:
        return module
    reshard = plan.reshard_after_forward
    policy = MixedPrecisionPolicy(param_dtype=plan.param_dtype, reduce_dtype=plan.reduce_dtype)
    for name in [*inner_first(module, units), ""]:
        unit = module.get_submodule(name)
        keep = True if expert[name] and reshard is not None and not isinstance(reshard, bool) else reshard
        axes = mesh.expert_fsdp if expert[name] else mesh.fsdp
        fully_shard(unit, mesh=axes, mp_policy=policy, reshard_after_forward=keep)  # type: ignore[call-overload]
        assert isinstance(unit, FSDPModule)
        # Sum: a factor of one, and only SUM on the wire. A factor alone becomes a pre-multiplied sum, which gloo lacks.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if plan.param_wire is not None:
        load_wire_hooks("parallelize")(module, plan.param_wire)
    _set_prefetch(module, units, plan)
    if collectives is not None:
        set_fully_shard_collectives(module, collectives)
    return module


def load_wire_hooks(owner: str) -> Callable[[nn.Module, ParamWire], None]:
    """What lets a sharded module's parameters travel in a form of their own.

    Raises:
        RuntimeError: torch's FSDP2 is not one that the hooks fit; names the version.
    """
    try:
        # What it stands on is not public: a later torch without it must not break what needs no wire.
        from gem_parallel._src.wired_param import wire_parameters
    except (AttributeError, ImportError) as error:
        raise RuntimeError(
            f"{owner}: `plan.param_wire` needs FSDP2 as torch 2.11 to 2.13 have it, got torch {torch.__version__} "
            f"({error}); leave it out, or install one of these"
        ) from error
    return wire_parameters


def _set_prefetch(module: nn.Module, units: list[str], plan: ParallelPlan) -> None:
    chain = [module, *(module.get_submodule(name) for name in units)]
    for position, unit in enumerate(chain):
        assert isinstance(unit, FSDPModule)
        if ahead := chain[position + 1 : position + 1 + plan.forward_prefetch]:
            unit.set_modules_to_forward_prefetch(ahead)  # type: ignore[arg-type]
        # Backward starts in the root, the last to finish forward, and meets the units from the last to the first.
        behind = chain[1:position] if position else chain[1:]
        if plan.backward_prefetch and behind:
            unit.set_modules_to_backward_prefetch(behind[: -plan.backward_prefetch - 1 : -1])  # type: ignore[arg-type]


@contextmanager
def defer_all_reduce(module: nn.Module) -> Iterator[None]:
    """Backwards inside add to the gradients without the all-reduce over dp_replicate.

    For gradient accumulation under HSDP: run all micro-batches but the last inside, the last outside, whose backward
    then reduces the sum once. Inside, gradients are reduce-scattered over the shard group and held by FSDP: ``.grad``
    has them after the last backward only. Every unit must get a gradient in the last micro-batch, else what it holds
    stays behind. Without replicas, or with a module that ``parallelize`` left as it was, it changes nothing.

    Args:
        module: What ``parallelize`` returned.

    Raises:
        TypeError: ``module`` is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"defer_all_reduce: `module` must be an nn.Module, got {type(module).__name__}; pass what "
            "parallelize returned"
        )
    if not isinstance(module, FSDPModule):
        yield
        return
    module.set_requires_all_reduce(False)
    try:
        yield
    finally:
        module.set_requires_all_reduce(True)
