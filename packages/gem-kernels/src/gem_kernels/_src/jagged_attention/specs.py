"""The variants of jagged attention's kernels that are compiled ahead of any GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from gem_kernels._src.attention.configs import TileConfig, fit_lengths, power_of_two
from gem_kernels._src.attention.specs import TRITON_NAMES, attention_spec, compiled_sizes
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.jagged_attention.backward import DELTA_ROWS, _jagged_attention_bwd_delta_kernel
from gem_kernels._src.jagged_attention.backward_dkdv import _jagged_attention_bwd_dkdv_kernel
from gem_kernels._src.jagged_attention.backward_dq import (
    _jagged_attention_bwd_dq_kernel,
    _jagged_attention_bwd_dq_seeds_kernel,
)
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.forward import _jagged_attention_fwd_kernel
from gem_kernels._src.jagged_attention.tables import (
    _jagged_attention_bwd_position_kernel,
    _jagged_attention_bwd_time_kernel,
    select_table,
)
from gem_kernels._src.tables.attention import Kernel

_KERNELS: dict[Kernel, Any] = {
    "forward": _jagged_attention_fwd_kernel,
    "dq": _jagged_attention_bwd_dq_kernel,
    "dkdv": _jagged_attention_bwd_dkdv_kernel,
    "dqdkdv": _jagged_attention_bwd_dkdv_kernel,
}


_BIAS_TYPES = {
    "position_ptr": "*fp32",
    "time_ptr": "*fp32",
    "times_q_ptr": "*i64",
    "times_k_ptr": "*i64",
    "partial_ptr": "*fp32",
    "ends_ptr": "*fp32",
    "tile_sequences_ptr": "*i64",
}
Parts = Literal["none", "position", "time", "both"]
"""Of the bias that a variant adds."""


def _with_types(spec: CompileSpec) -> CompileSpec:
    """The arguments of the bias in their own types, not in that of q."""
    types = {name: value for name, value in _BIAS_TYPES.items() if name in spec.signature}
    return dataclasses.replace(spec, signature={**spec.signature, **types})


def _bias_flags(parts: Parts) -> dict[str, Any]:
    """Flags of the parts of a bias, and None for the tensors of the others."""
    has_position, has_time = parts in ("position", "both"), parts in ("time", "both")
    absent = [] if has_position else ["position_ptr"]
    absent += [] if has_time else ["time_ptr", "times_q_ptr", "times_k_ptr"]
    return {"HAS_POSITION": has_position, "HAS_TIME": has_time, "TIME_SHIFT": 0, **dict.fromkeys(absent)}


def _table_specs(dtype: torch.dtype, dim: int, target: int, parts: Parts = "both") -> list[CompileSpec]:
    """The kernels of the table gradients."""
    config = select_table(dim, dtype, (target // 10, 0))
    constexprs = {"HAS_ENDS": parts != "time", "BUCKETS": 64, "CHUNKS": 8, "BROADCAST_Q": False}
    suffix = "" if parts == "both" else f"-{parts}"
    kernels = {"time": _jagged_attention_bwd_time_kernel, "position": _jagged_attention_bwd_position_kernel}
    return [
        _with_types(
            attention_spec(
                f"table-{name}-{TRITON_NAMES[dtype]}-{dim}-sm{target}{suffix}",
                kernel,
                config,
                dtype,
                dim,
                target=target,
                constexprs={**constexprs, **_bias_flags(parts)},
            )
        )
        for name, kernel in kernels.items()
        if name == "time" or parts != "time"
    ]


def _spec(
    name: Kernel,
    dtype: torch.dtype,
    dim: int,
    target: int,
    suffix: str = "",
    *,
    lengths: tuple[int, int] = (4096, 4096),
    window: bool = False,
    bias: Parts = "none",
    requests: bool = False,
    seeds: bool = False,
    search: bool = False,
) -> CompileSpec:
    shared_rows = seeds or (requests and name != "dq")
    config = select(
        name, dim, dtype, (target // 10, 0), has_bias=bias != "none", shared_rows=shared_rows, requests=requests
    )
    return _with_types(
        attention_spec(
            f"{name}-{TRITON_NAMES[dtype]}-{dim}-sm{target}{suffix}",
            _jagged_attention_bwd_dq_seeds_kernel if seeds and name == "dq" else _KERNELS[name],
            fit_lengths(config, *lengths, columns_per_key=2 * power_of_two(dim) if name in ("dkdv", "dqdkdv") else 0),
            dtype,
            dim,
            target=target,
            constexprs={"WRITE_DQ": name == "dqdkdv", "BROADCAST_Q": seeds, **_bias_flags(bias)},
            window=window,
            search=search,
            indices=("request_index_ptr", "request_starts_ptr") if requests else (),
        )
    )


def _bias_and_pairing_specs(name: Kernel, target: int) -> list[CompileSpec]:
    """A bias, seeds and requests at the head dims whose tiles differ; fewer of them for the second target."""
    sizes = compiled_sizes(name)
    if target == 100:
        sizes = [(dtype, dim) for dtype, dim in sizes if dtype == torch.bfloat16 and dim >= 128]
    specs = [_spec(name, dtype, dim, target, "-bias", bias="both") for dtype, dim in sizes]
    half = (name, torch.bfloat16, 128, target)
    specs.append(_spec(*half, "-request-bias", requests=True, bias="both"))
    if name == "dqdkdv":
        return specs
    specs.append(_spec(*half, "-request-window", requests=True, window=True))
    specs.append(_spec(*half, "-seeds-request", seeds=True, requests=True))
    specs.append(_spec(*half, "-seeds-bias", seeds=True, bias="both"))
    if target == 90:
        specs.append(_spec(*half, "-bias-position", bias="position"))
        specs.append(_spec(*half, "-bias-time", bias="time"))
        specs.append(_spec(name, torch.bfloat16, 256, target, "-seeds", seeds=True))
    return specs


def compile_specs() -> Sequence[CompileSpec]:
    """Every tile configuration; a window, the searched grid and short tiles at one."""
    specs = []
    for target in (90, 100):
        for name in _KERNELS:
            specs += [_spec(name, dtype, dim, target) for dtype, dim in compiled_sizes(name)]
            specs += _bias_and_pairing_specs(name, target)
            if name != "dqdkdv":
                specs.append(_spec(name, torch.bfloat16, 128, target, "-window", window=True))
        for dtype, dim in compiled_sizes("forward") if target == 90 else [(torch.bfloat16, 128), (torch.bfloat16, 256)]:
            specs += _table_specs(dtype, dim, target)
        specs.append(
            attention_spec(
                f"delta-bf16-128-sm{target}",
                _jagged_attention_bwd_delta_kernel,
                TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1),
                torch.bfloat16,
                128,
                target=target,
                constexprs={"HAS_DLSE": False, "dlse_ptr": None, "BLOCK_R": DELTA_ROWS, "BLOCK_DV": power_of_two(128)},
            )
        )
    for parts in ("position", "time"):
        specs += _table_specs(torch.bfloat16, 128, 90, parts)
    for name in _KERNELS:
        if name != "dqdkdv":
            specs.append(_spec(name, torch.bfloat16, 64, 90, "-search", search=True))
        specs.append(_spec(name, torch.bfloat16, 64, 90, "-q8", lengths=(8, 4096)))
        specs.append(_spec(name, torch.bfloat16, 128, 90, "-q32", lengths=(32, 4096), seeds=name != "dqdkdv"))
        specs.append(_spec(name, torch.bfloat16, 64, 90, "-k16", lengths=(4096, 16)))
    return specs
