"""The variants of GDPA's kernels that are compiled ahead of any GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gem_kernels._src.attention.configs import MAX_HEAD_DIM_DQDKDV, Kernel
from gem_kernels._src.attention.specs import TRITON_NAMES, attention_spec
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
    activation: str,
    suffix: str = "",
    *,
    window: bool = False,
    search: bool = False,
) -> CompileSpec:
    act = activation_pair(activation, hardware=True)
    constexprs = {"ACTIVATION": act.value, "DERIVATIVE": act.derivative, "WRITE_DQ": name == "dqdkdv"}
    return attention_spec(
        f"{name}-{TRITON_NAMES[dtype]}-{dim}-{activation}-sm{target}{suffix}",
        _KERNELS[name],
        select(name, dim, dtype, (target // 10, 0)),
        dtype,
        dim,
        target=target,
        constexprs=constexprs,
        window=window,
        search=search,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Every tile configuration with fast_gelu, every activation at one; windows and the searched grid likewise."""
    specs = []
    for target in (90, 100):
        for name in _KERNELS:
            for dtype in (torch.bfloat16, torch.float32):
                for dim in (32, 64, 96, 128, 256):
                    if name == "dqdkdv" and dim > MAX_HEAD_DIM_DQDKDV:
                        continue
                    specs.append(_spec(name, dtype, dim, target, "fast_gelu"))
            if name != "dqdkdv":
                specs.append(_spec(name, torch.bfloat16, 128, target, "fast_gelu", "-window", window=True))
                specs.append(_spec(name, torch.bfloat16, 128, target, "fast_gelu", "-search", search=True))
        for activation in ACTIVATION_NAMES:
            if activation != "fast_gelu":
                specs.append(_spec("dkdv", torch.bfloat16, 64, target, activation))
    return specs
