"""The variants of Hopper's forward of GDPA that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.compile_spec import CompileSpec


def compile_specs() -> Sequence[CompileSpec]:
    """Both head dims and both dtypes, and the kernel that cuts a batch into chunks."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from triton.experimental.gluon import language as gl

    from gem_kernels._src.gdpa.hopper_forward import ROWS, _gdpa_hopper_fwd_kernel
    from gem_kernels._src.gdpa.hopper_launch import BLOCK_N, STAGES
    from gem_kernels._src.gdpa.hopper_schedule import BLOCK, OTHERS, _schedule_kernel
    from gem_kernels._src.tiles.activation import activation_pair

    specs = []
    for name, dtype, dim in (("bf16", gl.bfloat16, 64), ("bf16", gl.bfloat16, 128), ("fp16", gl.float16, 128)):

        def descriptor(rows: int, name: str = name, dtype: gl.dtype = dtype, dim: int = dim) -> str:
            layout = gl.NVMMASharedLayout.get_default_for([rows, dim], dtype)
            return f"tensordesc<{name}[{rows}, {dim}],{layout!r}>"

        specs.append(
            CompileSpec(
                id=f"hopper-forward-{name}-D{dim}",
                kernel=_gdpa_hopper_fwd_kernel,
                signature={
                    "q_desc": descriptor(ROWS),
                    "k_desc": descriptor(BLOCK_N),
                    "v_desc": descriptor(BLOCK_N),
                    "out_desc": descriptor(ROWS),
                    "out_ptr": f"*{name}",
                    "stride_ot": "i32",
                    "chunks_ptr": "*i32",
                    "num_chunks_ptr": "*i32",
                    "num_heads": "i32",
                    "pre_scale": "fp32",
                    "post_scale": "fp32",
                },
                constexprs={
                    "ACTIVATION": activation_pair("fast_gelu", hardware=True).value,
                    "HAS_PRE_SCALE": True,
                    "GROUP": 1,
                    "STAGES": STAGES[dim],
                    "BLOCK_N": BLOCK_N,
                    "D": dim,
                    "num_warps": 4,
                },
                aligned=("out_ptr", "stride_ot", "chunks_ptr", "num_chunks_ptr"),
                targets=(90,),
                # Of the roles that copy and clean, outside their loops.
                max_spill_bytes=16,
            )
        )
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
            aligned=("offsets_q_ptr", "offsets_k_ptr", "chunks_ptr", "num_chunks_ptr", "tile_rows"),
            targets=(90,),
        )
    )
    return specs
