"""Tables to and from state dicts: logical tables, never the layout of one world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gem_parallel._src.embeddings.engine import Engine
from gem_parallel._src.embeddings.grid import Grid
from gem_parallel._src.embeddings.layout import Group, TableShard

__all__ = ["LoadResult", "LocalTable", "load_tables", "local_tables", "save_tables"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTable:
    """A table, or a column shard of one, as this rank keeps it."""

    shard: TableShard
    weight: Tensor
    """(last_row - first_row, shard.dim)"""
    state: dict[str, Tensor]
    """Moment -> (rows,) or (rows, shard.dim) float32."""
    first_row: int
    last_row: int

    def entries(self, prefix: str) -> dict[str, Tensor]:
        """State dict key -> this rank's part."""
        start = f"{prefix}tables.{self.shard.config.name}."
        return {f"{start}weight": self.weight, **{start + name: tensor for name, tensor in self.state.items()}}

    def step_key(self, prefix: str) -> str:
        """Key of the number of training lookups."""
        return f"{prefix}tables.{self.shard.config.name}.step"

    def full_shape(self, part: Tensor) -> tuple[int, ...]:
        """Shape of the whole tensor that ``part`` is of."""
        config = self.shard.config
        return (config.num_rows, config.dim) if part.dim() == 2 else (config.num_rows,)


def local_tables(groups: Sequence[Group], engines: Sequence[Sequence[Engine]], grid: Grid | None) -> list[LocalTable]:
    """Every table, or column shard of one, with this rank's rows, perhaps none, and optimizer state.

    Args:
        groups: All.
        engines: Of each group.
        grid: The ranks; None in one process.
    """
    found = []
    for group, own in zip(groups, engines, strict=True):
        weights = [weight for engine in own for weight in engine.weights()]
        states = [state for engine in own for state in engine.states()]
        for shard, weight, state in zip(group.tables, weights, states, strict=True):
            first, last = (0, shard.config.num_rows)
            if grid is not None:
                first, last = shard.slice_of(grid.shard_rank, grid.replica_rank)
            found.append(LocalTable(shard=shard, weight=weight, state=state, first_row=first, last_row=last))
    return found


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a table's tensors lie: None is a plain tensor, the same on every rank that has it."""

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] = ()


def _layout_of(shard: TableShard, part: Tensor, grid: Grid | None) -> _Layout | None:
    """None if this rank has nothing of the table."""
    if grid is None or shard.kind == "replicated":
        return _Layout(None)
    if shard.kind == "rows":
        return _Layout(grid.flat, (Shard(0),))
    if shard.owner != grid.shard_rank:
        return None
    rows = () if grid.replicas is None else (Shard(0),)
    if shard.num_pieces > 1:
        # A moment of one number per row is the same for all column shards.
        column: Placement = Shard(1) if part.dim() == 2 else Replicate()
        return _Layout(grid.columns[shard.num_pieces], (column, *rows))
    return _Layout(grid.replicas, rows)


@dataclass(kw_only=True, slots=True)
class LoadResult:
    """What ``load_tables`` found wrong, and Adam's step."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    step: int | None = None


def save_tables(tables: Sequence[LocalTable], prefix: str, grid: Grid | None, step: int | None) -> dict[str, Tensor]:
    """State dict entries of this rank; views of the live tables, of cached ones true until the next lookup.

    A table that lies whole on one rank is a plain tensor, on that rank only, and a replicated one a plain tensor on
    all. Others are DTensors on the ranks that hold a part: Shard(0) over all ranks if placed row-wise, Shard(1) over
    the holders of column shards, and Shard(0) over the replicas of a part. If updates are counted, every rank that has
    a table has ``tables.<name>.step``, an int64 scalar.
    """
    found: dict[str, Tensor] = {}
    for table in tables:
        for key, part in table.entries(prefix).items():
            layout = _layout_of(table.shard, part, grid)
            if layout is None:
                continue
            if step is not None:
                found[table.step_key(prefix)] = torch.tensor(step)
            if layout.mesh is None:
                found[key] = part
                continue
            shape = torch.Size(table.full_shape(part))
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            found[key] = DTensor.from_local(
                part, layout.mesh, layout.placements, run_check=False, shape=shape, stride=stride
            )
    return found


def load_tables(
    tables: Sequence[LocalTable],
    state_dict: Mapping[str, Any],
    prefix: str,
    grid: Grid | None,
    has_step: bool,
    strict: bool,
) -> LoadResult:
    """Copy this rank's part out of a state dict.

    An entry may be a DTensor as ``save_tables`` makes it, or a plain tensor with the whole table, whatever the table's
    placement here. Nothing is copied unless everything fits, and with ``strict`` unless every key is there and known.
    """
    result = LoadResult()
    copies: list[tuple[Tensor, Tensor]] = []
    known: set[str] = set()
    steps: dict[str, int] = {}
    for table in tables:
        wanted, step_key = table.entries(prefix), table.step_key(prefix)
        known.update(wanted, [step_key] if has_step else [])
        for key, part in wanted.items():
            layout = _layout_of(table.shard, part, grid)
            if layout is None:
                continue
            if key not in state_dict:
                result.missing.append(key)
                continue
            given, problem = _part_for(table, part, layout, state_dict[key])
            if given is None:
                result.errors.append(f"{key}: {problem}")
            else:
                copies.append((part, given))
            if has_step and step_key in state_dict:
                step, problem = _step_of(state_dict[step_key])
                if step is None:
                    result.errors.append(f"{step_key}: {problem}")
                else:
                    steps[step_key] = step
        held = _layout_of(table.shard, table.weight, grid) is not None
        if has_step and held and step_key not in state_dict:
            result.missing.append(step_key)
    # Of keys beside the tables, too: the module holds nothing else.
    result.unexpected = [key for key in state_dict if key.startswith(prefix) and key not in known]
    if len(set(steps.values())) > 1:
        result.errors.append(f"the steps of all tables must be equal, got {steps}")
    if result.errors or (strict and (result.missing or result.unexpected)):
        return result
    result.step = next(iter(steps.values()), None)
    with torch.no_grad():
        for part, given in copies:
            part.copy_(given)
    return result


def _step_of(given: object) -> tuple[int | None, str]:
    if isinstance(given, Tensor):
        whole = not (given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool)
        if given.layout is not torch.strided or given.is_meta or given.numel() != 1 or not whole:
            return None, (
                f"must be an int64 scalar, got shape {tuple(given.shape)} of {given.dtype} on {given.device}; "
                "save it without a cast"
            )
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool):
        return None, f"must be an int64 scalar, got {type(given).__name__}"
    if not 0 <= given < 2**63:
        return None, f"must lie in [0, 2^63), got {given}"
    return given, ""


def _part_for(table: LocalTable, part: Tensor, layout: _Layout, given: object) -> tuple[Tensor | None, str]:
    full = table.full_shape(part)
    if not isinstance(given, Tensor):
        return None, f"must be a tensor, got {type(given).__name__}"
    if given.layout is not torch.strided:
        return None, f"must be a dense tensor, got one of layout {given.layout}; pass its to_dense()"
    if not given.dtype.is_floating_point:
        return None, f"must be of a float dtype, got {given.dtype}; save weights and moments without a cast"
    if given.is_meta:
        return None, "must have values, got a tensor on the meta device; load the checkpoint onto the CPU"
    if tuple(given.shape) != full:
        return None, f"must have shape {full}, got {tuple(given.shape)}"
    if isinstance(given, DTensor):
        if given.device_mesh != layout.mesh or tuple(given.placements) != layout.placements:
            return None, (
                f"is a DTensor on {given.device_mesh} with {given.placements}, which is not how the table lies here; "
                "load through torch.distributed.checkpoint or pass given.full_tensor()"
            )
        return given.to_local(), ""
    rows = given[table.first_row : table.last_row]
    if part.dim() == 1:
        return rows, ""
    first = table.shard.first_column
    return rows[:, first : first + table.shard.dim], ""
