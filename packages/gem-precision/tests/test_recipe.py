import copy
import dataclasses
import pickle

import pytest
import torch

import gem_precision
from gem_precision import BF16Recipe, FP32Recipe, MXFP8Recipe, ScaleMode, get_recipe, recipe_names


def test_public_names() -> None:
    assert gem_precision.__all__ == [
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


def test_fields_and_defaults() -> None:
    recipe = MXFP8Recipe()
    assert {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)} == {
        "elem_dtype": torch.float8_e4m3fn,
        "scale_mode": ScaleMode.RCEIL,
        "weight_block_shape": (32, 32),
        "wgrad": "mxfp8",
        "min_features": 32,
        "backend": "auto",
    }
    assert [f.name for f in dataclasses.fields(BF16Recipe)] == ["activations", "min_features"]


def test_get_recipe() -> None:
    assert recipe_names() == ("fp32", "bf16", "bf16_activations", "mxfp8")
    assert [get_recipe(name) for name in recipe_names()] == [
        FP32Recipe(),
        BF16Recipe(),
        BF16Recipe(activations="bfloat16"),
        MXFP8Recipe(),
    ]
    assert [get_recipe(name).name for name in recipe_names()] == list(recipe_names())
    with pytest.raises(ValueError, match="`name` must be one of fp32, bf16, bf16_activations, mxfp8, got 'fp8'"):
        get_recipe("fp8")


def test_auto_resolves_to_what_exists() -> None:
    assert MXFP8Recipe(backend="auto").resolved_backend == "emulated"
    assert MXFP8Recipe(backend="emulated").resolved_backend == "emulated"


@pytest.mark.parametrize(
    ("recipe", "arguments", "error", "words"),
    [
        (MXFP8Recipe, {"elem_dtype": torch.float16}, ValueError, "`elem_dtype` must be .* got torch.float16"),
        (MXFP8Recipe, {"scale_mode": "even"}, ValueError, "`scale_mode` must be one of .* got 'even'"),
        (MXFP8Recipe, {"weight_block_shape": (32, 1)}, ValueError, r"`weight_block_shape` must be .* got \(32, 1\)"),
        (MXFP8Recipe, {"wgrad": "bf16"}, ValueError, "`wgrad` must be 'mxfp8' or 'high_precision', got 'bf16'"),
        (MXFP8Recipe, {"backend": "native"}, ValueError, "`backend` must be 'auto' or 'emulated', got 'native'"),
        (MXFP8Recipe, {"min_features": 0}, ValueError, "`min_features` must be >= 1, got 0"),
        (BF16Recipe, {"activations": "fp16"}, ValueError, "`activations` must be 'input' or 'bfloat16', got 'fp16'"),
        (BF16Recipe, {"min_features": 1.5}, TypeError, "`min_features` must be an int, got float"),
        (BF16Recipe, {"min_features": True}, TypeError, "`min_features` must be an int, got bool"),
        (MXFP8Recipe, {"block": 32}, TypeError, "block"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_errors(recipe: type, arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        recipe(**arguments)


def test_recipes_are_frozen_comparable_values() -> None:
    recipe = MXFP8Recipe(scale_mode="floor")
    assert recipe.scale_mode is ScaleMode.FLOOR
    assert recipe == pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe)
    assert hash(recipe) == hash(dataclasses.replace(recipe)) != hash(MXFP8Recipe())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.min_features = 1
