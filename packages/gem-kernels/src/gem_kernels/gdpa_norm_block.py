"""GDPA between its norms and residuals, as one op: the block around a personalised feed-forward network.

Per row, over all heads together, with n = layer_norm(q): ``out = rms_norm(gdpa(n, k, v) + n) + q``. The norms and sums
are two kernels around the attention, or one kernel with it: where sequences have few keys, and on Hopper with up to 128
keys and 2 to 4 heads of 128. The backward makes the intermediate rows again.

Source: the GDPA block of Meta's GEM training posts and ads_model_kernel_library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gem_kernels._src.attention.schedule import AttentionSchedule, check_schedule
from gem_kernels._src.autocast import autocast_operands
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES
from gem_kernels._src.gdpa_norm_block.op import NAME, gdpa_norm_block_op
from gem_kernels._src.validate import check_attention, check_bool, check_same, check_scalar, check_tensor
from gem_kernels.gdpa import gdpa

__all__ = ["gdpa_norm_block"]


def gdpa_norm_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str = "gelu",
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    rms_weight: Tensor | None = None,
    layer_norm: bool = True,
    query_residual: bool = True,
    rms_norm: bool = True,
    residual: bool = True,
    eps: float = 1e-5,
    recompute: bool = True,
    schedule: AttentionSchedule | None = None,
    validate: bool = False,
) -> Tensor:
    """Layer norm, activation attention, RMS norm and residuals of packed queries, sequence by sequence.

    With rows of H * D numbers: ``n = layer_norm(q) * norm_weight + norm_bias``, ``s = gdpa(n, k, v) + n``,
    ``out = rms_norm(s) * rms_weight + q``.

    Shapes: B sequences, T_q / T_k packed rows, H query heads, H_kv key heads (H_kv divides H; query head h reads key
    head ``h // (H / H_kv)``), D the head dim of q, k and v.

    Args:
        q: (T_q, H, D). float16, bfloat16 or float32 with H * D <= 16384; float64 too on CPU. Any strides; rows that
            are not contiguous are copied.
        k: (T_k, H_kv, D), dtype and device of q, as all floating point tensors.
        v: (T_k, H_kv, D).
        offsets_q: (B + 1,) int32 or int64 on q's device, from 0 to T_q (FlashAttention's ``cu_seqlens``).
        offsets_k: (B + 1,), from 0 to T_k.
        max_seqlen_q: Longest query sequence in tokens; an upper bound is allowed.
        max_seqlen_k: Longest key sequence in tokens; an upper bound is allowed.
        activation: Name of an activation of ``gem_kernels.gdpa``.
        pre_scale: Factor on the scores, inside the activation.
        post_scale: Factor on the activated scores.
        norm_weight: (H * D,), of the layer norm.
        norm_bias: (H * D,), of the layer norm.
        rms_weight: (H * D,), of the RMS norm.
        layer_norm: Take the layer norm of q; without it n is q. With a norm left out this is a composition of
            ``gem_kernels.gdpa`` and torch's norm, rounded between them and kept for the backward by torch, whatever
            ``recompute`` says.
        query_residual: Add n to the attention's output.
        rms_norm: Take the RMS norm of the sum.
        residual: Add q to the result.
        eps: Added to the variance and to the mean square.
        recompute: Run the layer norm and the attention again in the backward. ``False`` keeps what they wrote, twice
            the size of q; results differ at most by the rounding of the sum before the RMS norm. Where every sequence
            has few keys nothing is kept either way: those kernels make it again while they read q.
        schedule: An :class:`gem_kernels.AttentionSchedule` of these offsets, which the layers of a batch share; what it
            keeps is not made again. It changes no result.
        validate: On CUDA, also check the values of the offsets, which waits for the device. On CPU they always are.

    Returns:
        (T_q, H, D) in the dtype of q, contiguous.

    Raises:
        ValueError: on a shape, device, activation, ``eps``, offset or schedule that does not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: as ``gem_kernels.gdpa``; statistics and sums in float32 (float64 for float64), the attention's input and
    output (or its sum with the query residual) rounded to the dtype of q on CUDA, the output not where every sequence
    has few keys. The forward keeps its inputs and three numbers per row, and two rows more unless ``recompute``. Both
    directions give the same bits on every run. Under autocast all floating point tensors are cast to its dtype.
    """
    if offsets_q is None:
        raise TypeError(
            f"{NAME}: `offsets_q` must be a Tensor of shape (B + 1,), got None: shared seeds have no residual "
            "rows of their own; repeat them for each sequence, or use gdpa and compute the norms around it."
        )
    q, k, v = autocast_operands(q, k, v)
    check_attention(NAME, q, k, v, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k)
    if v.shape[2] != q.shape[2]:
        raise ValueError(
            f"{NAME}: `v` must have the head dim of `q`, {q.shape[2]}, which its output is added to, got {v.shape[2]}; "
            "project both to one width."
        )
    parameters = {"norm_weight": norm_weight, "norm_bias": norm_bias, "rms_weight": rms_weight}
    for name, x in parameters.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{NAME}: `{name}` must be a Tensor or None, got {type(x).__name__}; convert it with torch.as_tensor."
            )
        check_tensor(NAME, name, x)
        (parameters[name],) = (x,) = autocast_operands(x)
        if x.dim() != 1 or x.shape[0] != q.shape[1] * q.shape[2]:
            raise ValueError(
                f"{NAME}: `{name}` must have shape (H * D,) = ({q.shape[1] * q.shape[2]},), got {tuple(x.shape)}; give "
                "one number per channel."
            )
        check_same(NAME, {"q": q, name: x})
    check_bool(NAME, layer_norm=layer_norm, query_residual=query_residual, rms_norm=rms_norm, residual=residual)
    check_bool(NAME, recompute=recompute, validate=validate)
    for flag, is_on, of_norm in (
        ("layer_norm", layer_norm, ("norm_weight", "norm_bias")),
        ("rms_norm", rms_norm, ("rms_weight",)),
    ):
        given = [name for name in of_norm if parameters[name] is not None]
        if given and not is_on:
            raise ValueError(f"{NAME}: `{given[0]}` must be None without `{flag}`, got a tensor; drop one of them.")
    token = None
    if schedule is not None:
        sides = (offsets_q, offsets_k, max_seqlen_q, max_seqlen_k)
        token = check_schedule(NAME, schedule, q, k, *sides, None, validate=validate)
    for name, value in (("pre_scale", pre_scale), ("post_scale", post_scale), ("eps", eps)):
        check_scalar(NAME, name, value)
    if eps < 0:
        raise ValueError(f"{NAME}: `eps` must be >= 0, got {eps}; pass a small number such as 1e-5.")
    if activation not in ACTIVATION_NAMES:
        raise ValueError(
            f"{NAME}: `activation` must be one of {', '.join(ACTIVATION_NAMES)}, got {activation!r}; name one of them."
        )
    if not (layer_norm and rms_norm):
        batch = {
            "offsets_q": offsets_q,
            "offsets_k": offsets_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "activation": activation,
            "pre_scale": pre_scale,
            "post_scale": post_scale,
            "schedule": schedule,
            "validate": validate,
        }
        return _by_parts(q, k, v, batch, parameters, eps, layer_norm, query_residual, rms_norm, residual)
    out, *_ = gdpa_norm_block_op(
        q,
        k,
        v,
        offsets_q,
        offsets_k,
        parameters["norm_weight"],
        parameters["norm_bias"],
        parameters["rms_weight"],
        max_seqlen_q,
        max_seqlen_k,
        activation,
        float(pre_scale),
        float(post_scale),
        query_residual,
        residual,
        float(eps),
        validate,
        token,
        # Without a backward nothing is kept for it.
        recompute or not torch.is_grad_enabled(),
    )
    return out


def _by_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: dict[str, Any],
    parameters: dict[str, Tensor | None],
    eps: float,
    layer_norm: bool,
    query_residual: bool,
    rms_norm: bool,
    residual: bool,
) -> Tensor:
    """The block without one of its norms: gdpa and torch's ops, one after the other."""
    features = (q.shape[1] * q.shape[2],)
    n = q
    if layer_norm:
        weight, bias = parameters["norm_weight"], parameters["norm_bias"]
        # Autocast makes it float32.
        n = functional.layer_norm(q.flatten(1), features, weight, bias, eps).to(q.dtype).view(q.shape)
    out = gdpa(n, k, v, **batch)
    if query_residual:
        out = out + n
    if rms_norm:
        out = functional.rms_norm(out.flatten(1), features, parameters["rms_weight"], eps).to(q.dtype).view(q.shape)
    return out + q if residual else out
