"""The analytic FLOP count against what torch counts while the model runs."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gem_model import RankingModel, presets, random_batch
from gem_model.flops import BatchSizes, FlopCount, ModuleFlops

LENGTHS = {"edges": (0, 1, 5, 6, 31, 32, 33, 64, 65, 200), "one": (17,), "all-empty": (0, 0), "no-samples": ()}


@pytest.fixture(params=["tiny", "two_towers", "no_sequences", "experts"])
def config(request):
    return request.getfixturevalue(request.param)


def make(config, lengths):
    torch.manual_seed(0)
    by_name = {tower.name: lengths for tower in config.sequences}
    return RankingModel(config), *random_batch(config, len(lengths), lengths=by_name)


def subtotal(count, prefix):
    """FLOPs of a module and all below it."""
    return sum(f.forward for name, f in count.by_module.items() if name == prefix or name.startswith(f"{prefix}."))


def zero_columns(config, model, lengths):
    """Tower -> forward FLOPs of the columns of zeros that fill up the rows of its events, which torch counts."""
    flops = {}
    for tower in config.sequences:
        hidden = model.event_tokens[tower.name].hidden
        numbers = tower.num_event_dense + tower.num_age_buckets + tower.num_recency_buckets
        zeros = hidden.in_features - len(tower.event_features) * config.embedding_dim - numbers
        assert 0 <= zeros < 8
        flops[tower.name] = 2 * sum(lengths) * zeros * hidden.out_features
    return flops


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_forward_equals_what_torch_counts_in_every_module(config, lengths):
    model, batch, embeddings = make(config, lengths)
    with FlopCounterMode(display=False) as counter:
        model(batch, embeddings)
    count, zeros = model.flops(batch), zero_columns(config, model, lengths)
    assert count.forward + sum(zeros.values()) == counter.get_total_flops()
    seen = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.startswith("Ranking")}
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleDict | nn.ModuleList):
            leaf_of_own_code = name not in count.by_module and subtotal(count, name) == 0
            if not leaf_of_own_code:
                extra = zeros[name.split(".")[1]] if name.startswith("event_tokens.") else 0
                assert subtotal(count, name) + extra == seen.get(f"RankingModel.{name}", 0), name
    assert sum(f.forward for f in count.by_module.values()) == count.forward


def test_total_equals_what_torch_counts_forward_and_backward(config):
    """Torch skips the input gradient of the layers that read dense features, and that alone."""
    model, batch, embeddings = make(config, LENGTHS["edges"])
    with FlopCounterMode(display=False) as counter:
        model.loss(model(batch, embeddings), batch).total.backward()
    skipped = -3 * sum(zero_columns(config, model, LENGTHS["edges"]).values())
    if config.num_dense:
        skipped += 2 * batch.num_samples * config.num_dense * config.dense_hidden
    for tower in config.sequences:
        if not tower.event_features:
            skipped += 2 * sum(LENGTHS["edges"]) * model.event_tokens[tower.name].hidden.weight.numel()
    assert model.flops(batch).total - skipped == counter.get_total_flops()


def test_names_are_modules(config):
    model, batch, _ = make(config, LENGTHS["edges"])
    modules = dict(model.named_modules())
    for name, flops in model.flops(batch).by_module.items():
        assert name in modules
        assert flops.gemm >= 0
        assert flops.attention >= 0


@pytest.mark.parametrize("window", [0, 1, 5, 32, 200])
@pytest.mark.parametrize("block_size", [32, 64])
def test_pairs_are_those_of_a_mask(window, block_size):
    lengths = torch.tensor([0, 1, 2, 5, 6, 31, 32, 33, 64, 65, 100])
    sizes = BatchSizes(num_samples=len(lengths), lengths={"s": lengths})
    pairs_in_window = pairs_in_block = 0
    for n in lengths.tolist():
        i = torch.arange(n)
        pairs_in_window += int(((i[:, None] - i[None, :]).abs() <= window).sum())
        pairs_in_block += int((i[:, None] // block_size == i[None, :] // block_size).sum())
    assert sizes.window_pairs("s", window) == pairs_in_window
    assert sizes.block_pairs("s", block_size) == pairs_in_block
    assert sizes.num_events("s") == int(lengths.sum())


def test_backward_factors():
    count = FlopCount(by_module={"a": ModuleFlops(gemm=10), "b": ModuleFlops(attention=8), "c": ModuleFlops(1, 4)})
    assert count.forward == 10 + 8 + 5
    assert count.total == 30 + 28 + (3 + 14)


@pytest.mark.parametrize(
    ("preset", "embedding_dim", "length", "claimed"),
    [
        (presets.tiny, 32, 128, 14e6),
        (presets.tiny, 32, 512, 45e6),
        (presets.small, 64, 512, 1.06e9),
        (presets.large, 128, 512, 34e9),
    ],
)
def test_presets_cost_what_their_docstring_says(preset, embedding_dim, length, claimed):
    config = preset(
        context_features=tuple(f"c{i}" for i in range(8)),
        num_dense=8,
        event_features=("history.a", "history.b", "history.c"),
        num_event_dense=2,
        tasks=("click",),
    )
    assert config.embedding_dim == embedding_dim
    batch, _ = random_batch(config, 1, lengths={"history": (length,)})
    with torch.device("meta"):
        model = RankingModel(config)
    assert model.flops(batch).forward == pytest.approx(claimed, rel=0.2)


def test_flops_grow_with_the_window(tiny):
    def forward(window):
        tower = dataclasses.replace(tiny.sequences[0], self_attention=("window", "none"), window=window)
        model = RankingModel(dataclasses.replace(tiny, sequences=(tower,)))
        return model.flops(random_batch(tiny, 1, lengths={"history": (100,)})[0]).forward

    # One more key on either side, for the events that have one there.
    assert forward(17) - forward(16) == 4 * 64 * 2 * (100 - 17)
