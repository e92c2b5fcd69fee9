"""Fused ops against the plain computation they stand for. On the CPU, where the model takes the plain one by itself."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gem_model import RankingModel, random_batch
from gem_model._src import blocks, fused
from gem_model._src.fused import fuses_norm_block
from gem_model._src.jagged import Jagged
from gem_model._src.sequence_layer import PersonalizedFeedForward

LENGTHS = {"edges": (0, 1, 2, 31, 33, 65, 0), "all-empty": (0, 0), "no-samples": ()}


@pytest.fixture
def calls(monkeypatch):
    """The names of the feed-forward layers that ran fused; on the CPU they and the norms may from here on."""
    monkeypatch.setattr(fused, "_DEVICES", ("cpu",))
    monkeypatch.setattr(blocks, "NORM_DEVICES", ("cpu",))
    monkeypatch.setattr(blocks, "_MIN_NORM", 0)
    seen = []
    forward = nn.Module.__call__

    def call(self, *args, **kwargs):
        if kwargs.get("norm_block"):
            seen.append(type(self).__name__)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    return seen


def gradients(model, batch, embeddings):
    """Logits, and the gradient of every parameter and embedding."""
    inputs = [*model.parameters(), *embeddings.values()]
    outputs = model(batch, embeddings)
    return list(outputs.values()), torch.autograd.grad(model.loss(outputs, batch).total, inputs)


def plainly(monkeypatch, function, *args):
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_DEVICES", ())
        patch.setattr(blocks, "NORM_DEVICES", ())
        return function(*args)


@pytest.mark.parametrize("config", ["tiny", "two_towers", "experts"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_the_fused_model_is_the_plain_one(request, calls, monkeypatch, config, lengths):
    config = request.getfixturevalue(config)
    torch.manual_seed(0)
    model = RankingModel(config)
    batch, embeddings = random_batch(config, len(lengths), lengths={tower.name: lengths for tower in config.sequences})
    expected = plainly(monkeypatch, gradients, model, batch, embeddings)
    assert not calls
    actual = gradients(model, batch, embeddings)
    assert calls == ["GDPA"] * config.num_layers * len(config.sequences)
    for ours, theirs in zip(actual, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            # float32 rounding of sums over all events.
            torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5 * (1.0 + y.abs().max().item()) if y.numel() else 0.0)


@pytest.mark.parametrize("config", ["tiny", "experts"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_maps_of_tokens_on_rows_as_they_lie_are_the_transposed_ones(request, monkeypatch, config, lengths):
    config = request.getfixturevalue(config)
    torch.manual_seed(0)
    model = RankingModel(config)
    batch, embeddings = random_batch(config, len(lengths), lengths={tower.name: lengths for tower in config.sequences})
    expected = gradients(model, batch, embeddings)
    maps = []
    monkeypatch.setattr(blocks, "serves_token_linear", lambda x, *weights: maps.append(len(weights)) or True)
    actual = gradients(model, batch, embeddings)
    # Three of every interaction together, the others alone.
    assert maps.count(3) == config.num_layers * config.num_experts
    assert 1 in maps
    for ours, theirs in zip(actual, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5 * (1.0 + y.abs().max().item()) if y.numel() else 0.0)


def test_a_map_of_tokens_that_somebody_watches_is_called(monkeypatch):
    layer, seen = blocks.TokenLinear(5, 3), []
    monkeypatch.setattr(blocks, "serves_token_linear", lambda x, *weights: True)
    x = torch.randn(2, 5, 4)
    expected = layer(x)
    handle = layer.linear.register_forward_hook(lambda *_: seen.append(True))
    torch.testing.assert_close(layer(x), expected)
    assert seen == [True]
    handle.remove()
    layer(x)
    assert seen == [True]


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu_square", "raw"])
def test_the_fused_feed_forward_is_the_plain_one_in_float64(two_towers, calls, monkeypatch, activation):
    torch.manual_seed(0)
    tower = dataclasses.replace(two_towers.sequences[0], pffn_activation=activation)
    module = PersonalizedFeedForward(tower).double()
    offsets = torch.tensor([0, 0, 3, 8, 8, 50])
    s = (3.0 * torch.randn(50, tower.dim, dtype=torch.float64)).requires_grad_()
    x_sum = torch.randn(5, tower.num_context_tokens, tower.dim, dtype=torch.float64, requires_grad=True)
    inputs = [s, x_sum, *module.parameters()]

    def run():
        out = module(Jagged(s, offsets, 42), F.layer_norm(s, (tower.dim,)), x_sum)
        return out, *torch.autograd.grad(out.sin().sum(), inputs)

    for x, y in zip(run(), plainly(monkeypatch, run), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
    assert calls == ["GDPA"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_is_as_near_to_float64_as_the_plain_computation(two_towers, calls, monkeypatch, device):
    torch.manual_seed(0)
    monkeypatch.setattr(fused, "_DEVICES", (device,))
    tower = two_towers.sequences[0]
    module = PersonalizedFeedForward(tower).double()
    offsets = torch.tensor([0, 30, 30, 400])
    s, x_sum = torch.randn(400, tower.dim), torch.randn(3, tower.num_context_tokens, tower.dim)

    def run(dtype, device):
        events, context = (x.to(device, dtype).requires_grad_() for x in (s, x_sum))
        candidate = copy.deepcopy(module).to(device, dtype)
        out = candidate(Jagged(events, offsets.to(device), 370), F.layer_norm(events, (tower.dim,)), context)
        results = out, *torch.autograd.grad(out.sin().sum(), [events, context, *candidate.parameters()])
        return [x.cpu() for x in results]

    exact = plainly(monkeypatch, run, torch.float64, "cpu")
    plain = plainly(monkeypatch, run, torch.bfloat16, device)
    for x, y, z in zip(run(torch.bfloat16, device), plain, exact, strict=True):
        assert x.dtype == torch.bfloat16
        assert (x.double() - z).norm() <= 1.2 * (y.double() - z).norm()
    assert calls == ["GDPA"]


def test_dropout_stands_between_norm_and_residual(two_towers, calls):
    towers = tuple(dataclasses.replace(tower, dropout=0.5) for tower in two_towers.sequences)
    model = RankingModel(dataclasses.replace(two_towers, sequences=towers))
    batch, embeddings = random_batch(two_towers, 2, lengths={"clicks": (3, 40), "visits": (0, 5)})
    model(batch, embeddings)
    assert not calls
    model.eval()(batch, embeddings)
    assert calls


class Stranger(nn.Module):
    """What may have replaced the attention from outside."""


@pytest.mark.parametrize(
    ("attention", "residual", "keys", "dropout", "expected"),
    [
        ("own", torch.float32, torch.float32, 0.0, True),
        ("own", torch.bfloat16, torch.bfloat16, 0.0, True),
        ("own", torch.float32, torch.bfloat16, 0.0, False),
        ("own", torch.float32, torch.float32, 0.1, False),
        ("stranger", torch.float32, torch.float32, 0.0, False),
    ],
)
def test_where_the_block_is_fused(two_towers, monkeypatch, attention, residual, keys, dropout, expected):
    attention = PersonalizedFeedForward(two_towers.sequences[0]).attention if attention == "own" else Stranger()
    x, k = torch.zeros(2, 4, dtype=residual), torch.zeros(3, 2, 2, dtype=keys)
    assert not fuses_norm_block(attention, x, k, dropout)  # on the CPU
    monkeypatch.setattr(fused, "_DEVICES", ("cpu",))
    assert fuses_norm_block(attention, x, k, dropout) is expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not fuses_norm_block(attention, x, k, dropout)


def test_flops_stay_where_they_are_counted(two_towers, calls):
    model = RankingModel(two_towers)
    batch, embeddings = random_batch(two_towers, 3, lengths={"clicks": (3, 0, 40), "visits": (0, 5, 9)})
    with FlopCounterMode(display=False) as counter:
        model(batch, embeddings)
    counted = counter.get_flop_counts()
    for name, flops in model.flops(batch).by_module.items():
        if name.endswith("feed_forward.attention"):
            assert sum(counted[f"RankingModel.{name}"].values()) == flops.forward
    assert calls
    # Torch counts the columns of zeros that fill up the rows of the events, too.
    zeros = sum(
        2
        * batch.sequences[name].age.shape[0]
        * (tokens.hidden.in_features - tokens._num_inputs)
        * tokens.hidden.out_features
        for name, tokens in model.event_tokens.items()
    )
    assert model.flops(batch).forward + zeros == counter.get_total_flops()
