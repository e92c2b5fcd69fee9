"""Activations as Hopper's kernels of GDPA compute them: up to constant factors, which cost nothing elsewhere.

Between the products of those kernels the scalar units are busy for every cycle of the activation. Where a factor can be
taken out of the value or the derivative, it goes into the one multiplication that scales an output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gem_kernels._src.tiles.activation import activation_pair

_SLOPE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715 * 0.7978845608028654)
_LINEAR = tl.constexpr(2.0 / 3.0 * 0.7978845608028654)
_THIRD = tl.constexpr(1.0 / 3.0)


class ScaledActivation(NamedTuple):
    """act(s) = value_scale * value(s) and act'(s) = derivative_scale * derivative(s)."""

    value: Any
    derivative: Any
    value_scale: float
    derivative_scale: float


@triton.jit
def _tanh(u):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fast_gelu(x):
    # 2 gelu(x) = x + x tanh(u), u = sqrt(2 / pi) (x + 0.044715 x^3).
    return x * _tanh(x * (_SLOPE + _CUBIC * (x * x))) + x


@triton.jit
def _fast_gelu_derivative(x):
    # 2 gelu'(x) = 1 + t + (1 - t^2) x u'(x), where x u'(x) = 3 u - 2 sqrt(2 / pi) x; all of it over 3.
    u = x * (_SLOPE + _CUBIC * (x * x))
    t = _tanh(u)
    return (1.0 - t * t) * (u - _LINEAR * x) + (t * _THIRD + _THIRD)


_SCALED: dict[str, ScaledActivation] = {"fast_gelu": ScaledActivation(_fast_gelu, _fast_gelu_derivative, 0.5, 1.5)}


def scaled_activation(name: str) -> ScaledActivation:
    """The activation of ``name``, built in or a user's."""
    if name in _SCALED:
        return _SCALED[name]
    act = activation_pair(name, hardware=True)
    return ScaledActivation(act.value, act.derivative, 1.0, 1.0)
