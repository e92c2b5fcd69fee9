"""A user's own activation, and the process-wide table by which the ops, whose arguments are strings, find it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_kernels._src.gdpa.names import ACTIVATION_NAMES

_registered: dict[str, Activation] = {}
_POINTS = (0.0, 0.7364, -1.2871, 2.4619, -2.8713)
"""Where a user's functions are tried: 0, and where no function that is put together of pieces is likely to change."""
_STEP = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """An elementwise function and its derivative, accepted by :func:`gem_kernels.gdpa` wherever a name is.

    Making one registers its name for the life of the process: afterwards the name alone works too, also inside
    ``torch.compile``. Make it at module level, once; the same functions under the same name may be given again.

    Example:
        >>> shifted_relu = Activation(
        ...     name="shifted_relu",
        ...     torch_value=lambda s: torch.relu(s - 1.0),
        ...     torch_derivative=lambda s: (s > 1.0).to(s.dtype),
        ... )

    Padding is computed as score 0 and multiplied by zero rows, so both functions must be finite at 0; the value need
    not be 0 there.

    Raises:
        ValueError: on a built-in name, a name registered with other functions, only one of ``value`` and
            ``derivative``, or a function that fails on float32, changes the dtype, or is not elementwise and finite
            at 0.
        TypeError: on an argument that is not of the stated kind.

    Warns:
        UserWarning: where ``torch_derivative`` is not the slope of ``torch_value``, which a straight-through gradient
            may want.
    """

    name: str
    """Not one of the built-in names."""
    torch_value: Callable[[Tensor], Tensor]
    """s -> act(s) on float32 or float64 tensors of any shape, in the dtype of s; the CPU path and the reference. Must
    not write to s."""
    torch_derivative: Callable[[Tensor], Tensor]
    """s -> act'(s), likewise."""
    value: Any = None
    """``triton.jit`` function of one float32 tile, the CUDA path; None where the activation is for CPU only."""
    derivative: Any = None
    """``triton.jit`` function of one float32 tile, act'(s)."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Activation: `name` must be a str, got {type(self.name).__name__}; give it a name.")
        if not self.name.isidentifier() or self.name in ACTIVATION_NAMES:
            raise ValueError(
                f"Activation: `name` must be an identifier and not a built-in name, got {self.name!r}; choose another."
            )
        for field in ("torch_value", "torch_derivative"):
            if not callable(getattr(self, field)):
                raise TypeError(
                    f"Activation: `{field}` must be callable, got {type(getattr(self, field)).__name__}; give a "
                    "function."
                )
        if (self.value is None) != (self.derivative is None):
            missing = "value" if self.value is None else "derivative"
            raise ValueError(
                f"Activation: `{missing}` must be given with its other half, got None; "
                "CUDA needs the value and the derivative, CPU neither."
            )
        for field in ("value", "derivative"):
            function = getattr(self, field)
            # What triton.jit returns wraps the Python function; Triton is not imported here, it may be absent.
            if function is not None and not callable(getattr(function, "fn", None)):
                raise TypeError(
                    f"Activation: `{field}` must be a triton.jit function, got {type(function).__name__}; decorate it."
                )
        if _registered.get(self.name, self) != self:
            raise ValueError(
                f"Activation: `name` must be new, got {self.name!r}, registered with other functions; choose another."
            )
        _check_function("torch_value", self.torch_value)
        _check_function("torch_derivative", self.torch_derivative)
        self._compare_slopes()
        _registered[self.name] = self

    def _compare_slopes(self) -> None:
        """Warn of a derivative that is not that of the value: it may be meant, in place of a slope of 0."""
        x = torch.tensor(_POINTS[1:], dtype=torch.float64)
        slopes = (self.torch_value(x + _STEP) - self.torch_value(x - _STEP)) / (2 * _STEP)
        given = self.torch_derivative(x)
        for point, slope, value in zip(x.tolist(), slopes.tolist(), given.tolist(), strict=True):
            if math.isfinite(slope) and not math.isclose(slope, value, rel_tol=1e-2, abs_tol=1e-3):
                warnings.warn(
                    f"Activation: `torch_derivative` of {self.name!r} is {value:.4g} at {point}, where the slope of "
                    f"`torch_value` is {slope:.4g}; gradients follow `torch_derivative`.",
                    stacklevel=4,
                )
                return

    def __deepcopy__(self, memo: dict[int, Any]) -> Activation:
        # Immutable and registered by identity of its functions, which a copy of a compiled function would lose.
        return self


def _check_function(field: str, function: Callable[[Tensor], Tensor]) -> None:
    """Raise unless the function maps every number by itself, in its dtype, and 0 to a finite number."""
    x = torch.tensor(_POINTS)
    try:
        y, first = function(x), function(x[:1])
    except Exception as error:
        raise ValueError(
            f"Activation: `{field}` must take a float32 tensor of any shape, got {type(error).__name__}: {error}; try "
            "it on torch.zeros(2)."
        ) from error
    if not isinstance(y, Tensor) or y.dtype != x.dtype:
        got = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"Activation: `{field}` must keep the dtype of its argument, got {got}; cast its result.")
    is_elementwise = y.shape == x.shape and torch.allclose(y[:1], first, rtol=1e-5, equal_nan=True)
    if not is_elementwise or not y[0].isfinite():
        raise ValueError(
            f"Activation: `{field}` must be elementwise and finite at 0, as padding is scored 0, got {y.tolist()} of "
            f"{x.tolist()}; make it so for a tensor of any shape."
        )


def activation_name(op: str, activation: str | Activation) -> str:
    """The name that the op takes; raises on one that is neither built in nor registered."""
    if isinstance(activation, Activation):
        return activation.name
    if not isinstance(activation, str) or (activation not in ACTIVATION_NAMES and activation not in _registered):
        raise ValueError(
            f"{op}: `activation` must be one of {', '.join(ACTIVATION_NAMES)} or an Activation, got {activation!r}; "
            "name one of them, or make an Activation of your own."
        )
    return activation


def registered_activation(name: str) -> Activation:
    """The user's activation of this name."""
    if name not in _registered:
        raise ValueError(f"gdpa: `activation` must be registered in this process, got {name!r}; make its Activation.")
    return _registered[name]
