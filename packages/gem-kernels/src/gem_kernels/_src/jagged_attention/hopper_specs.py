"""The variants of Hopper's kernels of jagged attention that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gem_kernels._src.attention.hopper.specs import hopper_spec
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.jagged_attention.hopper_launch import (
    BLOCK_N,
    DKDV_STAGES,
    DQ_BLOCK_N,
    DQ_STAGES,
    HEAD_DIM,
    STAGES,
)
from gem_kernels._src.jagged_attention.hopper_stats import BLOCK_R, _jagged_attention_hopper_stats_kernel


def compile_specs() -> Sequence[CompileSpec]:
    """The forward in both dtypes, the backward in bfloat16, both also with grouped heads."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.jagged_attention.hopper_backward import (
        _jagged_attention_hopper_dkdv_kernel,
        _jagged_attention_hopper_dq_kernel,
    )
    from gem_kernels._src.jagged_attention.hopper_forward import _jagged_attention_hopper_fwd_kernel

    specs = [
        hopper_spec(
            f"hopper-forward-{name}-group{group}",
            _jagged_attention_hopper_fwd_kernel,
            name,
            HEAD_DIM,
            {"q_desc": ROWS, "out_desc": (1, 1, ROWS, HEAD_DIM)}
            | dict.fromkeys(("k_desc", "v_desc"), (1, 1, BLOCK_N, HEAD_DIM)),
            {"GROUP": group, "STAGES": STAGES, "BLOCK_N": BLOCK_N, "D": HEAD_DIM, "num_warps": 4},
            # Between query tiles, with ptxas 12.8, which comes with Triton 3.6.
            max_spill_bytes=160,
        )
        for name, group in (("bf16", 1), ("bf16", 4), ("fp16", 1))
    ]
    for group in (1, 4):
        common = {"GROUP": group, "D": HEAD_DIM, "num_warps": 4}
        backward = [
            hopper_spec(
                f"hopper-dkdv-bf16-group{group}",
                _jagged_attention_hopper_dkdv_kernel,
                "bf16",
                HEAD_DIM,
                {"q_desc": ROWS, "do_desc": ROWS, "k_desc": TILE_ROWS, "v_desc": TILE_ROWS}
                | {"dk_desc": ROWS, "dv_desc": ROWS},
                {**common, "STAGES": DKDV_STAGES},
                # In the cleaner, and between units of work; 72 bytes with ptxas 12.8, and 80 in dq.
                max_spill_bytes=128,
            ),
            hopper_spec(
                f"hopper-dq-bf16-group{group}",
                _jagged_attention_hopper_dq_kernel,
                "bf16",
                HEAD_DIM,
                {"q_desc": ROWS, "do_desc": ROWS, "k_desc": DQ_BLOCK_N, "v_desc": DQ_BLOCK_N, "dq_desc": ROWS},
                {**common, "STAGES": DQ_STAGES, "BLOCK_N": DQ_BLOCK_N},
                max_spill_bytes=112,
            ),
        ]
        specs += [replace(spec, signature={**spec.signature, "stats_ptr": "*fp32"}) for spec in backward]
    specs += [_stats_spec(has_dlse) for has_dlse in (True, False)]
    return specs


def _stats_spec(has_dlse: bool) -> CompileSpec:
    signature = {
        "out_ptr": "*bf16",
        "do_ptr": "*bf16",
        "lse_ptr": "*fp32",
        "stats_ptr": "*fp32",
        "stride_dot": "i32",
        "stride_s": "i32",
        "num_rows": "i32",
        "num_heads": "i32",
    }
    constexprs: dict[str, int | None] = {"HAS_DLSE": has_dlse, "D": HEAD_DIM, "BLOCK_R": BLOCK_R}
    if has_dlse:
        signature["dlse_ptr"] = "*fp32"
    else:
        constexprs["dlse_ptr"] = None
    return CompileSpec(
        id="hopper-stats" + ("-dlse" if has_dlse else ""),
        kernel=_jagged_attention_hopper_stats_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(x for x in signature if x.endswith("_ptr") or x.startswith("stride")),
        targets=(90,),
    )
