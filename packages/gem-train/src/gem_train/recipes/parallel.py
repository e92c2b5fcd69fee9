"""How a run is spread over its processes."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gem_parallel import (
    ExpertParallel,
    ParallelDims,
    ParallelMesh,
    ParallelPlan,
    ParamWire,
    Topology,
    choose_collectives,
    parallelize,
)
from gem_parallel.collectives import Collectives
from gem_parallel.experts import exchange_counts
from gem_train.checks import check_fields, default_of
from gem_train.errors import ConfigError

__all__ = ["AXES", "ParallelConfig", "describe_wire", "hold_experts", "spread"]

AXES = ("dp_replicate", "dp_shard", "ep", "sparse_replicate", "sparse_shard")
"""Degrees of `ParallelConfig`: they belong to a start of a run, all else to the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The five axes, and what moves between the ranks. Losses do not depend on the degrees, up to rounding."""

    dp_replicate: int = 1
    """Groups of ranks that hold equal copies of the dense parameters."""
    dp_shard: int | None = None
    """Ranks that share the dense parameters, experts aside; none takes the ranks that the other degrees leave."""
    ep: int = 1
    """Ranks that hold different experts of each layer; at most `model.num_experts`."""
    sparse_replicate: int = 1
    """Copies of the tables, each over fewer ranks."""
    sparse_shard: int | None = None
    """Ranks that share one copy of the tables; none takes the ranks that the copies leave."""
    wire_dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"] = "float32"
    """What embedding rows and their gradients are rounded to between ranks."""
    dense_wire: Literal["param_dtype", "mxfp8"] = "param_dtype"
    """What dense parameters are rounded to when they are gathered: nothing, or gem_precision's MXFP8, half the bytes of
    bfloat16. Compute reads what travels, on one process, too; master weights and gradients stay as they are."""
    sharded_at_rest: bool = True
    """Copies of a table keep a slice each between steps; false keeps what a lookup gathered until the next update."""
    table_gather: Literal["tables", "rows"] = "tables"
    """What a lookup fetches of the other copies' slices: whole tables, or the rows of the batch."""
    collectives: Literal["default", "nccl_zero_cta", "symm_mem_low_contention"] = "default"
    """Engine that gathers dense parameters and moves the rows of experts; `gem doctor` says which there are."""
    prefetch: int = 1
    """Units whose dense parameters are gathered while another computes."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in AXES:
            degree = getattr(self, name)
            if degree is not None and degree < 1:
                raise ConfigError(f"ParallelConfig: `{name}` must be >= 1, got {degree}; {default_of(self, name)}")
        if self.prefetch < 0:
            raise ConfigError(
                f"ParallelConfig: `prefetch` must be >= 0, got {self.prefetch}; {default_of(self, 'prefetch')}"
            )
        if self.table_gather == "rows" and not self.sharded_at_rest:
            raise ConfigError(
                "ParallelConfig: `sharded_at_rest` must be true with table_gather=rows, which gathers no table, "
                "got False; set table_gather=tables"
            )
        if self.dense_wire == "mxfp8" and importlib.util.find_spec("gem_precision") is None:
            raise ConfigError(
                "ParallelConfig: `dense_wire` must be param_dtype where gem-precision is not installed, got mxfp8; "
                "install gem-train[recipes], or leave it out"
            )

    def dims(self, num_processes: int, *, num_experts: int = 1, trained: bool = False) -> ParallelDims:
        """The axes over a number of processes; makes no process group.

        Args:
            num_processes: Ranks of the run.
            num_experts: Experts of each layer of the model.
            trained: The model has weights already, so that it can be given no more experts.

        Raises:
            ConfigError: if the degrees do not fit, with the nearest ones that do; or if `collectives` names an engine
                for ranks that share neither parameters nor experts.
        """
        dense = {
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard or max(1, num_processes // (self.dp_replicate * self.ep)),
            "ep": self.ep,
        }
        shards = self.sparse_shard or max(1, num_processes // self.sparse_replicate)
        sparse = {"sparse_replicate": self.sparse_replicate, "sparse_shard": shards}
        hosts = _hosts(num_processes)
        ranks_shown = "1 process" if num_processes == 1 else f"{num_processes} processes"
        for degrees in (dense, sparse):
            product = math.prod(degrees.values())
            if product != num_processes:
                raise ConfigError(
                    f"{self._flags()} on {ranks_shown}: {' * '.join(degrees)} = "
                    f"{' * '.join(map(str, degrees.values()))} = {product} must be the number of processes, got "
                    f"{num_processes}; nearest: {_nearest(degrees, hosts)}"
                )
        try:
            found = ParallelDims(**dense, **sparse)
            found.check(hosts)
        except ValueError as error:
            raise ConfigError(f"{self._flags()} on {ranks_shown}: {error}") from error
        if self.ep > max(1, num_experts):  # the model itself refuses less than one
            remedy = "" if trained else f"add --set model.num_experts={self.ep}, or "
            raise ConfigError(
                f"--ep: each of the {self.ep} ranks needs an expert of its own in every layer, and the model has "
                f"model.num_experts={num_experts}; {remedy}leave --ep out"
            )
        if self.collectives != "default" and found.dp_shard * found.ep == 1:
            raise ConfigError(
                f"--set parallel.collectives={self.collectives}: an engine serves ranks that share dense parameters or "
                f"experts, so dp_shard * ep must be above 1, got 1 on {ranks_shown}; leave it out, or set it to default"
            )
        return found

    def without_degrees(self) -> ParallelConfig:
        """The same with the default layout and engine, which fit any number of processes."""
        return dataclasses.replace(
            self, dp_replicate=1, dp_shard=None, ep=1, sparse_replicate=1, sparse_shard=None, collectives="default"
        )

    def _flags(self) -> str:
        given = [(name, getattr(self, name)) for name in AXES if getattr(self, name) not in (None, 1)]
        return " ".join(f"--{name.replace('_', '-')} {degree}" for name, degree in given) or "the layout"

    def table_options(self) -> dict[str, Any]:
        """Arguments of `ShardedEmbeddings`."""
        return {
            "wire_dtype": getattr(torch, self.wire_dtype),
            "gather": self.table_gather,
            "keep_gathered": not self.sharded_at_rest,
        }

    def param_wire(self, precision: str) -> ParamWire | None:
        """The form of dense parameters between ranks, or None.

        Args:
            precision: Name of the gem_precision recipe that the dense layers compute in: beside mxfp8 the blocks are
                those of its weights, so that its layers compute the same bits with the wire and without it.
        """
        if self.dense_wire == "param_dtype":
            return None
        from gem_precision import MXFP8Recipe, MXFP8Wire, get_recipe  # not needed, and so not required, without a wire

        recipe = get_recipe(precision)
        if isinstance(recipe, MXFP8Recipe):
            return MXFP8Wire(
                block_shape=recipe.weight_block_shape, scale_mode=recipe.scale_mode, min_features=recipe.min_features
            )
        return MXFP8Wire()


def _hosts(num_processes: int) -> Topology:
    """As many GPUs per host as torchrun says, or all in one."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    if num_processes % local:
        local = num_processes
    return Topology(gpus_per_host=local, hosts_per_zone=num_processes // local)


def _nearest(degrees: dict[str, int], hosts: Topology) -> str:
    """Flags of up to three layouts over all ranks, the smallest change of factors first."""
    inside = ("ep", "sparse_replicate")  # these stay inside a host
    count = hosts.num_gpus
    divisors = [degree for degree in range(1, count + 1) if count % degree == 0]
    found = [
        each
        for each in itertools.product(divisors, repeat=len(degrees))
        if math.prod(each) == count
        and all(name not in inside or hosts.tier_of(n) == "host" for name, n in zip(degrees, each, strict=True))
        # Experts are not asked of a model because of its other degrees.
        and (degrees.get("ep") != 1 or each[-1] == 1)
    ]
    found.sort(key=lambda each: sum(abs(math.log(n / m)) for n, m in zip(each, degrees.values(), strict=True)))
    shown = [
        " ".join(f"--{name.replace('_', '-')} {n}" for name, n in zip(degrees, each, strict=True)) for each in found[:3]
    ]
    return ", or ".join(shown)


def describe_wire(model: nn.Module, wire: ParamWire) -> str:
    """Which dense parameters travel in a form of their own, in one phrase.

    Args:
        model: Not yet spread over a mesh.
        wire: From `ParallelConfig.param_wire`.
    """
    parameters = list(model.parameters())
    covered = [each.numel() for each in parameters if wire.covers(tuple(each.shape))]
    share = sum(covered) / max(1, sum(each.numel() for each in parameters))
    blocks = f"{wire.rows_per_block}x32"
    return f"{wire.name} in blocks of {blocks}: {len(covered)} of {len(parameters)} parameters, {share:.1%} of elements"


def spread(model: nn.Module, config: ParallelConfig, mesh: ParallelMesh, *, wire: ParamWire | None = None) -> nn.Module:
    """Spreads the dense model over the ranks: experts over ep, parameters over the rest. All ranks call it.

    Args:
        model: Equal on all ranks, with `shard_units` and `expert_layers`.
        config: The settings.
        mesh: From `config.dims`.
        wire: Form of the parameters between ranks, from `config.param_wire`.

    Raises:
        ConfigError: if an engine of collectives cannot serve these ranks, or `wire` covers no parameter, with the
            reason.
    """
    engine = _engine(config, mesh)
    # Read before modules are replaced or wrapped.
    units: tuple[str, ...] = model.shard_units  # type: ignore[assignment]
    hold_experts(model, mesh, engine)
    plan = ParallelPlan(
        shard_units=units, forward_prefetch=config.prefetch, backward_prefetch=config.prefetch, param_wire=wire
    )
    if wire is not None and not any(wire.covers(tuple(each.shape)) for each in model.parameters()):
        raise ConfigError(
            f"--set parallel.dense_wire={config.dense_wire}: the model must have a matrix of 32 or more rows and "
            "columns, got none that large; leave it out, or make the model wider"
        )
    return parallelize(model, plan, mesh, collectives=engine)


def hold_experts(model: nn.Module, mesh: ParallelMesh, engine: Collectives | None = None) -> None:
    """Leaves this rank its experts of each layer, under their names, and exchanges rows with the ranks of the others.

    Args:
        model: Equal on all ranks, with `expert_layers`.
        mesh: With `ep` > 1; otherwise nothing changes.
        engine: Moves the rows; default: the group's backend.
    """
    names: tuple[str, ...] = model.expert_layers  # type: ignore[assignment]
    if mesh.dims.ep == 1 or not names:
        return
    counts = _Counts(mesh)
    for name in names:
        experts = model.get_submodule(name).experts
        model.set_submodule(name, _CountedExperts(experts, mesh, engine, counts))  # type: ignore[arg-type]
    model.register_forward_pre_hook(counts.read)


class _Counts:
    """Samples of the ranks that exchange rows, asked once per batch and over host memory, for all layers."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._group = mesh.ep_group
        self.rows: tuple[tuple[int, ...], ...] = ()

    def read(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.rows = exchange_counts([arguments[0].num_samples], self._group)


class _CountedExperts(ExpertParallel):
    """Experts whose layer is told the numbers of rows, so that it need not wait for the device to know them."""

    def __init__(self, experts: nn.ModuleList, mesh: ParallelMesh, engine: Collectives | None, counts: _Counts) -> None:
        super().__init__(experts, mesh.ep_group, collectives=engine)
        self._counts = counts

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(B, n, d) -> this rank's rows of the sum over all experts."""
        return super().forward(x, rows=self._counts.rows)


def _engine(config: ParallelConfig, mesh: ParallelMesh) -> Collectives | None:
    """One engine for every group that gathers parameters or moves rows, or None for the groups' backend."""
    if config.collectives == "default":
        return None
    groups = [mesh.shared[(mesh.shared.mesh_dim_names or ())[1]].get_group()]
    if mesh.dims.ep > 1:
        groups += [mesh.ep_group, mesh.dense["dp_shard"].get_group()]
    # One that a group lacks is refused here, with its reason. Groups of one rank move nothing.
    try:
        engines = [choose_collectives(group, config.collectives) for group in groups if group.size() > 1]
    except ValueError as error:
        raise ConfigError(f"--set parallel.collectives={config.collectives}: {error}") from error
    return engines[0]
