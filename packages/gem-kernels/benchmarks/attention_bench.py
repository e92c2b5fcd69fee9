"""What the benchmarks of jagged_attention and gdpa share: shapes, the other providers, the check, the command line.

Each op's benchmark times it against the attention a user would pick instead, as ratios to the library's matmul in the
same rounds: no pause between calls, so that all of them meet the clock that power allows.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from gem_kernels import AttentionSchedule
from gem_kernels._src.attention.configs import candidates, override
from gem_kernels._src.attention.flops import backward_flops, forward_flops
from gem_kernels._src.attention.window import count_pairs
from gem_kernels.testing import AttentionInputs, attention_inputs, make_offsets, random_lengths, zipf_lengths
from gem_kernels.testing.bench import Base, Work, compare, matmul_base

NUM_HEADS, HEAD_DIM = 4, 128
NUM_CHECKED = 6
"""Sequences of every shape whose results are compared with the reference."""
MAX_SCORE_BYTES = 10 * 2**30
"""Of one matrix of scores: what attention by single ops may write, several times over."""


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


Dense = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of (B, H, S, D)."""
Context = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Provider:
    """One way to compute the op."""

    forward: Dense
    """Of q, k, v as ``batch`` has them."""
    batch: AttentionInputs
    context: Context = contextlib.nullcontext
    """What a call, forward or backward, runs in."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output."""
        with self.context():
            return self.forward(q, k, v)

    def prepare(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """The forward, and the backward of a graph that is kept."""
        x = self.batch
        tensors = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        out = self.attend(*tensors)

        def forward() -> Tensor:
            return self.attend(x.q, x.k, x.v)

        def backward() -> tuple[Tensor, ...]:
            with self.context():
                return torch.autograd.grad(out, tensors, x.do, retain_graph=True)

        return forward, backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One attention op and how it is called on a batch."""

    name: str
    attend: Callable[..., Tensor]
    """(q, k, v, *, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, schedule) -> (T_q, H, D)."""
    reference: Callable[..., Tensor]
    """(q, k, v, *, offsets_q, offsets_k) -> (T_q, H, D): the loop."""
    dense: Dense
    """Single ops on (B, H, S, D)."""
    ignores_zeros: bool
    """Whether padding by zeros changes no row of the output, without a mask."""
    variants: Mapping[str, Context] = field(default_factory=dict)
    """Other kernels of the op: name, and the context in which a call takes them."""

    def on(self, x: AttentionInputs, schedule: AttentionSchedule | None = None) -> Dense:
        """The op on the batch as a function of q, k, v; with a schedule as layers of one batch share it."""
        return functools.partial(
            self.attend,
            offsets_q=x.offsets_q,
            offsets_k=x.offsets_k,
            max_seqlen_q=x.max_seqlen_q,
            max_seqlen_k=x.max_seqlen_k,
            schedule=schedule,
        )

    def kernels(self, x: AttentionInputs) -> dict[str, Provider]:
        """The op, by the kernels it chooses and by others; and as all layers of a batch but its first call it."""
        schedule = AttentionSchedule(
            x.offsets_q,
            x.offsets_k,
            total_q=x.q.shape[0],
            total_k=x.k.shape[0],
            max_seqlen_q=x.max_seqlen_q,
            max_seqlen_k=x.max_seqlen_k,
        )
        contexts = {"": contextlib.nullcontext} | {f" {name}": context for name, context in self.variants.items()}
        return {
            f"gem_kernels.{self.name}{name}": Provider(forward=self.on(x), batch=x, context=context)
            for name, context in contexts.items()
        } | {f"gem_kernels.{self.name}, schedule reused": Provider(forward=self.on(x, schedule), batch=x)}


def make_inputs(shape: Shape) -> AttentionInputs:
    """Packed random q, k, v and gradient of the output; jagged self-attention shares one set of lengths."""
    lengths_q = shape.lengths(shape.max_seqlen_q)
    lengths_k = lengths_q if shape.max_seqlen_k == shape.max_seqlen_q else shape.lengths(shape.max_seqlen_k)
    # Drawn for a few sequences and repeated: a billion normal numbers on the host would take minutes.
    few = attention_inputs([4096], [4096], num_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def fill(x: Tensor, rows: int) -> Tensor:
        return x.repeat(-(-rows // x.shape[0]), 1, 1)[:rows].contiguous()

    total_q, total_k = int(lengths_q.sum()), int(lengths_k.sum())
    offsets_q = make_offsets(lengths_q, device="cuda")
    return AttentionInputs(
        q=fill(few.q, total_q),
        k=fill(few.k, total_k),
        v=fill(few.v, total_k),
        do=fill(few.do, total_q),
        offsets_q=offsets_q,
        offsets_k=offsets_q if lengths_k is lengths_q else make_offsets(lengths_k, device="cuda"),
        max_seqlen_q=shape.max_seqlen_q,
        max_seqlen_k=shape.max_seqlen_k,
    )


def padded(x: AttentionInputs) -> AttentionInputs:
    """The batch with every sequence filled up to the longest by rows of zeros."""

    def pad(t: Tensor, offsets: Tensor, max_seqlen: int) -> Tensor:
        rows = torch.arange(t.shape[0], device=t.device)
        sequence = torch.searchsorted(offsets, rows, right=True) - 1
        out = t.new_zeros((offsets.shape[0] - 1) * max_seqlen, *t.shape[1:])
        out[sequence * max_seqlen + rows - offsets[sequence]] = t
        return out

    sides = ((x.q, x.offsets_q, x.max_seqlen_q), (x.k, x.offsets_k, x.max_seqlen_k))
    q, k = (pad(*side) for side in sides)
    v, do = pad(x.v, *sides[1][1:]), pad(x.do, *sides[0][1:])
    return x._replace(q=q, k=k, v=v, do=do)


def on_views(attend: Dense, num_sequences: int) -> Dense:
    """Dense attention of q, k, v (B S, H, D)."""

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        views = (x.view(num_sequences, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2) for x in (q, k, v))
        return attend(*views).transpose(1, 2).reshape(-1, NUM_HEADS, HEAD_DIM)

    return packed


def sdpa(backend: torch.nn.attention.SDPBackend) -> Dense:
    """Torch's scaled_dot_product_attention by one backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return attend


@functools.cache
def compiled(dense: Dense) -> Dense:
    """The single ops by torch.compile, one compilation for all sizes."""
    # The same graph is differentiated many times, so its buffers may not be donated to the first backward.
    functorch_config.donated_buffer = False
    return torch.compile(dense, fullgraph=True, dynamic=True)


def make_providers(op: Op, shape: Shape, x: AttentionInputs) -> dict[str, Provider]:
    """Ours first; of torch, what takes this shape. Unequal lengths are padded for what needs equal ones.

    No mask hides the padding, which would only slow these down; where zeros matter, the result is therefore another.
    """
    providers = op.kernels(x)
    batch, suffix = (x, "") if shape.is_dense else (padded(x), ", padded")
    backends = torch.nn.attention.SDPBackend
    dense = {"torch sdpa cudnn": sdpa(backends.CUDNN_ATTENTION)}
    if shape.is_dense:
        dense["torch sdpa flash"] = sdpa(backends.FLASH_ATTENTION)
    score_bytes = 2 * NUM_HEADS * shape.num_sequences * shape.max_seqlen_q * shape.max_seqlen_k
    if score_bytes <= MAX_SCORE_BYTES and (shape.is_dense or op.ignores_zeros):
        dense["torch compiled"] = compiled(op.dense)
    for name, attend in dense.items():
        providers[name + suffix] = Provider(forward=on_views(attend, shape.num_sequences), batch=batch)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return providers
    offsets_q, offsets_k = x.offsets_q.to(torch.int32), x.offsets_k.to(torch.int32)
    providers["torch varlen_attn"] = Provider(
        forward=lambda q, k, v: varlen_attn(q, k, v, offsets_q, offsets_k, x.max_seqlen_q, x.max_seqlen_k), batch=x
    )
    return providers


def check(op: Op, x: AttentionInputs) -> None:
    """Refuse to time a wrong result: output and gradients of the first sequences against the float64 loop."""
    firsts_q, firsts_k = (offsets[: NUM_CHECKED + 1] for offsets in (x.offsets_q, x.offsets_k))
    stop_q, stop_k = int(firsts_q[-1]), int(firsts_k[-1])
    stops = (stop_q, stop_k, stop_k)
    leaves = [t[:stop].double().requires_grad_() for t, stop in zip((x.q, x.k, x.v), stops, strict=True)]
    out = op.reference(*leaves, offsets_q=firsts_q, offsets_k=firsts_k)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, x.do[:stop_q].double())]
    for name, provider in op.kernels(x).items():
        forward, backward = provider.prepare()
        found = [forward(), *backward()]
        for what, got, want, stop in zip(("out", "dq", "dk", "dv"), found, expected, (stop_q, *stops), strict=True):
            error = float((got[:stop].double() - want).square().mean().sqrt() / want.square().mean().sqrt())
            if not error <= 1e-2:
                raise SystemExit(f"{name}: {what} is wrong (relative RMS error {error:.2e}): not timed")


def directions(op: Op, shape: Shape, x: AttentionInputs) -> tuple[Work, Work]:
    """What forward and backward cost."""
    counts = (count_pairs(x.offsets_q, x.offsets_k, -1, -1), NUM_HEADS, HEAD_DIM, HEAD_DIM)
    bytes_q, bytes_k = (t.numel() * t.element_size() for t in (x.q, x.k))
    common = {"op": op.name, "shape": shape.id, "dtype": torch.bfloat16}
    return (
        Work(direction="forward", flops=forward_flops(*counts), num_bytes=2 * bytes_q + 2 * bytes_k, **common),
        Work(direction="backward", flops=backward_flops(*counts), num_bytes=3 * bytes_q + 4 * bytes_k, **common),
    )


def prepare(providers: dict[str, Provider]) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Forward and backward of the providers that take this batch; why another does not is printed."""
    found = {}
    for name, provider in providers.items():
        try:
            calls = provider.prepare()
            for call in calls:
                call()
        except Exception as error:
            if name.startswith("gem_kernels"):
                raise
            print(f"# {name}: {str(error).splitlines()[0]}")
        else:
            found[name] = calls
    return found


def run(op: Op, shape: Shape, base: Base, repeats: int, skip: Sequence[str] = ()) -> None:
    """One shape, both directions, all providers but those whose names hold one of ``skip``."""
    x = make_inputs(shape)
    check(op, x)
    providers = make_providers(op, shape, x)
    found = prepare({n: p for n, p in providers.items() if not any(part in n for part in skip)})
    for i, work in enumerate(directions(op, shape, x)):
        functions = {name: calls[i] for name, calls in found.items()}
        compare(work, functions, device=torch.device("cuda"), warmup=1, repeats=repeats, base=base, in_rounds=True)


def tune(op: Op, kernel: str, shape: Shape, base: Base, repeats: int) -> None:
    """Time every candidate configuration of one kernel inside its op, by the portable kernels."""
    x = make_inputs(shape)
    direction = 0 if kernel == "forward" else 1
    work = directions(op, shape, x)[direction]
    for config in candidates(kernel, HEAD_DIM, torch.cuda.get_device_capability()):
        sizes = f"{config.block_m}x{config.block_n} warps {config.num_warps} stages {config.num_stages}"
        with override(kernel, config):
            try:
                function = Provider(forward=op.on(x), batch=x, context=op.variants["portable"]).prepare()[direction]
                compare(
                    work, {sizes: function}, device=torch.device("cuda"), warmup=2, repeats=repeats, base=base,
                    in_rounds=True,
                )  # fmt: skip
            except Exception as error:
                if "out of resource" not in str(error).lower() and "OutOfResources" not in type(error).__name__:
                    raise
                print(f"# {sizes}: {error}")


def main(op: Op, shapes: Sequence[Shape], description: str | None, argv: Sequence[str] | None = None) -> None:
    """The command line of one op's benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, few repeats")
    parser.add_argument("--shape", help="only the shape of this id")
    parser.add_argument("--skip", action="append", default=[], help="no provider whose name holds this")
    parser.add_argument("--repeats", type=int, default=9, help="rounds")
    parser.add_argument("--tune", choices=("forward", "dq", "dkdv", "dqdkdv"), help="time candidates of this kernel")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit(f"bench_{op.name}: needs a CUDA device, found none; bench_cpu.py times the CPU kernels")
    chosen = [s for s in shapes if arguments.shape in (None, s.id)]
    if not chosen:
        raise SystemExit(f"bench_{op.name}: --shape must be one of {', '.join(s.id for s in shapes)}")
    repeats = 5 if arguments.quick else arguments.repeats
    # Not the default stream, from which no graph can be captured.
    with torch.cuda.stream(torch.cuda.Stream()):
        base = matmul_base(torch.device("cuda"))
        for shape in chosen[:2] if arguments.quick else chosen:
            if arguments.tune:
                tune(op, arguments.tune, shape, base, repeats)
            else:
                run(op, shape, base, repeats, arguments.skip)
            # What the graphs of one shape held cannot serve those of the next.
            torch.cuda.empty_cache()
