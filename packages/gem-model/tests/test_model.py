"""The whole model: shapes, gradients, isolation of samples, empty input, loss, learning."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gem_model import RankingModel, random_batch

CONFIGS = ["tiny", "two_towers", "no_sequences", "experts"]


@dataclass(frozen=True)
class Case:
    id: str
    lengths: tuple[int, ...]


LENGTHS = [
    Case("edges", (0, 1, 2, 31, 32, 33, 63, 64, 65, 0)),
    Case("one-sample", (7,)),
    Case("outlier", (1, 0, 300, 2)),
    Case("all-empty", (0, 0, 0)),
    Case("no-samples", ()),
]


@pytest.fixture(params=CONFIGS)
def config(request):
    return request.getfixturevalue(request.param)


def make(config, lengths, seed=0):
    """Both towers of a config get the lengths, the second one in reverse order."""
    by_name = {
        tower.name: lengths if index == 0 else tuple(reversed(lengths)) for index, tower in enumerate(config.sequences)
    }
    torch.manual_seed(seed)
    return RankingModel(config), *random_batch(config, len(lengths), lengths=by_name, seed=seed)


@pytest.mark.parametrize("case", LENGTHS, ids=lambda case: case.id)
def test_outputs_and_every_gradient(config, case):
    model, batch, embeddings = make(config, case.lengths)
    outputs = model(batch, embeddings)
    assert list(outputs) == list(config.tasks)
    for logits in outputs.values():
        assert logits.shape == (len(case.lengths),)
        assert logits.dtype == torch.float32
        assert torch.isfinite(logits).all()
    model.loss(outputs, batch).total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        assert torch.isfinite(parameter.grad).all(), name
    for name, embedding in embeddings.items():
        assert embedding.grad is not None, f"{name} got no gradient"
        assert torch.isfinite(embedding.grad).all(), name


def test_every_parameter_and_feature_matters(config):
    model, batch, embeddings = make(config, (5, 9, 40, 70, 1, 12))
    model.loss(model(batch, embeddings), batch).total.backward()
    for name, tensor in [*model.named_parameters(), *embeddings.items()]:
        assert tensor.grad.abs().max() > 0.0, f"{name} has no effect"


def test_no_samples_leave_zero_gradients(config):
    model, batch, embeddings = make(config, ())
    loss = model.loss(model(batch, embeddings), batch)
    loss.total.backward()
    assert loss.total == 0.0
    assert loss.count == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.parametrize("victim", [0, 3, 7])
def test_no_sample_changes_another(config, victim):
    """One sample is all NaN: it answers NaN, and not one bit of the others changes."""
    lengths = (3, 0, 64, 65, 1, 33, 20, 12)
    model, batch, embeddings = make(config, lengths)
    model.eval()
    with torch.no_grad():
        before = model(batch, embeddings)
        batch.dense[victim] = float("nan")
        rows = {name: slice(victim, victim + 1) for name in config.context_features}
        for tower in config.sequences:
            sequence = batch.sequences[tower.name]
            begin, end = sequence.offsets[victim : victim + 2].tolist()
            sequence.dense[begin:end] = float("nan")
            sequence.age[begin:end] = float("nan")
            rows |= dict.fromkeys(tower.event_features, slice(begin, end))
        for name, owned in rows.items():
            embeddings[name][owned] = float("nan")
        after = model(batch, embeddings)
    others = torch.arange(len(lengths)) != victim
    for task in config.tasks:
        assert after[task][victim].isnan()
        assert torch.equal(after[task][others], before[task][others])


def test_no_gradient_reaches_another_sample(config):
    lengths = (3, 0, 64, 65, 1)
    model, batch, embeddings = make(config, lengths)
    outputs = model(batch, embeddings)
    sum(logits[3] for logits in outputs.values()).backward()
    for name in config.context_features:
        assert embeddings[name].grad[3].abs().sum() > 0.0
        assert embeddings[name].grad[[0, 1, 2, 4]].abs().sum() == 0.0
    for tower in config.sequences:
        begin, end = batch.sequences[tower.name].offsets[3:5].tolist()
        for name in tower.event_features:
            grad = embeddings[name].grad
            assert grad[begin:end].abs().sum() > 0.0
            assert grad[:begin].abs().sum() == 0.0
            assert grad[end:].abs().sum() == 0.0


def test_order_and_company_of_samples_do_not_matter(config):
    """Samples scored alone give what they give in a batch, up to the order of sums."""
    lengths = (3, 0, 64, 1, 90)
    model, batch, embeddings = make(config, lengths)
    model.eval()
    with torch.no_grad():
        together = model(batch, embeddings)
        for index in range(len(lengths)):
            sequences, rows = {}, {name: slice(index, index + 1) for name in config.context_features}
            for tower in config.sequences:
                s = batch.sequences[tower.name]
                begin, end = s.offsets[index : index + 2].tolist()
                sequences[tower.name] = s._replace(
                    offsets=torch.tensor([0, end - begin]),
                    max_seqlen=end - begin,
                    dense=s.dense[begin:end],
                    age=s.age[begin:end],
                )
                rows |= dict.fromkeys(tower.event_features, slice(begin, end))
            one = dataclasses.replace(
                batch, num_samples=1, dense=batch.dense[index : index + 1], sequences=sequences, labels={}
            )
            alone = model(one, {name: embeddings[name][owned] for name, owned in rows.items()})
            for task in config.tasks:
                torch.testing.assert_close(alone[task], together[task][index : index + 1], rtol=1e-4, atol=1e-5)


def test_upper_bound_of_max_seqlen_is_enough(tiny):
    model, batch, embeddings = make(tiny, (3, 0, 20))
    loose = {name: s._replace(max_seqlen=s.max_seqlen + 13) for name, s in batch.sequences.items()}
    with torch.no_grad():
        exact, bound = model(batch, embeddings), model(dataclasses.replace(batch, sequences=loose), embeddings)
    for task in tiny.tasks:
        torch.testing.assert_close(bound[task], exact[task])


def test_two_runs_give_the_same_bits(config):
    results = []
    for _ in range(2):
        model, batch, embeddings = make(config, (0, 4, 64, 65, 130), seed=5)
        outputs = model(batch, embeddings)
        model.loss(outputs, batch).total.backward()
        tensors = [*outputs.values(), *(p.grad for p in model.parameters()), *(e.grad for e in embeddings.values())]
        results.append([x.detach().clone() for x in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_loss_is_a_sum_per_task(two_towers):
    model, batch, embeddings = make(two_towers, (3, 0, 20, 5))
    outputs = model(batch, embeddings)
    loss = model.loss(outputs, batch)
    assert loss.count == 4
    expected = {}
    for task, logits in outputs.items():
        p = torch.sigmoid(logits.double())
        y = batch.labels[task].double()
        expected[task] = -(y * p.log() + (1 - y) * (1 - p).log()).sum()
        torch.testing.assert_close(loss.sum[task].double(), expected[task], rtol=1e-5, atol=1e-6)
    weighted = 1.0 * expected["click"] + 0.25 * expected["buy"]
    torch.testing.assert_close(loss.total.double(), weighted, rtol=1e-5, atol=1e-6)
    assert loss.total.shape == ()


def test_first_predictions_are_near_the_priors(tiny):
    model, batch, embeddings = make(tiny, (20, 0, 50, 3) * 8)
    with torch.no_grad():
        outputs = model(batch, embeddings)
    for task, prior in zip(tiny.tasks, tiny.priors, strict=True):
        assert torch.sigmoid(outputs[task]).mean().item() == pytest.approx(prior, rel=0.1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_small_batch_is_learned_by_heart(two_towers, dropout):
    config = dataclasses.replace(two_towers, dropout=dropout, dim=32)
    model, batch, embeddings = make(config, (3, 0, 20, 40, 5, 9, 33, 2))
    embeddings = {name: x.detach() for name, x in embeddings.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(model(batch, embeddings), batch)
        (loss.total / loss.count).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        final = model.loss(model(batch, embeddings), batch)
    for task in config.tasks:
        assert final.sum[task] / final.count < 0.1 * math.log(2.0)


def test_the_history_can_decide(tiny):
    """The label is the sign of a number on the latest event, which nothing else in the batch knows."""
    torch.manual_seed(0)
    config = dataclasses.replace(tiny, tasks=("like",), priors=())
    model = RankingModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def draw(seed):
        batch, embeddings = random_batch(config, 64, lengths={"history": list(range(1, 17)) * 4}, seed=seed)
        sequence = batch.sequences["history"]
        label = (sequence.dense[sequence.offsets[1:] - 1, 0] > 0).float()
        return dataclasses.replace(batch, labels={"like": label}), embeddings

    for step in range(100):
        batch, embeddings = draw(step)
        optimizer.zero_grad()
        (model.loss(model(batch, embeddings), batch).total / 64).backward()
        optimizer.step()
    with torch.no_grad():
        batch, embeddings = draw(1000)
        right = (model(batch, embeddings)["like"] > 0) == (batch.labels["like"] > 0.5)
    assert right.float().mean() > 0.85


def test_dropout_is_off_in_eval(tiny):
    tower = dataclasses.replace(tiny.sequences[0], dropout=0.3)
    model, batch, embeddings = make(dataclasses.replace(tiny, dropout=0.3, sequences=(tower,)), (5, 30))
    first, second = model(batch, embeddings), model(batch, embeddings)
    assert not torch.equal(first["like"], second["like"])
    model.eval()
    first, second = model(batch, embeddings), model(batch, embeddings)
    assert torch.equal(first["like"], second["like"])


def test_shard_units_name_modules_that_hold_all_parameters(config):
    model = RankingModel(config)
    units = model.shard_units
    assert len(set(units)) == len(units)
    held = {id(p) for unit in units for p in model.get_submodule(unit).parameters()}
    assert held == {id(p) for p in model.parameters()}
    assert sum(len(list(model.get_submodule(unit).parameters())) for unit in units) == len(list(model.parameters()))


def test_every_expert_adds_its_gated_output(experts):
    model, batch, embeddings = make(experts, (3, 0, 20))
    assert model.expert_layers == ("layers.0.interaction.mixture", "layers.1.interaction.mixture")
    assert set(model.expert_layers) < set(model.shard_units)
    with torch.no_grad():
        whole = model(batch, embeddings)
        mixture = model.get_submodule(model.expert_layers[0])
        x = torch.randn(5, mixture.experts[0].interaction.residual.linear.in_features, experts.dim)
        parts = torch.stack([expert(x) for expert in mixture.experts])
        torch.testing.assert_close(mixture(x), parts.sum(0))
        assert all((parts[i] - parts[j]).abs().max() > 1e-2 for i, j in ((0, 1), (1, 2)))
        # A shut gate takes its expert out.
        mixture.experts[1].gate.gate.weight.zero_()
        mixture.experts[1].gate.gate.bias.fill_(-1e4)
        torch.testing.assert_close(mixture(x), parts[0] + parts[2])
        assert not torch.equal(model(batch, embeddings)["click"], whole["click"])


def test_a_replaced_sum_of_experts_keeps_names_and_flops(experts):
    """What spreads the experts over ranks holds some of them, under their positions."""

    class Some(nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.experts = nn.ModuleDict({"1": experts[1]})

        def forward(self, x):
            return self.experts["1"](x)

    model, batch, embeddings = make(experts, (3, 0, 20))
    names, flops = set(model.state_dict()), model.flops(batch)
    for name in model.expert_layers:
        model.set_submodule(name, Some(model.get_submodule(name).experts))
    assert set(model.state_dict()) == {name for name in names if ".experts." not in name or ".experts.1." in name}
    assert model.flops(batch).by_module == flops.by_module
    assert model(batch, embeddings)["click"].shape == (3,)


def test_one_expert_is_the_plain_model(two_towers):
    model = RankingModel(two_towers)
    assert model.expert_layers == ()
    assert not any("mixture" in name for name in model.state_dict())


def test_state_dict_round_trip(config):
    model, batch, embeddings = make(config, (3, 0, 20))
    torch.manual_seed(9)
    other = RankingModel(config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        ours, theirs = model(batch, embeddings), other(batch, embeddings)
    assert all(torch.equal(ours[task], theirs[task]) for task in config.tasks)


def test_bfloat16_autocast(config):
    model, batch, embeddings = make(config, (3, 0, 20, 64))
    exact = model(batch, embeddings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(batch, embeddings)
        loss = model.loss(outputs, batch)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    for task in config.tasks:
        assert outputs[task].dtype == torch.float32
        # The logits are a tenth of a unit at the start; bfloat16 has 8 bits.
        torch.testing.assert_close(outputs[task], exact[task], rtol=0.1, atol=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_missing_and_misshapen_inputs_are_named(tiny):
    model, batch, embeddings = make(tiny, (3, 2))
    cases = [
        (batch, {k: v for k, v in embeddings.items() if k != "year"}, r"`embeddings\['year'\]` must be given"),
        (batch, embeddings | {"year": embeddings["year"][:, :5]}, r"`embeddings\['year'\]` must have shape \(2, 32\)"),
        (
            batch,
            embeddings | {"history.item": embeddings["history.item"][1:]},
            r"`embeddings\['history.item'\]` must have shape \(5, 32\), got \(4, 32\)",
        ),
        (dataclasses.replace(batch, dense=batch.dense[:, 1:]), embeddings, r"`batch.dense` must have shape \(2, 4\)"),
        (dataclasses.replace(batch, sequences={}), embeddings, r"`batch.sequences` must hold 'history', got \[\]"),
        (dataclasses.replace(batch, num_samples=3), embeddings, r"must have shape \(3, 4\), got \(2, 4\)"),
    ]
    for wrong_batch, wrong_embeddings, message in cases:
        with pytest.raises(ValueError, match=message):
            model(wrong_batch, wrong_embeddings)
    outputs = model(batch, embeddings)
    with pytest.raises(ValueError, match="must hold every task of the config, got none for 'favourite'; add"):
        model.loss(outputs, dataclasses.replace(batch, labels={"like": batch.labels["like"]}))
    wrong = batch.labels | {"like": batch.labels["like"][:1]}
    with pytest.raises(ValueError, match=r"must have shape \(2,\) like its logits, got \(1,\)"):
        model.loss(outputs, dataclasses.replace(batch, labels=wrong))


def test_the_forward_pass_is_one_graph(config):
    model, batch, embeddings = make(config, (0, 3, 40, 65, 1))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        outputs, exact = compiled(batch, embeddings), model(batch, embeddings)
    for task in config.tasks:
        torch.testing.assert_close(outputs[task], exact[task])
