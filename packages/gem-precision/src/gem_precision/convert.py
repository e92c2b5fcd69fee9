"""Put a module's layers into low precision from outside, without touching its code or its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from gem_precision._src import bypass, layers
from gem_precision._src.cast_once import cast_once
from gem_precision.linear import BF16Linear
from gem_precision.recipe import BF16Recipe, FP32Recipe, MXFP8Recipe, Recipe

__all__ = ["convert"]


def _check_filter(keep: Callable[[nn.Module, str], bool], module: nn.Module) -> None:
    """Raise on a filter that cannot be called as filter(layer, fqn); errors from within it stay its own."""
    if not callable(keep):
        raise TypeError(
            f"convert: `filter` must be a callable filter(layer, fqn) -> bool, got {type(keep).__name__}; pass a "
            "function, or None for every layer."
        )
    try:
        signature = inspect.signature(keep)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(module, "")
    except TypeError as error:
        raise TypeError(
            f"convert: `filter` must take two arguments, filter(layer, fqn) -> bool, got a callable with the "
            f"parameters {signature}; write lambda layer, fqn: ... with the name of the layer second."
        ) from error


def convert(module: nn.Module, recipe: Recipe, *, filter: Callable[[nn.Module, str], bool] | None = None) -> nn.Module:
    """Make the linear and attention layers of ``module`` compute as ``recipe`` says, in place.

    Layers of exactly the types ``nn.Linear`` and ``gem_kernels.modules.JaggedAttention``, ``GDPA`` and
    ``BlockAttention`` change their class; nothing else about them does. Parameters stay the same objects under the same
    names, so optimizers made before stay valid, and checkpoints load into any recipe. Call it before ``fully_shard`` or
    ``torch.compile``.

    Layers that torch's ``MultiheadAttention`` and ``LinearCrossEntropyLoss`` read without calling them are passed over.
    Of a ``TransformerEncoderLayer`` whose layers are converted, and of a ``TransformerEncoder`` around it, the fast
    path for eval mode is off afterwards, as it reads weights likewise. Convert them whole: a layer that is handed in
    without the module around it cannot tell.

    Args:
        module: The model, or a part of it; parts may take different recipes.
        recipe: What to compute in.
        filter: ``filter(layer, fqn) -> bool``, False to leave a layer in high precision. ``fqn`` is the layer's name
            within ``module``.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if a layer that the filter accepts has been converted before, or if no layer matches.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert: `module` must be an nn.Module, got {type(module).__name__}; pass the model.")
    if not isinstance(recipe, MXFP8Recipe | BF16Recipe | FP32Recipe):
        raise TypeError(
            f"convert: `recipe` must be a recipe, got {type(recipe).__name__}; get_recipe(name) makes one from a name."
        )
    if filter is not None:
        _check_filter(filter, module)
    done = [
        fqn
        for fqn, layer in module.named_modules()
        if layers.is_converted(layer) and (filter is None or filter(layer, fqn))
    ]
    if done:
        raise ValueError(
            f"convert: `module` must not have been converted before, got {len(done)} converted layers, the first "
            f"{done[0]!r}; load its state dict into a new module, or exclude them by `filter`."
        )
    if isinstance(recipe, FP32Recipe):
        return module
    candidates = [
        (fqn, layer)
        for fqn, layer in module.named_modules()
        if isinstance(layer, layers.CONVERTIBLE) and not layers.is_converted(layer)
    ]
    readers = bypass.readers(module)
    obstacles = {
        fqn: layers.obstacle(layer, fqn, recipe, filter, read_by=readers.get(id(layer))) for fqn, layer in candidates
    }
    if all(obstacles.values()):
        example = next(iter(obstacles.items()), None)
        found = f"{len(candidates)} layers, the first {example[0]!r}: {example[1]}" if example else "no such layer"
        raise ValueError(
            f"convert: `module` must have a Linear, JaggedAttention, GDPA or BlockAttention layer that takes part, "
            f"got {found}; change `filter` or the recipe's min_features."
        )
    for fqn, layer in candidates:
        reason = obstacles[fqn]
        if reason is None:
            layers.replace(layer, recipe)
        else:
            layers.pass_over(layer, recipe, reason)
    bypass.take_off_fast_paths(module)
    low: list[nn.Linear] = [x for fqn, x in candidates if obstacles[fqn] is None and isinstance(x, BF16Linear)]
    if low:
        cast_once(module, low)
    return module
