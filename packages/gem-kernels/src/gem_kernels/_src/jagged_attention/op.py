"""Registrations of jagged attention: forward and backward ops, CPU and CUDA kernels, fakes, autograd, FLOP counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_kernels._src.attention.flops import backward_flops, forward_flops, num_pairs
from gem_kernels._src.jagged_attention import cpu
from gem_kernels._src.validate import check_batch

_NAME = "jagged_attention"


@torch.library.custom_op("gem_kernels::jagged_attention", mutates_args=(), device_types="cuda")
def jagged_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    validate: bool,
) -> tuple[Tensor, Tensor]:
    """Output (T_q, H, D_v) and log-sum-exp (T_q, H) in float32 (float64 for float64 inputs)."""
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.jagged_attention.forward import launch_forward

    check_batch(_NAME, q, k, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, read_offsets=validate)
    return launch_forward(q, k, v, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, scale, window_left, window_right)


@jagged_attention_op.register_kernel("cpu")
def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    validate: bool,
) -> tuple[Tensor, Tensor]:
    check_batch(_NAME, q, k, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, read_offsets=True)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.forward(q, k, v, offsets_q, offsets_k, scale, window_left, window_right)


@jagged_attention_op.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[0], q.shape[1], dtype=lse_dtype)


@torch.library.custom_op("gem_kernels::jagged_attention_backward", mutates_args=(), device_types="cuda")
def jagged_attention_backward_op(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv, contiguous, in the dtypes of q, k, v; the same bits on every run."""
    from gem_kernels._src.jagged_attention.backward import launch_backward

    return launch_backward(
        do, dlse, q, k, v, out, lse, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, scale, window_left, window_right
    )


@jagged_attention_backward_op.register_kernel("cpu")
def _backward_cpu(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.backward(do, dlse, q, k, v, out, lse, offsets_q, offsets_k, scale, window_left, window_right)


@jagged_attention_backward_op.register_fake
def _backward_fake(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets_q, offsets_k, *ctx.scalars, _validate = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, offsets_q, offsets_k)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, offsets_q, offsets_k = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 11
    do = torch.zeros_like(out) if do is None else do
    dq, dk, dv = jagged_attention_backward_op(do, dlse, q, k, v, out, lse, offsets_q, offsets_k, *ctx.scalars)
    return dq, dk, dv, *(None,) * 8


jagged_attention_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.gem_kernels.jagged_attention, get_raw=True)
def _forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = num_pairs(q, k, offsets_q, offsets_k, window_left, window_right)
    return forward_flops(pairs, q.shape[1], q.shape[2], v.shape[2])


@register_flop_formula(torch.ops.gem_kernels.jagged_attention_backward, get_raw=True)
def _backward_flops(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = num_pairs(q, k, offsets_q, offsets_k, window_left, window_right)
    return backward_flops(pairs, q.shape[1], q.shape[2], v.shape[2])
