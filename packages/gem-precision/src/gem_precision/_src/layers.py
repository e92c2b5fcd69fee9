"""Which layers can be converted, into what, and why a layer is not."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gem_kernels.modules import GDPA, BlockAttention, JaggedAttention
from gem_precision.attention import (
    BF16GDPA,
    MXFP8GDPA,
    BF16BlockAttention,
    BF16JaggedAttention,
    MXFP8BlockAttention,
    MXFP8JaggedAttention,
)
from gem_precision.linear import BF16Linear, HighPrecisionLinear, MXFP8Linear
from gem_precision.recipe import BF16Recipe, MXFP8Recipe

Filter = Callable[[nn.Module, str], bool]

_TARGETS: dict[type, dict[type[nn.Module], type[nn.Module]]] = {
    MXFP8Recipe: {
        nn.Linear: MXFP8Linear,
        HighPrecisionLinear: MXFP8Linear,
        JaggedAttention: MXFP8JaggedAttention,
        GDPA: MXFP8GDPA,
        BlockAttention: MXFP8BlockAttention,
    },
    BF16Recipe: {
        nn.Linear: BF16Linear,
        HighPrecisionLinear: BF16Linear,
        JaggedAttention: BF16JaggedAttention,
        GDPA: BF16GDPA,
        BlockAttention: BF16BlockAttention,
    },
}
CONVERTIBLE: tuple[type[nn.Module], ...] = (nn.Linear, JaggedAttention, GDPA, BlockAttention)
_CONVERTED: tuple[type[nn.Module], ...] = tuple(target for targets in _TARGETS.values() for target in targets.values())
_NOTE = "_gem_precision_note"
"""Attribute of a layer that ``convert`` passed over: the reason. No buffer, so it is in no state dict."""


def is_converted(module: nn.Module) -> bool:
    """Whether ``convert`` made this layer what it is, also if it has been wrapped since."""
    return isinstance(module, _CONVERTED)


def computes_in_its_weight(module: nn.Module) -> bool:
    """Whether the layer computes in the dtype of its weight: its forward takes no other input, or casts it."""
    return isinstance(module, HighPrecisionLinear) or type(module).forward is nn.Linear.forward


def kind_of(module: nn.Module) -> str:
    """The name a user knows the layer by: that of what it was before conversion."""
    for kind in CONVERTIBLE:
        if isinstance(module, kind):
            return kind.__name__
    return type(module).__name__


def target_of(module: nn.Module, recipe: MXFP8Recipe | BF16Recipe) -> type[nn.Module] | None:
    """The low-precision class of a layer, None if the recipe has none.

    Exact types only: a subclass may compute something else.
    """
    return _TARGETS[type(recipe)].get(type(module))


def obstacle(
    module: nn.Module, fqn: str, recipe: MXFP8Recipe | BF16Recipe, keep: Filter | None, *, read_by: str | None
) -> str | None:
    """Why this layer, a convertible kind or a subclass of one, stays in high precision; None if it is converted.

    ``read_by`` is the module that reads its weight and never calls it, if there is one.
    """
    if read_by is not None:
        return f"{read_by} reads its weight and never calls it"
    if target_of(module, recipe) is None:
        return f"{type(module).__name__} is a subclass of {kind_of(module)}, and its forward may be another"
    if keep is not None and not keep(module, fqn):
        return "excluded by the filter"
    if isinstance(module, nn.Linear):
        smallest = min(module.in_features, module.out_features)
        if smallest < recipe.min_features:
            return f"{module.in_features} -> {module.out_features} features, below min_features={recipe.min_features}"
    return None


def replace(module: nn.Module, recipe: MXFP8Recipe | BF16Recipe) -> None:
    """Make the layer its low-precision form, in place.

    Whoever holds the layer still holds it, and its parameters and hooks stay the same.
    """
    target = target_of(module, recipe)
    assert target is not None
    module.__class__ = target
    module.recipe = recipe  # type: ignore[assignment]
    module.__dict__.pop(_NOTE, None)


def pass_over(module: nn.Module, recipe: MXFP8Recipe | BF16Recipe, reason: str) -> None:
    """Leave the layer in high precision and remember on it why; where activations are low, make it cast its input."""
    module.__dict__[_NOTE] = reason
    if isinstance(recipe, BF16Recipe) and recipe.activations == "bfloat16" and type(module) is nn.Linear:
        module.__class__ = HighPrecisionLinear


def noted(module: nn.Module) -> str | None:
    """What ``pass_over`` remembered."""
    return module.__dict__.get(_NOTE)
