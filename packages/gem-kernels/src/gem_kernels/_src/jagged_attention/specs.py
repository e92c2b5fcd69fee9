"""The variants of jagged attention's kernels that are compiled ahead of any GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gem_kernels._src.attention.configs import Kernel, TileConfig, fit_lengths, power_of_two
from gem_kernels._src.attention.specs import TRITON_NAMES, attention_spec, compiled_sizes
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.jagged_attention.backward import (
    DELTA_ROWS,
    _jagged_attention_bwd_delta_kernel,
    _jagged_attention_bwd_dkdv_kernel,
    _jagged_attention_bwd_dq_kernel,
)
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.forward import _jagged_attention_fwd_kernel

_KERNELS: dict[Kernel, Any] = {
    "forward": _jagged_attention_fwd_kernel,
    "dq": _jagged_attention_bwd_dq_kernel,
    "dkdv": _jagged_attention_bwd_dkdv_kernel,
    "dqdkdv": _jagged_attention_bwd_dkdv_kernel,
}


def _spec(
    name: Kernel,
    dtype: torch.dtype,
    dim: int,
    target: int,
    suffix: str = "",
    *,
    lengths: tuple[int, int] = (4096, 4096),
    window: bool = False,
    search: bool = False,
) -> CompileSpec:
    return attention_spec(
        f"{name}-{TRITON_NAMES[dtype]}-{dim}-sm{target}{suffix}",
        _KERNELS[name],
        fit_lengths(select(name, dim, dtype, (target // 10, 0)), *lengths),
        dtype,
        dim,
        target=target,
        constexprs={"WRITE_DQ": name == "dqdkdv"},
        window=window,
        search=search,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Every tile configuration; a window, the searched grid and short tiles at one."""
    specs = []
    for target in (90, 100):
        for name in _KERNELS:
            specs += [_spec(name, dtype, dim, target) for dtype, dim in compiled_sizes(name)]
            if name != "dqdkdv":
                specs.append(_spec(name, torch.bfloat16, 128, target, "-window", window=True))
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
        specs.append(_spec(name, torch.bfloat16, 64, 90, "-k16", lengths=(4096, 16)))
    return specs
