"""The variants of GDPA's kernels that are compiled ahead of any GPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from gem_kernels._src.attention.specs import TRITON_NAMES, attention_spec, compiled_sizes
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.gdpa.backward import _gdpa_bwd_dkdv_kernel
from gem_kernels._src.gdpa.backward_dq import _gdpa_bwd_dq_kernel, _gdpa_bwd_dq_seeds_kernel
from gem_kernels._src.gdpa.configs import select_fitting
from gem_kernels._src.gdpa.forward import _gdpa_fwd_kernel
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES
from gem_kernels._src.tables.attention import Kernel
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
    causal: bool = False,
    search: bool = False,
    seeds: bool = False,
    indices: Collection[str] = (),
) -> CompileSpec:
    act = activation_pair(activation, hardware=True)
    constexprs = {
        "ACTIVATION": act.value,
        "DERIVATIVE": act.derivative,
        "WRITE_DQ": name == "dqdkdv",
        "BROADCAST_Q": seeds,
    }
    return attention_spec(
        f"{name}-{TRITON_NAMES[dtype]}-{dim}-{activation}-sm{target}{suffix}",
        _gdpa_bwd_dq_seeds_kernel if seeds and name == "dq" else _KERNELS[name],
        select_fitting(
            name,
            (dim, dim),
            dtype,
            (target // 10, 0),
            *lengths,
            indexed=seeds or (bool(indices) and name != "dq"),
            requests="request_starts_ptr" in indices,
        ),
        dtype,
        dim,
        target=target,
        constexprs=constexprs | ({"HAS_RIGHT": True} if causal else {}),
        window=window,
        search=search,
        indices=indices,
    )


def _pairing_specs(name: Kernel, target: int) -> list[CompileSpec]:
    """Targets, requests and seeds in one kernel, at the head dims whose tiles are largest."""
    specs = []
    requests = ("request_starts_ptr",) if name == "dkdv" else ("request_index_ptr",)
    for dim in (128, 256) if target == 90 else (128,):
        half = (name, torch.bfloat16, dim, target)
        specs += [
            _spec(*half, "silu", "-targets-causal", causal=True, indices=("num_targets_ptr",)),
            _spec(*half, suffix="-requests-causal", causal=True, indices=requests),
            _spec(*half, suffix="-seeds", lengths=(32, 4096), seeds=True),
            _spec(*half, suffix="-seeds-requests-window", window=True, seeds=True, indices=requests),
        ]
    return specs


def compile_specs() -> Sequence[CompileSpec]:
    """Every tile configuration with fast_gelu; every other choice of a variant at one or two configurations."""
    specs = []
    for target in (90, 100):
        for name in _KERNELS:
            specs += [_spec(name, dtype, dim, target) for dtype, dim in compiled_sizes(name)]
            if name != "dqdkdv":
                specs.append(_spec(name, torch.bfloat16, 128, target, suffix="-window", window=True))
                specs += _pairing_specs(name, target)
    for name in _KERNELS:
        if name != "dqdkdv":
            specs.append(_spec(name, torch.bfloat16, 64, 90, suffix="-search", search=True))
        specs.append(_spec(name, torch.bfloat16, 64, 90, suffix="-q8", lengths=(8, 4096)))
        specs.append(_spec(name, torch.bfloat16, 64, 90, suffix="-k16", lengths=(4096, 16)))
    for activation in ACTIVATION_NAMES:
        if activation != "fast_gelu":
            specs.append(_spec("dkdv", torch.bfloat16, 64, 90, activation))
    return specs
