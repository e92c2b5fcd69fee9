"""The variants of jagged attention's kernels that are compiled ahead of any GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from gem_kernels._src.attention.configs import Kernel, TileConfig, fit_lengths, power_of_two
from gem_kernels._src.attention.specs import TRITON_NAMES, attention_spec, compiled_sizes
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.jagged_attention.backward import DELTA_ROWS, _jagged_attention_bwd_delta_kernel
from gem_kernels._src.jagged_attention.backward_dkdv import _jagged_attention_bwd_dkdv_kernel
from gem_kernels._src.jagged_attention.backward_dq import (
    _jagged_attention_bwd_dq_kernel,
    _jagged_attention_bwd_dq_seeds_kernel,
)
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.forward import _jagged_attention_fwd_kernel
from gem_kernels._src.jagged_attention.tables import (
    _jagged_attention_bwd_position_kernel,
    _jagged_attention_bwd_time_kernel,
    select_square,
)

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
_NO_BIAS = dict.fromkeys(("position_ptr", "time_ptr", "times_q_ptr", "times_k_ptr"))


def _with_types(spec: CompileSpec) -> CompileSpec:
    """The arguments of the bias in their own types, not in that of q."""
    types = {name: value for name, value in _BIAS_TYPES.items() if name in spec.signature}
    return dataclasses.replace(spec, signature={**spec.signature, **types})


def _bias_flags(bias: bool) -> dict[str, Any]:
    """Both parts of a bias, or none."""
    return {"HAS_POSITION": True, "HAS_TIME": True, "TIME_SHIFT": 0} if bias else {**_NO_BIAS, **Bias().flags()}


def _table_specs(dtype: torch.dtype, dim: int, target: int) -> list[CompileSpec]:
    """The two kernels of the table gradients, for all keys and for a window."""
    config = select_square(dim, dtype, (target // 10, 0))
    constexprs = {**_bias_flags(True), "HAS_ENDS": True, "BUCKETS": 64, "CHUNKS": 8, "BROADCAST_Q": False}
    return [
        _with_types(
            attention_spec(
                f"{name}-{TRITON_NAMES[dtype]}-{dim}-sm{target}",
                kernel,
                config,
                dtype,
                dim,
                target=target,
                constexprs=constexprs,
            )
        )
        for name, kernel in (
            ("time", _jagged_attention_bwd_time_kernel),
            ("position", _jagged_attention_bwd_position_kernel),
        )
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
    bias: bool = False,
    requests: bool = False,
    seeds: bool = False,
    search: bool = False,
) -> CompileSpec:
    shared_rows = seeds or (requests and name != "dq")
    config = select(name, dim, dtype, (target // 10, 0), has_bias=bias, shared_rows=shared_rows)
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


def compile_specs() -> Sequence[CompileSpec]:
    """Every tile configuration; a window, the searched grid and short tiles at one."""
    specs = []
    for target in (90, 100):
        for name in _KERNELS:
            specs += [_spec(name, dtype, dim, target) for dtype, dim in compiled_sizes(name)]
            specs += [_spec(name, dtype, dim, target, "-bias", bias=True) for dtype, dim in compiled_sizes(name)]
            if name != "dqdkdv":
                specs.append(_spec(name, torch.bfloat16, 128, target, "-window", window=True))
                for dim in (64, 128, 256):
                    specs.append(_spec(name, torch.bfloat16, dim, target, "-seeds", seeds=True, requests=dim == 128))
                specs.append(_spec(name, torch.bfloat16, 128, target, "-seeds-bias", seeds=True, bias=True))
                specs.append(_spec(name, torch.bfloat16, 128, target, "-request", requests=True, window=True))
                specs.append(_spec(name, torch.bfloat16, 128, target, "-request-bias", requests=True, bias=True))
            else:
                specs.append(_spec(name, torch.bfloat16, 128, target, "-request-bias", requests=True, bias=True))
        for dtype, dim in compiled_sizes("forward"):
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
    for name in _KERNELS:
        if name != "dqdkdv":
            specs.append(_spec(name, torch.bfloat16, 64, 90, "-search", search=True))
        specs.append(_spec(name, torch.bfloat16, 64, 90, "-q8", lengths=(8, 4096)))
        specs.append(_spec(name, torch.bfloat16, 128, 90, "-q32", lengths=(32, 4096), seeds=name != "dqdkdv"))
        specs.append(_spec(name, torch.bfloat16, 64, 90, "-k16", lengths=(4096, 16)))
    return specs
