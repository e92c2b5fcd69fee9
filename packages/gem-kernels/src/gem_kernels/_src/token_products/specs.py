"""The products of tokens that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.specs import TRITON_NAMES
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.token_products.kernels import constants, token_products_bwd_kernel, token_products_fwd_kernel


def _spec(tokens: int, dim: int, rank: int, dtype: torch.dtype, *, backward: bool) -> CompileSpec:
    kernel = token_products_bwd_kernel if backward else token_products_fwd_kernel
    constexprs = constants(tokens, dim, rank)
    name = TRITON_NAMES[dtype]
    pointers = tuple(argument for argument in kernel.arg_names if argument not in constexprs)
    return CompileSpec(
        id=f"{'backward' if backward else 'forward'}-{tokens}x{dim}x{rank}-{name}",
        kernel=kernel,
        signature=dict.fromkeys(pointers, f"*{name}"),
        constexprs=constexprs,
        aligned=pointers,
        num_warps=4,
        num_stages=3,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """64 tokens, ragged ones, and the most that a tile holds."""
    shapes = [(64, 256, 16, torch.bfloat16), (38, 96, 8, torch.float16), (128, 1024, 64, torch.bfloat16)]
    return [_spec(*shape, backward=backward) for shape in shapes for backward in (False, True)]
