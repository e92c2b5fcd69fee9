"""Activation attention over packed sequences as a plain loop: the oracle of ``gem_kernels.gdpa``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.attention.window import normalize_window, pair_mask
from gem_kernels.reference.jagged_attention import _heads_first

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


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor,
    offsets_k: Tensor,
    activation: str = "gelu",
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Output (T_q, H, D_v) in the dtype of q; arguments as in ``gem_kernels.gdpa``."""
    left, right = normalize_window(causal, window_size)
    repeat = q.shape[1] // k.shape[1]
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    bounds_q, bounds_k = offsets_q.tolist(), offsets_k.tolist()
    for b in range(len(bounds_q) - 1):
        (q0, q1), (k0, k1) = bounds_q[b : b + 2], bounds_k[b : b + 2]
        qs, ks, vs = _heads_first(q, q0, q1, 1), _heads_first(k, k0, k1, repeat), _heads_first(v, k0, k1, repeat)
        mask = pair_mask(torch.arange(q1 - q0, device=q.device), torch.arange(k1 - k0, device=q.device), left, right)
        p = ACTIVATIONS[activation].value(pre_scale * (qs @ ks.transpose(1, 2))).masked_fill(~mask, 0.0)
        out[q0:q1] = (post_scale * (p @ vs)).transpose(0, 1)
    return out


def gdpa_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor,
    offsets_k: Tensor,
    activation: str = "gelu",
    pre_scale: float = 1.0,
    post_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv from ``do`` (T_q, H, D_v).

    With S = pre_scale Q Kᵀ and M the mask: dV = post_scale (M ⊙ act(S))ᵀ dO,
    dS = post_scale M ⊙ act'(S) ⊙ (dO Vᵀ), dQ = pre_scale dS K, dK = pre_scale dSᵀ Q.
    """
    left, right = normalize_window(causal, window_size)
    repeat = q.shape[1] // k.shape[1]
    act = ACTIVATIONS[activation]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    bounds_q, bounds_k = offsets_q.tolist(), offsets_k.tolist()
    for b in range(len(bounds_q) - 1):
        (q0, q1), (k0, k1) = bounds_q[b : b + 2], bounds_k[b : b + 2]
        qs, ks, vs = _heads_first(q, q0, q1, 1), _heads_first(k, k0, k1, repeat), _heads_first(v, k0, k1, repeat)
        dos = _heads_first(do, q0, q1, 1)
        mask = pair_mask(torch.arange(q1 - q0, device=q.device), torch.arange(k1 - k0, device=q.device), left, right)
        scores = pre_scale * (qs @ ks.transpose(1, 2))
        p = act.value(scores).masked_fill(~mask, 0.0)
        ds = post_scale * (act.derivative(scores) * (dos @ vs.transpose(1, 2))).masked_fill(~mask, 0.0)
        dq[q0:q1] = (pre_scale * (ds @ ks)).transpose(0, 1)
        dk[k0:k1] = pre_scale * (ds.transpose(1, 2) @ qs).unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
        dv[k0:k1] = post_scale * (p.transpose(1, 2) @ dos).unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
    return dq, dk, dv
