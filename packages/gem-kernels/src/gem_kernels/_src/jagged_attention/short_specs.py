"""Short windows and few queries as the compile test builds them without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gem_kernels._src.attention.configs import TileConfig
from gem_kernels._src.attention.specs import attention_spec
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.jagged_attention.short import FEW_QUERIES, WINDOW
from gem_kernels._src.jagged_attention.specs import _KERNELS, _bias_flags, _with_types
from gem_kernels._src.tables.attention import Kernel, Sizes


def _spec(kernel: Kernel, dim: int, sizes: Sizes, target: int, *, window: bool) -> CompileSpec:
    block_m, block_n, num_warps, num_stages = sizes
    return _with_types(
        attention_spec(
            f"{kernel}-{'window' if window else 'few'}-short-{dim}-sm{target}",
            _KERNELS[kernel],
            TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages),
            torch.bfloat16,
            dim,
            target=target,
            constexprs={"WRITE_DQ": False, "BROADCAST_Q": False, **_bias_flags("none")},
            window=window,
            search=False,
            indices=(),
        )
    )


def compile_specs() -> Sequence[CompileSpec]:
    """All tiles of both tables."""
    return [
        _spec(kernel, dim, sizes, target, window=window)
        for window, tables in ((True, WINDOW), (False, FEW_QUERIES))
        for dim, table in tables.items()
        for kernel, sizes in table.items()
        for target in (90, 100)
    ]
