"""The variants of jagged attention's kernels that are compiled ahead of any GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gem_kernels._src.attention.configs import MAX_HEAD_DIM_DQDKDV, Kernel, TileConfig, power_of_two
from gem_kernels._src.attention.specs import TRITON_NAMES, attention_spec
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


def compile_specs() -> Sequence[CompileSpec]:
    """Every tile configuration for bfloat16 and float32; windows and the searched grid on the commonest of them."""
    specs = []
    for target in (90, 100):
        capability = (target // 10, 0)
        for name, kernel in _KERNELS.items():
            for dtype in (torch.bfloat16, torch.float32):
                for dim in (32, 64, 96, 128, 256):
                    if name == "dqdkdv" and dim > MAX_HEAD_DIM_DQDKDV:
                        continue
                    variants = [("", False, False)]
                    if dim == 128 and dtype == torch.bfloat16 and name != "dqdkdv":
                        variants += [("-window", True, False), ("-search", False, True)]
                    for suffix, window, search in variants:
                        specs.append(
                            attention_spec(
                                f"{name}-{TRITON_NAMES[dtype]}-{dim}-sm{target}{suffix}",
                                kernel,
                                select(name, dim, dtype, capability),
                                dtype,
                                dim,
                                target=target,
                                constexprs={"WRITE_DQ": name == "dqdkdv"},
                                window=window,
                                search=search,
                            )
                        )
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
    return specs
