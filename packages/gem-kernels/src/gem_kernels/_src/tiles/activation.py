"""Activations of GDPA as pairs (value, derivative) of jit functions on float32 tiles; every value maps 0 to 0.

Adding one touches this file, ``_src/gdpa/names.py`` and the two torch tables (reference and CPU). The kernels take the
functions as constexpr arguments, forward and backward alike. Where value and derivative share a transcendental, the
compiler computes it once.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gem_kernels._src.gdpa.activation import registered_activation

# 2 * sqrt(2 / pi): gelu's tanh form is x * sigmoid(2u) with 2u = _TWO_U * (x + _CUBIC * x^3).
_TWO_U = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_RSQRT_2PI = tl.constexpr(0.3989422804014327)
_C4 = tl.constexpr(-0.06649038006690545)
_C6 = tl.constexpr(0.009973557010035818)


class Activation(NamedTuple):
    """Two jit functions of one float32 tile."""

    value: Any
    derivative: Any


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _sigmoid_hardware(x):
    # tanh.approx (sm_75 and later) is one special-function operation, the exact form two; relative error 2^-11.
    t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], dtype=tl.float32, is_pure=True, pack=1)
    return 0.5 * t + 0.5


@triton.jit
def _raw(x):
    return x


@triton.jit
def _raw_derivative(x):
    return x * 0.0 + 1.0


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))


@triton.jit
def _gelu_derivative(x):
    return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * _RSQRT_2PI * tl.exp(-0.5 * x * x)


@triton.jit
def _gelu_tanh_argument(x):
    return x * (_TWO_U + (_TWO_U * _CUBIC) * x * x)


@triton.jit
def _gelu_tanh_slope(x, s):
    return s + x * s * (1.0 - s) * (_TWO_U + (3.0 * _TWO_U * _CUBIC) * x * x)


@triton.jit
def _gelu_approx(x):
    return x * _sigmoid(_gelu_tanh_argument(x))


@triton.jit
def _gelu_approx_derivative(x):
    return _gelu_tanh_slope(x, _sigmoid(_gelu_tanh_argument(x)))


@triton.jit
def _gelu_tanh_hardware(x):
    u = x * (0.5 * _TWO_U + (0.5 * _TWO_U * _CUBIC) * x * x)
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fast_gelu(x):
    # x * sigmoid(2u) as h + h * tanh(u) with h = x / 2: two operations fewer.
    h = 0.5 * x
    return h * _gelu_tanh_hardware(x) + h


@triton.jit
def _fast_gelu_derivative(x):
    t = _gelu_tanh_hardware(x)
    slope = x * (0.25 * _TWO_U + (0.75 * _TWO_U * _CUBIC) * x * x)
    return (0.5 * t + 0.5) + (1.0 - t * t) * slope


@triton.jit
def _leaky_relu(x):
    return tl.where(x > 0, x, 0.01 * x)


@triton.jit
def _leaky_relu_derivative(x):
    return tl.where(x > 0, 1.0, 0.01)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def _relu_derivative(x):
    return tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _silu(x):
    return x * _sigmoid(x)


@triton.jit
def _silu_derivative(x):
    s = _sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def _fast_silu(x):
    return x * _sigmoid_hardware(x)


@triton.jit
def _fast_silu_derivative(x):
    s = _sigmoid_hardware(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def _hardswish(x):
    return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)


@triton.jit
def _hardswish_derivative(x):
    return tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 1.0, x * (1.0 / 3.0) + 0.5))


@triton.jit
def _relu_square(x):
    r = tl.maximum(x, 0.0)
    return r * r


@triton.jit
def _relu_square_derivative(x):
    return 2.0 * tl.maximum(x, 0.0)


@triton.jit
def _gelu_taylor(x):
    y = x * x
    return 0.5 * x + y * (_RSQRT_2PI + y * (_C4 + y * _C6))


@triton.jit
def _gelu_taylor_derivative(x):
    y = x * x
    return 0.5 + x * (2.0 * _RSQRT_2PI + y * (4.0 * _C4 + y * (6.0 * _C6)))


_GELU_APPROX = Activation(_gelu_approx, _gelu_approx_derivative)
_SILU = Activation(_silu, _silu_derivative)

_PORTABLE: dict[str, Activation] = {
    "raw": Activation(_raw, _raw_derivative),
    "gelu": Activation(_gelu, _gelu_derivative),
    "gelu_approx": _GELU_APPROX,
    "fast_gelu": _GELU_APPROX,
    "leaky_relu": Activation(_leaky_relu, _leaky_relu_derivative),
    "relu": Activation(_relu, _relu_derivative),
    "silu": _SILU,
    "fast_silu": _SILU,
    "hardswish": Activation(_hardswish, _hardswish_derivative),
    "relu_square": Activation(_relu_square, _relu_square_derivative),
    "fast_gelu_taylor_approx": Activation(_gelu_taylor, _gelu_taylor_derivative),
}
_HARDWARE: dict[str, Activation] = {
    "fast_gelu": Activation(_fast_gelu, _fast_gelu_derivative),
    "fast_silu": Activation(_fast_silu, _fast_silu_derivative),
}


def activation_pair(name: str, *, hardware: bool) -> Activation:
    """The pair of ``name``, built in or a user's; ``hardware`` allows NVIDIA instructions, which no interpreter has."""
    if hardware and name in _HARDWARE:
        return _HARDWARE[name]
    if name in _PORTABLE:
        return _PORTABLE[name]
    act = registered_activation(name)
    if act.value is None:
        raise ValueError(
            f"gdpa: the activation {name!r} must have a `value` and a `derivative` for CUDA, got None; "
            "give triton.jit functions."
        )
    return Activation(act.value, act.derivative)
