"""Generalized dot-product attention (GDPA): an elementwise activation in place of the softmax.

For sequence b and head h: ``o = post_scale * activation(pre_scale * q_b @ k_b.T) @ v_b`` over the valid pairs; the
others contribute 0. No normaliser, no log-sum-exp; nothing but q, k and v is kept for the backward.

Source: the attention of the Kunlun ranking model (GDPA-enhanced personalised feed-forward network) and Meta's GDPA
kernels. Meta's code scales after the activation, the Kunlun paper inside it: both factors are arguments here.

With ``activation="silu"``, ``causal=True``, ``post_scale=1 / N`` and ``num_targets`` it is the attention of HSTU
(Zhai et al. 2024, "Actions Speak Louder than Words"), N the longest sequence.
"""

from __future__ import annotations

from torch import Tensor

from gem_kernels._src.attention.schedule import AttentionSchedule, check_schedule
from gem_kernels._src.attention.window import normalize_window
from gem_kernels._src.autocast import autocast_operands
from gem_kernels._src.gdpa.activation import Activation, activation_name
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES
from gem_kernels._src.gdpa.op import gdpa_op
from gem_kernels._src.validate import check_attention, check_bool, check_scalar, check_targets, check_window

__all__ = ["ACTIVATIONS", "Activation", "gdpa"]

ACTIVATIONS = ACTIVATION_NAMES
"""Names of the built-in activations."""


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str | Activation = "gelu",
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_targets: Tensor | None = None,
    request_index: Tensor | None = None,
    schedule: AttentionSchedule | None = None,
    validate: bool = False,
) -> Tensor:
    """Activation attention of packed queries over packed keys, sequence by sequence.

    Shapes: B sequences, T_q / T_k packed rows, H query heads, H_kv key heads (H_kv divides H; query head h reads key
    head ``h // (H / H_kv)``), D and D_v head dims.

    Args:
        q: (T_q, H, D). float16, bfloat16 or float32; float64 too on CPU. Any strides; a last dim that is not
            contiguous is copied. With ``offsets_q=None``: (S, H, D) seeds, read by every sequence.
        k: (T_k, H_kv, D), dtype and device of q.
        v: (T_k, H_kv, D_v), dtype and device of q.
        offsets_q: (B + 1,) int32 or int64 on q's device, from 0 to T_q (FlashAttention's ``cu_seqlens``).
            None: q holds the S seed queries of every sequence (pooling by attention), the gradient of which is summed
            over the batch in float32.
        offsets_k: (B + 1,), from 0 to T_k; (R + 1,) with ``request_index``.
        max_seqlen_q: Longest query sequence in tokens, at least S with seeds; an upper bound is allowed. A Python int,
            so that nothing waits for the device.
        max_seqlen_k: Longest key sequence in tokens; an upper bound is allowed.
        activation: One of ``raw`` (identity), ``gelu`` (erf), ``gelu_approx`` (tanh), ``fast_gelu`` (the tanh form by
            the hardware's approximate tanh; for bfloat16 on Hopper, the forward rounds scores and activation to
            bfloat16, as eager does), ``leaky_relu`` (slope 0.01), ``relu``, ``silu``, ``fast_silu`` (by the
            approximate tanh), ``hardswish``, ``relu_square``, ``fast_gelu_taylor_approx`` (degree 6; only for scores
            of absolute value below about 1.5, which the caller must bound); or an :class:`Activation` of your own.
        pre_scale: Factor on the scores, inside the activation.
        post_scale: Factor on the activated scores.
        causal: Keep only keys j <= i.
        window_size: (left, right) in tokens: keep keys i - left <= j <= i + right; -1 is unbounded.
        num_targets: (B,) int32 or int64. The last ``num_targets[b]`` rows of sequence b are targets, candidates that
            must not know of each other: each sees itself and the history, the rows before the first target, as if it
            stood right behind that history (which is where ``window_size`` counts from). History rows see no target.
            Self-attention only: q and k share their offsets.
        request_index: (B,) int32 or int64, non-decreasing. Query sequence i reads key sequence ``request_index[i]``, so
            that many candidates share one user's keys; gradients of keys and values sum over them. Positions count
            from each query sequence's own start. A key sequence may have no query sequence.
        schedule: An :class:`gem_kernels.AttentionSchedule` of these offsets and requests, which the layers of a batch
            share; what it keeps is not made again. It changes no result.
        validate: On CUDA, also check the values of the offsets, ``num_targets`` and ``request_index``, which waits for
            the device. On CPU they always are.

    Returns:
        (T_q, H, D_v) in the dtype of q, contiguous; with seeds (B S, H, D_v), sequence b at rows [b S, (b + 1) S). A
        row without a valid key is 0 and so are its gradients.

    Raises:
        ValueError: on a shape, device, window, activation, offset, target count, request or schedule that does not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: scores and sums in float32 (float64 for float64); activated scores are rounded to the dtype of v before
    the second matmul on CUDA. float32 inputs use full-precision matmuls, not TF32. Forward and backward give the same
    bits on every run. Under autocast q, k and v are cast to the autocast dtype.

    Memory: on Hopper the backward with fast_gelu in bfloat16, D = 128, allocates 4 bytes per element of q, for sums in
    float32, where ``max_seqlen_k`` is above 256.

    Example:
        HSTU over histories that end in candidates, and pooling by seeds (S, H, D):

        >>> lengths = dict(offsets_q=offsets, offsets_k=offsets, max_seqlen_q=n, max_seqlen_k=n)
        >>> out = gdpa(q, k, v, **lengths, activation="silu", post_scale=1 / n, causal=True, num_targets=num_targets)
        >>> pooled = gdpa(seeds, k, v, offsets_q=None, offsets_k=offsets, max_seqlen_q=len(seeds), max_seqlen_k=n)
    """
    q, k, v = autocast_operands(q, k, v)
    check_attention("gdpa", q, k, v, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, request_index=request_index)
    if num_targets is not None:
        check_targets("gdpa", num_targets, q, k, offsets_q, request_index)
    check_bool("gdpa", causal=causal, validate=validate)
    check_window("gdpa", window_size)
    check_scalar("gdpa", "pre_scale", pre_scale)
    check_scalar("gdpa", "post_scale", post_scale)
    token = None
    if schedule is not None:
        sides = (offsets_q, offsets_k, max_seqlen_q, max_seqlen_k)
        token = check_schedule("gdpa", schedule, q, k, *sides, request_index, validate=validate)
    name = activation_name("gdpa", activation)
    left, right = normalize_window(causal, window_size)
    out: Tensor = gdpa_op(
        q,
        k,
        v,
        offsets_q,
        offsets_k,
        max_seqlen_q,
        max_seqlen_k,
        name,
        float(pre_scale),
        float(post_scale),
        left,
        right,
        num_targets,
        request_index,
        validate,
        token,
    )
    return out
