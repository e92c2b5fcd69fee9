"""The backward of few queries that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.specs import TRITON_NAMES
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.jagged_attention.backward_few_queries import (
    _jagged_attention_bwd_few_queries_kernel,
    select_few_queries,
)


def _spec(queries: int, dim: int, dtype: torch.dtype, *, has_dlse: bool, shared: bool = False) -> CompileSpec:
    kernel, name = _jagged_attention_bwd_few_queries_kernel, TRITON_NAMES[dtype]
    config = select_few_queries(queries, dim)
    constexprs: dict[str, int | None] = {
        "D": dim,
        "D_V": dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": power_of_two(dim),
        "BLOCK_DV": power_of_two(dim),
        "SHARED": shared,
    }
    if not has_dlse:
        constexprs["dlse_ptr"] = None
    types = {"lse_ptr": "*fp32", "dlse_ptr": "*fp32", "offsets_q_ptr": "*i64", "offsets_k_ptr": "*i64", "scale": "fp32"}
    signature = {
        argument: types.get(argument, f"*{name}" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
        if argument not in constexprs
    }
    return CompileSpec(
        id=f"few-queries-{queries}-{dim}-{name}{'-dlse' if has_dlse else ''}{'-shared' if shared else ''}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(x for x in signature if x.endswith("_ptr") or x.startswith("stride")),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # Three gradients of the widest heads: up to 64 bytes with ptxas of Triton 3.9, and timed so.
        max_spill_bytes=80 if dim > 64 else 0,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Full tiles of queries and few, whole heads and narrow ones."""
    return [
        _spec(48, 64, torch.bfloat16, has_dlse=False),
        _spec(48, 64, torch.bfloat16, has_dlse=False, shared=True),
        _spec(64, 64, torch.float16, has_dlse=True),
        _spec(48, 128, torch.bfloat16, has_dlse=False),
        _spec(48, 128, torch.bfloat16, has_dlse=False, shared=True),
        _spec(64, 128, torch.float16, has_dlse=True),
        _spec(8, 40, torch.bfloat16, has_dlse=False),
    ]
