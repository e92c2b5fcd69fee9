"""The backward kernel that the compile test builds without a GPU; the forward is among those of gdpa_norm_block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.specs import TRITON_NAMES
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.layer_norm_rows.kernels import MAX_READERS, layer_norm_rows_bwd_kernel
from gem_kernels._src.norm_linear.configs import select_backward_rows


def _spec(features: int, dtype: torch.dtype, readers: int, *, direct: bool) -> CompileSpec:
    config = select_backward_rows(features)
    kernel, name = layer_norm_rows_bwd_kernel, TRITON_NAMES[dtype]
    constexprs: dict[str, int | None] = {"N": features, "ROWS": config.rows, "BLOCK_N": config.block_n}
    constexprs |= dict.fromkeys(f"dy{reader}_ptr" for reader in range(readers, MAX_READERS))
    if not direct:
        constexprs["direct_ptr"] = None
    signature = {}
    for argument in kernel.arg_names:
        if argument in constexprs:
            continue
        if argument in ("mean_ptr", "rstd_ptr"):
            signature[argument] = "*fp32"
        else:
            signature[argument] = f"*{name}" if argument.endswith("_ptr") else "i32"
    return CompileSpec(
        id=f"backward-N{features}-{name}-{readers}{'-direct' if direct else ''}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(x for x in signature if x.endswith("_ptr") or x.startswith("stride")),
        num_warps=config.num_warps,
        num_stages=1,
        # The widest rows: one row holds what four do.
        max_spill_bytes=64 if features == 16384 else 0,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """One reader and all of them, usual rows, rows that fill no tile, and the widest."""
    return [
        _spec(256, torch.bfloat16, 1, direct=False),
        _spec(256, torch.bfloat16, 3, direct=True),
        _spec(256, torch.float32, MAX_READERS, direct=True),
        _spec(192, torch.float16, 2, direct=True),
        _spec(16384, torch.bfloat16, MAX_READERS, direct=True),
    ]
