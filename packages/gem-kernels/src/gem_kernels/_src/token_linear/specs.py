"""The maps of tokens that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.specs import TRITON_NAMES
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.token_linear.kernels import constants, token_linear_bwd_kernel, token_linear_fwd_kernel, warps


def _spec(
    num_out: int,
    num_in: int,
    dim: int,
    dtype: torch.dtype,
    *,
    exact: bool,
    backward: bool,
    first: int | None = None,
) -> CompileSpec:
    kernel = token_linear_bwd_kernel if backward else token_linear_fwd_kernel
    constexprs: dict[str, int | bool | None] = {
        **constants(num_out, num_in, dim, exact=exact, backward=backward, first=first)
    }
    if first is None:
        constexprs["drest_ptr" if backward else "rest_ptr"] = None
    name = TRITON_NAMES[dtype]
    own = {"weight_ptr": "*fp32", "bias_ptr": "*fp32", "partial_ptr": "*fp32"}
    signature = {
        argument: own.get(argument, f"*{name}" if argument.endswith("_ptr") else "i32")
        for argument in kernel.arg_names
        if argument not in constexprs
    }
    return CompileSpec(
        id=f"{'backward' if backward else 'forward'}-{num_in}to{num_out}x{dim}-{name}"
        f"{'-exact' if exact else ''}{'' if first is None else f'-first{first}'}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(x for x in signature if x != "num_samples"),
        num_warps=warps(num_out, num_in),
        num_stages=1,
        # Two registers of the three maps together, on sm_100.
        max_spill_bytes=8,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Three maps of 64 tokens together, few tokens, and the most that a tile holds."""
    shapes = [(56, 64, 256, torch.bfloat16), (32, 6, 256, torch.bfloat16), (16, 38, 96, torch.float16)]
    together = [
        _spec(40, 64, 256, torch.bfloat16, exact=True, backward=backward, first=8) for backward in (False, True)
    ]
    return together + [
        _spec(*shape, exact=exact, backward=backward)
        for shape in (*shapes, (128, 128, 512, torch.bfloat16))
        for exact in (False, True)
        for backward in (False, True)
    ]
