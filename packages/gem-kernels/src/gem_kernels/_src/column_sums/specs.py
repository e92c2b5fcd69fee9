"""The sums over rows that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.column_sums.kernels import MAX_BLOCK_N, ROWS, column_sums_kernel
from gem_kernels._src.compile_spec import CompileSpec


def _spec(width: int, dtype: str) -> CompileSpec:
    return CompileSpec(
        id=f"{width}-{dtype}",
        kernel=column_sums_kernel,
        signature={"x_ptr": f"*{dtype}", "partial_ptr": "*fp32", "stride_x": "i32", "num_rows": "i32"},
        constexprs={"N": width, "ROWS": ROWS, "BLOCK_N": min(power_of_two(width), MAX_BLOCK_N)},
        aligned=("x_ptr", "partial_ptr", "stride_x"),
        num_warps=4,
        num_stages=3,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Widths of a model, and one that fills no tile."""
    return [_spec(256, "bf16"), _spec(1024, "bf16"), _spec(96, "fp32")]
