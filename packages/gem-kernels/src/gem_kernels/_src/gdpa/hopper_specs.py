"""The variants of Hopper's kernels of GDPA that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from gem_kernels._src.attention.hopper.schedule import BLOCK, OTHERS, _schedule_kernel
from gem_kernels._src.attention.hopper.specs import hopper_spec, sums_type
from gem_kernels._src.attention.hopper.units import units_kernel
from gem_kernels._src.compile_spec import CompileSpec


def compile_specs() -> Sequence[CompileSpec]:
    """Every kernel in both head dims and dtypes, the forward in its forms, and the lists."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.gdpa.hopper_activation import pair_activation, scaled_activation
    from gem_kernels._src.gdpa.hopper_backward import _gdpa_hopper_dkdv_kernel, _gdpa_hopper_dq_kernel
    from gem_kernels._src.gdpa.hopper_backward_pairs import _gdpa_hopper_bwd_pairs_kernel
    from gem_kernels._src.gdpa.hopper_forward import _gdpa_hopper_fwd_kernel
    from gem_kernels._src.gdpa.hopper_launch import (
        BLOCK_N,
        DKDV_STAGES,
        DQ_BLOCK_N,
        DQ_STAGES,
        PAIRS_HEAD_DIM,
        PAIRS_STAGES,
        STAGES,
    )

    act = scaled_activation("fast_gelu")
    value, derivative = {"ACTIVATION": act.value}, {"ACTIVATION_DERIVATIVE": act.derivative}
    specs = []
    pairs = pair_activation("fast_gelu", torch.bfloat16)
    assert pairs is not None
    forwards = (("bf16", 64, True), ("bf16", 128, True), ("bf16", 128, False), ("fp16", 128, False))
    for (name, dim, in_pairs), (add_queries, ends) in product(forwards, ((False, False), (True, False), (False, True))):
        suffix = "".join((in_pairs * "-pairs", add_queries * "-add", ends * "-ends"))
        specs.append(
            hopper_spec(
                f"hopper-forward-{name}-D{dim}{suffix}",
                _gdpa_hopper_fwd_kernel,
                name,
                dim,
                {"q_desc": ROWS, "out_desc": ROWS} | dict.fromkeys(("k_desc", "v_desc"), (1, 1, BLOCK_N, dim)),
                {
                    "ACTIVATION": pairs.value if in_pairs else act.value,
                    "IN_PAIRS": in_pairs,
                    "HAS_PRE_SCALE": not in_pairs,
                    "ADD_QUERIES": add_queries,
                    "ENDS": ends,
                    "GROUP": 1,
                    "STAGES": STAGES[dim],
                    "BLOCK_N": BLOCK_N,
                    "D": dim,
                    "num_warps": 4,
                },
                max_spill_bytes=16,
            )
        )
    for name, dim in (("bf16", 64), ("bf16", 128), ("fp16", 128)):
        common = {"HAS_PRE_SCALE": True, "GROUP": 1, "D": dim, "num_warps": 4}
        specs += [
            hopper_spec(
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
            hopper_spec(
                f"hopper-dq-{name}-D{dim}",
                _gdpa_hopper_dq_kernel,
                name,
                dim,
                {"q_desc": ROWS, "do_desc": ROWS, "k_desc": DQ_BLOCK_N, "v_desc": DQ_BLOCK_N, "dq_desc": ROWS},
                {**common, **derivative, "STAGES": DQ_STAGES[dim], "BLOCK_N": DQ_BLOCK_N},
                max_spill_bytes=32,
            ),
        ]
    tiles: dict[str, int | tuple[int, ...]]
    tiles = dict.fromkeys(("q_desc", "do_desc", "dk_desc", "dv_desc"), (1, 1, ROWS, PAIRS_HEAD_DIM))
    tiles |= dict.fromkeys(("k_desc", "v_desc"), (1, 1, TILE_ROWS, PAIRS_HEAD_DIM))
    tiles |= {"dq_desc": (1, 1, ROWS, PAIRS_HEAD_DIM // 2), "sums_desc": (ROWS, PAIRS_HEAD_DIM // 2)}
    for group in (1, 2):
        spec = hopper_spec(
            f"hopper-backward-bf16-D128-pairs{'-grouped' if group > 1 else ''}",
            _gdpa_hopper_bwd_pairs_kernel,
            "bf16",
            PAIRS_HEAD_DIM,
            tiles,
            {
                "VALUE_AND_SLOPE": pairs.value_and_slope,
                "GROUP": group,
                "STAGES": PAIRS_STAGES,
                "D": PAIRS_HEAD_DIM,
                "num_warps": 4,
            },
            # Between units of work.
            max_spill_bytes=72,
        )
        types = {"sums_desc": sums_type(ROWS, PAIRS_HEAD_DIM // 2), "turns_ptr": "*i32", "claims_ptr": "*i32"}
        specs.append(replace(spec, signature={**spec.signature, **types}))
    specs.append(
        CompileSpec(
            id="hopper-units",
            kernel=units_kernel,
            signature={
                "offsets_q_ptr": "*i64",
                "offsets_k_ptr": "*i64",
                "order_ptr": "*i32",
                "units_ptr": "*i32",
                "num_units_ptr": "*i32",
                "num_sequences": "i32",
            },
            constexprs={"TILE_ROWS": TILE_ROWS, "ROWS": ROWS, "SIDE": 4, "OTHERS": OTHERS},
            aligned=("offsets_q_ptr", "offsets_k_ptr", "order_ptr", "units_ptr", "num_units_ptr"),
            targets=(90,),
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
            aligned=("offsets_q_ptr", "offsets_k_ptr", "chunks_ptr", "num_chunks_ptr"),
            targets=(90,),
        )
    )
    return specs
