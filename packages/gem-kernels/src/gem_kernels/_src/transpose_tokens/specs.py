"""The transposes that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.specs import TRITON_NAMES
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.transpose_tokens.kernel import blocks, transpose_kernel


def _spec(rows: int, columns: int, dtype: torch.dtype) -> CompileSpec:
    block_m, block_n = blocks(rows, columns)
    name = TRITON_NAMES[dtype]
    return CompileSpec(
        id=f"{rows}x{columns}-{name}",
        kernel=transpose_kernel,
        signature={"x_ptr": f"*{name}", "out_ptr": f"*{name}"},
        constexprs={"M": rows, "N": columns, "BLOCK_M": block_m, "BLOCK_N": block_n},
        aligned=("x_ptr", "out_ptr"),
        num_warps=4,
        num_stages=1,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Many tokens and few, both ways, in half and single precision."""
    return [
        _spec(64, 256, torch.bfloat16),
        _spec(256, 38, torch.bfloat16),
        _spec(8, 1024, torch.float32),
        _spec(256, 64, torch.float32),
    ]
