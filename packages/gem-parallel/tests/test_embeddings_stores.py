"""Updates without a lookup in the graph: engines alone and replicated tables, on each device."""

import pytest
import torch
from reference_optimizers import ReferenceTable

from gem_parallel import FeatureConfig, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings.build import Storage, make_engines
from gem_parallel._src.embeddings.layout import make_groups, make_shards
from gem_parallel._src.embeddings.stores import ReplicatedStore, Update

DIM, ROWS = 8, {"a": 300, "b": 7}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


def make(kind, device, placement, weight_dtype=torch.float32):
    """Engines of two tables as a rank of two holds them; weights are random."""
    tables = [TableConfig(name=name, num_rows=rows, dim=DIM, placement=placement) for name, rows in ROWS.items()]
    features = [FeatureConfig(name=name, table=name) for name in ROWS]
    world_size = 2 if placement == "replicated" else 1
    (group,) = make_groups(make_shards(tables, world_size), features)
    storage = Storage(
        optimizer=SparseOptimizerConfig(kind=kind, learning_rate=0.1, eps=1e-6),
        weight_dtype=weight_dtype,
        wire_dtype=torch.float32,
        gather="tables",
        keep_gathered=False,
        device=torch.device(device),
        seed=0,
    )
    engines = make_engines(group, 0, 0, storage)
    generator = torch.Generator().manual_seed(3)
    for weight in weights_of(engines):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return group, engines, storage.optimizer


def weights_of(engines):
    return [weight for engine in engines for weight in engine.weights()]


def states_of(engines):
    return [state for engine in engines for state in engine.states()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_update_equals_the_backward_of_a_lookup(kind, device):
    """Bit for bit, at the learning rate given, whatever the engine's is by then."""
    _, one, _ = make(kind, device, "table_wise")
    _, other, _ = make(kind, device, "table_wise")
    generator = torch.Generator().manual_seed(5)
    ids = torch.cat([torch.randint(0, rows, (40,), generator=generator) for rows in ROWS.values()]).to(device)
    grad = torch.randn(80, DIM, generator=generator).to(device)
    for step in (1, 2):
        start = 0
        for first, second in zip(one, other, strict=True):
            counts = [40] * first.num_tables
            end = start + sum(counts)
            first.lookup(ids[start:end], counts, None, step).backward(grad[start:end])
            second.set_learning_rate(7.0)
            second.update(ids[start:end], counts, grad[start:end], step, 0.1)
            start = end
    for first, second in zip(weights_of(one), weights_of(other), strict=True):
        assert torch.equal(first, second)
    for first, second in zip(states_of(one), states_of(other), strict=True):
        assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_replicated_update_equals_reference(kind, device):
    """Rows that no rank names keep weight and moments; named ones with a zero gradient are updated by it."""
    group, engines, optimizer = make(kind, device, "replicated")
    assert group.replicated
    store = ReplicatedStore(group, engines, torch.device(device))
    references = [ReferenceTable(weight.cpu().double(), optimizer) for weight in weights_of(engines)]
    generator = torch.Generator().manual_seed(7)
    named_ever = torch.zeros(sum(ROWS.values()), dtype=torch.bool)
    before = [weight.cpu().clone() for weight in weights_of(engines)]
    for step in (1, 2, 3):
        named = torch.rand(sum(ROWS.values()), generator=generator) < 0.3
        grad = torch.randn(len(named), DIM, generator=generator) * named.unsqueeze(1)
        grad[0], named[0] = 0, True
        named_ever |= named
        total = torch.cat([grad, 2.0 * named.unsqueeze(1)], dim=1)
        store.update(total.to(device), Update(step=step, learning_rate=0.1))
        for reference, rows, part in zip(
            references, named.split([*ROWS.values()]), grad.split([*ROWS.values()]), strict=True
        ):
            ids = rows.nonzero().flatten()
            reference.update(ids, part[ids].double())
    start = 0
    for weight, state, reference, first in zip(
        weights_of(engines), states_of(engines), references, before, strict=True
    ):
        torch.testing.assert_close(weight.cpu().double(), reference.weight, rtol=2e-5, atol=2e-5)
        still = ~named_ever[start : start + len(first)]
        assert torch.equal(weight.cpu()[still], first[still])
        moment = {"adam": "exp_avg_sq"}.get(kind, "sum")
        if kind != "sgd":
            second = state[moment].cpu().double().view_as(reference.second)
            torch.testing.assert_close(second, reference.second, rtol=2e-5, atol=2e-5)
            assert not second[still].any()
        start += len(first)
