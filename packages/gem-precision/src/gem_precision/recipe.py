"""What a precision recipe says: formats, block shapes, and which layers are too small to take part.

MXFP8 follows Mishra et al., Recipes for Pre-training LLMs with MXFP8 (arXiv:2506.08027): E4M3 for weights, activations
and gradients, and scales rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

import torch

__all__ = [
    "BF16Recipe",
    "FP32Recipe",
    "MXFP8Recipe",
    "Recipe",
    "ScaleMode",
    "get_recipe",
    "recipe_names",
]

_ELEM_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_WEIGHT_BLOCK_SHAPES = ((32, 32), (1, 32))


class ScaleMode(StrEnum):
    """How the power-of-two scale of a block is rounded; formulas in :mod:`gem_kernels.mx`."""

    RCEIL = "rceil"
    """Up: no element saturates."""
    FLOOR = "floor"
    """Down, the minimum rule of the OCP specification: elements above 1.75 * 2**k saturate."""


def _check_min_features(recipe: str, min_features: int) -> None:
    if isinstance(min_features, bool) or not isinstance(min_features, int):
        raise TypeError(f"{recipe}: `min_features` must be an int, got {type(min_features).__name__}; pass int(x).")
    if min_features < 1:
        raise ValueError(f"{recipe}: `min_features` must be >= 1, got {min_features}; 1 converts layers of any size.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP8Recipe:
    """FP8 elements in blocks of 32 along each matmul's reduction dim, one power-of-two scale per block.

    A linear layer has three matmuls: y = x Wᵀ, dx = dy W, dW = dyᵀ x. Each quantises both of its operands along its own
    reduction dim, from high precision: x and dy by row blocks for the first two, by column blocks (along tokens) for
    the third.
    """

    elem_dtype: torch.dtype = torch.float8_e4m3fn
    """torch.float8_e4m3fn or torch.float8_e5m2, for weights, activations and gradients."""
    scale_mode: ScaleMode = ScaleMode.RCEIL
    """Rounding of the scales."""
    weight_block_shape: tuple[int, int] = (32, 32)
    """(32, 32): square blocks, so that y and dx read the same quantised weight. (1, 32): quantised anew for dx."""
    wgrad: Literal["mxfp8", "high_precision"] = "mxfp8"
    """Precision of dW = dyᵀ x."""
    min_features: int = 32
    """Linear layers with fewer inputs or outputs stay in high precision; so does, with it, a prediction layer."""
    backend: Literal["auto", "emulated"] = "auto"
    """"emulated" quantises, dequantises and multiplies in high precision, on any device. "auto" takes the fastest
    backend that exists here, which in this version is "emulated" everywhere."""

    def __post_init__(self) -> None:
        if self.elem_dtype not in _ELEM_DTYPES:
            raise ValueError(
                "MXFP8Recipe: `elem_dtype` must be torch.float8_e4m3fn or torch.float8_e5m2, "
                f"got {self.elem_dtype}; E4M3 is the usual choice."
            )
        modes = [mode.value for mode in ScaleMode]
        if self.scale_mode not in modes:
            raise ValueError(
                f"MXFP8Recipe: `scale_mode` must be one of {modes}, got {self.scale_mode!r}; choose one of them."
            )
        object.__setattr__(self, "scale_mode", ScaleMode(self.scale_mode))
        if self.weight_block_shape not in _WEIGHT_BLOCK_SHAPES:
            raise ValueError(
                "MXFP8Recipe: `weight_block_shape` must be (32, 32) or (1, 32), "
                f"got {self.weight_block_shape!r}; other blocks do not lie along the reduction dim."
            )
        if self.wgrad not in ("mxfp8", "high_precision"):
            raise ValueError(
                f"MXFP8Recipe: `wgrad` must be 'mxfp8' or 'high_precision', got {self.wgrad!r}; choose one of them."
            )
        if self.backend not in ("auto", "emulated"):
            raise ValueError(
                f"MXFP8Recipe: `backend` must be 'auto' or 'emulated', got {self.backend!r}; "
                "this version multiplies in no other way."
            )
        _check_min_features("MXFP8Recipe", self.min_features)

    @property
    def name(self) -> str:
        """Name under which layers are reported."""
        return "mxfp8"

    @property
    def resolved_backend(self) -> str:
        """What "auto" stands for here."""
        return "emulated"


@dataclass(frozen=True, kw_only=True, slots=True)
class BF16Recipe:
    """Linear and attention layers compute in bfloat16 from float32 master weights."""

    activations: Literal["input", "bfloat16"] = "input"
    """Dtype of their results. "input": that of the layer's input, so that what lies between layers, residual sums and
    norms, stays as it was. "bfloat16": what lies between is bfloat16, too, half the bytes and no casts; it asks of the
    model that its other modules take bfloat16. Linear layers that stay in high precision then cast their input."""
    min_features: int = 32
    """Linear layers with fewer inputs or outputs stay in high precision; so does, with it, a prediction layer, whose
    logits 8 bits would make coarse."""

    def __post_init__(self) -> None:
        if self.activations not in ("input", "bfloat16"):
            raise ValueError(
                f"BF16Recipe: `activations` must be 'input' or 'bfloat16', got {self.activations!r}; 'input' is safe "
                "with any model."
            )
        _check_min_features("BF16Recipe", self.min_features)

    @property
    def name(self) -> str:
        """Name under which layers are reported."""
        return "bf16" if self.activations == "input" else "bf16_activations"


@dataclass(frozen=True, kw_only=True, slots=True)
class FP32Recipe:
    """Nothing is converted."""

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return "fp32"


Recipe: TypeAlias = MXFP8Recipe | BF16Recipe | FP32Recipe
"""What :func:`gem_precision.convert` takes."""

_RECIPES: dict[str, Recipe] = {
    "fp32": FP32Recipe(),
    "bf16": BF16Recipe(),
    "bf16_activations": BF16Recipe(activations="bfloat16"),
    "mxfp8": MXFP8Recipe(),
}


def recipe_names() -> tuple[str, ...]:
    """The names that ``get_recipe`` knows."""
    return tuple(_RECIPES)


def get_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Args:
        name: "fp32", "bf16" or "mxfp8", each with its defaults, or "bf16_activations", which is
            ``BF16Recipe(activations="bfloat16")``.

    Raises:
        ValueError: on another name.
    """
    if name not in _RECIPES:
        raise ValueError(f"get_recipe: `name` must be one of {', '.join(_RECIPES)}, got {name!r}; name one of them.")
    return _RECIPES[name]
