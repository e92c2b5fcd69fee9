"""Linear layers with a norm before or after them: ours, torch's eager and compiled, and the linear layer alone.

python bench_norm_linear.py                       # on CUDA: the published shape and others, JSON lines
python bench_norm_linear.py --tune linear_norm    # every candidate tile of one kernel
python bench_norm_linear.py --device cpu          # a shape of training on a laptop

The ratio to quote is that of the times of one shape: "torch compiled" over ours, and ours over "linear alone". On
Hopper the op is timed twice, with its own matmul and with the portable one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.nn import functional

from gem_kernels import linear_norm, rmsnorm_linear
from gem_kernels._src.attention.hopper.launch import portable_only
from gem_kernels._src.norm_linear.configs import candidates, override
from gem_kernels.testing import max_error
from gem_kernels.testing.bench import Work, compare


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """x (rows, in_features), weight (out_features, in_features)."""

    rows: int
    in_features: int
    out_features: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def id(self) -> str:
        """Name in the rows."""
        return f"M{self.rows}-K{self.in_features}-N{self.out_features}"


SHAPES = {
    "cuda": [
        Shape(rows=262144, in_features=512, out_features=512),
        Shape(rows=262144, in_features=256, out_features=256),
        Shape(rows=262144, in_features=512, out_features=1024),
        Shape(rows=65536, in_features=1024, out_features=512),
    ],
    "cpu": [Shape(rows=8192, in_features=128, out_features=128, dtype=torch.float32)],
}
Layer = Callable[[Tensor, Tensor], Tensor]


def _pre(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(functional.rms_norm(x, x.shape[-1:], eps=1e-6), weight)


def _post(x: Tensor, weight: Tensor) -> Tensor:
    return functional.layer_norm(functional.linear(x, weight), weight.shape[:1], eps=1e-5)


OPS: dict[str, tuple[Layer, Layer]] = {"rmsnorm_linear": (rmsnorm_linear, _pre), "linear_norm": (linear_norm, _post)}


def portable(layer: Layer) -> Layer:
    """The layer by the matmul that all GPUs take; its backward is the same."""

    def call(x: Tensor, weight: Tensor) -> Tensor:
        with portable_only():
            return layer(x, weight)

    return call


def make_inputs(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and the gradient of the output."""
    torch.manual_seed(0)
    x = torch.randn(shape.rows, shape.in_features, device=device, dtype=shape.dtype, requires_grad=True)
    weight = torch.randn(shape.out_features, shape.in_features, device=device, dtype=shape.dtype)
    weight = (weight * shape.in_features**-0.5).requires_grad_()
    return x, weight, torch.randn(shape.rows, shape.out_features, device=device, dtype=shape.dtype)


def make_work(op: str, shape: Shape, direction: str) -> Work:
    """One matmul forward and two backward; x, weight and output read or written once, in the backward twice."""
    flops = 2 * shape.rows * shape.in_features * shape.out_features
    numbers = shape.rows * (shape.in_features + shape.out_features) + shape.in_features * shape.out_features
    passes = 1 if direction == "forward" else 2
    return Work(
        op=op,
        direction=direction,
        shape=shape.id,
        dtype=shape.dtype,
        flops=passes * flops,
        num_bytes=passes * numbers * shape.dtype.itemsize,
    )


def run(op: str, shape: Shape, device: torch.device, repeats: int) -> None:
    """Check that the providers agree, then time their forwards and their backwards."""
    ours, eager = OPS[op]
    x, weight, dout = make_inputs(shape, device)
    providers: dict[str, Layer] = {f"gem_kernels.{op}": ours, "torch eager": eager}
    if device.type == "cuda":
        providers[f"gem_kernels.{op} portable"] = portable(ours)
        # Timed on one graph many times, so its buffers may not be donated to the first backward.
        functorch_config.donated_buffer = False
        providers["torch compiled"] = torch.compile(eager, fullgraph=True)
    providers["linear alone"] = functional.linear
    outputs = {name: layer(x, weight) for name, layer in providers.items()}
    expected = outputs["torch eager"].detach()
    # A few roundings of the largest output.
    allowed = 8 * torch.finfo(shape.dtype).eps * float(expected.abs().max())
    for name, out in outputs.items():
        error = max_error(out, expected)
        if name != "linear alone" and not error <= allowed:
            raise SystemExit(f"{op}: {name} differs from eager by {error:.1e} > {allowed:.1e}: not timed")
    base = "torch compiled" if device.type == "cuda" else "torch eager"
    with torch.no_grad():
        compare(
            make_work(op, shape, "forward"),
            {name: lambda layer=layer: layer(x, weight) for name, layer in providers.items()},
            device=device,
            repeats=repeats,
            base=base,
        )
    compare(
        make_work(op, shape, "backward"),
        {
            name: lambda out=out: torch.autograd.grad(out, (x, weight), dout, retain_graph=True)
            for name, out in outputs.items()
        },
        device=device,
        repeats=repeats,
        base=base,
    )


def tune(op: str, shape: Shape, device: torch.device, repeats: int) -> None:
    """Time every candidate tile of one portable forward kernel beside the linear layer alone."""
    x, weight, _ = (tensor.detach() for tensor in make_inputs(shape, device))
    ours = portable(OPS[op][0])
    for config in candidates(op, torch.cuda.get_device_capability(device)):
        name = f"{config.block_m}x{config.block_n}x{config.block_k} warps {config.num_warps} stages {config.num_stages}"
        with override(op, config):
            try:
                compare(
                    make_work(op, shape, "forward"),
                    {name: lambda: ours(x, weight), "linear alone": lambda: functional.linear(x, weight)},
                    device=device,
                    repeats=repeats,
                    base="linear alone",
                )
            except Exception as error:
                if "OutOfResources" not in type(error).__name__:
                    raise
                print(f"# {name}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shape", help="only shapes of this id")
    parser.add_argument("--tune", choices=tuple(OPS), help="time candidates of this kernel on the first shape")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.tune:
        if device.type != "cuda":
            raise SystemExit("bench_norm_linear: --tune needs a CUDA device")
        tune(arguments.tune, SHAPES["cuda"][0], device, arguments.repeats)
        return
    for op in OPS:
        for shape in SHAPES[arguments.device]:
            if arguments.shape in (None, shape.id):
                run(op, shape, device, arguments.repeats)


if __name__ == "__main__":
    main()
