"""The variants of Hopper's matmuls with a norm that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gem_kernels._src.attention.hopper.specs import hopper_spec
from gem_kernels._src.compile_spec import CompileSpec


def compile_specs() -> Sequence[CompileSpec]:
    """Both kernels at the usual width with and without options, and on one narrow tile."""
    # Imported here: only the compile test and CUDA launches need Gluon.
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.norm_linear.hopper_backward import _dweight_hopper_kernel, _dx_hopper_kernel
    from gem_kernels._src.norm_linear.hopper_launch import (
        BLOCK_K,
        DWEIGHT_BLOCK_N,
        DWEIGHT_STAGES,
        DX_BLOCK_N,
        DX_STAGES,
        STAGES,
        columns_of,
    )
    from gem_kernels._src.norm_linear.hopper_matmul import _linear_norm_hopper_kernel, _rmsnorm_linear_hopper_kernel

    specs = []
    for name, in_features, out_features in (("bf16", 512, 512), ("fp16", 512, 512), ("bf16", 256, 64)):
        block_n = columns_of(out_features)
        assert block_n is not None
        tiles: dict[str, int | tuple[int, int]] = {"x_desc": TILE_ROWS, "w_desc": block_n, "out_desc": (ROWS, block_n)}
        common = {"N": out_features, "K": in_features, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K, "STAGES": STAGES}
        common["num_warps"] = 4
        for options in (False, True):
            suffix = f"{name}-K{in_features}-N{out_features}{'-options' if options else ''}"
            specs.append(
                hopper_spec(
                    f"hopper-rmsnorm_linear-{suffix}",
                    _rmsnorm_linear_hopper_kernel,
                    name,
                    BLOCK_K,
                    tiles,
                    common | {"HAS_BIAS": options},
                    max_spill_bytes=64,
                )
            )
            for is_layer in (True, False):
                specs.append(
                    hopper_spec(
                        f"hopper-linear_norm-{suffix}{'' if is_layer else '-rms'}",
                        _linear_norm_hopper_kernel,
                        name,
                        BLOCK_K,
                        tiles | {"unit_desc": (ROWS, block_n)},
                        common
                        | dict.fromkeys(("HAS_BIAS", "HAS_NORM_WEIGHT"), options)
                        | {"IS_LAYER": is_layer, "HAS_NORM_BIAS": options and is_layer},
                        # A product of 128 registers, and one number per column for each option: once per tile.
                        max_spill_bytes=176 if options else 64,
                    )
                )
    for name, in_features, out_features in (("bf16", 512, 512), ("fp16", 512, 512), ("bf16", 128, 128)):
        suffix, half = f"{name}-K{in_features}-N{out_features}", in_features // 2
        specs.append(
            hopper_spec(
                f"hopper-rmsnorm_linear-dx-{suffix}",
                _dx_hopper_kernel,
                name,
                half,
                {
                    "dout_desc": (ROWS, DX_BLOCK_N),
                    "w_desc": (DX_BLOCK_N, half),
                    "x_desc": (ROWS, half),
                    "dx_desc": (ROWS, half),
                },
                {"N": out_features, "HALF": half, "BLOCK_N": DX_BLOCK_N, "STAGES": DX_STAGES, "num_warps": 4},
                max_spill_bytes=0,
            )
        )
        dweight = hopper_spec(
            f"hopper-rmsnorm_linear-dweight-{suffix}",
            _dweight_hopper_kernel,
            name,
            half,
            {"dout_desc": (ROWS, DWEIGHT_BLOCK_N), "x_desc": (ROWS, min(256, in_features))},
            {
                "N": out_features,
                "K": in_features,
                "BLOCK_N": DWEIGHT_BLOCK_N,
                "BLOCK_K": min(256, in_features),
                "STAGES": DWEIGHT_STAGES,
                "num_warps": 4,
            },
            max_spill_bytes=0,
        )
        specs.append(replace(dweight, signature={**dweight.signature, "sums_ptr": "*fp32"}))
    return specs
