"""The variants of Hopper's kernels of GDPA that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gem_kernels._src.compile_spec import CompileSpec


def compile_specs() -> Sequence[CompileSpec]:
    """Every kernel in both head dims and both dtypes, and the kernel that cuts a batch into chunks."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from gem_kernels._src.gdpa.hopper_activation import scaled_activation
    from gem_kernels._src.gdpa.hopper_backward import _gdpa_hopper_dkdv_kernel, _gdpa_hopper_dq_kernel
    from gem_kernels._src.gdpa.hopper_forward import ROWS, TILE_ROWS, _gdpa_hopper_fwd_kernel
    from gem_kernels._src.gdpa.hopper_launch import BLOCK_N, DKDV_STAGES, DQ_BLOCK_N, DQ_STAGES, STAGES
    from gem_kernels._src.gdpa.hopper_schedule import BLOCK, OTHERS, _schedule_kernel

    act = scaled_activation("fast_gelu")
    value, derivative = {"ACTIVATION": act.value}, {"ACTIVATION_DERIVATIVE": act.derivative}
    specs = []
    for name, dim in (("bf16", 64), ("bf16", 128), ("fp16", 128)):
        common = {"HAS_PRE_SCALE": True, "GROUP": 1, "D": dim, "num_warps": 4}
        specs += [
            _spec(
                f"hopper-forward-{name}-D{dim}",
                _gdpa_hopper_fwd_kernel,
                name,
                dim,
                {"q_desc": ROWS, "k_desc": BLOCK_N, "v_desc": BLOCK_N, "out_desc": ROWS},
                {**common, **value, "STAGES": STAGES[dim], "BLOCK_N": BLOCK_N},
                max_spill_bytes=16,
            ),
            _spec(
                f"hopper-dkdv-{name}-D{dim}",
                _gdpa_hopper_dkdv_kernel,
                name,
                dim,
                {"q_desc": ROWS, "do_desc": ROWS, "k_desc": TILE_ROWS, "v_desc": TILE_ROWS}
                | {"dk_desc": ROWS, "dv_desc": ROWS},
                {**common, **value, **derivative, "STAGES": DKDV_STAGES[dim]},
                # Two accumulators of 64 registers and two tiles of scores leave few for addresses.
                max_spill_bytes=224,
            ),
            _spec(
                f"hopper-dq-{name}-D{dim}",
                _gdpa_hopper_dq_kernel,
                name,
                dim,
                {"q_desc": ROWS, "do_desc": ROWS, "k_desc": DQ_BLOCK_N, "v_desc": DQ_BLOCK_N, "dq_desc": ROWS},
                {**common, **derivative, "STAGES": DQ_STAGES[dim], "BLOCK_N": DQ_BLOCK_N},
                max_spill_bytes=32,
            ),
        ]
    specs.append(
        CompileSpec(
            id="hopper-schedule",
            kernel=_schedule_kernel,
            signature={
                "offsets_q_ptr": "*i64",
                "offsets_k_ptr": "*i64",
                "chunks_ptr": "*i32",
                "num_chunks_ptr": "*i32",
                "num_sequences": "i32",
                "tile_rows": "i32",
                "resident_keys": "i32",
                "max_tiles": "i32",
            },
            constexprs={"SORTED": True, "BLOCK": BLOCK, "OTHERS": OTHERS},
            aligned=("offsets_q_ptr", "offsets_k_ptr", "chunks_ptr", "num_chunks_ptr"),
            targets=(90,),
        )
    )
    return specs


def _spec(
    spec_id: str,
    kernel: Any,
    name: str,
    dim: int,
    tiles: Mapping[str, int],
    constexprs: Mapping[str, Any],
    *,
    max_spill_bytes: int,
) -> CompileSpec:
    """A Gluon kernel whose arguments are tile descriptors (by rows), pointers, strides, head counts and scales."""
    from triton.experimental.gluon import language as gl

    dtype = {"bf16": gl.bfloat16, "fp16": gl.float16}[name]
    signature = {}
    for argument in kernel.arg_names:
        if argument in tiles:
            rows = tiles[argument]
            layout = gl.NVMMASharedLayout.get_default_for([rows, dim], dtype)
            signature[argument] = f"tensordesc<{name}[{rows}, {dim}],{layout!r}>"
        elif argument.endswith("chunks_ptr"):
            signature[argument] = "*i32"
        elif argument.endswith("_ptr"):
            signature[argument] = f"*{name}"
        elif argument not in constexprs:
            signature[argument] = "fp32" if argument.endswith("_scale") else "i32"
    return CompileSpec(
        id=spec_id,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(x for x in signature if x.endswith("_ptr") or x.startswith("stride")),
        targets=(90,),
        max_spill_bytes=max_spill_bytes,
    )
