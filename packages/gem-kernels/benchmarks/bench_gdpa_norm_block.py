"""gdpa_norm_block against the same block of single ops, eager and compiled, and against its attention alone.

python bench_gdpa_norm_block.py                   # on CUDA: the published shape and others, JSON lines
python bench_gdpa_norm_block.py --device cpu      # a shape of training on a laptop

The ratio to quote is that of the times of one shape: "single ops, compiled" over ours. The providers alternate in
rounds; on CUDA their calls come from graphs, so that no time of the host is in them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.nn import functional

from gem_kernels import gdpa, gdpa_norm_block
from gem_kernels._src.attention.flops import backward_flops, forward_flops
from gem_kernels._src.attention.window import count_pairs
from gem_kernels.testing import AttentionInputs, make_offsets, max_error, random_lengths
from gem_kernels.testing.bench import Work, compare

EPS = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Jagged queries, and as many keys in every sequence."""

    id: str
    num_sequences: int
    max_seqlen_q: int
    sparsity: float
    """Mean over maximum of the query lengths, about."""
    num_keys: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "cuda": [
        Shape(
            id="B768-1024-s0.5-K128-H4-D128",
            num_sequences=768,
            max_seqlen_q=1024,
            sparsity=0.5,
            num_keys=128,
            num_heads=4,
            head_dim=128,
        ),
        Shape(
            id="B768-1024-K128-H4-D128",
            num_sequences=768,
            max_seqlen_q=1024,
            sparsity=1.0,
            num_keys=128,
            num_heads=4,
            head_dim=128,
        ),
        Shape(
            id="B768-1024-s0.5-K64-H2-D128",
            num_sequences=768,
            max_seqlen_q=1024,
            sparsity=0.5,
            num_keys=64,
            num_heads=2,
            head_dim=128,
        ),
    ],
    "cpu": [
        Shape(
            id="B64-256-s0.5-K16-H2-D32",
            num_sequences=64,
            max_seqlen_q=256,
            sparsity=0.5,
            num_keys=16,
            num_heads=2,
            head_dim=32,
            dtype=torch.float32,
        )
    ],
}
Block = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_inputs(shape: Shape, device: torch.device) -> AttentionInputs:
    """Random q, k, v and gradient of the output, drawn on the device."""
    lengths = random_lengths(shape.num_sequences, shape.max_seqlen_q, sparsity=shape.sparsity)
    offsets_q = make_offsets(lengths, device=device)
    offsets_k = make_offsets([shape.num_keys] * shape.num_sequences, device=device)
    torch.manual_seed(0)

    def draw(rows: int, scale: float = 1.0) -> Tensor:
        size = (rows, shape.num_heads, shape.head_dim)
        return torch.randn(size, device=device, dtype=shape.dtype) * scale

    total_q, total_k = int(lengths.sum()), shape.num_keys * shape.num_sequences
    # Keys as small as trained ones: scores of about 1.
    k = draw(total_k, shape.head_dim**-0.5)
    return AttentionInputs(
        draw(total_q), k, draw(total_k), draw(total_q), offsets_q, offsets_k, shape.max_seqlen_q, shape.num_keys
    )


def make_providers(x: AttentionInputs) -> dict[str, Block]:
    """Ours, ours with rows kept for the backward, single ops, and their attention without norms and residuals."""
    options = {
        "offsets_q": x.offsets_q,
        "offsets_k": x.offsets_k,
        "max_seqlen_q": x.max_seqlen_q,
        "max_seqlen_k": x.max_seqlen_k,
        "activation": "fast_gelu",
    }

    def single_ops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        features = (q.shape[1] * q.shape[2],)
        normed = functional.layer_norm(q.flatten(1), features, eps=EPS)
        total = gdpa(normed.view(q.shape), k, v, **options).flatten(1) + normed
        return functional.rms_norm(total, features, eps=EPS).view(q.shape) + q

    providers: dict[str, Block] = {
        "gdpa_norm_block": lambda q, k, v: gdpa_norm_block(q, k, v, eps=EPS, **options),
        "gdpa_norm_block, kept": lambda q, k, v: gdpa_norm_block(q, k, v, eps=EPS, recompute=False, **options),
        "single ops": single_ops,
    }
    if x.q.is_cuda:
        # Timed on one graph many times, so its buffers may not be donated to the first backward.
        functorch_config.donated_buffer = False
        providers["single ops, compiled"] = torch.compile(single_ops, fullgraph=True)
    return providers | {"gdpa alone": lambda q, k, v: gdpa(q, k, v, **options)}


def step_providers(
    providers: dict[str, Block], tensors: tuple[Tensor, ...], do: Tensor
) -> dict[str, Callable[[], object]]:
    """Forward and backward as one call."""
    return {
        name: lambda block=block: torch.autograd.grad(block(*tensors), tensors, do) for name, block in providers.items()
    }


def run(shape: Shape, device: torch.device, repeats: int) -> None:
    """Check that the providers agree, then time their forwards and their backwards."""
    x = make_inputs(shape, device)
    tensors = tuple(t.requires_grad_() for t in (x.q, x.k, x.v))
    providers = make_providers(x)
    outputs = {name: block(*tensors) for name, block in providers.items()}
    expected = outputs["single ops"][:4096].detach()
    # A few roundings of the largest output.
    allowed = 8 * torch.finfo(shape.dtype).eps * float(expected.abs().max())
    for name, out in outputs.items():
        error = max_error(out[:4096], expected)
        if name != "gdpa alone" and not error <= allowed:
            raise SystemExit(f"{name} differs from single ops by {error:.1e} > {allowed:.1e}: not timed")
    counts = (count_pairs(x.offsets_q, x.offsets_k, -1, -1), shape.num_heads, shape.head_dim, shape.head_dim)
    bytes_q, bytes_k = (t.numel() * t.element_size() for t in (x.q, x.k))
    common = {"op": "gdpa_norm_block", "shape": shape.id, "dtype": shape.dtype}
    base = "single ops, compiled" if x.q.is_cuda else "single ops"
    with torch.no_grad():
        compare(
            Work(direction="forward", flops=forward_flops(*counts), num_bytes=2 * bytes_q + 2 * bytes_k, **common),
            {name: lambda block=block: block(*tensors) for name, block in providers.items()},
            device=device,
            repeats=repeats,
            base=base,
            in_rounds=True,
        )
    compare(
        Work(direction="backward", flops=backward_flops(*counts), num_bytes=3 * bytes_q + 4 * bytes_k, **common),
        {
            name: lambda out=out: torch.autograd.grad(out, tensors, x.do, retain_graph=True)
            for name, out in outputs.items()
        },
        device=device,
        repeats=repeats,
        base=base,
        in_rounds=True,
    )
    flops = forward_flops(*counts) + backward_flops(*counts)
    compare(
        Work(direction="forward+backward", flops=flops, num_bytes=5 * bytes_q + 6 * bytes_k, **common),
        step_providers(providers, tensors, x.do),
        device=device,
        repeats=repeats,
        base=base,
        in_rounds=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15, help="rounds")
    parser.add_argument("--shape", help="only shapes of this id")
    arguments = parser.parse_args()
    # Not the default stream, from which no graph can be captured.
    stream = torch.cuda.stream(torch.cuda.Stream()) if arguments.device == "cuda" else contextlib.nullcontext()
    with stream:
        for shape in SHAPES[arguments.device]:
            if arguments.shape in (None, shape.id):
                run(shape, torch.device(arguments.device), arguments.repeats)


if __name__ == "__main__":
    main()
