"""Activation attention over packed sequences as a plain loop: the oracle of ``gem_kernels.gdpa``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.attention.window import normalize_window, pair_mask
from gem_kernels._src.gdpa.activation import Activation as UserActivation
from gem_kernels._src.gdpa.activation import activation_name, registered_activation

_SQRT_HALF = math.sqrt(0.5)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715
# Even-power coefficients of gelu's Taylor series at 0, to degree 6.
_C2, _C4, _C6 = 0.3989422804014327, -0.06649038006690545, 0.009973557010035818


class Activation(NamedTuple):
    """An elementwise function that maps 0 to 0, and its derivative."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _tanh_argument(x: Tensor) -> Tensor:
    return torch.tanh(_SQRT_2_OVER_PI * x * (1 + _GELU_CUBIC * x * x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * _SQRT_HALF))


def _gelu_derivative(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * _SQRT_HALF)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + _tanh_argument(x))


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    t = _tanh_argument(x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * x * x)


def _silu_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _hardswish_derivative(x: Tensor) -> Tensor:
    inside = (2 * x + 3) / 6
    return torch.where(x < -3, torch.zeros_like(x), torch.where(x > 3, torch.ones_like(x), inside))


_GELU_TANH = Activation(_gelu_tanh, _gelu_tanh_derivative)
_SILU = Activation(lambda x: x * torch.sigmoid(x), _silu_derivative)

ACTIVATIONS: dict[str, Activation] = {
    "raw": Activation(lambda x: x, torch.ones_like),
    "gelu": Activation(_gelu, _gelu_derivative),
    "gelu_approx": _GELU_TANH,
    "fast_gelu": _GELU_TANH,
    "leaky_relu": Activation(
        lambda x: torch.where(x > 0, x, 0.01 * x), lambda x: torch.where(x > 0, 1.0, 0.01).to(x.dtype)
    ),
    "relu": Activation(lambda x: x.clamp(min=0), lambda x: (x > 0).to(x.dtype)),
    "silu": _SILU,
    "fast_silu": _SILU,
    "hardswish": Activation(lambda x: x * (x + 3).clamp(0, 6) / 6, _hardswish_derivative),
    "relu_square": Activation(lambda x: x.clamp(min=0).square(), lambda x: 2 * x.clamp(min=0)),
    "fast_gelu_taylor_approx": Activation(
        lambda x: 0.5 * x + x * x * (_C2 + x * x * (_C4 + _C6 * x * x)),
        lambda x: 0.5 + x * (2 * _C2 + x * x * (4 * _C4 + 6 * _C6 * x * x)),
    ),
}
"""By name; the ``fast_`` forms are the same functions, computed with hardware approximations by the kernels."""


def _activation(activation: str | UserActivation) -> Activation:
    name = activation_name("reference.gdpa", activation)
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    user = registered_activation(name)
    return Activation(user.torch_value, user.torch_derivative)


class _Pair(NamedTuple):
    """One query sequence and the keys it reads."""

    q_rows: slice
    """Of q."""
    out_rows: slice
    """Of the output; those of q, unless q holds seeds."""
    k_rows: slice
    mask: Tensor
    """(L_q, L_k) bool."""


def _pairs(
    q: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    request_index: Tensor | None,
    num_targets: Tensor | None,
    left: int,
    right: int,
) -> Iterator[_Pair]:
    bounds_k = offsets_k.tolist()
    requests = range(len(bounds_k) - 1) if request_index is None else request_index.tolist()
    bounds_q = [i * q.shape[0] for i in range(len(requests) + 1)] if offsets_q is None else offsets_q.tolist()
    for i, r in enumerate(requests):
        (o0, o1), (k0, k1) = bounds_q[i : i + 2], bounds_k[r : r + 2]
        keys = torch.arange(k1 - k0, device=q.device)
        mask = pair_mask(torch.arange(o1 - o0, device=q.device), keys, left, right)
        history = k1 - k0 - (0 if num_targets is None else int(num_targets[i]))
        for target in range(history, k1 - k0):
            mask[target] = pair_mask(keys.new_tensor([history]), keys, left, right)
        mask[:, history:] = False
        for target in range(history, k1 - k0):
            mask[target, target] = True
        yield _Pair(slice(0, q.shape[0]) if offsets_q is None else slice(o0, o1), slice(o0, o1), slice(k0, k1), mask)


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    activation: str | UserActivation = "gelu",
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_targets: Tensor | None = None,
    request_index: Tensor | None = None,
) -> Tensor:
    """Output (T_q, H, D_v), or (B S, H, D_v) of seeds, in the dtype of q; arguments as in ``gem_kernels.gdpa``."""
    repeat = q.shape[1] // k.shape[1]
    act = _activation(activation)
    pairs = list(_pairs(q, offsets_q, offsets_k, request_index, num_targets, *normalize_window(causal, window_size)))
    out = q.new_zeros(pairs[-1].out_rows.stop if pairs else 0, q.shape[1], v.shape[2])
    for rows, out_rows, keys, mask in pairs:
        qs, ks, vs = _heads_first(q, rows, 1), _heads_first(k, keys, repeat), _heads_first(v, keys, repeat)
        p = act.value(pre_scale * (qs @ ks.transpose(1, 2))).masked_fill(~mask, 0.0)
        out[out_rows] = (post_scale * (p @ vs)).transpose(0, 1)
    return out


def gdpa_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    activation: str | UserActivation = "gelu",
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    num_targets: Tensor | None = None,
    request_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv from ``do`` (T_q, H, D_v), or (B S, H, D_v) of seeds.

    With S = pre_scale Q Kᵀ and M the mask: dV = post_scale (M ⊙ act(S))ᵀ dO,
    dS = post_scale M ⊙ act'(S) ⊙ (dO Vᵀ), dQ = pre_scale dS K, dK = pre_scale dSᵀ Q; summed over the query sequences
    of a request in dK and dV, over the batch in dQ of seeds.
    """
    repeat = q.shape[1] // k.shape[1]
    act = _activation(activation)
    left, right = normalize_window(causal, window_size)
    # Sums over sequences are kept in float32 at least, as one matmul would.
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    for rows, out_rows, keys, mask in _pairs(q, offsets_q, offsets_k, request_index, num_targets, left, right):
        qs, ks, vs = _heads_first(q, rows, 1), _heads_first(k, keys, repeat), _heads_first(v, keys, repeat)
        dos = _heads_first(do, out_rows, 1)
        scores = pre_scale * (qs @ ks.transpose(1, 2))
        p = act.value(scores).masked_fill(~mask, 0.0)
        ds = post_scale * (act.derivative(scores) * (dos @ vs.transpose(1, 2))).masked_fill(~mask, 0.0)
        dq[rows] += (pre_scale * (ds @ ks)).transpose(0, 1)
        dk[keys] += pre_scale * (ds.transpose(1, 2) @ qs).unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
        dv[keys] += post_scale * (p.transpose(1, 2) @ dos).unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _heads_first(x: Tensor, rows: slice, repeat: int) -> Tensor:
    """(T, H, D) rows of one sequence as (H * repeat, L, D), each head repeated for its group of query heads."""
    return x[rows].transpose(0, 1).repeat_interleave(repeat, dim=0)
