"""The gates that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.gate.kernels import BLOCK, gate_bwd_kernel, gate_fwd_kernel


def _spec(name: str, dtype: str) -> CompileSpec:
    kernel = {"forward": gate_fwd_kernel, "backward": gate_bwd_kernel}[name]
    pointers = tuple(argument for argument in kernel.arg_names if argument.endswith("_ptr"))
    return CompileSpec(
        id=f"{name}-{dtype}",
        kernel=kernel,
        signature={**dict.fromkeys(pointers, f"*{dtype}"), "size": "i32"},
        constexprs={"BLOCK": BLOCK, "EVEN": True},
        aligned=pointers,
        num_warps=4,
        num_stages=1,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Both ways in half and single precision."""
    return [_spec(name, dtype) for name in ("forward", "backward") for dtype in ("bf16", "fp32")]
