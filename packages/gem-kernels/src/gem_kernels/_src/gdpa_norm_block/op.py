"""Registrations of the block: forward and backward ops, CPU and CUDA kernels, fakes, autograd, FLOP counts.

``schedule`` is the token of an ``AttentionSchedule``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_kernels._src.attention.batching import compute_dtype
from gem_kernels._src.attention.flops import backward_flops, forward_flops, num_pairs
from gem_kernels._src.attention.reuse import reusing
from gem_kernels._src.attention.schedule import find_store
from gem_kernels._src.gdpa_norm_block import cpu
from gem_kernels._src.gdpa_norm_block.arguments import Kept, Options, Parameters, Statistics
from gem_kernels._src.gdpa_norm_block.selection import keeps_rows
from gem_kernels._src.results import as_result
from gem_kernels._src.validate import check_batch, reads_values

NAME = "gdpa_norm_block"


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(0, *q.shape[1:]), q.new_empty(0, *q.shape[1:])


def _kept(normed: Tensor | None, total: Tensor | None, q: Tensor) -> Kept | None:
    """The rows of the forward, or None where the backward makes them again."""
    if normed is None or total is None or normed.shape[0] != q.shape[0]:
        return None
    return Kept(normed, total)


@torch.library.custom_op("gem_kernels::gdpa_norm_block", mutates_args=(), device_types="cuda")
def gdpa_norm_block_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    rms_weight: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    query_residual: bool,
    residual: bool,
    eps: float,
    validate: bool,
    schedule: Tensor | None = None,
    recompute: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output (T_q, H, D), contiguous, in the dtype of q; three statistics (T_q,) of its rows; ``Kept``.

    The last two have no rows if the backward makes them again.
    """
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.gdpa_norm_block.launch import launch_forward
    from gem_kernels._src.norm_linear.rows import check_features

    check_batch(NAME, q, k, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, read_offsets=reads_values(validate))
    check_features(NAME, q.shape[1] * q.shape[2])
    options = Options(max_seqlen_q, max_seqlen_k, activation, pre_scale, post_scale, query_residual, residual, eps)
    parameters = Parameters(norm_weight, norm_bias, rms_weight)
    with reusing(find_store(NAME, schedule, offsets_q, offsets_k, None)):
        keep = keeps_rows(recompute, q, k, parameters, options, offsets_q.shape[0] - 1)
        out, statistics, kept = launch_forward(q, k, v, offsets_q, offsets_k, parameters, options, keep=keep)
    return as_result(out), *statistics, *(_nothing(q) if kept is None else kept)


@gdpa_norm_block_op.register_kernel("cpu")
def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    rms_weight: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    query_residual: bool,
    residual: bool,
    eps: float,
    validate: bool,
    schedule: Tensor | None = None,
    recompute: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # Whoever made a schedule of the offsets has read them; the attention inside finds it in scope.
    store = find_store(NAME, schedule, offsets_q, offsets_k, None)
    read_offsets = store is None or validate
    check_batch(NAME, q, k, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, read_offsets=read_offsets)
    options = Options(max_seqlen_q, max_seqlen_k, activation, pre_scale, post_scale, query_residual, residual, eps)
    parameters = Parameters(norm_weight, norm_bias, rms_weight)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False), reusing(store):
        keep = keeps_rows(recompute, q, k, parameters, options, offsets_q.shape[0] - 1)
        out, statistics, kept = cpu.forward(q, k, v, offsets_q, offsets_k, parameters, options, keep=keep)
    return as_result(out), *statistics, *(_nothing(q) if kept is None else kept)


@gdpa_norm_block_op.register_fake
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    rms_weight: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    query_residual: bool,
    residual: bool,
    eps: float,
    validate: bool,
    schedule: Tensor | None = None,
    recompute: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = Options(max_seqlen_q, max_seqlen_k, activation, pre_scale, post_scale, query_residual, residual, eps)
    parameters = Parameters(norm_weight, norm_bias, rms_weight)
    mean, rstd, rrms = (q.new_empty(q.shape[0], dtype=compute_dtype(q.dtype)) for _ in range(3))
    keep = keeps_rows(recompute, q, k, parameters, options, offsets_q.shape[0] - 1)
    normed, total = (q.new_empty(q.shape) for _ in range(2)) if keep else _nothing(q)
    return q.new_empty(q.shape), mean, rstd, rrms, normed, total


@torch.library.custom_op("gem_kernels::gdpa_norm_block_backward", mutates_args=(), device_types="cuda")
def gdpa_norm_block_backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    rms_weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rrms: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    query_residual: bool,
    residual: bool,
    eps: float,
    schedule: Tensor | None = None,
    normed: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the three parameters, empty for absent ones; the same bits on every run."""
    from gem_kernels._src.gdpa_norm_block.launch import launch_backward

    options = Options(max_seqlen_q, max_seqlen_k, activation, pre_scale, post_scale, query_residual, residual, eps)
    parameters, statistics = Parameters(norm_weight, norm_bias, rms_weight), Statistics(mean, rstd, rrms)
    with reusing(find_store(NAME, schedule, offsets_q, offsets_k, None)):
        kept = _kept(normed, total, q)
        return launch_backward(do, q, k, v, offsets_q, offsets_k, parameters, statistics, options, kept)


@gdpa_norm_block_backward_op.register_kernel("cpu")
def _backward_cpu(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    rms_weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    rrms: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    pre_scale: float,
    post_scale: float,
    query_residual: bool,
    residual: bool,
    eps: float,
    schedule: Tensor | None = None,
    normed: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = Options(max_seqlen_q, max_seqlen_k, activation, pre_scale, post_scale, query_residual, residual, eps)
    parameters, statistics = Parameters(norm_weight, norm_bias, rms_weight), Statistics(mean, rstd, rrms)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    store = find_store(NAME, schedule, offsets_q, offsets_k, None)
    with torch.autocast("cpu", enabled=False), reusing(store):
        kept = _kept(normed, total, q)
        return cpu.backward(do, q, k, v, offsets_q, offsets_k, parameters, statistics, options, kept)


@gdpa_norm_block_backward_op.register_fake
def _backward_fake(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    rms_weight: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    features = q.shape[1] * q.shape[2]
    dnorm_weight, dnorm_bias, drms_weight = (
        q.new_empty(0 if x is None else features) for x in (norm_weight, norm_bias, rms_weight)
    )
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dnorm_weight, dnorm_bias, drms_weight


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors_and_options, _validate, schedule, recompute = inputs
    tensors, ctx.options = tensors_and_options[:8], tensors_and_options[8:]
    kept = (None, None) if recompute else output[4:]
    ctx.save_for_backward(*tensors, *output[1:4], schedule, *kept)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if do is None:
        return (None,) * 19
    *saved, schedule, normed, total = ctx.saved_tensors
    dq, dk, dv, *dparameters = gdpa_norm_block_backward_op(do, *saved, *ctx.options, schedule, normed, total)
    given = (None if x is None else dx for x, dx in zip(saved[5:8], dparameters, strict=True))
    return dq, dk, dv, None, None, *given, *(None,) * 11


gdpa_norm_block_op.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.gem_kernels.gdpa_norm_block, get_raw=True)
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, *args: Any, **kwargs: Any
) -> int:
    return forward_flops(num_pairs(q, k, offsets_q, offsets_k, -1, -1), q.shape[1], q.shape[2], v.shape[2])


@register_flop_formula(torch.ops.gem_kernels.gdpa_norm_block_backward, get_raw=True)
def _backward_flops(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, *args: Any, **kwargs: Any
) -> int:
    return backward_flops(num_pairs(q, k, offsets_q, offsets_k, -1, -1), q.shape[1], q.shape[2], v.shape[2])
