"""The recipes that ship with gem-train."""

import difflib

from gem_train.errors import ConfigError
from gem_train.recipes import cluster_4096, ml_latest_2149u, ml_latest_small, online_retail, synthetic
from gem_train.recipes.plan_recipe import PlanRecipe
from gem_train.recipes.recipe import Recipe

__all__ = ["get", "get_plan", "names", "plan_names"]

_RECIPES: dict[str, Recipe] = {
    module.RECIPE.name: module.RECIPE for module in (ml_latest_small, ml_latest_2149u, online_retail, synthetic)
}
_PLANS: dict[str, PlanRecipe] = {cluster_4096.RECIPE.name: cluster_4096.RECIPE}


def plan_names() -> tuple[str, ...]:
    """Names of the recipes that can only be planned."""
    return tuple(_PLANS)


def get_plan(name: str) -> PlanRecipe | None:
    """A recipe that can only be planned, or None if there is none of that name."""
    return _PLANS.get(name)


def names() -> tuple[str, ...]:
    """Names of all recipes."""
    return tuple(_RECIPES)


def get(name: str, *, plans: bool = False) -> Recipe:
    """A recipe by name.

    Args:
        name: One of `names()`.
        plans: The caller also takes those of `plan_names()`, so that an error lists them.

    Returns:
        The recipe.

    Raises:
        ConfigError: if there is none of that name; the nearest ones are listed.
    """
    if name in _PLANS:
        raise ConfigError(f"the recipe {name} can only be planned; use `gem plan explain {name}`")
    if name not in _RECIPES:
        known = [*_RECIPES, *(_PLANS if plans else ())]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the recipes are {', '.join(known)}"
        raise ConfigError(f"there is no recipe {name!r}; {hint}")
    return _RECIPES[name]
