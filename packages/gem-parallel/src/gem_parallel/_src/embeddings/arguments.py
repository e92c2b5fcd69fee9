"""Checks of what the module is constructed with, before any work and any collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.checks import check_number
from gem_parallel._src.embeddings.config import (
    FeatureConfig,
    Gather,
    IdPolicy,
    SparseOptimizerConfig,
    TableConfig,
    check_choice,
    check_flag,
    check_integer,
)
from gem_parallel._src.embeddings.wire import WIRE_DTYPES

__all__ = ["check_configs", "check_options", "resolve_device"]

OWNER = "ShardedEmbeddings"
MAX_SEED = 2**63 - 1


def _check_members(argument: str, given: object, kind: type) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(
            f"{OWNER}: `{argument}` must be a sequence of {kind.__name__}, got {type(given).__name__}; pass a list"
        )
    for index, each in enumerate(given):
        if not isinstance(each, kind):
            raise TypeError(
                f"{OWNER}: `{argument}[{index}]` must be a {kind.__name__}, got {type(each).__name__}; make one"
            )


def check_configs(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> None:
    """Raise unless names are unique and every feature names a table."""
    _check_members("tables", tables, TableConfig)
    _check_members("features", features, FeatureConfig)
    if not tables:
        raise ValueError(f"{OWNER}: `tables` must hold at least one TableConfig, got none; add one")
    for argument, configs in (("tables", tables), ("features", features)):
        seen: set[str] = set()
        for config in configs:
            if config.name in seen:
                raise ValueError(
                    f"{OWNER}: names in `{argument}` must be unique, got {config.name!r} twice; rename one"
                )
            seen.add(config.name)
    names = {table.name for table in tables}
    for feature in features:
        if feature.table not in names:
            raise ValueError(
                f"{OWNER}: feature {feature.name!r} must name a table of `tables`, got {feature.table!r}; "
                f"the tables are {', '.join(sorted(names))}"
            )


def check_options(
    *,
    optimizer: object,
    mesh: object,
    seed: object,
    weight_dtype: object,
    id_policy: object,
    wire_dtype: object,
    gather: object,
    keep_gathered: object,
    timeout_s: float | None,
    measure_updates: object,
) -> None:
    """Raise unless each option is of its kind and in its range, and they go together."""
    if not isinstance(optimizer, SparseOptimizerConfig):
        raise TypeError(
            f"{OWNER}: `optimizer` must be a SparseOptimizerConfig, got {type(optimizer).__name__}; "
            "it runs inside backward, for example SparseOptimizerConfig(kind='adam', learning_rate=0.001)"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{OWNER}: `mesh` must be a DeviceMesh or None, got {type(mesh).__name__}; "
            "pass `.sparse` of what ParallelDims(...).build_mesh(...) returns"
        )
    check_integer(OWNER, "seed", seed, 0, MAX_SEED)
    check_choice(OWNER, "id_policy", id_policy, get_args(IdPolicy))
    if weight_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"{OWNER}: `weight_dtype` must be torch.float32, torch.float16 or torch.bfloat16, got {weight_dtype!r}; "
            "choose one of them"
        )
    if wire_dtype not in tuple(WIRE_DTYPES):
        raise ValueError(
            f"{OWNER}: `wire_dtype` must be one of {', '.join(map(str, WIRE_DTYPES))}, got {wire_dtype!r}; choose one "
            "of them"
        )
    check_choice(OWNER, "gather", gather, get_args(Gather))
    check_flag(OWNER, "keep_gathered", keep_gathered)
    check_flag(OWNER, "measure_updates", measure_updates)
    if keep_gathered and gather == "rows":
        raise ValueError(
            f"{OWNER}: `keep_gathered` must be False with gather='rows', which gathers no tables, got True; leave it "
            "out"
        )
    if timeout_s is not None:
        check_number(OWNER, "timeout_s", timeout_s)
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(
                f"{OWNER}: `timeout_s` must be finite and above 0, got {timeout_s}; None is the process groups' own"
            )


def resolve_device(device: object, mesh: DeviceMesh | None) -> torch.device:
    """Where the tables live, with its index.

    Raises:
        TypeError, ValueError: no device, one of another type, or one that is not there.
    """
    if device is None:
        device = mesh.device_type if mesh is not None else "cpu"
    if not isinstance(device, str | torch.device):
        raise TypeError(
            f"{OWNER}: `device` must be a torch.device or a str, got {type(device).__name__} {device!r}; "
            "name it as in 'cpu' or 'cuda:0'"
        )
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"{OWNER}: `device` must name a device as in 'cpu' or 'cuda:0', got {device!r}; name it so"
        ) from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"{OWNER}: `device` must be a CPU or CUDA device, got {resolved}; name one of these")
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            raise ValueError(
                f"{OWNER}: `device` must be one that torch sees, which are {count} CUDA devices, got {resolved}; "
                "use device='cpu', or gem_parallel.engine_report() for what is missing"
            )
        if resolved.index is None:
            resolved = torch.device("cuda", torch.cuda.current_device())
    return resolved
