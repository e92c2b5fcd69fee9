"""The joins that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.join_columns.kernels import MAX_PARTS, ROWS, join_columns_kernel


def _spec(widths: Sequence[int], parts: Sequence[str | None], joined: str, *, apart: bool) -> CompileSpec:
    absent = MAX_PARTS - len(widths)
    types = [*parts, *(None,) * absent]
    pointers = {f"part{index}_ptr": f"*{name}" for index, name in enumerate(types) if name is not None}
    constexprs: dict[str, object] = {f"part{index}_ptr": None for index, name in enumerate(types) if name is None}
    constexprs |= {f"W{index}": width for index, width in enumerate([*widths, *(1,) * absent])}
    return CompileSpec(
        id=f"{'apart' if apart else 'join'}-{'-'.join(map(str, widths))}-{joined}",
        kernel=join_columns_kernel,
        signature={"joined_ptr": f"*{joined}", **pointers, "stride_joined": "i32", "num_rows": "i32"},
        constexprs={**constexprs, "ROWS": ROWS, "APART": apart},
        aligned=("joined_ptr", *pointers, "stride_joined"),
        num_warps=4,
        num_stages=1,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Embeddings and numbers of events, both ways, and the most parts."""
    return [
        _spec((64, 64, 64, 32), ("fp32",) * 4, "bf16", apart=False),
        _spec((64, 64, 64, 32), ("fp32", "fp32", "fp32", None), "bf16", apart=True),
        _spec((32,) * 7 + (29,), ("bf16",) * 7 + ("fp32",), "fp16", apart=False),
    ]
