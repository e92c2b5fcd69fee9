"""The activations of GDPA on CPU tensors: value, and gradient through the activation, each in one or few passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_kernels._src.gdpa.activation import registered_activation

_C2, _C4, _C6 = 0.3989422804014327, -0.06649038006690545, 0.009973557010035818


class CpuActivation(NamedTuple):
    """Whole-tensor forms; both leave their arguments alone."""

    value: Callable[[Tensor], Tensor]
    """s -> act(s)."""
    gradient: Callable[[Tensor, Tensor], Tensor]
    """(dp, s) -> dp * act'(s)."""


def _gelu(approximate: str) -> CpuActivation:
    return CpuActivation(
        lambda s: F.gelu(s, approximate=approximate),
        lambda dp, s: torch.ops.aten.gelu_backward(dp, s, approximate=approximate),
    )


def _taylor_value(s: Tensor) -> Tensor:
    x = s * s
    return (x * _C6).add_(_C4).mul_(x).add_(_C2).mul_(x).add_(s, alpha=0.5)


def _taylor_gradient(dp: Tensor, s: Tensor) -> Tensor:
    x = s * s
    return (x * (6 * _C6)).add_(4 * _C4).mul_(x).add_(2 * _C2).mul_(s).add_(0.5).mul_(dp)


_SILU = CpuActivation(F.silu, lambda dp, s: torch.ops.aten.silu_backward(dp, s))

CPU_ACTIVATIONS: dict[str, CpuActivation] = {
    "raw": CpuActivation(lambda s: s, lambda dp, s: dp),
    "gelu": _gelu("none"),
    "gelu_approx": _gelu("tanh"),
    "fast_gelu": _gelu("tanh"),
    "leaky_relu": CpuActivation(
        lambda s: F.leaky_relu(s, 0.01), lambda dp, s: torch.ops.aten.leaky_relu_backward(dp, s, 0.01, False)
    ),
    "relu": CpuActivation(F.relu, lambda dp, s: torch.ops.aten.threshold_backward(dp, s, 0.0)),
    "silu": _SILU,
    "fast_silu": _SILU,
    "hardswish": CpuActivation(F.hardswish, lambda dp, s: torch.ops.aten.hardswish_backward(dp, s)),
    "relu_square": CpuActivation(lambda s: F.relu(s).square_(), lambda dp, s: F.relu(s).mul_(dp).mul_(2.0)),
    "fast_gelu_taylor_approx": CpuActivation(_taylor_value, _taylor_gradient),
}


def cpu_activation(name: str) -> CpuActivation:
    """The forms of a built-in or a user's activation."""
    if name in CPU_ACTIVATIONS:
        return CPU_ACTIVATIONS[name]
    act = registered_activation(name)
    return CpuActivation(act.torch_value, lambda dp, s: dp * act.torch_derivative(s))
