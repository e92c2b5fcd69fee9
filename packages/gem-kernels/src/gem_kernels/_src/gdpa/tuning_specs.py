"""The variants of GDPA's kernels that tuning may choose: what the compile test builds of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.specs import alternatives, attention_spec
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.gdpa.configs import select
from gem_kernels._src.gdpa.specs import _KERNELS
from gem_kernels._src.tiles.activation import activation_pair


def compile_specs() -> Sequence[CompileSpec]:
    """Every alternative to a default tile, without a mask and causal."""
    act = activation_pair("fast_gelu", hardware=True)
    specs = []
    for target, kernel, dim, name, config in alternatives(select):
        for causal in (False, True) if kernel != "dqdkdv" else (False,):
            constexprs = {
                "ACTIVATION": act.value,
                "DERIVATIVE": act.derivative,
                "WRITE_DQ": kernel == "dqdkdv",
                "BROADCAST_Q": False,
            }
            specs.append(
                attention_spec(
                    f"{name}{'-causal' if causal else ''}-sm{target}",
                    _KERNELS[kernel],
                    config,
                    torch.bfloat16,
                    dim,
                    target=target,
                    constexprs=constexprs | ({"HAS_RIGHT": True} if causal else {}),
                )
            )
    return specs
