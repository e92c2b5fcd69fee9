"""The variants of the block's attention on Hopper that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.attention.hopper.specs import hopper_spec
from gem_kernels._src.compile_spec import CompileSpec


def compile_specs() -> Sequence[CompileSpec]:
    """The backward with and without options, and its order of sequences; the forward is GDPA's."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.gdpa.hopper_activation import scaled_activation
    from gem_kernels._src.gdpa_norm_block.hopper_backward import BLOCK, OTHERS, attend_bwd_kernel, order_kernel
    from gem_kernels._src.gdpa_norm_block.hopper_launch import BACKWARD_HEAD_DIM, BACKWARD_KV_STAGES, BACKWARD_STAGES

    act = scaled_activation("fast_gelu")
    specs = []
    dim = BACKWARD_HEAD_DIM
    for name, options in (("bf16", False), ("bf16", True), ("fp16", True)):
        specs.append(
            hopper_spec(
                f"hopper-backward-{name}-D{dim}{'-options' if options else ''}",
                attend_bwd_kernel,
                name,
                dim,
                dict.fromkeys(("x_desc", "do_desc", "dk_desc", "dv_desc"), ROWS)
                | dict.fromkeys(("k_desc", "v_desc"), TILE_ROWS)
                | {"dx_desc": (ROWS, dim // 2)},
                {
                    "ACTIVATION": act.value,
                    "ACTIVATION_DERIVATIVE": act.derivative,
                    "HAS_PRE_SCALE": options,
                    "ADD": options,
                    "STAGES": BACKWARD_STAGES,
                    "KV_STAGES": BACKWARD_KV_STAGES,
                    "D": dim,
                    "num_warps": 4,
                },
                # Two accumulators of 64 registers beside two tiles of scores, and a third accumulator after them.
                max_spill_bytes=448,
            )
        )
    specs += [
        CompileSpec(
            id=f"hopper-order{'' if is_sorted else '-as-they-come'}",
            kernel=order_kernel,
            signature={
                "offsets_q_ptr": "*i64",
                "offsets_k_ptr": "*i64",
                "chunks_ptr": "*i32",
                "num_sequences": "i32",
            },
            constexprs={"SORTED": is_sorted, "BLOCK": BLOCK, "OTHERS": OTHERS},
            aligned=("offsets_q_ptr", "offsets_k_ptr", "chunks_ptr"),
            targets=(90,),
            max_spill_bytes=16,
        )
        for is_sorted in (True, False)
    ]
    return specs
