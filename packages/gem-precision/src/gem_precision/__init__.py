"""Low-precision training recipes for ranking models, applied from outside and reported layer by layer."""

from gem_precision._version import __version__
from gem_precision.attention import (
    BF16GDPA,
    MXFP8GDPA,
    BF16BlockAttention,
    BF16JaggedAttention,
    MXFP8BlockAttention,
    MXFP8JaggedAttention,
)
from gem_precision.convert import convert
from gem_precision.linear import BF16Linear, MXFP8Linear
from gem_precision.recipe import BF16Recipe, FP32Recipe, MXFP8Recipe, Recipe, ScaleMode, get_recipe, recipe_names
from gem_precision.report import LayerReport, PrecisionSummary, describe, format_report, summarize
from gem_precision.wire import MXFP8Wire, get_wire, wire_names

__all__ = [
    "BF16GDPA",
    "MXFP8GDPA",
    "BF16BlockAttention",
    "BF16JaggedAttention",
    "BF16Linear",
    "BF16Recipe",
    "FP32Recipe",
    "LayerReport",
    "MXFP8BlockAttention",
    "MXFP8JaggedAttention",
    "MXFP8Linear",
    "MXFP8Recipe",
    "MXFP8Wire",
    "PrecisionSummary",
    "Recipe",
    "ScaleMode",
    "__version__",
    "convert",
    "describe",
    "format_report",
    "get_recipe",
    "get_wire",
    "recipe_names",
    "summarize",
    "wire_names",
]
