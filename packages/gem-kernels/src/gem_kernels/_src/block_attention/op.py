"""Registrations of block attention: forward and backward ops, CPU and CUDA kernels, fakes, autograd, FLOP counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_kernels._src.attention.flops import backward_flops, forward_flops
from gem_kernels._src.block_attention import cpu
from gem_kernels._src.block_attention.blocks import num_pairs
from gem_kernels._src.block_attention.check import check_lengths
from gem_kernels._src.validate import reads_values


@torch.library.custom_op("gem_kernels::block_attention", mutates_args=(), device_types="cuda")
def block_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    block_size: int,
    scale: float,
    validate: bool,
    rotary: Tensor | None = None,
) -> Tensor:
    """Output (T, H, D_v), contiguous, in the dtype of q."""
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.block_attention.forward import launch_forward

    check_lengths(q, offsets, max_seqlen, read_offsets=reads_values(validate))
    return launch_forward(q, k, v, offsets, block_size, scale, rotary)


@block_attention_op.register_kernel("cpu")
def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_seqlen: int,
    block_size: int,
    scale: float,
    validate: bool,
    rotary: Tensor | None = None,
) -> Tensor:
    check_lengths(q, offsets, max_seqlen, read_offsets=True)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.forward(q, k, v, offsets, block_size, scale, rotary)


@block_attention_op.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("gem_kernels::block_attention_backward", mutates_args=(), device_types="cuda")
def block_attention_backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    block_size: int,
    scale: float,
    rotary: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv, contiguous, in the dtypes of q, k, v; the same bits on every run."""
    from gem_kernels._src.block_attention.backward import launch_backward

    return launch_backward(do, q, k, v, offsets, block_size, scale, rotary)


@block_attention_backward_op.register_kernel("cpu")
def _backward_cpu(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    block_size: int,
    scale: float,
    rotary: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.backward(do, q, k, v, offsets, block_size, scale, rotary)


@block_attention_backward_op.register_fake
def _backward_fake(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, offsets, _max_seqlen, ctx.block_size, ctx.scale, _validate, rotary = inputs
    ctx.save_for_backward(q, k, v, offsets, rotary)


def _backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    q, k, v, offsets, rotary = ctx.saved_tensors
    dq, dk, dv = block_attention_backward_op(do, q, k, v, offsets, ctx.block_size, ctx.scale, rotary)
    return dq, dk, dv, None, None, None, None, None, None


block_attention_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.gem_kernels.block_attention, get_raw=True)  # type: ignore[untyped-decorator]
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_seqlen: int, block_size: int, *args: Any, **kwargs: Any
) -> int:
    return forward_flops(num_pairs(offsets, q.shape[0], block_size), q.shape[1], q.shape[2], v.shape[2])


@register_flop_formula(torch.ops.gem_kernels.block_attention_backward, get_raw=True)  # type: ignore[untyped-decorator]
def _backward_flops(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block_size: int, *args: Any, **kwargs: Any
) -> int:
    return backward_flops(num_pairs(offsets, q.shape[0], block_size), q.shape[1], q.shape[2], v.shape[2])
