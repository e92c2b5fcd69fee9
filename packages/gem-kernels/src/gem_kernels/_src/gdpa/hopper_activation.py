"""Activations as Hopper's kernels of GDPA compute them: up to constant factors, which cost nothing elsewhere.

Between the products of those kernels the scalar units are busy for every cycle of the activation. Where a factor can be
taken out of the value or the derivative, it goes into the one multiplication that scales an output. In bfloat16, to
which activated scores and score gradients are rounded for the products anyway, two of them take one operation; float16
has not the range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gem_kernels._src.tiles.activation import activation_pair

_SLOPE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715 * 0.7978845608028654)
_LINEAR = tl.constexpr(2.0 / 3.0 * 0.7978845608028654)
_THIRD = tl.constexpr(1.0 / 3.0)


class PairActivation(NamedTuple):
    """act(y) = scale * pre_scale * value(s, pre_scale) and act'(y) = scale * slope(s, pre_scale) of y = pre_scale * s.

    Computed in bfloat16.
    """

    value: Any
    """jit function of a float32 tile and a number; its result is bfloat16."""
    slope: Any
    """The same of the derivative."""
    value_and_slope: Any
    """Both, which have most in common."""
    scale: float


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
def _fast_gelu_pairs(x, pre_scale):
    # The same of pre_scale x, divided by pre_scale, which costs no operation: u = x (a + b x^2).
    a = (_SLOPE * pre_scale).to(tl.bfloat16)
    b = (_CUBIC * pre_scale * pre_scale * pre_scale).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x, u;
        cvt.rn.bf16x2.f32 x, $2, $1;
        mul.rn.bf16x2 u, x, x;
        fma.rn.bf16x2 u, u, $4, $3;
        mul.rn.bf16x2 u, u, x;
        tanh.approx.bf16x2 u, u;
        fma.rn.bf16x2 $0, x, u, x;
        }""",
        "=r,r,r,r,r",
        [x, a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


# 2 gelu'(y) = 1 + t + (1 - t^2) y u'(y) with y = pre_scale x, where y u'(y) = x (a + 3 b x^2). 0x3f80 is 1.
@triton.jit
def _fast_gelu_slope_pairs(x, pre_scale):
    a = (_SLOPE * pre_scale).to(tl.bfloat16)
    b = (_CUBIC * pre_scale * pre_scale * pre_scale).to(tl.bfloat16)
    c = (3.0 * _CUBIC * pre_scale * pre_scale * pre_scale).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x, u, t, z, one;
        .reg .f32 low, high;
        mov.b32 one, 0x3f803f80;
        cvt.rn.bf16x2.f32 x, $2, $1;
        mul.rn.bf16x2 z, x, x;
        fma.rn.bf16x2 u, z, $4, $3;
        mul.rn.bf16x2 u, u, x;
        shl.b32 t, u, 16;
        and.b32 u, u, 0xffff0000;
        mov.b32 low, t;
        mov.b32 high, u;
        tanh.approx.f32 low, low;
        tanh.approx.f32 high, high;
        cvt.rn.bf16x2.f32 t, high, low;
        fma.rn.bf16x2 z, z, $5, $3;
        mul.rn.bf16x2 z, z, x;
        neg.bf16x2 u, t;
        fma.rn.bf16x2 u, u, t, one;
        fma.rn.bf16x2 z, u, z, t;
        add.rn.bf16x2 $0, z, one;
        }""",
        "=r,r,r,r,r,r",
        [x, a, b, c],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _fast_gelu_value_and_slope_pairs(x, pre_scale):
    a = (_SLOPE * pre_scale).to(tl.bfloat16)
    b = (_CUBIC * pre_scale * pre_scale * pre_scale).to(tl.bfloat16)
    c = (3.0 * _CUBIC * pre_scale * pre_scale * pre_scale).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x, u, t, z, one;
        .reg .f32 low, high;
        mov.b32 one, 0x3f803f80;
        cvt.rn.bf16x2.f32 x, $3, $2;
        mul.rn.bf16x2 z, x, x;
        fma.rn.bf16x2 u, z, $5, $4;
        mul.rn.bf16x2 u, u, x;
        shl.b32 t, u, 16;
        and.b32 u, u, 0xffff0000;
        mov.b32 low, t;
        mov.b32 high, u;
        tanh.approx.f32 low, low;
        tanh.approx.f32 high, high;
        cvt.rn.bf16x2.f32 t, high, low;
        fma.rn.bf16x2 z, z, $6, $4;
        mul.rn.bf16x2 z, z, x;
        fma.rn.bf16x2 $0, x, t, x;
        neg.bf16x2 u, t;
        fma.rn.bf16x2 u, u, t, one;
        fma.rn.bf16x2 z, u, z, t;
        add.rn.bf16x2 $1, z, one;
        }""",
        "=&r,=&r,r,r,r,r,r",
        [x, a, b, c],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def times_pairs(slope, grad):
    """The product of bfloat16 and float32, which is rounded first, in bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 g;
        cvt.rn.bf16x2.f32 g, $3, $2;
        mul.rn.bf16x2 $0, $1, g;
        }""",
        "=r,r,r,r",
        [slope, grad],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _fast_gelu_derivative(x):
    # 2 gelu'(x) = 1 + t + (1 - t^2) x u'(x), where x u'(x) = 3 u - 2 sqrt(2 / pi) x; all of it over 3.
    u = x * (_SLOPE + _CUBIC * (x * x))
    t = _tanh(u)
    return (1.0 - t * t) * (u - _LINEAR * x) + (t * _THIRD + _THIRD)


_SCALED: dict[str, ScaledActivation] = {"fast_gelu": ScaledActivation(_fast_gelu, _fast_gelu_derivative, 0.5, 1.5)}

_PAIRS: dict[str, PairActivation] = {
    "fast_gelu": PairActivation(_fast_gelu_pairs, _fast_gelu_slope_pairs, _fast_gelu_value_and_slope_pairs, 0.5)
}


def pair_activation(name: str, dtype: torch.dtype) -> PairActivation | None:
    """How the kernels compute the activation in pairs, or None where they take ``scaled_activation``."""
    return _PAIRS.get(name) if dtype == torch.bfloat16 else None


def scaled_activation(name: str) -> ScaledActivation:
    """The activation of ``name``, built in or a user's."""
    if name in _SCALED:
        return _SCALED[name]
    act = activation_pair(name, hardware=True)
    return ScaledActivation(act.value, act.derivative, 1.0, 1.0)


def forward_activation(
    name: str, dtype: torch.dtype, pre_scale: float, post_scale: float
) -> tuple[dict[str, Any], float]:
    """Constants of a forward kernel, in the order of its arguments, and the factor on its sums."""
    pairs = pair_activation(name, dtype)
    if pairs is not None:
        value, scale = pairs.value, post_scale * pre_scale * pairs.scale
    else:
        act = scaled_activation(name)
        value, scale = act.value, post_scale * act.value_scale
    has_pre_scale = pairs is None and pre_scale != 1.0
    return {"ACTIVATION": value, "IN_PAIRS": pairs is not None, "HAS_PRE_SCALE": has_pre_scale}, scale
