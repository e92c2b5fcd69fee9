"""The variants of GDPA's kernels that tuning may choose: what the compile test builds of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.candidates import CANDIDATES
from gem_kernels._src.attention.specs import attention_spec
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.gdpa.configs import select
from gem_kernels._src.gdpa.specs import _KERNELS
from gem_kernels._src.tiles.activation import activation_pair


def compile_specs() -> Sequence[CompileSpec]:
    """Every alternative to a default tile, without a mask and causal."""
    act = activation_pair("fast_gelu", hardware=True)
    specs = []
    for target in (90, 100):
        for kernel, by_dim in CANDIDATES.items():
            for dim in by_dim:
                tunable = select(kernel, dim, torch.bfloat16, (target // 10, 0)).tunable
                assert tunable is not None
                for number, config in enumerate(tunable.others):
                    for causal in (False, True) if kernel != "dqdkdv" else (False,):
                        constexprs = {
                            "ACTIVATION": act.value,
                            "DERIVATIVE": act.derivative,
                            "WRITE_DQ": kernel == "dqdkdv",
                            "BROADCAST_Q": False,
                        }
                        specs.append(
                            attention_spec(
                                f"{kernel}-{dim}-candidate-{number}{'-causal' if causal else ''}-sm{target}",
                                _KERNELS[kernel],
                                config,
                                torch.bfloat16,
                                dim,
                                target=target,
                                constexprs=constexprs | ({"HAS_RIGHT": True} if causal else {}),
                            )
                        )
    return specs
