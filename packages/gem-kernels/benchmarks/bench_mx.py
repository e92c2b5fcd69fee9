"""MX casts: our kernels, the same arithmetic in torch operations, and the device's copy rate.

python bench_mx.py                   # on CUDA: shapes of ranking models, JSON lines
python bench_mx.py --device cpu      # shapes of training on a laptop
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from gem_kernels._src.mx import vectorized
from gem_kernels._src.mx.formats import BLOCK_SHAPES
from gem_kernels.mx import mx_dequantize, mx_fake_quantize, mx_quantize
from gem_kernels.testing.bench import Work, compare


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A matrix to cast."""

    rows: int
    """Tokens, or outputs of a weight."""
    cols: int
    """Features."""
    dtype: torch.dtype = torch.bfloat16

    @property
    def id(self) -> str:
        """Name in the rows."""
        return f"M{self.rows}-K{self.cols}"


SHAPES = {
    "cuda": [
        Shape(rows=2048, cols=123200),
        Shape(rows=524288, cols=512),
        Shape(rows=1048576, cols=256),
        Shape(rows=8192, cols=8192, dtype=torch.float32),
    ],
    "cpu": [
        Shape(rows=8192, cols=256, dtype=torch.float32),
        Shape(rows=32768, cols=64, dtype=torch.float32),
    ],
}


def run(shape: Shape, block_shape: tuple[int, int], device: torch.device, repeats: int) -> None:
    """Check that the providers agree bit by bit, then time quantise, dequantise and the two in one."""
    torch.manual_seed(0)
    x = torch.randn(shape.rows, shape.cols, dtype=shape.dtype, device=device)
    elem_dtype, mode, dtype = torch.float8_e4m3fn, "rceil", shape.dtype
    qdata, scale = mx_quantize(x, block_shape=block_shape)
    fake = mx_fake_quantize(x, block_shape=block_shape)
    expected = vectorized.dequantize(*vectorized.quantize(x, block_shape, elem_dtype, mode), block_shape, dtype)
    if not (
        torch.equal(fake, expected)
        and torch.equal(mx_dequantize(qdata, scale, block_shape=block_shape, dtype=dtype), fake)
    ):
        raise SystemExit(f"{shape.id} {block_shape}: the providers differ: not timed")
    wide, narrow = x.numel() * x.element_size(), qdata.numel() + scale.numel()
    common = {"op": "mx", "shape": f"{shape.id}-{block_shape[0]}x{block_shape[1]}", "dtype": dtype, "flops": 0}

    def dequantize_quantized() -> torch.Tensor:
        return mx_dequantize(*mx_quantize(x, block_shape=block_shape), block_shape=block_shape, dtype=dtype)

    quantize = {"mx_quantize": lambda: mx_quantize(x, block_shape=block_shape)}
    dequantize = {"mx_dequantize": lambda: mx_dequantize(qdata, scale, block_shape=block_shape, dtype=dtype)}
    fused = {
        "mx_fake_quantize": lambda: mx_fake_quantize(x, block_shape=block_shape),
        "mx_quantize, then mx_dequantize": dequantize_quantized,
        "copy": lambda: x.clone(),
    }
    if x.is_cuda:  # on the CPU these are what ours run
        name = "torch operations"
        quantize[name] = lambda: vectorized.quantize(x, block_shape, elem_dtype, mode)
        dequantize[name] = lambda: vectorized.dequantize(qdata, scale, block_shape, dtype)
        fused[name] = lambda: vectorized.fake_quantize(x, block_shape, elem_dtype, mode)
    for direction, providers, num_bytes in (
        ("quantize", quantize, wide + narrow),
        ("dequantize", dequantize, wide + narrow),
        ("fake_quantize", fused, 2 * wide),
    ):
        compare(Work(direction=direction, num_bytes=num_bytes, **common), providers, device=device, repeats=repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    for shape in SHAPES[arguments.device]:
        for block_shape in BLOCK_SHAPES:
            run(shape, block_shape, torch.device(arguments.device), arguments.repeats)


if __name__ == "__main__":
    main()
