"""The kernel variants of block attention that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.configs import precision_of
from gem_kernels._src.block_attention.backward import _block_attention_bwd_kernel
from gem_kernels._src.block_attention.configs import Direction, select
from gem_kernels._src.block_attention.forward import _block_attention_fwd_kernel
from gem_kernels._src.compile_spec import CompileSpec

_KERNELS = {"forward": _block_attention_fwd_kernel, "backward": _block_attention_bwd_kernel}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# (block size, D, query heads per key head): every chunking and warp count of ``select``, a head dim that is not a power
# of two, and grouped heads, whose key gradients are float32.
_SHAPES: dict[Direction, tuple[tuple[int, int, int], ...]] = {
    "forward": ((32, 16, 1), (64, 96, 1), (64, 128, 1), (64, 256, 1), (128, 256, 1)),
    "backward": (
        (32, 128, 1),
        (64, 32, 1),
        (64, 96, 1),
        (64, 128, 1),
        (64, 128, 2),
        (64, 256, 1),
        (128, 64, 1),
        (128, 128, 1),
        (128, 256, 1),
    ),
}


def _spec(
    direction: Direction,
    dtype: torch.dtype,
    block_size: int,
    head_dim: int,
    group: int,
    *,
    head_dim_v: int | None = None,
    single_head: bool = False,
    rotary: bool = False,
    targets: tuple[int, ...] = (90, 100),
    max_spill_bytes: int = 0,
) -> CompileSpec:
    dim_v = head_dim if head_dim_v is None else head_dim_v
    config = select(direction, dtype, block_size, head_dim, dim_v, rotary=rotary)
    kernel = _KERNELS[direction]
    constexprs = {
        "GROUP": group,
        "D": head_dim,
        "D_V": dim_v,
        "BLOCK": block_size,
        "BLOCK_D": config.block_d,
        "BLOCK_DV": config.block_dv,
        "ROTARY": rotary,
        "PRECISION": precision_of(dtype),
    }
    if single_head:
        constexprs["num_heads"] = 1
    signature = {}
    for name in kernel.arg_names:
        if name in constexprs:
            continue
        if name == "offsets_ptr":
            signature[name] = "*i64"
        elif name == "table_ptr" or (name in ("dk_ptr", "dv_ptr") and group > 1):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = f"*{_NAMES[dtype]}"
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
    shape = f"block{block_size}-D{head_dim}" + (f"-Dv{dim_v}" if dim_v != head_dim else "")
    suffix = f"-group{group}" if group > 1 else "-head1" if single_head else "-sm80" if targets == (80,) else ""
    suffix += "-rotary" if rotary else ""
    return CompileSpec(
        id=f"{direction}-{_NAMES[dtype]}-{shape}{suffix}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(name for name in signature if name.endswith("_ptr") or name.startswith("stride")),
        num_warps=config.num_warps,
        num_stages=1,
        targets=targets,
        max_spill_bytes=max_spill_bytes,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Forward and backward in bfloat16, and one shape of each in float16, whose code differs in the dtype only.

    That one has a single head, which Triton makes a constant of the kernel. Values narrower than keys are chunked
    with them.
    sm_80 has its own matrix instructions and less shared memory: the usual shape is built for it too, and its
    backward may spill a few registers. So may the rotation of the widest tiles.
    """
    specs = []
    for direction, shapes in _SHAPES.items():
        specs += [_spec(direction, torch.bfloat16, *shape) for shape in shapes]
        specs.append(_spec(direction, torch.float16, 64, 64, 1, single_head=True))
        specs.append(_spec(direction, torch.bfloat16, 64, 128, 1, targets=(80,), max_spill_bytes=64))
        specs.append(_spec(direction, torch.bfloat16, 64, 64, 1, head_dim_v=32))
        specs.append(_spec(direction, torch.bfloat16, 64, 256, 1, head_dim_v=32))
        specs += [
            _spec(direction, torch.bfloat16, block_size, head_dim, 1, rotary=True, max_spill_bytes=spill)
            for block_size, head_dim, spill in (
                (32, 32, 0),
                (64, 64, 0),
                (64, 96, 0),
                (64, 128, 0),
                (64, 256, 128),
                (128, 128, 128),
            )
        ]
    return specs
