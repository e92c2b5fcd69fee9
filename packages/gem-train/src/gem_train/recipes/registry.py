"""The recipes that ship with gem-train."""

import difflib

from gem_train.errors import ConfigError
from gem_train.recipes import ml_latest_2149u, ml_latest_small, online_retail, synthetic
from gem_train.recipes.recipe import Recipe

__all__ = ["get", "names"]

_RECIPES: dict[str, Recipe] = {
    module.RECIPE.name: module.RECIPE for module in (ml_latest_small, ml_latest_2149u, online_retail, synthetic)
}


def names() -> tuple[str, ...]:
    """Names of all recipes."""
    return tuple(_RECIPES)


def get(name: str) -> Recipe:
    """A recipe by name.

    Args:
        name: One of `names()`.

    Returns:
        The recipe.

    Raises:
        ConfigError: if there is none of that name; the nearest ones are listed.
    """
    if name not in _RECIPES:
        near = difflib.get_close_matches(name, _RECIPES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the recipes are {', '.join(_RECIPES)}"
        raise ConfigError(f"there is no recipe {name!r}; {hint}")
    return _RECIPES[name]
