"""Bytes that one step of the dense model reads and writes, its passes over memory, and what it keeps for backward.

    python benchmarks/count_traffic.py --preset small --precision bf16_activations
    python benchmarks/count_traffic.py --fused          # GDPA-PFFNs as one op, as on CUDA

Counts, not times, taken on a CPU from every op that torch dispatches: each reads its inputs and writes its outputs. A
fused op of gem_kernels counts what its CUDA kernels read and write, an RMS norm as one kernel, as on CUDA. Two small
batches give the share of a sample and that of the weights; the table is of one sample, in KiB and in passes.
"""

from __future__ import annotations

import argparse
import collections
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from gem_model import RankingModel, presets, random_batch
from gem_model._src import blocks, fused, sequence_layer
from gem_precision import convert, get_recipe

_NO_TRAFFIC = ("empty", "detach", "new_empty", "_unsafe_view", "_reshape_alias", "prim")
# What the kernels of gdpa_norm_block pass over besides the op's inputs and outputs, in rows of q. Forward: n is written
# and read, the attention's output written and read, q read again. Backward: n written and read three times, the
# attention's output written and read, the sum's gradient written and read three times, n's written and read, q read
# twice more, dout once more.
_INNER_ROWS = {"gdpa_norm_block": 5, "gdpa_norm_block_backward": 15}
_ROWS_ONLY = ("index", "index_select", "index_add_")
# dq and dk, dv are kernels of their own that both read q, k, v and dout.
_TWICE = ("gdpa_backward", "jagged_attention_backward", "block_attention_backward")


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def _bytes(x: Tensor) -> int:
    """Of the elements that lie in memory: an expanded dim lies there once."""
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else 1
    return size


class Traffic(TorchDispatchMode):
    """Bytes and number of the ops that touch memory, by name and by pass of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.bytes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.ops: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(self, name: str, num_bytes: int) -> None:
        self.bytes[self.phase, name] += num_bytes
        self.ops[self.phase, name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.is_view or name.startswith(_NO_TRAFFIC):
            return out
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        if name in _ROWS_ONLY:
            # The rows that are chosen are read and written, and in place of a sum read once more.
            rows = outputs[0] if name in ("index", "index_select") else inputs[-1]
            self.add(name, (3 if name == "index_add_" else 2) * _bytes(rows))
            return out
        count = sum(map(_bytes, inputs)) * (2 if name in _TWICE else 1) + sum(map(_bytes, outputs))
        count += _INNER_ROWS.get(name, 0) * (_bytes(outputs[0]) if outputs else 0)
        if outputs and count:
            self.add(name, count)
        return out


def one_kernel_rms_norm(traffic: Traffic) -> type[torch.autograd.Function]:
    """RMS norm that counts as one op forward and one backward."""

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with _disable_current_modes():
                wide = x.float()
                rrms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
                out = (wide * rrms).to(x.dtype)
            ctx.save_for_backward(x, rrms)
            traffic.add("rms_norm", 2 * _bytes(x))
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            x, rrms = ctx.saved_tensors
            traffic.add("rms_norm_backward", 3 * _bytes(x))
            with _disable_current_modes():
                unit, wide = x.float() * rrms, grad.float()
                return ((wide - unit * (wide * unit).mean(-1, keepdim=True)) * rrms).to(x.dtype)

    return RMSNorm


def count(model: nn.Module, num_samples: int, length: int) -> tuple[Traffic, int]:
    """Traffic of a step over samples of equal length, and bytes kept for backward that are no parameters."""
    assert isinstance(model, RankingModel)
    lengths = {tower.name: [length] * num_samples for tower in model.config.sequences}
    batch, embeddings = random_batch(model.config, num_samples, lengths=lengths)
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    traffic = Traffic()
    sequence_layer.rms_norm = one_kernel_rms_norm(traffic).apply
    model.zero_grad()
    with traffic:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model.loss(model(batch, embeddings), batch).total
        traffic.phase = "backward"
        loss.backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return traffic, sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("tiny", "small"), default="small")
    parser.add_argument("--precision", default="bf16_activations")
    parser.add_argument("--length", type=int, default=256, help="events of every sample")
    parser.add_argument("--fused", action="store_true", help="take the fused ops that CUDA takes")
    parser.add_argument("--top", type=int, default=25)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fused._DEVICES = blocks.NORM_DEVICES = ("cpu",) if arguments.fused else ()
    blocks._MIN_NORM = 0
    config = getattr(presets, arguments.preset)(
        context_features=tuple(f"c{i}" for i in range(8)),
        num_dense=8,
        event_features=("history.a", "history.b", "history.c"),
        num_event_dense=2,
        tasks=("like",),
    )
    model = convert(RankingModel(config), get_recipe(arguments.precision))
    small, large = 8, 24
    (first, kept_first), (second, kept_second) = (count(model, n, arguments.length) for n in (small, large))
    per_sample = {key: (second.bytes[key] - first.bytes[key]) / (large - small) for key in second.bytes}
    for key, num_bytes in sorted(per_sample.items(), key=lambda item: -item[1])[: arguments.top]:
        print(f"{num_bytes / 1024:10.1f} KiB {second.ops[key]:5d} ops  {key[0]:8s} {key[1]}")
    for phase in ("forward", "backward"):
        total = sum(x for key, x in per_sample.items() if key[0] == phase)
        ops = sum(x for key, x in second.ops.items() if key[0] == phase)
        print(f"{phase}: {total / 2**20:.3f} MiB a sample, {ops} ops that touch memory")
    print(f"kept for backward: {(kept_second - kept_first) / (large - small) / 2**20:.3f} MiB a sample")


if __name__ == "__main__":
    main()
