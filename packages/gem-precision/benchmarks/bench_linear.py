"""What a recipe costs: forward and backward of one linear layer in each, at shapes of ranking models.

python bench_linear.py                   # on CUDA, JSON lines
python bench_linear.py --device cpu      # shapes of training on a laptop
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem_kernels.testing.bench import Work, compare
from gem_precision import MXFP8Recipe, Recipe, convert, get_recipe, recipe_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One layer."""

    tokens: int
    in_features: int
    out_features: int
    dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        """Name in the rows."""
        return f"T{self.tokens}-{self.in_features}x{self.out_features}"


SHAPES = {
    "cuda": [
        Shape(tokens=2048, in_features=256, out_features=768),
        Shape(tokens=2048, in_features=123200, out_features=1024),
        Shape(tokens=524288, in_features=512, out_features=512),
        Shape(tokens=524288, in_features=512, out_features=512, dtype=torch.bfloat16),
    ],
    "cpu": [
        Shape(tokens=8192, in_features=256, out_features=256),
        Shape(tokens=32768, in_features=64, out_features=64),
    ],
}


def make_step(shape: Shape, recipe: Recipe, device: torch.device) -> Callable[[], Tensor]:
    """Forward and backward of a fresh layer; the same weights for every recipe."""
    torch.manual_seed(0)
    layer = nn.Linear(shape.in_features, shape.out_features, device=device, dtype=shape.dtype)
    convert(layer, recipe)
    x = torch.randn(shape.tokens, shape.in_features, device=device, dtype=shape.dtype, requires_grad=True)
    dy = torch.randn(shape.tokens, shape.out_features, device=device, dtype=shape.dtype)

    def step() -> Tensor:
        x.grad = None
        layer.zero_grad()
        y: Tensor = layer(x)
        y.backward(dy)
        return y

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    recipes: dict[str, Recipe] = {name: get_recipe(name) for name in recipe_names()}
    recipes["mxfp8, wgrad in high precision"] = MXFP8Recipe(wgrad="high_precision")
    for shape in SHAPES[arguments.device]:
        products = shape.tokens * shape.in_features * shape.out_features
        elements = shape.tokens * (shape.in_features + shape.out_features) + shape.in_features * shape.out_features
        compare(
            Work(
                op="linear",
                direction="forward and backward",
                shape=shape.id,
                dtype=shape.dtype,
                flops=6 * products,
                num_bytes=3 * elements * shape.dtype.itemsize,
            ),
            {name: make_step(shape, recipe, device) for name, recipe in recipes.items()},
            device=device,
            repeats=arguments.repeats,
        )


if __name__ == "__main__":
    main()
