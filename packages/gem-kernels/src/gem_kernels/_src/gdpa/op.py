"""Registrations of GDPA: forward and backward ops, CPU and CUDA kernels, fakes, autograd, FLOP counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_kernels._src.attention.flops import backward_flops, forward_flops, num_pairs
from gem_kernels._src.gdpa import cpu
from gem_kernels._src.validate import check_batch

_NAME = "gdpa"


@torch.library.custom_op("gem_kernels::gdpa", mutates_args=(), device_types="cuda")
def gdpa_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    validate: bool,
) -> Tensor:
    """Output (T_q, H, D_v), contiguous, in the dtype of q."""
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.gdpa.forward import launch_forward

    check_batch(_NAME, q, k, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, read_offsets=validate)
    return launch_forward(
        q,
        k,
        v,
        offsets_q,
        offsets_k,
        max_seqlen_q,
        max_seqlen_k,
        activation,
        pre_scale,
        post_scale,
        window_left,
        window_right,
    )


@gdpa_op.register_kernel("cpu")
def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    validate: bool,
) -> Tensor:
    check_batch(_NAME, q, k, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, read_offsets=True)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.forward(q, k, v, offsets_q, offsets_k, activation, pre_scale, post_scale, window_left, window_right)


@gdpa_op.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("gem_kernels::gdpa_backward", mutates_args=(), device_types="cuda")
def gdpa_backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv, contiguous, in the dtypes of q, k, v; the same bits on every run."""
    from gem_kernels._src.gdpa.backward import launch_backward

    return launch_backward(
        do,
        q,
        k,
        v,
        offsets_q,
        offsets_k,
        max_seqlen_q,
        max_seqlen_k,
        activation,
        pre_scale,
        post_scale,
        window_left,
        window_right,
    )


@gdpa_backward_op.register_kernel("cpu")
def _backward_cpu(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.backward(
            do, q, k, v, offsets_q, offsets_k, activation, pre_scale, post_scale, window_left, window_right
        )


@gdpa_backward_op.register_fake
def _backward_fake(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, offsets_q, offsets_k, *ctx.scalars, _validate = inputs
    ctx.save_for_backward(q, k, v, offsets_q, offsets_k)


def _backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    dq, dk, dv = gdpa_backward_op(do, *ctx.saved_tensors, *ctx.scalars)
    return dq, dk, dv, *(None,) * 10


gdpa_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.gem_kernels.gdpa, get_raw=True)
def _forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = num_pairs(q, k, offsets_q, offsets_k, window_left, window_right)
    return forward_flops(pairs, q.shape[1], q.shape[2], v.shape[2])


@register_flop_formula(torch.ops.gem_kernels.gdpa_backward, get_raw=True)
def _backward_flops(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = num_pairs(q, k, offsets_q, offsets_k, window_left, window_right)
    return backward_flops(pairs, q.shape[1], q.shape[2], v.shape[2])
