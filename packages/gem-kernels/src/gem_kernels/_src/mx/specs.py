"""The casts that the compile test builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.mx.formats import BLOCK_SHAPES, E4M3, E5M2, ElementFormat
from gem_kernels._src.mx.triton_casts import NUM_WARPS, _constexprs, _mx_dequantize_kernel, _mx_quantize_kernel


def _quantize_spec(
    fmt: ElementFormat, block_shape: tuple[int, int], dtype: str, scale_mode: str, fake: bool
) -> CompileSpec:
    name = str(fmt.dtype).removeprefix("torch.float8_")
    pointers = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}" if fake else "*u8"}
    if not fake:
        pointers["scale_ptr"] = "*u8"
    return CompileSpec(
        id=f"{'fake-' if fake else ''}quantize-{name}-{block_shape[0]}x{block_shape[1]}-{dtype}-{scale_mode}",
        kernel=_mx_quantize_kernel,
        signature={**pointers, "stride_xm": "i32", "M": "i32", "K": "i32"},
        constexprs={
            **_constexprs(fmt, block_shape),
            **({"scale_ptr": None} if fake else {}),
            "EMAX": fmt.emax,
            "RCEIL": scale_mode == "rceil",
            "FAKE": fake,
        },
        aligned=(*pointers, "stride_xm", "K"),
        num_warps=NUM_WARPS,
    )


def _dequantize_spec(fmt: ElementFormat, block_shape: tuple[int, int], dtype: str) -> CompileSpec:
    name = str(fmt.dtype).removeprefix("torch.float8_")
    return CompileSpec(
        id=f"dequantize-{name}-{block_shape[0]}x{block_shape[1]}-{dtype}",
        kernel=_mx_dequantize_kernel,
        signature={
            "qdata_ptr": "*u8",
            "scale_ptr": "*u8",
            "out_ptr": f"*{dtype}",
            "stride_qm": "i32",
            "stride_si": "i32",
            "M": "i32",
            "K": "i32",
        },
        constexprs=_constexprs(fmt, block_shape),
        aligned=("qdata_ptr", "scale_ptr", "out_ptr", "stride_qm", "K"),
        num_warps=NUM_WARPS,
    )


def compile_specs() -> Sequence[CompileSpec]:
    """Every block shape in bfloat16 and float32, and one variant each of the other formats, modes and dtypes."""
    specs = []
    for block_shape in BLOCK_SHAPES:
        for dtype in ("bf16", "fp32"):
            specs += [_quantize_spec(E4M3, block_shape, dtype, "rceil", fake) for fake in (False, True)]
            specs.append(_dequantize_spec(E4M3, block_shape, dtype))
    specs += [
        _quantize_spec(E4M3, (1, 32), "fp16", "floor", False),
        _quantize_spec(E5M2, (32, 32), "fp16", "floor", True),
        _dequantize_spec(E5M2, (1, 32), "fp16"),
    ]
    return specs
