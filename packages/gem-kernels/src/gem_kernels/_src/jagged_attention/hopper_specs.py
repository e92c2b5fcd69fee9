"""The variants of Hopper's kernel of jagged attention that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.attention.hopper.specs import hopper_spec
from gem_kernels._src.compile_spec import CompileSpec


def compile_specs() -> Sequence[CompileSpec]:
    """The forward in both dtypes, and with grouped heads."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.jagged_attention.hopper_forward import _jagged_attention_hopper_fwd_kernel
    from gem_kernels._src.jagged_attention.hopper_launch import BLOCK_N, HEAD_DIM, STAGES

    return [
        hopper_spec(
            f"hopper-forward-{name}-group{group}",
            _jagged_attention_hopper_fwd_kernel,
            name,
            HEAD_DIM,
            {"q_desc": ROWS, "k_desc": BLOCK_N, "v_desc": BLOCK_N, "out_desc": ROWS},
            {"GROUP": group, "STAGES": STAGES, "BLOCK_N": BLOCK_N, "D": HEAD_DIM, "num_warps": 4},
            # Between query tiles; 56 bytes with ptxas 12.8, which comes with Triton 3.6.
            max_spill_bytes=160,
        )
        for name, group in (("bf16", 1), ("bf16", 4), ("fp16", 1))
    ]
