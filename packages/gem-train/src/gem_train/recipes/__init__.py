"""Whole runs by name; a recipe is data, and every field of it can be changed on the command line."""

from gem_train.recipes.build import Parts, build
from gem_train.recipes.capture import SegmentCapture, check_capture
from gem_train.recipes.describe import describe_dense, describe_run
from gem_train.recipes.parallel import ParallelConfig
from gem_train.recipes.plan_recipe import PlanRecipe
from gem_train.recipes.recipe import DataConfig, Recipe, RunConfig
from gem_train.recipes.registry import get, get_plan, names, plan_names

__all__ = [
    "DataConfig",
    "ParallelConfig",
    "Parts",
    "PlanRecipe",
    "Recipe",
    "RunConfig",
    "SegmentCapture",
    "build",
    "check_capture",
    "describe_dense",
    "describe_run",
    "get",
    "get_plan",
    "names",
    "plan_names",
]
