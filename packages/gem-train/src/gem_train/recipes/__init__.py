"""Whole runs by name; a recipe is data, and every field of it can be changed on the command line."""

from gem_train.recipes.build import Parts, build
from gem_train.recipes.recipe import DataConfig, Recipe, RunConfig
from gem_train.recipes.registry import get, names

__all__ = ["DataConfig", "Parts", "Recipe", "RunConfig", "build", "get", "names"]
