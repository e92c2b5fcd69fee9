"""Queries, keys and values of the model by one product under bf16_activations, on the CPU as on CUDA."""

import pytest
import torch

from gem_model import RankingModel, presets, random_batch
from gem_model._src import fused, sequence_layer
from gem_precision import convert, get_recipe
from gem_precision._src import cast_once


@pytest.fixture
def on_the_cpu(monkeypatch):
    """What a GPU is needed for otherwise, but the norm block, which is another matter."""
    monkeypatch.setattr(fused, "_DEVICES", ("cpu",))
    monkeypatch.setattr(cast_once, "DEVICES", ("cpu",))
    monkeypatch.setattr(sequence_layer, "fuses_norm_block", lambda *_: False)


def results(model, batch, embeddings):
    leaves = [*model.parameters(), *embeddings.values()]
    outputs = model(batch, embeddings)
    return [*outputs.values(), *torch.autograd.grad(model.loss(outputs, batch).total, leaves)]


@pytest.mark.usefixtures("on_the_cpu")
def test_one_product_is_three(monkeypatch):
    config = presets.small(
        context_features=("item",),
        num_dense=3,
        event_features=("history.item",),
        num_event_dense=1,
        tasks=("like",),
    )
    torch.manual_seed(0)
    model = convert(RankingModel(config), get_recipe("bf16_activations"))
    batch, embeddings = random_batch(config, 5, lengths={"history": (0, 3, 70, 1, 20)}, seed=0)
    joined, joins = [], sequence_layer.joins_products
    monkeypatch.setattr(sequence_layer, "joins_products", lambda *args: joined.append(joins(*args)) or joined[-1])
    together = results(model, batch, embeddings)
    # The windowed layers; the layer between has no self-attention.
    assert joined == [True, True]
    monkeypatch.setattr(sequence_layer, "joins_products", lambda *_: False)
    apart = results(model, batch, embeddings)
    assert torch.equal(together[0], apart[0])
    actual, expected = (torch.cat([x.flatten() for x in found[1:]]) for found in (together, apart))
    # bfloat16 between: one sum of three gradients is rounded where three were.
    assert (actual - expected).norm() <= 0.02 * expected.norm()
