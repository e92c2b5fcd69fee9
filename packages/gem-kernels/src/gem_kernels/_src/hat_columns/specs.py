"""The columns of events that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.hat_columns.kernel import constants, hat_columns_kernel


def _spec(num_dense: int, age_knots: int, recency_knots: int, width: int) -> CompileSpec:
    constexprs = constants(num_dense, age_knots, recency_knots, width)
    types = {
        "dense_ptr": "*fp32",
        "age_ptr": "*fp32",
        "offsets_ptr": "*i64",
        "out_ptr": "*fp32",
        "num_tiles": "i32",
        "largest_age": "fp32",
        "largest_recency": "fp32",
    }
    return CompileSpec(
        id=f"{num_dense}-{age_knots}-{recency_knots}-of-{width}",
        kernel=hat_columns_kernel,
        signature=types,
        constexprs=constexprs,
        aligned=tuple(name for name in types if name.endswith("_ptr")),
        num_warps=4,
        num_stages=1,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """With and without numbers of their own, and columns of zeros."""
    return [_spec(1, 16, 12, 32), _spec(0, 16, 12, 28), _spec(5, 2, 40, 48)]
