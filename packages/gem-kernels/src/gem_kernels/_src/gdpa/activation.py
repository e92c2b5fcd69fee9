"""A user's own activation, and the process-wide table by which the ops, whose arguments are strings, find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_kernels._src.gdpa.names import ACTIVATION_NAMES

_registered: dict[str, Activation] = {}


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
            ``derivative``, or a function that is not finite and elementwise at 0.
        TypeError: on an argument that is not of the stated kind.
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
        zero = torch.zeros(2)
        for field in ("torch_value", "torch_derivative"):
            at_zero = getattr(self, field)(zero)
            if not isinstance(at_zero, Tensor) or at_zero.shape != zero.shape or not at_zero.isfinite().all():
                raise ValueError(
                    f"Activation: `{field}` must be elementwise and finite at 0, as padding is scored 0, got "
                    f"{at_zero}; make it so for a tensor of any shape."
                )
        _registered[self.name] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Activation:
        # Immutable and registered by identity of its functions, which a copy of a compiled function would lose.
        return self


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
