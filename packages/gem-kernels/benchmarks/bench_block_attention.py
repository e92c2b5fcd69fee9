"""Block attention against packed attention over the blocks, and against the device's copy rate.

python bench_block_attention.py                   # on CUDA: the published shape, JSON lines
python bench_block_attention.py --device cpu      # a shape of training on a laptop
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from gem_kernels import block_attention, jagged_attention
from gem_kernels._src.block_attention.blocks import block_offsets, num_pairs
from gem_kernels._src.block_attention.rotary import rotate
from gem_kernels.testing import AttentionInputs, make_offsets, max_error, random_lengths, zipf_lengths
from gem_kernels.testing.bench import Work, compare


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A batch of random lengths."""

    id: str
    num_sequences: int
    max_seqlen: int
    sparsity: float
    """Mean over maximum length, about; 0.7 is uniform between 0.4 and 1 times the maximum. 0: lengths n of
    [1, maximum] as often as 1 / n."""
    num_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 64


_SMALL = {"num_sequences": 1024, "max_seqlen": 512, "sparsity": 0.25, "num_heads": 4, "head_dim": 32}
_LARGE = {"num_sequences": 1152, "max_seqlen": 2000, "sparsity": 0.7, "num_heads": 4}
SHAPES = {
    "cuda": [
        Shape(id="B1152-2000-s0.7-H4-D128", head_dim=128, **_LARGE),
        Shape(id="B1152-2000-s0.7-H4-D64", head_dim=64, **_LARGE),
        Shape(id="B4096-zipf4096-H4-D128", num_sequences=4096, max_seqlen=4096, sparsity=0, num_heads=4, head_dim=128),
        Shape(id="B1024-512-s0.25-H4-D32", **_SMALL),
        Shape(id="B1024-512-s0.25-H4-D32", dtype=torch.float32, **_SMALL),
    ],
    "cpu": [
        Shape(
            id="B256-512-s0.25-H2-D16",
            num_sequences=256,
            max_seqlen=512,
            sparsity=0.25,
            num_heads=2,
            head_dim=16,
            dtype=torch.float32,
        ),
        Shape(id="B1024-512-s0.25-H4-D32", dtype=torch.float32, **_SMALL),
    ],
}

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_inputs(shape: Shape, device: torch.device) -> AttentionInputs:
    """Random q, k, v and gradient of the output, drawn on the device: the largest shape has billions of numbers."""
    if shape.sparsity == 0:
        lengths = zipf_lengths(shape.num_sequences, shape.max_seqlen)
    else:
        lengths = random_lengths(shape.num_sequences, shape.max_seqlen, sparsity=shape.sparsity)
    offsets = make_offsets(lengths, device=device)
    size = (int(lengths.sum()), shape.num_heads, shape.head_dim)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(size, dtype=shape.dtype, device=device) for _ in range(4))
    return AttentionInputs(q, k, v, do, offsets, offsets, shape.max_seqlen, shape.max_seqlen)


def make_providers(shape: Shape, inputs: AttentionInputs) -> dict[str, Forward]:
    """Without rotation: ours, and packed attention with every block as a sequence; its offsets are made beforehand."""
    size = shape.block_size
    blocks = torch.unique_consecutive(block_offsets(inputs.offsets_q, inputs.q.shape[0], size))
    packed = {"offsets_q": blocks, "offsets_k": blocks, "max_seqlen_q": size, "max_seqlen_k": size}

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, offsets=inputs.offsets_q, max_seqlen=inputs.max_seqlen_q, block_size=size)

    def jagged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = jagged_attention(q, k, v, **packed)
        assert isinstance(out, Tensor)
        return out

    providers = {"block_attention": ours, "jagged_attention over blocks": jagged}
    if inputs.q.is_cuda and inputs.q.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        blocks32 = blocks.to(torch.int32)
        providers["torch varlen_attn over blocks"] = lambda q, k, v: varlen_attn(
            q, k, v, blocks32, blocks32, size, size
        )
    return providers


def rotary_providers(shape: Shape, inputs: AttentionInputs) -> dict[str, Forward]:
    """Rotation inside the kernel, and by torch operations before it, compiled on CUDA."""
    total, half = inputs.q.shape[0], shape.head_dim // 2
    angles = (
        torch.arange(total, device=inputs.q.device)[:, None]
        % 2000
        * torch.logspace(0, -4, half, device=inputs.q.device)
    )
    table = torch.cat([angles.sin(), angles.cos()], 1)
    options = {"offsets": inputs.offsets_q, "max_seqlen": inputs.max_seqlen_q, "block_size": shape.block_size}
    # Timed on one graph many times, so its buffers may not be donated to the first backward.
    functorch_config.donated_buffer = False
    turn = torch.compile(rotate, fullgraph=True) if inputs.q.is_cuda else rotate
    return {
        "block_attention, rotary": lambda q, k, v: block_attention(q, k, v, rotary=table, **options),
        "torch rotation, then block_attention": lambda q, k, v: block_attention(
            turn(q, table), turn(k, table), turn(v, table), **options
        ),
    }


def run(shape: Shape, device: torch.device, repeats: int) -> None:
    """Plain and rotary block attention of one shape."""
    inputs = make_inputs(shape, device)
    time_providers(shape, inputs, make_providers(shape, inputs), "block_attention", device, repeats)
    time_providers(shape, inputs, rotary_providers(shape, inputs), "block_attention, rotary", device, repeats)


def time_providers(
    shape: Shape,
    inputs: AttentionInputs,
    providers: dict[str, Forward],
    first: str,
    device: torch.device,
    repeats: int,
) -> None:
    """Check that the providers agree with the first, then time their forwards and their backwards."""
    dtype = shape.dtype
    tensors = tuple(x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    outputs = {name: forward(*tensors) for name, forward in providers.items()}
    ours = outputs[first][:4096].detach()
    # A few roundings of the largest output.
    allowed = 8 * torch.finfo(dtype).eps * float(ours.abs().max())
    for name, out in outputs.items():
        error = max_error(out[:4096], ours)
        if not error <= allowed:
            raise SystemExit(f"{name} differs from {first} by {error:.1e} > {allowed:.1e}: not timed")
    pairs = num_pairs(inputs.offsets_q, inputs.q.shape[0], shape.block_size)
    flops = 4 * pairs * shape.num_heads * shape.head_dim
    num_bytes = inputs.q.numel() * inputs.q.element_size()
    common = {"op": first, "shape": shape.id, "dtype": dtype}
    with torch.no_grad():
        compare(
            Work(direction="forward", flops=flops, num_bytes=4 * num_bytes, **common),
            {name: lambda forward=forward: forward(*tensors) for name, forward in providers.items()},
            device=device,
            repeats=repeats,
        )
    compare(
        Work(direction="backward", flops=flops * 5 // 2, num_bytes=7 * num_bytes, **common),
        {
            name: lambda out=out: torch.autograd.grad(out, tensors, inputs.do, retain_graph=True)
            for name, out in outputs.items()
        },
        device=device,
        repeats=repeats,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shape", help="only shapes of this id")
    arguments = parser.parse_args()
    for shape in SHAPES[arguments.device]:
        if arguments.shape in (None, shape.id):
            run(shape, torch.device(arguments.device), arguments.repeats)


if __name__ == "__main__":
    main()
