"""The variants of Hopper's kernel of jagged attention that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.compile_spec import CompileSpec


def compile_specs() -> Sequence[CompileSpec]:
    """The forward in both dtypes, and with grouped heads."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from triton.experimental.gluon import language as gl

    from gem_kernels._src.gdpa.hopper_forward import ROWS
    from gem_kernels._src.jagged_attention.hopper_forward import _jagged_attention_hopper_fwd_kernel
    from gem_kernels._src.jagged_attention.hopper_launch import BLOCK_N, HEAD_DIM, STAGES

    def tile(name: str, rows: int) -> str:
        dtype = {"bf16": gl.bfloat16, "fp16": gl.float16}[name]
        layout = gl.NVMMASharedLayout.get_default_for([rows, HEAD_DIM], dtype)
        return f"tensordesc<{name}[{rows}, {HEAD_DIM}],{layout!r}>"

    specs = []
    for name, group in (("bf16", 1), ("bf16", 4), ("fp16", 1)):
        signature = {
            "q_desc": tile(name, ROWS),
            "k_desc": tile(name, BLOCK_N),
            "v_desc": tile(name, BLOCK_N),
            "out_desc": tile(name, ROWS),
            "out_ptr": f"*{name}",
            "stride_ot": "i32",
            "lse_ptr": "*fp32",
            "chunks_ptr": "*i32",
            "num_chunks_ptr": "*i32",
            "num_heads": "i32",
            "scale_log2": "fp32",
        }
        specs.append(
            CompileSpec(
                id=f"hopper-forward-{name}-group{group}",
                kernel=_jagged_attention_hopper_fwd_kernel,
                signature=signature,
                constexprs={"GROUP": group, "STAGES": STAGES, "BLOCK_N": BLOCK_N, "D": HEAD_DIM, "num_warps": 4},
                aligned=("out_ptr", "stride_ot", "lse_ptr", "chunks_ptr", "num_chunks_ptr"),
                targets=(90,),
                # Between query tiles; 56 bytes with ptxas 12.8, which comes with Triton 3.6.
                max_spill_bytes=160,
            )
        )
    return specs
