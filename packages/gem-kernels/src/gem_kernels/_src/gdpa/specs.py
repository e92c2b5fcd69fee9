"""The variants of GDPA's kernels that are compiled ahead of any GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gem_kernels._src.attention.configs import Kernel, fit_lengths
from gem_kernels._src.attention.specs import TRITON_NAMES, attention_spec, compiled_sizes
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.gdpa.backward import _gdpa_bwd_dkdv_kernel, _gdpa_bwd_dq_kernel
from gem_kernels._src.gdpa.configs import select
from gem_kernels._src.gdpa.forward import _gdpa_fwd_kernel
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES
from gem_kernels._src.tiles.activation import activation_pair

_KERNELS: dict[Kernel, Any] = {
    "forward": _gdpa_fwd_kernel,
    "dq": _gdpa_bwd_dq_kernel,
    "dkdv": _gdpa_bwd_dkdv_kernel,
    "dqdkdv": _gdpa_bwd_dkdv_kernel,
}


def _spec(
    name: Kernel,
    dtype: torch.dtype,
    dim: int,
    target: int,
    activation: str = "fast_gelu",
    suffix: str = "",
    *,
    lengths: tuple[int, int] = (4096, 4096),
    window: bool = False,
    search: bool = False,
) -> CompileSpec:
    act = activation_pair(activation, hardware=True)
    return attention_spec(
        f"{name}-{TRITON_NAMES[dtype]}-{dim}-{activation}-sm{target}{suffix}",
        _KERNELS[name],
        fit_lengths(select(name, dim, dtype, (target // 10, 0)), *lengths),
        dtype,
        dim,
        target=target,
        constexprs={"ACTIVATION": act.value, "DERIVATIVE": act.derivative, "WRITE_DQ": name == "dqdkdv"},
        window=window,
        search=search,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Every tile configuration with fast_gelu; every activation, a window, the searched grid and short tiles at one."""
    specs = []
    for target in (90, 100):
        for name in _KERNELS:
            specs += [_spec(name, dtype, dim, target) for dtype, dim in compiled_sizes(name)]
            if name != "dqdkdv":
                specs.append(_spec(name, torch.bfloat16, 128, target, suffix="-window", window=True))
    for name in _KERNELS:
        if name != "dqdkdv":
            specs.append(_spec(name, torch.bfloat16, 64, 90, suffix="-search", search=True))
        specs.append(_spec(name, torch.bfloat16, 64, 90, suffix="-q8", lengths=(8, 4096)))
        specs.append(_spec(name, torch.bfloat16, 64, 90, suffix="-k16", lengths=(4096, 16)))
    for activation in ACTIVATION_NAMES:
        if activation != "fast_gelu":
            specs.append(_spec("dkdv", torch.bfloat16, 64, 90, activation))
    return specs
