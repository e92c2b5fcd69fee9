"""Tables to and from state dicts: logical tables, never the layout of one world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gem_parallel._src.embeddings.layout import TableShard

__all__ = ["LoadResult", "load_tables", "save_tables"]

LocalTable = tuple[TableShard, Tensor, dict[str, Tensor]]


@dataclass(kw_only=True, slots=True)
class LoadResult:
    """What ``load_tables`` found wrong, and Adam's step."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    step: int | None = None


def _keys(name: str, local: Tensor, state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """State dict key -> this rank's rows, of one table."""
    return {
        f"{prefix}tables.{name}.weight": local,
        **{f"{prefix}tables.{name}.{suffix}": tensor for suffix, tensor in state.items()},
    }


def save_tables(
    tables: Sequence[LocalTable], prefix: str, rank: int, mesh: DeviceMesh | None, step: int | None
) -> dict[str, Tensor]:
    """State dict entries of this rank; views of the live tables.

    A table that lies on one rank is a plain tensor, on that rank only. A row-wise one is a DTensor with Shard(0),
    also on ranks without rows. With Adam every rank has ``tables.<name>.step``, an int64 scalar.
    """
    found: dict[str, Tensor] = {}
    for shard, weight, state in tables:
        name = shard.config.name
        if step is not None and (shard.row_wise or rank == shard.owner):
            found[f"{prefix}tables.{name}.step"] = torch.tensor(step)
        if not shard.row_wise:
            if rank == shard.owner:
                found.update(_keys(name, weight, state, prefix))
            continue
        assert mesh is not None
        for key, local in _keys(name, weight, state, prefix).items():
            shape = torch.Size((shard.config.num_rows, *local.shape[1:]))
            stride = (local.shape[1], 1) if local.dim() == 2 else (1,)
            found[key] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return found


def load_tables(
    tables: Sequence[LocalTable],
    state_dict: Mapping[str, Any],
    prefix: str,
    rank: int,
    mesh: DeviceMesh | None,
    has_step: bool,
    strict: bool,
) -> LoadResult:
    """Copy this rank's rows out of a state dict.

    An entry may be a DTensor as ``save_tables`` makes it, or a plain tensor with all rows of the table, whatever the
    table's placement here. Nothing is copied unless everything fits, and with ``strict`` unless every key is there and
    known.
    """
    result = LoadResult()
    copies: list[tuple[Tensor, Tensor]] = []
    known: set[str] = set()
    steps: dict[str, int] = {}
    for shard, weight, state in tables:
        name = shard.config.name
        wanted = _keys(name, weight, state, prefix)
        step_key = f"{prefix}tables.{name}.step"
        known.update(wanted, [step_key] if has_step else [])
        if not shard.row_wise and rank != shard.owner:
            continue
        for key, local in wanted.items():
            if key not in state_dict:
                result.missing.append(key)
                continue
            given, problem = _rows_for(shard, rank, local, state_dict[key], mesh)
            if given is None:
                result.errors.append(f"{key}: {problem}")
            else:
                copies.append((local, given))
        if has_step and step_key not in state_dict:
            result.missing.append(step_key)
        elif has_step:
            steps[step_key] = int(state_dict[step_key])
    start = f"{prefix}tables."
    result.unexpected = [key for key in state_dict if key.startswith(start) and key not in known]
    if len(set(steps.values())) > 1:
        result.errors.append(f"the steps of all tables must be equal, got {steps}")
    if result.errors or (strict and (result.missing or result.unexpected)):
        return result
    result.step = next(iter(steps.values()), None)
    with torch.no_grad():
        for local, given in copies:
            local.copy_(given)
    return result


def _rows_for(
    shard: TableShard, rank: int, local: Tensor, given: object, mesh: DeviceMesh | None
) -> tuple[Tensor | None, str]:
    full = (shard.config.num_rows, *local.shape[1:])
    if not isinstance(given, Tensor):
        return None, f"must be a tensor, got {type(given).__name__}"
    if tuple(given.shape) != full:
        return None, f"must have shape {full}, got {tuple(given.shape)}"
    if isinstance(given, DTensor):
        same = shard.row_wise and given.device_mesh == mesh and tuple(given.placements) == (Shard(0),)
        if not same:
            return None, (
                f"is a DTensor on {given.device_mesh} with {given.placements}, which is not how the table lies here; "
                "load through torch.distributed.checkpoint or pass given.full_tensor()"
            )
        return given.to_local(), ""
    start, end = shard.rows_of(rank)
    return given[start:end], ""
