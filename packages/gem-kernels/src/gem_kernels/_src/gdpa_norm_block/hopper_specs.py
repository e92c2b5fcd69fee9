"""The variants of the block's kernels on Hopper that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.hopper.schedule import BLOCK, OTHERS
from gem_kernels._src.attention.hopper.specs import hopper_spec
from gem_kernels._src.compile_spec import CompileSpec


def compile_specs() -> Sequence[CompileSpec]:
    """The forward in one kernel in its forms, the backward with and without options, and the order of sequences."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.gdpa.hopper_activation import pair_activation, scaled_activation
    from gem_kernels._src.gdpa_norm_block.hopper_backward import attend_bwd_kernel, order_kernel
    from gem_kernels._src.gdpa_norm_block.hopper_forward import block_fwd_kernel
    from gem_kernels._src.gdpa_norm_block.hopper_launch import BACKWARD_STAGES, FORWARD_STAGES, HEAD_DIM

    act = scaled_activation("fast_gelu")
    pairs = pair_activation("fast_gelu", torch.bfloat16)
    assert pairs is not None
    specs = []
    dim = HEAD_DIM
    for name, heads, key_tiles, has_out, keep, options in (
        ("bf16", 4, 2, True, False, False),
        ("bf16", 4, 2, True, True, True),
        ("bf16", 4, 2, False, True, True),
        ("bf16", 2, 1, True, True, False),
        ("fp16", 4, 2, True, True, True),
    ):
        suffix = "".join(("-out" * has_out, "-keep" * keep, "-options" * options))
        in_pairs = name == "bf16"
        specs.append(
            hopper_spec(
                f"hopper-forward-{name}-H{heads}-D{dim}-K{64 * key_tiles}{suffix}",
                block_fwd_kernel,
                name,
                dim,
                dict.fromkeys(
                    ("q_desc", "k_desc", "v_desc", "out_desc", "normed_desc", "total_desc"), (1, 1, ROWS, dim)
                ),
                {
                    "ACTIVATION": pairs.value if in_pairs else act.value,
                    "IN_PAIRS": in_pairs,
                    "HAS_PRE_SCALE": options and not in_pairs,
                    "HAS_WEIGHT": options,
                    "HAS_BIAS": options,
                    "HAS_RMS_WEIGHT": options,
                    "HAS_OUT": has_out,
                    "KEEP": keep,
                    "GROUP": 1,
                    "KEY_TILES": key_tiles,
                    "STAGES": FORWARD_STAGES,
                    "H": heads,
                    "D": dim,
                    "num_warps": 4,
                },
                max_spill_bytes=0,
            )
        )
    tiles = dict.fromkeys(("x_desc", "do_desc", "k_desc", "v_desc", "dk_desc", "dv_desc"), (1, 1, ROWS, dim))
    for name, in_pairs, options in (
        ("bf16", True, False),
        ("bf16", False, True),
        ("fp16", False, True),
    ):
        specs.append(
            hopper_spec(
                f"hopper-backward-{name}-D{dim}{'-pairs' if in_pairs else ''}{'-options' if options else ''}",
                attend_bwd_kernel,
                name,
                dim,
                tiles | {"dx_desc": (1, 1, ROWS, dim // 2)},
                {
                    "ACTIVATION": pairs.value_and_slope if in_pairs else act.value,
                    "ACTIVATION_DERIVATIVE": pairs.slope if in_pairs else act.derivative,
                    "IN_PAIRS": in_pairs,
                    "HAS_PRE_SCALE": options and not in_pairs,
                    "ADD": options,
                    "STAGES": BACKWARD_STAGES,
                    "D": dim,
                    "num_warps": 4,
                },
                # Two accumulators of 64 registers beside tiles of scores, and a warpgroup with 72 registers.
                max_spill_bytes=256,
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
