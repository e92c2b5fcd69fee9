"""The variants of Hopper's kernels of jagged attention that the compile test builds without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gem_kernels._src.attention.hopper.order import order_by_work_kernel
from gem_kernels._src.attention.hopper.schedule import BLOCK, OTHERS
from gem_kernels._src.attention.hopper.specs import hopper_spec, sums_type
from gem_kernels._src.attention.hopper.window_schedule import _window_schedule_kernel
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.jagged_attention.hopper_launch import (
    BACKWARD_HEAD_DIMS,
    BLOCK_N,
    DKDV_STAGES,
    DQ_BLOCK_N,
    DQ_STAGES,
    HEAD_DIM,
    ONEPASS_STAGES,
    STAGES,
    WINDOW_BLOCK_N,
    WINDOW_STAGES,
)
from gem_kernels._src.jagged_attention.hopper_stats import BLOCK_R, _jagged_attention_hopper_stats_kernel


def compile_specs() -> Sequence[CompileSpec]:
    """The forward in both dtypes, the backward's two forms in bfloat16, all also with grouped heads."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.jagged_attention.hopper_forward import _jagged_attention_hopper_fwd_kernel
    from gem_kernels._src.jagged_attention.hopper_onepass import _jagged_attention_hopper_onepass_kernel
    from gem_kernels._src.jagged_attention.hopper_window_forward import _jagged_attention_hopper_window_fwd_kernel

    key_tile, row_tile = (1, 1, BLOCK_N, HEAD_DIM), (1, 1, ROWS, HEAD_DIM)
    specs = [
        hopper_spec(
            f"hopper-forward-{name}-group{group}{'-rests' if rests else ''}",
            _jagged_attention_hopper_fwd_kernel,
            name,
            HEAD_DIM,
            {"q_desc": ROWS, "k_desc": key_tile, "v_desc": key_tile, "out_desc": row_tile},
            {
                "RESTS": rests,
                "GROUP": group,
                "STAGES": STAGES,
                "BLOCK_N": BLOCK_N,
                "D": HEAD_DIM,
                "num_warps": 4,
            },
            max_spill_bytes=0,
        )
        for name, group in (("bf16", 1), ("bf16", 4), ("fp16", 1))
        for rests in (False, True)
    ]
    window_tile = (1, 1, WINDOW_BLOCK_N, HEAD_DIM)
    for name, group in (("bf16", 1), ("bf16", 4), ("fp16", 1)):
        spec = hopper_spec(
            f"hopper-window-forward-{name}-group{group}",
            _jagged_attention_hopper_window_fwd_kernel,
            name,
            HEAD_DIM,
            {"q_desc": ROWS, "k_desc": window_tile, "v_desc": window_tile, "out_desc": row_tile},
            {"GROUP": group, "STAGES": WINDOW_STAGES, "BLOCK_N": WINDOW_BLOCK_N, "D": HEAD_DIM, "num_warps": 4},
            max_spill_bytes=0,
        )
        specs.append(replace(spec, signature={**spec.signature, "shifts_ptr": "*i32"}))
    for dim, group, window in itertools.product(BACKWARD_HEAD_DIMS, (1, 4), (False, True)):
        if dim == HEAD_DIM or group == 1:
            specs += _backward_specs(dim, group, window=window)
    onepass_tiles: dict[str, int | tuple[int, ...]] = dict.fromkeys(
        ("q_desc", "do_desc", "dk_desc", "dv_desc"), row_tile
    )
    onepass_tiles |= dict.fromkeys(("k_desc", "v_desc"), (1, 1, TILE_ROWS, HEAD_DIM))
    onepass_tiles |= {"dq_desc": (1, 1, ROWS, HEAD_DIM // 2), "sums_desc": (ROWS, HEAD_DIM // 2)}
    for group in (1, 4):
        onepass = hopper_spec(
            f"hopper-onepass-bf16-group{group}",
            _jagged_attention_hopper_onepass_kernel,
            "bf16",
            HEAD_DIM,
            onepass_tiles,
            {"GROUP": group, "D": HEAD_DIM, "num_warps": 4, "STAGES": ONEPASS_STAGES},
            # Between units of work, with ptxas 12.8.
            max_spill_bytes=64,
        )
        types = {"stats_ptr": "*fp32", "turns_ptr": "*i32", "claims_ptr": "*i32"}
        types["sums_desc"] = sums_type(ROWS, HEAD_DIM // 2)
        specs.append(replace(onepass, signature={**onepass.signature, **types}))
    specs += [_stats_spec(has_dlse) for has_dlse in (True, False)]
    return specs + _helpers()


def _backward_specs(dim: int, group: int, *, window: bool) -> list[CompileSpec]:
    """The two kernels of the backward."""
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.jagged_attention.hopper_backward import (
        _jagged_attention_hopper_dkdv_kernel,
        _jagged_attention_hopper_dq_kernel,
    )

    common = {"GROUP": group, "D": dim, "HAS_WINDOW": window, "num_warps": 4}
    suffix = f"{dim}-group{group}{'-window' if window else ''}"
    row_tile, key_tile = (1, 1, ROWS, dim), (1, 1, DQ_BLOCK_N, dim)
    of_keys: dict[str, int | tuple[int, ...]] = dict.fromkeys(("q_desc", "do_desc", "k_desc", "v_desc"), ROWS)
    of_keys |= dict.fromkeys(("q_end_desc", "do_end_desc", "dk_desc", "dv_desc"), row_tile)
    of_queries: dict[str, int | tuple[int, ...]] = {"q_desc": ROWS, "do_desc": ROWS, "dq_desc": row_tile}
    of_queries |= {"k_desc": DQ_BLOCK_N, "v_desc": DQ_BLOCK_N, "k_end_desc": key_tile, "v_end_desc": key_tile}
    specs = [
        hopper_spec(
            f"hopper-dkdv-bf16-{suffix}",
            _jagged_attention_hopper_dkdv_kernel,
            "bf16",
            dim,
            of_keys,
            {**common, "STAGES": DKDV_STAGES[dim]},
            # Between units of work, with ptxas 12.8.
            max_spill_bytes=0 if dim < HEAD_DIM else 112 if window else 32,
        ),
        hopper_spec(
            f"hopper-dq-bf16-{suffix}",
            _jagged_attention_hopper_dq_kernel,
            "bf16",
            dim,
            of_queries,
            {**common, "STAGES": DQ_STAGES[dim], "BLOCK_N": DQ_BLOCK_N},
            max_spill_bytes=0,
        ),
    ]
    types = {"stats_ptr": "*fp32", "shifts_ptr": "*i32"}
    return [replace(spec, signature={**spec.signature, **types}) for spec in specs]


def _helpers() -> list[CompileSpec]:
    """Units of work of windows, and the order of those of the backward in one kernel, whose list gdpa compiles."""
    offsets = {"offsets_q_ptr": "*i64", "offsets_k_ptr": "*i64"}
    count = {"num_sequences": "i32"}
    kernels: list[tuple[str, Any, dict[str, str], dict[str, int | bool]]] = [
        (
            f"hopper-order{'-sorted' if is_sorted else ''}",
            order_by_work_kernel,
            {**offsets, "order_ptr": "*i32", **count},
            {"SORTED": is_sorted, "BLOCK": BLOCK, "OTHERS": OTHERS // 2},
        )
        for is_sorted in (True, False)
    ]
    kernels += [
        (
            f"hopper-window-schedule{'-sorted' if is_sorted else ''}",
            _window_schedule_kernel,
            {"offsets_ptr": "*i64", "other_offsets_ptr": "*i64", "chunks_ptr": "*i32", "num_chunks_ptr": "*i32"}
            | {"shifts_ptr": "*i32", "left": "i32", "right": "i32", "tile_rows": "i32", **count},
            {"SORTED": is_sorted, "BLOCK": BLOCK, "OTHERS": OTHERS},
        )
        for is_sorted in (True, False)
    ]
    return [
        CompileSpec(
            id=name,
            kernel=kernel,
            signature=signature,
            constexprs=constexprs,
            aligned=tuple(x for x in signature if x.endswith("_ptr") or x.startswith("stride")),
            targets=(90,),
        )
        for name, kernel, signature, constexprs in kernels
    ]


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
