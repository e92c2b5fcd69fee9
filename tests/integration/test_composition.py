"""Kernels, model, tables and precision in a loop written by hand: nothing here knows gem-train."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gem_precision
from gem_model import RankingModel

LENGTHS = (0, 1, 5, 63, 64, 65, 3, 0, 17, 2)


def step(model, tables, batch, optimizer=None):
    embeddings = tables.lookup(tables.exchange(batch.ids))
    outputs = model(batch, embeddings)
    loss = model.loss(outputs, batch)
    if optimizer is not None:
        optimizer.zero_grad()
        (loss.total / max(1, batch.num_samples)).backward()
        optimizer.step()
    return outputs, loss


def test_a_loop_by_hand_learns(config, make_batch, make_tables) -> None:
    torch.manual_seed(0)
    model, tables = RankingModel(config), make_tables()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for index in range(60):
        lengths = torch.randint(0, 20, (64,), generator=generator).tolist()
        _, loss = step(model, tables, make_batch(lengths, seed=index), optimizer)
        losses.append(loss.total.item() / 64)
    unseen = make_batch(torch.randint(0, 20, (256,), generator=generator).tolist(), seed=1000)
    with torch.no_grad():
        _, loss = step(model, tables, unseen)
    # Two tasks at 0.69 each know nothing. `like` is a lookup and `click` needs the history.
    assert sum(losses[:5]) / 5 > 1.2
    assert loss.total.item() / 256 < 0.9, losses[-5:]
    assert loss.sum["like"].item() / 256 < 0.4


def test_forward_flops_are_those_the_operators_report(config, make_batch, make_tables) -> None:
    model, tables, batch = RankingModel(config), make_tables(), make_batch(LENGTHS)
    embeddings = tables.lookup(tables.exchange(batch.ids))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch, embeddings)
    # Zeros that fill up the rows of the events are multiplied and not counted.
    (tower,) = config.sequences
    hidden = model.event_tokens[tower.name].hidden
    numbers = tower.num_event_dense + tower.num_age_buckets + tower.num_recency_buckets
    zeros = hidden.in_features - len(tower.event_features) * config.embedding_dim - numbers
    extra = 2 * sum(LENGTHS) * zeros * hidden.out_features
    assert model.flops(batch).forward + extra == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_no_sample_changes_another(config, make_batch, make_tables) -> None:
    model, tables, batch = RankingModel(config).eval(), make_tables(), make_batch(LENGTHS)
    with torch.no_grad():
        embeddings = tables.lookup(tables.exchange(batch.ids))
        before = model(batch, embeddings)
        begin, end = batch.sequences["history"].offsets[5:7].tolist()
        poisoned = {name: value.clone() for name, value in embeddings.items()}
        for name, value in poisoned.items():
            value[slice(begin, end) if name.startswith("history.") else slice(5, 6)] = float("nan")
        after = model(batch, poisoned)
    others = torch.arange(batch.num_samples) != 5
    for task, logits in before.items():
        assert after[task][5].isnan()
        torch.testing.assert_close(after[task][others], logits[others], rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0), (0, 4)], ids=["no-samples", "one", "all-empty", "mixed"])
def test_empty_histories_and_batches(config, make_batch, make_tables, lengths) -> None:
    model, tables, batch = RankingModel(config), make_tables(), make_batch(lengths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs, loss = step(model, tables, batch, optimizer)
    assert {task: tuple(logits.shape) for task, logits in outputs.items()} == {
        "click": (len(lengths),),
        "like": (len(lengths),),
    }
    assert torch.isfinite(loss.total)
    assert loss.count == len(lengths)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp8"])
def test_convert_the_real_model(config, make_batch, make_tables, recipe) -> None:
    torch.manual_seed(0)
    model, tables, batch = RankingModel(config), make_tables(), make_batch(LENGTHS)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        embeddings = {name: value.detach() for name, value in tables.lookup(tables.exchange(batch.ids)).items()}
        exact = model(batch, embeddings)
    converted = gem_precision.convert(model, gem_precision.get_recipe(recipe))
    # The same objects under the same names: an optimizer built before `convert` goes on working.
    assert {name: id(value) for name, value in converted.named_parameters()} == {
        name: id(value) for name, value in parameters.items()
    }
    outputs = converted(batch, embeddings)
    converted.loss(outputs, batch).total.backward()
    assert all(parameter.grad is not None for parameter in parameters.values())
    for task, logits in exact.items():
        error = (outputs[task].detach() - logits).norm() / logits.norm().clamp_min(1e-12)
        assert outputs[task].dtype == logits.dtype
        assert torch.isfinite(outputs[task]).all()
        assert error <= {"fp32": 0.0, "bf16": 0.05, "mxfp8": 0.3}[recipe]
        if recipe != "fp32":
            assert error > 0.0, "the recipe changed nothing"
    reports = gem_precision.describe(converted)
    assert len(reports) > 0
    if recipe != "fp32":
        assert any(report.precision != "fp32" for report in reports)


def test_state_dicts_go_both_ways(config, make_batch, make_tables) -> None:
    torch.manual_seed(0)
    plain, batch, tables = RankingModel(config), make_batch(LENGTHS), make_tables()
    embeddings = {name: value.detach() for name, value in tables.lookup(tables.exchange(batch.ids)).items()}
    converted = gem_precision.convert(copy.deepcopy(plain), gem_precision.get_recipe("mxfp8"))
    assert plain.state_dict().keys() == converted.state_dict().keys()
    other = RankingModel(config)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    converted.load_state_dict(other.state_dict())
    plain.load_state_dict(converted.state_dict())
    for task, logits in other(batch, embeddings).items():
        assert torch.equal(plain(batch, embeddings)[task], logits)


def test_table_state_survives_a_new_instance(config, make_batch, make_tables) -> None:
    model = RankingModel(config)
    trained, fresh = make_tables(seed=0), make_tables(seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for index in range(3):
        step(model, trained, make_batch(LENGTHS, seed=index), optimizer)
    fresh.load_state_dict({name: value.clone() for name, value in trained.state_dict().items()})
    # Not only the rows: one more update must use the moments that were saved.
    for tables in (trained, fresh):
        step(model, tables, make_batch(LENGTHS, seed=3), optimizer)
    ours, theirs = trained.state_dict(), fresh.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
