"""Registrations of jagged attention: forward and backward ops, CPU and CUDA kernels, fakes, autograd, FLOP counts.

``schedule`` is the token of an ``AttentionSchedule``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_kernels._src.attention.flops import backward_flops, forward_flops, num_pairs
from gem_kernels._src.attention.pairing import num_output_rows
from gem_kernels._src.attention.reuse import reusing
from gem_kernels._src.attention.schedule import find_store
from gem_kernels._src.jagged_attention import cpu
from gem_kernels._src.jagged_attention.bias import Bias, pair_with_bias
from gem_kernels._src.validate import check_batch, reads_values

_NAME = "jagged_attention"


@torch.library.custom_op("gem_kernels::jagged_attention", mutates_args=(), device_types="cuda")
def jagged_attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    validate: bool,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (T_q, H, D_v), (B S, H, D_v) of seeds, and log-sum-exp (T_q, H) in float32 (float64 for float64)."""
    # Imported here: Triton is absent where only the CPU kernels are used.
    from gem_kernels._src.jagged_attention.forward import launch_forward

    lengths = (offsets_q, offsets_k, max_seqlen_q, max_seqlen_k)
    check_batch(_NAME, q, k, *lengths, request_index=request_index, read_offsets=reads_values(validate))
    bias = Bias(position_bias, time_bias, times_q, times_k, buckets_per_octave)
    with reusing(find_store(_NAME, schedule, offsets_q, offsets_k, request_index)):
        return launch_forward(q, k, v, *lengths, scale, window_left, window_right, bias, request_index)


@jagged_attention_op.register_kernel("cpu")
def _forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    validate: bool,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    lengths = (offsets_q, offsets_k, max_seqlen_q, max_seqlen_k)
    # Whoever made a schedule of the offsets has read them.
    known = find_store(_NAME, schedule, offsets_q, offsets_k, request_index) is not None and not validate
    check_batch(_NAME, q, k, *lengths, request_index=request_index, read_offsets=not known)
    bias = Bias(position_bias, time_bias, times_q, times_k, buckets_per_octave)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        pairing = pair_with_bias(q, *lengths[:2], request_index, max_seqlen_q, window_left, window_right, bias)
        return cpu.forward(q, k, v, pairing, scale, window_left, window_right, bias)


@jagged_attention_op.register_fake
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    validate: bool,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = num_output_rows(q, offsets_q, offsets_k, request_index)
    return q.new_empty(rows, q.shape[1], v.shape[2]), q.new_empty(rows, q.shape[1], dtype=lse_dtype)


@torch.library.custom_op("gem_kernels::jagged_attention_backward", mutates_args=(), device_types="cuda")
def jagged_attention_backward_op(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv, contiguous, in the dtypes of q, k, v; the same bits on every run."""
    from gem_kernels._src.jagged_attention.backward import launch_backward

    bias = Bias(position_bias, time_bias, times_q, times_k, buckets_per_octave)
    sizes = (max_seqlen_q, max_seqlen_k, scale, window_left, window_right)
    with reusing(find_store(_NAME, schedule, offsets_q, offsets_k, request_index)):
        found = launch_backward(do, dlse, q, k, v, out, lse, offsets_q, offsets_k, *sizes, bias, request_index)
    dq, dk, dv = (x.contiguous() for x in found)
    return dq, dk, dv


@jagged_attention_backward_op.register_kernel("cpu")
def _backward_cpu(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    bias = Bias(position_bias, time_bias, times_q, times_k, buckets_per_octave)
    # The matmuls inside keep their dtype although the caller may be under autocast.
    with torch.autocast("cpu", enabled=False):
        window = (window_left, window_right)
        pairing = pair_with_bias(q, offsets_q, offsets_k, request_index, max_seqlen_q, *window, bias)
        return cpu.backward(do, dlse, q, k, v, out, lse, pairing, scale, *window, bias)


@jagged_attention_backward_op.register_fake
def _backward_fake(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("gem_kernels::jagged_attention_bias_backward", mutates_args=(), device_types="cuda")
def jagged_attention_bias_backward_op(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the two tables in their dtypes, the same bits on every run; empty for a table that is None."""
    from gem_kernels._src.jagged_attention.tables import launch_table_gradients

    bias = Bias(position_bias, time_bias, times_q, times_k, buckets_per_octave)
    sizes = (max_seqlen_q, max_seqlen_k, scale, window_left, window_right)
    saved = (do, dlse, q, k, v, out, lse, offsets_q, offsets_k)
    with reusing(find_store(_NAME, schedule, offsets_q, offsets_k, request_index)):
        return _like_tables(q, bias, launch_table_gradients(*saved, *sizes, bias, request_index))


@jagged_attention_bias_backward_op.register_kernel("cpu")
def _bias_backward_cpu(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    bias = Bias(position_bias, time_bias, times_q, times_k, buckets_per_octave)
    window = (window_left, window_right)
    pairing = pair_with_bias(q, offsets_q, offsets_k, request_index, max_seqlen_q, *window, bias)
    with torch.autocast("cpu", enabled=False):
        gradients = cpu.backward_tables(do, dlse, q, k, v, out, lse, pairing, scale, *window, bias)
    return _like_tables(q, bias, gradients)


def _like_tables(q: Tensor, bias: Bias, gradients: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Table gradients in the dtypes of the tables; an op returns no None, so an absent table gets an empty tensor."""
    dposition, dtime = (
        q.new_empty(0) if table is None or gradient is None else gradient.to(table.dtype)
        for table, gradient in zip((bias.position, bias.time), gradients, strict=True)
    )
    return dposition, dtime


@jagged_attention_bias_backward_op.register_fake
def _bias_backward_fake(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    dposition, dtime = (
        q.new_empty(0) if table is None else table.new_empty(table.shape) for table in (position_bias, time_bias)
    )
    return dposition, dtime


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets_q, offsets_k = inputs[:5]
    ctx.scalars = inputs[5:10]
    *bias, per_octave, request_index, schedule = inputs[11:]
    ctx.buckets_per_octave = per_octave
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, offsets_q, offsets_k, *bias, request_index, schedule)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, offsets_q, offsets_k, *bias, request_index, schedule = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 18
    do = torch.zeros_like(out) if do is None else do
    args = (do, dlse, q, k, v, out, lse, offsets_q, offsets_k, *ctx.scalars)
    args = (*args, *bias, ctx.buckets_per_octave, request_index, schedule)
    dq, dk, dv = jagged_attention_backward_op(*args)
    dposition = dtime = None
    # Frozen tables cost nothing. The dispatcher drops trailing arguments at their defaults.
    position_needed, time_needed = (*ctx.needs_input_grad, *(False,) * 6)[11:13]
    if position_needed or time_needed:
        dposition, dtime = jagged_attention_bias_backward_op(*args)
    dposition, dtime = dposition if position_needed else None, dtime if time_needed else None
    return dq, dk, dv, *(None,) * 8, dposition, dtime, *(None,) * 5


jagged_attention_op.register_autograd(_backward, setup_context=_setup_context)


def _request_index(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The argument ``place`` behind the window, however the call spelled it."""
    value: Tensor | None = args[place] if len(args) > place else kwargs.get("request_index")
    return value


@register_flop_formula(torch.ops.gem_kernels.jagged_attention, get_raw=True)
def _forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = num_pairs(
        q, k, offsets_q, offsets_k, window_left, window_right, request_index=_request_index(6, args, kwargs)
    )
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
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    window_left: int,
    window_right: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    pairs = num_pairs(
        q, k, offsets_q, offsets_k, window_left, window_right, request_index=_request_index(5, args, kwargs)
    )
    return backward_flops(pairs, q.shape[1], q.shape[2], v.shape[2])
