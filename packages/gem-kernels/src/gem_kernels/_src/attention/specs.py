"""From a kernel, its tile configuration and its flags to the variant that the compile test builds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from gem_kernels._src.attention.configs import (
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_DQDKDV,
    TileConfig,
    power_of_two,
    precision_of,
)
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.tables.attention import CANDIDATES, Kernel

TRITON_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_MAX_SPILL_BYTES = 160
"""Per thread: the largest tiles hold two accumulators and spill up to 40 registers; smaller ones read more memory."""
_FLOAT32_POINTERS = {"partial_ptr", "lse_ptr", "dlse_ptr", "delta_ptr"}
_INDEX_POINTERS = {"request_index_ptr", "request_starts_ptr", "num_targets_ptr"}
"""Absent, None, unless a variant asks for them."""
_FLOATS = {"scale", "scale_log2", "pre_scale", "post_scale"}


def alternatives(
    select: Callable[[Kernel, int, torch.dtype, tuple[int, int]], TileConfig],
) -> Iterator[tuple[int, Kernel, int, str, TileConfig]]:
    """(target, kernel, head dim, name, tiles) of all that tuning may choose in the place of an op's defaults."""
    for target in (90, 100):
        for kernel, by_dim in CANDIDATES.items():
            for dim in by_dim:
                tunable = select(kernel, dim, torch.bfloat16, (target // 10, 0)).tunable
                assert tunable is not None
                for number, config in enumerate(tunable.others):
                    yield target, kernel, dim, f"{kernel}-{dim}-candidate-{number}", config


def attention_spec(
    spec_id: str,
    kernel: Any,
    config: TileConfig,
    dtype: torch.dtype,
    head_dim: int,
    *,
    target: int,
    constexprs: Mapping[str, Any],
    window: bool = False,
    search: bool = False,
    indices: Collection[str] = (),
) -> CompileSpec:
    """Variant of a packed attention kernel with D = D_v = ``head_dim`` and one query head per key head.

    ``indices`` are the optional index pointers that the variant takes, such as ``request_index_ptr``.
    """
    values: dict[str, Any] = {
        **dict.fromkeys(_INDEX_POINTERS - set(indices)),
        "GROUP": 1,
        "D": head_dim,
        "D_V": head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": power_of_two(head_dim),
        "BLOCK_DV": power_of_two(head_dim),
        "HAS_LEFT": window,
        "HAS_RIGHT": window,
        "SEARCH": search,
        "PRECISION": precision_of(dtype),
        **constexprs,
    }
    values = {name: value for name, value in values.items() if name in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        if name in values:
            continue
        if name in _FLOAT32_POINTERS:
            signature[name] = "*fp32"
        elif name in _INDEX_POINTERS or name.endswith("offsets_ptr") or name.startswith("offsets"):
            signature[name] = "*i64"
        elif name.endswith("_ptr"):
            signature[name] = f"*{TRITON_NAMES[dtype]}"
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
    aligned = tuple(name for name in signature if name.endswith("_ptr") or name.startswith("stride_"))
    return CompileSpec(
        id=spec_id,
        kernel=kernel,
        signature=signature,
        constexprs=values,
        aligned=aligned,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        targets=(target,),
        max_spill_bytes=_MAX_SPILL_BYTES,
    )


def compiled_sizes(kernel: Kernel) -> list[tuple[torch.dtype, int]]:
    """(dtype, head dim) that between them use every entry of the tile tables, and a head dim that needs padding."""
    half = [(torch.bfloat16, dim) for dim in (64, 96, 128, 256)]
    full = [(torch.float32, dim) for dim in (32, 128)]
    limit = MAX_HEAD_DIM_DQDKDV if kernel == "dqdkdv" else MAX_HEAD_DIM
    return [(dtype, dim) for dtype, dim in half + full if dim <= limit]
