"""Softmax attention over packed sequences of any length, queries and keys of different length included.

For sequence b and head h: ``o = softmax(scale * q_b @ k_b.T + bias) @ v_b`` over the valid pairs. Nothing is padded and
no score or bias matrix is stored. Positions count from each sequence's own start, on the query and on the key side.

Algorithm: Dao, FlashAttention-2 (arXiv:2307.08691), on the jagged layout of ranking models.
"""

from __future__ import annotations

from torch import Tensor

from gem_kernels._src.attention.pairing import num_output_rows
from gem_kernels._src.attention.schedule import AttentionSchedule, check_schedule
from gem_kernels._src.attention.window import normalize_window
from gem_kernels._src.autocast import autocast_operands
from gem_kernels._src.eager import launches_directly
from gem_kernels._src.jagged_attention.bias import check_bias
from gem_kernels._src.jagged_attention.direct import DirectAttention
from gem_kernels._src.jagged_attention.op import jagged_attention_op
from gem_kernels._src.validate import check_attention, check_bool, check_scale, check_window

__all__ = ["jagged_attention"]


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    time_buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
    schedule: AttentionSchedule | None = None,
    return_lse: bool = False,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of packed queries over packed keys, sequence by sequence.

    Shapes: B sequences, T_q / T_k packed rows, H query heads, H_kv key heads (H_kv divides H; query head h reads key
    head ``h // (H / H_kv)``), D and D_v head dims.

    Args:
        q: (T_q, H, D). float16, bfloat16 or float32; float64 too on CPU. Any strides; a last dim that is not
            contiguous is copied. With ``offsets_q=None``: (S, H, D) seeds, read by every sequence.
        k: (T_k, H_kv, D), dtype and device of q.
        v: (T_k, H_kv, D_v), dtype and device of q.
        offsets_q: (B + 1,) int32 or int64 on q's device, from 0 to T_q (FlashAttention's ``cu_seqlens``).
            None: q holds the S seed queries of every sequence (pooling by attention), the gradient of which is summed
            over the batch in float32. T_q below is then B S, sequence b at rows [b S, (b + 1) S).
        offsets_k: (B + 1,), from 0 to T_k; (R + 1,) with ``request_index``.
        max_seqlen_q: Longest query sequence in tokens, at least S with seeds; an upper bound is allowed. A Python int,
            so that nothing waits for the device.
        max_seqlen_k: Longest key sequence in tokens; an upper bound is allowed.
        scale: Factor on the scores, > 0; default ``D ** -0.5``.
        causal: Keep only keys j <= i.
        window_size: (left, right) in tokens: keep keys i - left <= j <= i + right; -1 is unbounded.
        position_bias: (H, 2 * P + 1) float, added to ``scale * q @ k.T``: query i and key j of head h take entry
            ``[h, clamp(j - i, -P, P) + P]``. Differentiable, any float dtype; entries must be finite.
        time_bias: (H, N) float, added likewise: entry ``[h, min(floor(R * octave(gap)), N - 1)]`` for a gap of
            ``abs(times_q[i] - times_k[j])`` seconds, see below. Differentiable; at most ``128 * R`` columns.
        times_q: (T_q,) time of each query row, needed with ``time_bias``: int64, int32, float32 or float64, in seconds
            (Unix times or ages; only differences count). It must not require a gradient.
        times_k: (T_k,) time of each key row, dtype of ``times_q``.
        time_buckets_per_octave: R: 1, 2, 4 or 8 buckets each time the gap doubles; left out without ``time_bias``.
        request_index: (B,) int32 or int64, non-decreasing. Query sequence i reads key sequence ``request_index[i]``, so
            that many candidates share one user's keys; gradients of keys and values sum over them. Positions count
            from each query sequence's own start. A key sequence may have no query sequence.
        schedule: An :class:`gem_kernels.AttentionSchedule` of these offsets and requests, which the layers of a batch
            share; what it keeps is not made again. It changes no result.
        return_lse: Also return the log-sum-exp of the scores, differentiable.
        validate: On CUDA, also check the values of the offsets and ``request_index``, which waits for the device. On
            CPU they always are.

    Returns:
        (T_q, H, D_v) in the dtype of q, contiguous; with ``return_lse`` also (T_q, H) float32 (float64 for float64).
        A row without a valid key is 0, its log-sum-exp -inf, its gradients 0.

    Raises:
        ValueError: on a shape, device, window, offset, request, schedule or bias that does not fit.
        TypeError: on a dtype or argument type that does not fit.

    Time buckets: the gap is taken in the dtype of the times, rounded to float32, and raised to 1 second. Then
    ``octave(gap)`` is ``n + gap / 2**n - 1`` with ``n = floor(log2(gap))``: log2, linear between powers of two, so that
    bucket borders are exact numbers of seconds and every device agrees on them. With R = 1 the bucket is
    ``floor(log2(gap))``: 32 columns reach 68 years. Gaps that are NaN take the last bucket. The bias is that of HSTU
    (Zhai et al., arXiv:2402.17152) with a row per head; its code takes ``floor(log(gap) / 0.301)``, 2.3 buckets per
    octave.

    Numerics: scores, softmax and sums in float32 (float64 for float64); probabilities are rounded to the dtype of v
    before the second matmul on CUDA. float32 inputs use full-precision matmuls, not TF32. Forward and backward give
    the same bits on every run. Under autocast q, k and v are cast to the autocast dtype; the tables are not, and are
    added in float32. The gradients of the tables are summed without atomics, from partial sums of bounded size: on
    CUDA at most 1024 rows of 512 distances and of the time buckets, in float32. They cost a second pass over the pairs
    per table, only when a table requires a gradient.

    Memory: on Hopper the backward of sequences of more than 256 queries in the mean, D = 128, allocates 4 bytes per
    element of q, for sums in float32.
    """
    q, k, v = autocast_operands(q, k, v)
    check_attention(
        "jagged_attention", q, k, v, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, request_index=request_index
    )
    check_bool("jagged_attention", causal=causal, return_lse=return_lse, validate=validate)
    check_window("jagged_attention", window_size)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    check_scale("jagged_attention", scale)
    token = None
    if schedule is not None:
        sides = (offsets_q, offsets_k, max_seqlen_q, max_seqlen_k)
        token = check_schedule("jagged_attention", schedule, q, k, *sides, request_index, validate=validate)
    num_rows = num_output_rows(q, offsets_q, offsets_k, request_index)
    check_bias("jagged_attention", q, k, num_rows, position_bias, time_bias, times_q, times_k, time_buckets_per_octave)
    left, right = normalize_window(causal, window_size)
    others = [x for x in (offsets_q, offsets_k, request_index) if x is not None]
    if position_bias is None and time_bias is None and launches_directly(q, k, v, *others):
        sizes = (max_seqlen_q, max_seqlen_k, float(scale), left, right)
        out, lse = DirectAttention.apply(q, k, v, offsets_q, offsets_k, sizes, validate, request_index, token)
        return (out, lse) if return_lse else out
    out, lse = jagged_attention_op(
        q,
        k,
        v,
        offsets_q,
        offsets_k,
        max_seqlen_q,
        max_seqlen_k,
        float(scale),
        left,
        right,
        validate,
        position_bias,
        time_bias,
        times_q,
        times_k,
        time_buckets_per_octave,
        request_index,
        token,
    )
    return (out, lse) if return_lse else out
