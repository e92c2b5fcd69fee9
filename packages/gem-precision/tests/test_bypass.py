"""Modules of torch that read the weights of their linear layers: conversion must not stop at the layer's class."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gem_precision import MXFP8Linear, convert, describe, get_recipe

NAMES = ("mxfp8", "bf16", "bf16_activations")


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0, **options).eval()


def results(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
    """With gradients, where torch takes no fast path, and without."""
    slow = model(*args, **kwargs).detach()
    with torch.no_grad():
        return slow, model(*args, **kwargs)


def assert_same_recipe(fast: Tensor, slow: Tensor, full: Tensor) -> None:
    """torch's attention sums in another order without gradients, and may so turn the rounding of single operands."""
    assert (slow - full).norm() > 1e-4 * full.norm()
    assert (fast - slow).norm() < 0.1 * (slow - full).norm()


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_in_eval_mode_computes_in_the_recipe(name: str, activation: str, norm_first: bool) -> None:
    layer = encoder_layer(activation=activation, norm_first=norm_first)
    x = torch.randn(3, 5, 64)
    _, full = results(layer, x)
    slow, fast = results(convert(layer, get_recipe(name)), x)
    assert_same_recipe(fast, slow, full)


def test_one_converted_layer_is_enough() -> None:
    layer, x = encoder_layer(), torch.randn(3, 5, 64)
    _, full = results(layer, x)
    convert(layer, get_recipe("mxfp8"), filter=lambda _, fqn: fqn == "linear2")
    assert_same_recipe(*reversed(results(layer, x)), full)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("converted", ["layers.0", "layers.1", ""], ids=["first", "second", "all"])
def test_an_encoder_makes_no_nested_tensors_of_padded_batches(converted: str) -> None:
    encoder = nn.TransformerEncoder(encoder_layer(), 2).eval()
    assert encoder.use_nested_tensor
    x, padding = torch.randn(3, 5, 64), torch.arange(5) >= torch.tensor([[5], [2], [3]])
    _, full = results(encoder, x, src_key_padding_mask=padding)
    convert(encoder, get_recipe("mxfp8"), filter=lambda _, fqn: fqn.startswith(converted))
    slow, fast = results(encoder, x, src_key_padding_mask=padding)
    assert_same_recipe(fast[~padding], slow[~padding], full[~padding])


def test_layers_that_no_recipe_touched_keep_the_fast_path() -> None:
    model = nn.Sequential(encoder_layer(), nn.Linear(64, 64))
    convert(model, get_recipe("mxfp8"), filter=lambda _, fqn: fqn == "1")
    assert model[0].activation_relu_or_gelu == 1


def test_a_copy_has_no_fast_path_either() -> None:
    layer, x = encoder_layer(), torch.randn(3, 5, 64)
    _, full = results(layer, x)
    assert_same_recipe(*reversed(results(copy.deepcopy(convert(layer, get_recipe("mxfp8"))), x)), full)


class Plain(nn.MultiheadAttention):
    """With an output projection of exactly the type that ``convert`` takes."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.out_proj = nn.Linear(64, 64)


class Calls(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attention", [nn.MultiheadAttention(64, 4), Plain()], ids=["torch", "plain"])
def test_an_output_projection_that_is_never_called_is_passed_over(name: str, attention: nn.Module) -> None:
    model = convert(nn.ModuleDict({"attention": attention, "head": nn.Linear(64, 64)}), get_recipe(name))
    report = {r.fqn: r for r in describe(model)}["attention.out_proj"]
    assert not report.is_converted
    assert report.reason == "MultiheadAttention reads its weight and never calls it"


def test_a_forward_of_ones_own_may_call_it() -> None:
    assert isinstance(convert(Calls(), get_recipe("mxfp8")).out_proj, MXFP8Linear)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no LinearCrossEntropyLoss")
def test_the_layer_of_a_loss_that_is_never_called_is_passed_over() -> None:
    with pytest.raises(ValueError, match="LinearCrossEntropyLoss reads its weight and never calls it"):
        convert(nn.LinearCrossEntropyLoss(64, 64), get_recipe("mxfp8"))


def test_describe_says_so_of_a_layer_that_was_converted_without_its_parent() -> None:
    layer = encoder_layer()
    convert(layer.linear1, get_recipe("mxfp8"))
    reports = {r.fqn: r.reason for r in describe(layer)}
    assert reports["linear1"].startswith("NOT where the fast path of TransformerEncoderLayer, in eval mode")
    convert(layer, get_recipe("mxfp8"), filter=lambda _, fqn: fqn == "linear2")
    assert not any(r.reason.startswith("NOT") for r in describe(layer))
