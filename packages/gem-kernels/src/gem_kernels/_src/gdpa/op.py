"""Registrations of GDPA: forward and backward ops, CPU and CUDA kernels, fakes, autograd, FLOP counts.

``schedule`` is the token of an ``AttentionSchedule``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_kernels._src.attention.flops import backward_flops, forward_flops, num_pairs
from gem_kernels._src.attention.pairing import num_output_rows, pair_sequences
from gem_kernels._src.attention.reuse import reusing
from gem_kernels._src.attention.schedule import find_store
from gem_kernels._src.gdpa import cpu
from gem_kernels._src.validate import check_batch, check_target_values, reads_values

_NAME = "gdpa"


@torch.library.custom_op("gem_kernels::gdpa", mutates_args=(), device_types="cuda")
def gdpa_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    num_targets: Tensor | None,
    request_index: Tensor | None,
    validate: bool,
    schedule: Tensor | None = None,
) -> Tensor:
    """Output (T_q, H, D_v), or (B S, H, D_v) of seeds, contiguous, in the dtype of q."""
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.gdpa.forward import launch_forward

    check_batch(
        _NAME,
        q,
        k,
        offsets_q,
        offsets_k,
        max_seqlen_q,
        max_seqlen_k,
        request_index=request_index,
        num_targets=num_targets,
        read_offsets=reads_values(validate),
    )
    with reusing(find_store(_NAME, schedule, offsets_q, offsets_k, request_index)):
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
            num_targets=num_targets,
            request_index=request_index,
        )


@gdpa_op.register_kernel("cpu")
def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    num_targets: Tensor | None,
    request_index: Tensor | None,
    validate: bool,
    schedule: Tensor | None = None,
) -> Tensor:
    # Whoever made a schedule of the offsets has read them.
    known = find_store(_NAME, schedule, offsets_q, offsets_k, request_index) is not None and not validate
    check_batch(
        _NAME,
        q,
        k,
        offsets_q,
        offsets_k,
        max_seqlen_q,
        max_seqlen_k,
        request_index=request_index,
        num_targets=num_targets,
        read_offsets=not known,
    )
    if known and num_targets is not None:
        assert offsets_q is not None  # by check_targets
        check_target_values(_NAME, num_targets, offsets_q, offsets_k)
    pairing = pair_sequences(q, offsets_q, offsets_k, request_index, max_seqlen_q, window_left, window_right)
    num_rows = num_output_rows(q, offsets_q, offsets_k, request_index)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.forward(
            q,
            k,
            v,
            pairing,
            activation,
            pre_scale,
            post_scale,
            window_left,
            window_right,
            num_targets,
            num_rows,
        )


@gdpa_op.register_fake
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    num_targets: Tensor | None,
    request_index: Tensor | None,
    validate: bool,
    schedule: Tensor | None = None,
) -> Tensor:
    return q.new_empty(num_output_rows(q, offsets_q, offsets_k, request_index), q.shape[1], v.shape[2])


@torch.library.custom_op("gem_kernels::gdpa_backward", mutates_args=(), device_types="cuda")
def gdpa_backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    num_targets: Tensor | None,
    request_index: Tensor | None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv, contiguous, in the dtypes of q, k, v; the same bits on every run."""
    from gem_kernels._src.gdpa.backward import launch_backward

    with reusing(find_store(_NAME, schedule, offsets_q, offsets_k, request_index)):
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
            num_targets=num_targets,
            request_index=request_index,
        )


@gdpa_backward_op.register_kernel("cpu")
def _backward_cpu(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    num_targets: Tensor | None,
    request_index: Tensor | None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    pairing = pair_sequences(q, offsets_q, offsets_k, request_index, max_seqlen_q, window_left, window_right)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        return cpu.backward(
            do, q, k, v, pairing, activation, pre_scale, post_scale, window_left, window_right, num_targets
        )


@gdpa_backward_op.register_fake
def _backward_fake(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, offsets_q, offsets_k, *ctx.scalars, num_targets, request_index, _validate, schedule = inputs
    ctx.save_for_backward(q, k, v, offsets_q, offsets_k, num_targets, request_index, schedule)


def _backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
    *tensors, num_targets, request_index, schedule = ctx.saved_tensors
    dq, dk, dv = gdpa_backward_op(do, *tensors, *ctx.scalars, num_targets, request_index, schedule)
    return dq, dk, dv, *(None,) * 13


gdpa_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.gem_kernels.gdpa, get_raw=True)
def _forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    num_targets: Tensor | None,
    request_index: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = num_pairs(
        q, k, offsets_q, offsets_k, window_left, window_right, request_index=request_index, num_targets=num_targets
    )
    return forward_flops(pairs, q.shape[1], q.shape[2], v.shape[2])


@register_flop_formula(torch.ops.gem_kernels.gdpa_backward, get_raw=True)
def _backward_flops(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    window_left: int,
    window_right: int,
    num_targets: Tensor | None,
    request_index: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = num_pairs(
        q, k, offsets_q, offsets_k, window_left, window_right, request_index=request_index, num_targets=num_targets
    )
    return backward_flops(pairs, q.shape[1], q.shape[2], v.shape[2])
