"""From a Gluon kernel and its tiles to the variant that the compile test builds for Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gem_kernels._src.compile_spec import CompileSpec

_TYPES = dict.fromkeys(("chunks_ptr", "num_chunks_ptr", "units_ptr", "num_units_ptr"), "*i32") | dict.fromkeys(
    ("lse_ptr", "mean_ptr", "rstd_ptr", "rrms_ptr"), "*fp32"
)
"""Of pointers that do not point to elements of q."""


def sums_type(rows: int, columns: int) -> str:
    """Type of the descriptor of float32 sums in tiles (rows, columns)."""
    from triton.experimental.gluon import language as gl

    block = [rows, columns]
    return f"tensordesc<fp32{block},{gl.NVMMASharedLayout.get_default_for(block, gl.float32)!r}>"


def hopper_spec(
    spec_id: str,
    kernel: Any,
    name: str,
    dim: int,
    tiles: Mapping[str, int | tuple[int, ...]],
    constexprs: Mapping[str, Any],
    *,
    max_spill_bytes: int,
) -> CompileSpec:
    """A Gluon kernel whose arguments are tile descriptors, pointers, strides, counts, scales and ``eps``.

    ``tiles`` says their rows, of ``dim`` columns, or their shape. ``name`` is the dtype in Triton's notation, bf16 or
    fp16.
    """
    # Imported here: only the compile test needs Gluon.
    from triton.experimental.gluon import language as gl

    dtype = {"bf16": gl.bfloat16, "fp16": gl.float16}[name]
    signature = {}
    for argument in kernel.arg_names:
        if argument in tiles:
            size = tiles[argument]
            shape = [size, dim] if isinstance(size, int) else list(size)
            layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
            signature[argument] = f"tensordesc<{name}{shape},{layout!r}>"
        elif argument.endswith("_ptr"):
            signature[argument] = _TYPES.get(argument, f"*{name}")
        elif argument not in constexprs:
            signature[argument] = "fp32" if "scale" in argument or argument == "eps" else "i32"
    return CompileSpec(
        id=spec_id,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(x for x in signature if x.endswith("_ptr") or x.startswith("stride")),
        targets=(90,),
        max_spill_bytes=max_spill_bytes,
    )
