"""The row kernels of the block that the compile test builds without a GPU; its attention is among those of GDPA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.specs import TRITON_NAMES
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.gdpa_norm_block.rows import (
    add_rms_norm_bwd_kernel,
    add_rms_norm_kernel,
    layer_norm_bwd_kernel,
    layer_norm_kernel,
)
from gem_kernels._src.norm_linear.configs import select_backward_rows, select_rows

_KERNELS = {
    "layer_norm": layer_norm_kernel,
    "add_rms_norm": add_rms_norm_kernel,
    "add_rms_norm-backward": add_rms_norm_bwd_kernel,
    "layer_norm-backward": layer_norm_bwd_kernel,
}
_FLOAT32_POINTERS = {"mean_ptr", "rstd_ptr", "rrms_ptr", "sums_ptr"}


def _spec(name: str, features: int, dtype: torch.dtype, *, full: bool) -> CompileSpec:
    kernel = _KERNELS[name]
    config = (select_backward_rows if name.endswith("-backward") else select_rows)(features)
    flags = ("HAS_WEIGHT", "HAS_BIAS", "HAS_RMS_WEIGHT", "QUERY_RESIDUAL", "RESIDUAL", "KEEP", "SUMS")
    constexprs = {"N": features, "ROWS": config.rows, "BLOCK_N": config.block_n} | dict.fromkeys(flags, full)
    constexprs = {key: value for key, value in constexprs.items() if key in kernel.arg_names}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constexprs:
            continue
        if argument in _FLOAT32_POINTERS:
            signature[argument] = "*fp32"
        elif argument.endswith("_ptr"):
            signature[argument] = f"*{TRITON_NAMES[dtype]}"
        else:
            signature[argument] = "fp32" if argument == "eps" else "i32"
    return CompileSpec(
        id=f"{name}-N{features}-{TRITON_NAMES[dtype]}-{'full' if full else 'plain'}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(x for x in signature if x.endswith("_ptr") or x.startswith("stride")),
        num_warps=config.num_warps,
        num_stages=1,
        # The widest rows: sums of two parameters beside the tile.
        max_spill_bytes=384 if features == 16384 else 32,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Every kernel with all its options and with none, narrow, usual and as wide as they go."""
    return [
        *(_spec(name, 512, torch.bfloat16, full=full) for name in _KERNELS for full in (True, False)),
        *(_spec(name, features, torch.bfloat16, full=True) for name in _KERNELS for features in (192, 16384)),
        *(_spec(name, 512, torch.float32, full=True) for name in _KERNELS),
    ]
