"""The CPU kernels of jagged attention and GDPA at shapes of training on a laptop, float32.

python bench_cpu.py [--threads 2] [--repeats 10]

Providers: ours; the batch padded to its longest sequence, with torch's scaled_dot_product_attention and a mask or with
two matmuls around the activation (padding and unpadding not timed); the Python loop of ``gem_kernels.reference``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels import gdpa, jagged_attention, reference
from gem_kernels._src.attention.flops import backward_flops, forward_flops
from gem_kernels._src.attention.window import count_pairs, pair_mask
from gem_kernels.testing import AttentionInputs, attention_inputs, max_error
from gem_kernels.testing.bench import Work, compare

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Histories with a median of 50 and at most 512 events, against themselves or against a few rows."""

    id: str
    op: str
    num_sequences: int
    num_heads: int
    head_dim: int
    rows_q: int | None = None
    """Query rows of every sample; None: the history."""
    max_rows_k: int | None = None
    """Key rows of a sample, uniform in [8, this]; None: the history."""
    window: int = -1
    """Tokens to either side; -1: all."""


SHAPES = [
    Shape(id="self-H4-D32", op="jagged_attention", num_sequences=256, num_heads=4, head_dim=32),
    Shape(id="self-H2-D16", op="jagged_attention", num_sequences=256, num_heads=2, head_dim=16),
    Shape(id="self-H4-D32-window31", op="jagged_attention", num_sequences=256, num_heads=4, head_dim=32, window=31),
    Shape(id="pool8-H4-D32", op="jagged_attention", num_sequences=512, num_heads=4, head_dim=32, rows_q=8),
    Shape(id="gdpa-kv8..32-H4-D32", op="gdpa", num_sequences=256, num_heads=4, head_dim=32, max_rows_k=32),
]


def history_lengths(num_sequences: int) -> Tensor:
    """Log-normal lengths: median 50, mean about 80, at most 512, some 0."""
    generator = torch.Generator().manual_seed(0)
    return torch.exp(3.9 + 1.1 * torch.randn(num_sequences, generator=generator)).long().clamp(max=512)


def make_inputs(shape: Shape) -> AttentionInputs:
    """Packed q, k, v and gradient of the output."""
    history = history_lengths(shape.num_sequences)
    lengths_q = history if shape.rows_q is None else torch.full_like(history, shape.rows_q)
    lengths_k = None if shape.rows_q is None else history
    if shape.max_rows_k is not None:
        lengths_k = torch.randint(8, shape.max_rows_k + 1, history.shape, generator=torch.Generator().manual_seed(1))
    return attention_inputs(lengths_q, lengths_k, num_heads=shape.num_heads, head_dim=shape.head_dim)


def pad(x: Tensor, offsets: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
    """(B, H, S, D) zero-padded values and the (B, S) mask of real rows."""
    mask = torch.arange(max_seqlen)[None, :] < torch.diff(offsets)[:, None]
    padded = x.new_zeros(mask.shape[0], max_seqlen, *x.shape[1:])
    padded[mask] = x
    return padded.transpose(1, 2).contiguous(), mask


def packed_providers(shape: Shape, x: AttentionInputs) -> dict[str, Forward]:
    """Ours and the loop, on packed tensors."""
    window = {"window_size": (shape.window, shape.window)}
    offsets = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k}
    longest = {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}
    if shape.op == "gdpa":
        act = {"activation": "fast_gelu", "pre_scale": shape.head_dim**-0.5}
        return {
            "gem_kernels": lambda q, k, v: gdpa(q, k, v, **offsets, **longest, **act, **window),
            "loop": lambda q, k, v: LoopGDPA.apply(q, k, v, offsets | act | window),
        }
    return {
        "gem_kernels": lambda q, k, v: jagged_attention(q, k, v, **offsets, **longest, **window),
        "loop": lambda q, k, v: LoopAttention.apply(q, k, v, offsets | window),
    }


class LoopAttention(torch.autograd.Function):
    """The loop with its closed-form backward."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return reference.jagged_attention(q, k, v, **options)[0]

    @staticmethod
    def backward(ctx, do):
        return *reference.jagged_attention_backward(do, *ctx.saved_tensors, **ctx.options), None


class LoopGDPA(torch.autograd.Function):
    """The loop with its closed-form backward."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return reference.gdpa(q, k, v, **options)

    @staticmethod
    def backward(ctx, do):
        return *reference.gdpa_backward(do, *ctx.saved_tensors, **ctx.options), None


def padded_provider(shape: Shape, mask_k: Tensor, max_seqlen_q: int) -> Forward:
    """The padded computation; padded keys are masked, or zero where the activation keeps zero."""
    max_seqlen_k = mask_k.shape[1]
    if shape.op == "gdpa":
        return lambda q, k, v: F.gelu(q @ k.transpose(2, 3) * shape.head_dim**-0.5, approximate="tanh") @ v
    # A finite bias: samples without a history have no key at all, and -inf would make them NaN.
    bias = torch.zeros(mask_k.shape[0], 1, 1, max_seqlen_k).masked_fill(~mask_k[:, None, None, :], -1e9)
    if shape.window >= 0:
        keep = pair_mask(torch.arange(max_seqlen_q), torch.arange(max_seqlen_k), shape.window, shape.window)
        bias = bias.masked_fill(~keep, -1e9)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def run(shape: Shape, repeats: int) -> None:
    """Forward, and forward with backward, of all providers."""
    x = make_inputs(shape)
    q, mask_q = pad(x.q, x.offsets_q, x.max_seqlen_q)
    k, mask_k = pad(x.k, x.offsets_k, x.max_seqlen_k)
    v, _ = pad(x.v, x.offsets_k, x.max_seqlen_k)
    do, _ = pad(x.do, x.offsets_q, x.max_seqlen_q)
    packed = (x.q.requires_grad_(), x.k.requires_grad_(), x.v.requires_grad_())
    calls = {name: (f, packed, x.do) for name, f in packed_providers(shape, x).items()}
    calls["padded"] = (
        padded_provider(shape, mask_k, x.max_seqlen_q),
        (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()),
        do,
    )
    with torch.no_grad():
        outputs = {name: f(*tensors) for name, (f, tensors, _) in calls.items()}
    outputs["padded"] = outputs["padded"].transpose(1, 2)[mask_q]
    has_keys = torch.repeat_interleave(torch.diff(x.offsets_k) > 0, torch.diff(x.offsets_q))
    for name, out in outputs.items():
        error = max_error(out[has_keys], outputs["gem_kernels"][has_keys])
        if not error <= 1e-4:
            raise SystemExit(f"{name} differs from gem_kernels by {error:.1e}: not timed")
    counts = (count_pairs(x.offsets_q, x.offsets_k, shape.window, shape.window), shape.num_heads)
    dims = (shape.head_dim, shape.head_dim)
    forward, backward = forward_flops(*counts, *dims), backward_flops(*counts, *dims)
    num_bytes = 2 * (x.q.numel() + x.k.numel()) * x.q.element_size()
    common = {"op": shape.op, "shape": shape.id, "dtype": torch.float32}
    device, threads = torch.device("cpu"), torch.get_num_threads()
    with torch.no_grad():
        compare(
            Work(direction="forward", flops=forward, num_bytes=num_bytes, **common),
            {name: lambda f=f, t=tensors: f(*t) for name, (f, tensors, _) in calls.items()},
            device=device,
            warmup=1,
            repeats=repeats,
            threads=threads,
        )
    compare(
        Work(direction="forward and backward", flops=forward + backward, num_bytes=3 * num_bytes, **common),
        {
            name: lambda f=f, t=tensors, g=grad: torch.autograd.grad(f(*t), t, g)
            for name, (f, tensors, grad) in calls.items()
        },
        device=device,
        warmup=1,
        repeats=repeats,
        threads=threads,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for shape in SHAPES:
        run(shape, arguments.repeats)


if __name__ == "__main__":
    main()
