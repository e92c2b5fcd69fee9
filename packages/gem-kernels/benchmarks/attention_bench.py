"""What the benchmarks of jagged_attention and gdpa share: shapes, the other providers, the check, the command line.

Each op's benchmark times it against the attention a user would pick instead, as ratios to the library's matmul in the
same run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.attention.configs import candidates, override
from gem_kernels._src.attention.flops import backward_flops, forward_flops
from gem_kernels._src.attention.window import count_pairs
from gem_kernels.testing import AttentionInputs, attention_inputs, random_lengths, zipf_lengths
from gem_kernels.testing.bench import Base, Work, compare, matmul_base

NUM_HEADS, HEAD_DIM = 4, 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A batch of bfloat16, H = 4, D = 128."""

    id: str
    num_sequences: int
    max_seqlen_q: int
    max_seqlen_k: int
    sparsity: float = 1.0
    """1: all lengths are the maximum; 0.5: uniform in [1, maximum]."""
    zipf: bool = False
    """Lengths n of [1, maximum] as often as 1 / n, in place of ``sparsity``."""

    @property
    def is_dense(self) -> bool:
        """Whether the batch can be viewed as (B, S, H, D)."""
        return self.sparsity == 1.0 and not self.zipf

    def lengths(self, max_seqlen: int) -> Tensor:
        """Lengths (B,) of one side."""
        if self.zipf:
            return zipf_lengths(self.num_sequences, max_seqlen)
        return random_lengths(self.num_sequences, max_seqlen, sparsity=self.sparsity)


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Context = Callable[[], contextlib.AbstractContextManager[None]]


class Provider(NamedTuple):
    """One way to compute the op."""

    forward: Forward
    context: Context = contextlib.nullcontext
    """What a call, forward or backward, runs in."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output."""
        with self.context():
            return self.forward(q, k, v)

    def differentiate(self, out: Tensor, tensors: Sequence[Tensor], do: Tensor) -> tuple[Tensor, ...]:
        """Gradients of ``tensors``, keeping what a second call needs."""
        with self.context():
            return torch.autograd.grad(out, tensors, do, retain_graph=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One attention op and how it is called on a batch."""

    name: str
    attend: Callable[..., Tensor]
    """(q, k, v, *, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k) -> (T_q, H, D)."""
    reference: Callable[..., Tensor]
    """(q, k, v, *, offsets_q, offsets_k) -> (T_q, H, D): the loop."""
    variants: Mapping[str, Context] = field(default_factory=dict)
    """Other kernels of the op: name, and the context in which a call takes them."""

    def on(self, x: AttentionInputs) -> Forward:
        """The op on the batch as a function of q, k, v."""
        return functools.partial(
            self.attend,
            offsets_q=x.offsets_q,
            offsets_k=x.offsets_k,
            max_seqlen_q=x.max_seqlen_q,
            max_seqlen_k=x.max_seqlen_k,
        )


def make_inputs(shape: Shape) -> AttentionInputs:
    """Packed random q, k, v and gradient of the output; jagged self-attention shares one set of lengths."""
    lengths_q = shape.lengths(shape.max_seqlen_q)
    lengths_k = None if shape.max_seqlen_k == shape.max_seqlen_q else shape.lengths(shape.max_seqlen_k)
    # Drawn for a few sequences and repeated: a billion normal numbers on the host would take minutes.
    few = attention_inputs([4096], [4096], num_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    layout = attention_inputs(lengths_q, lengths_k, num_heads=1, head_dim=1, device="cuda")

    def fill(x: Tensor, rows: int) -> Tensor:
        return x.repeat(-(-rows // x.shape[0]), 1, 1)[:rows].contiguous()

    total_q, total_k = layout.q.shape[0], layout.k.shape[0]
    return layout._replace(
        q=fill(few.q, total_q), k=fill(few.k, total_k), v=fill(few.v, total_k), do=fill(few.do, total_q)
    )


def dense_sdpa(shape: Shape, backend: torch.nn.attention.SDPBackend) -> Forward:
    """Torch's scaled_dot_product_attention on (B, H, S, D) views of equal lengths."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        views = (x.view(shape.num_sequences, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2) for x in (q, k, v))
        with torch.nn.attention.sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(*views)
        return out.transpose(1, 2).reshape(-1, NUM_HEADS, HEAD_DIM)

    return attend


def make_providers(op: Op, shape: Shape, x: AttentionInputs) -> dict[str, Provider]:
    """Ours first; of torch, what takes this shape."""
    providers = {f"gem_kernels.{op.name}": Provider(op.on(x))}
    for name, context in op.variants.items():
        providers[f"gem_kernels.{op.name} {name}"] = Provider(op.on(x), context)
    if shape.is_dense:
        backends = torch.nn.attention.SDPBackend
        providers["torch sdpa cudnn"] = Provider(dense_sdpa(shape, backends.CUDNN_ATTENTION))
        providers["torch sdpa flash"] = Provider(dense_sdpa(shape, backends.FLASH_ATTENTION))
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return providers
    offsets_q, offsets_k = x.offsets_q.to(torch.int32), x.offsets_k.to(torch.int32)
    providers["torch varlen_attn"] = Provider(
        lambda q, k, v: varlen_attn(q, k, v, offsets_q, offsets_k, x.max_seqlen_q, x.max_seqlen_k)
    )
    return providers


def check(op: Op, x: AttentionInputs) -> None:
    """Refuse to time a wrong result: the first sequences against the float64 loop."""
    stop_q, stop_k = (int(offsets[2]) for offsets in (x.offsets_q, x.offsets_k))
    q, k, v = x.q[:stop_q].double(), x.k[:stop_k].double(), x.v[:stop_k].double()
    expected = op.reference(q, k, v, offsets_q=x.offsets_q[:3], offsets_k=x.offsets_k[:3])
    error = (op.on(x)(x.q, x.k, x.v)[:stop_q].double() - expected).square().mean().sqrt()
    if not error <= 1e-2 * expected.square().mean().sqrt():
        raise SystemExit(f"{op.name} is wrong (RMS error {float(error):.2e}): not timed")


def directions(
    op: Op, shape: Shape, x: AttentionInputs, providers: dict[str, Provider]
) -> Iterator[tuple[Work, dict[str, Callable[[], object]]]]:
    """Forward, then backward, with what each costs."""
    pairs = count_pairs(x.offsets_q, x.offsets_k, -1, -1)
    counts = (pairs, NUM_HEADS, HEAD_DIM, HEAD_DIM)
    bytes_q, bytes_k = (t.numel() * t.element_size() for t in (x.q, x.k))
    common = {"op": op.name, "shape": shape.id, "dtype": torch.bfloat16}
    work = Work(direction="forward", flops=forward_flops(*counts), num_bytes=2 * bytes_q + 2 * bytes_k, **common)
    yield work, {name: lambda p=p: p.attend(x.q, x.k, x.v) for name, p in providers.items()}
    tensors = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    work = Work(direction="backward", flops=backward_flops(*counts), num_bytes=3 * bytes_q + 4 * bytes_k, **common)
    outputs = {name: p.attend(*tensors) for name, p in providers.items()}
    yield (
        work,
        {name: lambda p=p, out=outputs[name]: p.differentiate(out, tensors, x.do) for name, p in providers.items()},
    )


def supported(x: AttentionInputs, providers: dict[str, Provider]) -> dict[str, Provider]:
    """The providers that take this batch, forward and backward; why another does not is printed."""
    found = {}
    for name, provider in providers.items():
        tensors = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        try:
            provider.differentiate(provider.attend(*tensors), tensors, x.do)
        except RuntimeError as error:
            if name.startswith("gem_kernels"):
                raise
            print(f"# {name}: {str(error).splitlines()[0]}")
        else:
            found[name] = provider
    return found


def run(op: Op, shape: Shape, base: Base, repeats: int) -> None:
    """One shape, both directions, all providers."""
    x = make_inputs(shape)
    check(op, x)
    for work, functions in directions(op, shape, x, supported(x, make_providers(op, shape, x))):
        compare(work, functions, device=torch.device("cuda"), repeats=repeats, base=base)


def tune(op: Op, kernel: str, shape: Shape, base: Base, repeats: int) -> None:
    """Time every candidate configuration of one kernel inside its op."""
    x = make_inputs(shape)
    direction = "forward" if kernel == "forward" else "backward"
    for config in candidates(kernel, HEAD_DIM, torch.cuda.get_device_capability()):
        sizes = f"{config.block_m}x{config.block_n} warps {config.num_warps} stages {config.num_stages}"
        with override(kernel, config):
            try:
                work, functions = next(
                    item
                    for item in directions(op, shape, x, {sizes: Provider(op.on(x))})
                    if item[0].direction == direction
                )
                compare(work, functions, device=torch.device("cuda"), warmup=2, repeats=repeats, base=base)
            except Exception as error:
                if "out of resource" not in str(error).lower() and "OutOfResources" not in type(error).__name__:
                    raise
                print(f"# {sizes}: {error}")


def main(op: Op, shapes: Sequence[Shape], description: str | None) -> None:
    """The command line of one op's benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, few repeats")
    parser.add_argument("--shape", help="only the shape of this id")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tune", choices=("forward", "dq", "dkdv", "dqdkdv"), help="time candidates of this kernel")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"bench_{op.name}: needs a CUDA device, found none; bench_cpu.py times the CPU kernels")
    chosen = [s for s in shapes if arguments.shape in (None, s.id)]
    if not chosen:
        raise SystemExit(f"bench_{op.name}: --shape must be one of {', '.join(s.id for s in shapes)}")
    repeats = 7 if arguments.quick else arguments.repeats
    base = matmul_base(torch.device("cuda"))
    for shape in chosen[:2] if arguments.quick else chosen:
        if arguments.tune:
            tune(op, arguments.tune, shape, base, repeats)
        else:
            run(op, shape, base, repeats)
