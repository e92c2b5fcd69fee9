"""The kernels for few keys that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.specs import TRITON_NAMES
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.gdpa_norm_block.few_keys import DKDV_STAGES, DQ_STAGES, ROWS, forward_kernel
from gem_kernels._src.gdpa_norm_block.few_keys_backward import dkdv_kernel, dq_kernel
from gem_kernels._src.tiles.activation import activation_pair

_KERNELS = {"few_keys": forward_kernel, "few_keys-dq": dq_kernel, "few_keys-dkdv": dkdv_kernel}
_MAX_SPILL_BYTES = 224
"""Per thread, of the forward that holds whole rows in float32: measured faster than smaller tiles that fit."""
_FLOAT32_POINTERS = {"mean_ptr", "rstd_ptr", "rrms_ptr", "inner_ptr"}


def _spec(name: str, heads: int, head_dim: int, num_keys: int, dtype: torch.dtype, activation: str) -> CompileSpec:
    kernel = _KERNELS[name]
    pair = activation_pair(activation, hardware=True)
    constexprs = {
        "ACTIVATION": pair.value,
        "DERIVATIVE": pair.derivative,
        "HEADS": heads,
        "D": head_dim,
        "BLOCK_M": ROWS,
        "BLOCK_K": power_of_two(num_keys),
        "BLOCK_D": power_of_two(head_dim),
        "BLOCK_N": power_of_two(heads * head_dim),
        "QUERY_RESIDUAL": True,
        "RESIDUAL": True,
        "SEARCH": True,
    }
    constexprs = {key: value for key, value in constexprs.items() if key in kernel.arg_names}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constexprs:
            continue
        if argument in _FLOAT32_POINTERS:
            signature[argument] = "*fp32"
        elif argument.endswith("_ptr"):
            signature[argument] = "*i64" if "offsets" in argument else f"*{TRITON_NAMES[dtype]}"
        else:
            signature[argument] = "fp32" if argument in ("eps", "pre_scale", "post_scale") else "i32"
    return CompileSpec(
        id=f"{name}-H{heads}-D{head_dim}-K{num_keys}-{TRITON_NAMES[dtype]}-{activation}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(x for x in signature if x.endswith("_ptr") or x.startswith("stride")),
        num_warps=4,
        num_stages={"few_keys-dq": DQ_STAGES, "few_keys-dkdv": DKDV_STAGES}.get(name, 1),
        max_spill_bytes=_MAX_SPILL_BYTES,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Usual sizes, the widest rows with the most keys, and heads that fill no tile."""
    return [
        *(_spec(name, 4, 64, 16, torch.bfloat16, "gelu") for name in _KERNELS),
        *(_spec(name, 4, 64, 32, torch.bfloat16, "gelu") for name in _KERNELS),
        *(_spec(name, 3, 24, 20, torch.float16, "silu") for name in _KERNELS),
        *(_spec(name, 2, 32, 8, torch.bfloat16, "gelu") for name in _KERNELS),
    ]
