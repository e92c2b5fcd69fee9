"""The model under bf16_activations on CUDA, where kernels of their own take part, beside float32 and torch's ops."""

import sys

import pytest
import torch

from gem_kernels._src.jagged_attention import backward as attention_backward
from gem_model import RankingModel, presets, random_batch
from gem_model._src import blocks, events, interaction, sequence_layer
from gem_precision import convert, get_recipe
from gem_precision._src import cast_once

pytestmark = pytest.mark.gpu


def plain_events(columns, dtype):
    return torch.cat(columns, dim=1)


def plain_products(x, y):
    return torch.bmm(x, torch.bmm(x.transpose(1, 2), y))


def without_kernels(patch):
    patch.setattr(blocks, "serves_token_linear", lambda *_: False)
    patch.setattr(interaction, "token_products", plain_products)
    patch.setattr(events, "join_columns", plain_events)
    patch.setattr(cast_once, "DEVICES", ())
    patch.setattr(attention_backward, "few_queries", lambda *_: False)
    patch.setattr(sequence_layer, "joins_products", lambda *_: False)
    patch.setattr(blocks, "gate", lambda x, z: x * torch.sigmoid(z))
    patch.setattr(sys.modules["gem_kernels.jagged_attention"], "launches_directly", lambda *_: False)


def results(model, batch, embeddings):
    """Logits, then the gradients of parameters and embeddings, each as one vector."""
    leaves = [*model.parameters(), *embeddings.values()]
    outputs = model(batch, embeddings)
    gradients = torch.autograd.grad(model.loss(outputs, batch).total, leaves)
    return torch.cat(list(outputs.values())), torch.cat([g.flatten().double() for g in gradients])


def error(actual, exact):
    return ((actual.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("preset", [presets.tiny, presets.small])
@pytest.mark.parametrize("large", [False, True], ids=["as-small-batches", "as-large-batches"])
def test_kernels_are_no_farther_from_float32_than_torchs_ops(preset, large, monkeypatch):
    if large:
        monkeypatch.setattr(blocks, "_MIN_NORM", 0)
        monkeypatch.setattr(blocks, "_MIN_TRANSPOSE", 0)
    config = preset(
        context_features=("item", "category"),
        num_dense=6,
        event_features=("history.item", "history.category"),
        num_event_dense=1,
        tasks=("like", "favourite"),
    )
    batch, embeddings = random_batch(config, 200, mean_length=60.0, max_length=300, seed=0)
    batch = batch.to("cuda")
    embeddings = {name: x.detach().cuda().requires_grad_() for name, x in embeddings.items()}
    torch.manual_seed(0)
    model = RankingModel(config).cuda()
    logits, gradients = results(model, batch, embeddings)
    model = convert(model, get_recipe("bf16_activations"))
    ours = results(model, batch, embeddings)
    with monkeypatch.context() as patch:
        without_kernels(patch)
        torchs = results(model, batch, embeddings)
    for mine, plain, exact in zip(ours, torchs, (logits, gradients), strict=True):
        # What bf16 does to small gradients that nearly cancel: 0.07 to 0.11 for torch's own ops.
        assert error(plain, exact) < 0.2
        assert error(mine, exact) < 1.1 * error(plain, exact) + 1e-4
