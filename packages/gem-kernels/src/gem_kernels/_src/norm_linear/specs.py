"""The kernel variants of the linear layers with a norm that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gem_kernels._src.attention.configs import precision_of
from gem_kernels._src.attention.specs import TRITON_NAMES
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.norm_linear.configs import MAX_NORM, select, select_backward_rows, select_rows
from gem_kernels._src.norm_linear.matmul import _linear_norm_fwd_kernel, _rmsnorm_linear_fwd_kernel
from gem_kernels._src.norm_linear.rows import _norm_rows_bwd_kernel, _norm_rows_kernel
from gem_kernels._src.tables.norm_linear import MatmulConfig

_MAX_SPILL_BYTES = 896
"""Per thread, of the matmul that holds a row in two products; once per 128 rows, a fifth of what it reads."""
_FLOAT32_POINTERS = {"rrms_ptr", "rstd_ptr", "sums_ptr"}


def _spec(
    spec_id: str,
    kernel: Any,
    dtype: torch.dtype,
    constexprs: Mapping[str, Any],
    *,
    num_warps: int,
    num_stages: int = 1,
    targets: tuple[int, ...] = (90, 100),
    max_spill_bytes: int = 0,
) -> CompileSpec:
    values = {name: value for name, value in constexprs.items() if name in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        if name in values:
            continue
        if name in _FLOAT32_POINTERS:
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = f"*{TRITON_NAMES[dtype]}"
        else:
            signature[name] = "fp32" if name in ("eps", "one") else "i32"
    return CompileSpec(
        id=f"{spec_id}-{TRITON_NAMES[dtype]}",
        kernel=kernel,
        signature=signature,
        constexprs=values,
        aligned=tuple(name for name in signature if name.endswith("_ptr") or name.startswith("stride")),
        num_warps=num_warps,
        num_stages=num_stages,
        targets=targets,
        max_spill_bytes=max_spill_bytes,
    )


def _matmul_spec(
    kernel: Any,
    config: MatmulConfig,
    name: str,
    in_features: int,
    out_features: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    affine: bool = False,
    bias: bool = False,
    is_layer: bool = True,
    targets: tuple[int, ...],
) -> CompileSpec:
    constexprs = {
        "N": out_features,
        "K": in_features,
        "HAS_BIAS": bias,
        "IS_LAYER": is_layer,
        "HAS_NORM_WEIGHT": affine,
        "HAS_NORM_BIAS": affine and is_layer,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PRECISION": precision_of(dtype),
    }
    flags = ("-bias" if bias else "") + ("-affine" if affine else "") + ("" if is_layer else "-rms")
    return _spec(
        f"{name}-K{in_features}-N{out_features}{flags}" + ("-sm80" if targets == (80,) else ""),
        kernel,
        dtype,
        constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        targets=targets,
        # After the loop: the product in the layout of the matrix unit and the same in that of the stores.
        max_spill_bytes=_MAX_SPILL_BYTES if out_features > config.block_n else 64,
    )


def _row_specs(features: int, dtype: torch.dtype) -> list[CompileSpec]:
    flags = {"IS_LAYER": True, "RAW": False, "HAS_WEIGHT": True, "HAS_BIAS": True, "SUMS": True}
    plain = {"IS_LAYER": False, "RAW": True, "HAS_WEIGHT": False, "HAS_BIAS": False, "SUMS": False}
    return [
        _spec(
            f"{name}-N{features}-{kind}",
            kernel,
            dtype,
            {"N": features, "ROWS": config.rows, "BLOCK_N": config.block_n} | values,
            num_warps=config.num_warps,
            max_spill_bytes=384 if features == MAX_NORM else 32,
        )
        for name, kernel, config in (
            ("rows", _norm_rows_kernel, select_rows(features)),
            ("rows-backward", _norm_rows_bwd_kernel, select_backward_rows(features)),
        )
        for kind, values in (("affine", flags), ("plain", plain))
    ]


def compile_specs() -> Sequence[CompileSpec]:
    """Matmuls with and without masks and options; row kernels narrow, wide and of the widest row."""
    specs = []
    variants: tuple[dict[str, Any], ...]
    for target in (80, 90, 100):
        for in_features, out_features, variants in (
            (512, 512, ({}, {"affine": True}, {"is_layer": False})),
            (200, 384, ({"affine": True},)),
            (256, 64, ({},)),
        ):
            options: dict[str, Any] = {"bias": in_features != 512, "targets": (target,)}
            config = select("rmsnorm_linear", in_features, out_features, (target // 10, 0))
            specs.append(
                _matmul_spec(_rmsnorm_linear_fwd_kernel, config, "rmsnorm_linear", in_features, out_features, **options)
            )
            config = select("linear_norm", in_features, out_features, (target // 10, 0))
            specs += [
                _matmul_spec(
                    _linear_norm_fwd_kernel, config, "linear_norm", in_features, out_features, **(options | variant)
                )
                for variant in variants
            ]
    for features in (64, 512, 1000, 16384):
        specs += _row_specs(features, torch.bfloat16)
    return specs + _row_specs(512, torch.float32)
