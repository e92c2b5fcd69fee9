"""State dicts in one process."""

import copy
import pickle
from io import BytesIO

import pytest
import torch
from torch import nn

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

NAMES = {
    "sgd": ["weight"],
    "adagrad": ["weight", "sum"],
    "rowwise_adagrad": ["weight", "sum"],
    "adam": ["weight", "exp_avg", "exp_avg_sq", "step"],
}


def make(kind, seed=0, rows=10):
    tables = [TableConfig(name="a", num_rows=rows, dim=8), TableConfig(name="b", num_rows=1, dim=4)]
    features = [FeatureConfig(name="fa", table="a"), FeatureConfig(name="fb", table="b")]
    return ShardedEmbeddings(tables, features, optimizer=SparseOptimizerConfig(kind=kind), seed=seed)


def step(module):
    batch = {
        "fa": (torch.tensor([1, 2, 2]), torch.tensor([0, 2, 3])),
        "fb": (torch.tensor([0]), torch.tensor([0, 1, 1])),
    }
    sum(each.square().sum() for each in module.lookup(module.exchange(batch)).values()).backward()


@pytest.mark.parametrize("kind", NAMES)
def test_continues_as_if_never_saved(kind):
    module, plain = make(kind), make(kind)
    for each in (module, plain):
        step(each)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    assert sorted(state) == sorted(f"tables.{table}.{name}" for table in "ab" for name in NAMES[kind])
    shapes = {"weight": (10, 8), "exp_avg": (10, 8), "exp_avg_sq": (10, 8), "step": ()}
    shapes["sum"] = (10,) if kind == "rowwise_adagrad" else (10, 8)
    assert {key: tuple(state[key].shape) for key in state if ".a." in key} == {
        f"tables.a.{name}": shapes[name] for name in NAMES[kind]
    }
    other = make(kind, seed=9)
    assert other.load_state_dict(state) == ([], [])
    for each in (other, plain):
        step(each)
    for key, value in plain.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


def test_inside_another_module():
    class Model(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.sparse = make("adam", seed)
            self.dense = nn.Linear(2, 2)

    first, second = Model(0), Model(1)
    step(first.sparse)
    second.load_state_dict(first.state_dict())
    assert "sparse.tables.a.weight" in first.state_dict()
    for key, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key
    third = Model(2)
    weights = {key: value for key, value in first.state_dict().items() if "exp_avg" not in key and "step" not in key}
    missing, _ = third.load_state_dict(weights, strict=False)
    assert "sparse.tables.a.exp_avg" in missing
    assert torch.equal(third.state_dict()["sparse.tables.a.weight"], weights["sparse.tables.a.weight"])
    with pytest.raises(RuntimeError, match=r"Missing key.*sparse\.tables\.a\.exp_avg"):
        third.load_state_dict(weights)
    with pytest.raises(ValueError, match="load_state_dict: `assign` must be False"):
        third.sparse.load_state_dict(first.sparse.state_dict(), assign=True)


def test_state_dict_shares_memory_with_the_tables():
    """As for any module; a checkpointer that writes in the background copies first."""
    module = make("sgd")
    weight = module.state_dict()["tables.a.weight"]
    before = weight.clone()
    step(module)
    assert not torch.equal(weight, before)


def test_refusals_change_nothing():
    module = make("adam")
    before = {key: value.clone() for key, value in module.state_dict().items()}
    state = {key: value + 1 for key, value in before.items()}

    ones = torch.ones(10, 8)

    def refused(text, **changes):
        changed = {key: value for key, value in {**state, **changes}.items() if value is not None}
        with pytest.raises(RuntimeError, match=text):
            module.load_state_dict(changed)
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items()), text

    refused(r"must have shape \(10, 8\), got \(9, 8\)", **{"tables.a.weight": torch.zeros(9, 8)})
    refused("must be a tensor, got int", **{"tables.a.weight": 3})
    for dtype in (torch.int64, torch.bool, torch.complex64):
        refused(rf"tables\.a\.weight: must be of a float dtype, got {dtype}", **{"tables.a.weight": ones.to(dtype)})
    refused(r"exp_avg: must be of a float dtype", **{"tables.a.exp_avg": ones.int()})
    refused("must have values, got a tensor on the meta device", **{"tables.a.weight": ones.to("meta")})
    refused(r"must be a dense tensor, got one of layout torch\.sparse_coo", **{"tables.a.weight": ones.to_sparse()})
    for step in (torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(1j), torch.tensor(1, device="meta"), True, "1"):
        refused(r"tables\.a\.step: must be an int64 scalar, got", **{"tables.a.step": step})
    refused(r"step: must lie in \[0, 2\^63\), got -1", **{"tables.a.step": torch.tensor(-1)})
    refused(r"Unexpected key.*tables\.c\.weight", **{"tables.c.weight": torch.zeros(1, 4)})
    refused(r"Missing key.*tables\.a\.exp_avg", **{"tables.a.exp_avg": None})
    refused(r"Missing key.*tables\.b\.step", **{"tables.b.step": None})
    refused("the steps of all tables must be equal", **{"tables.b.step": torch.tensor(7)})


def test_values_are_taken_as_they_are():
    module = make("sgd")
    state = {key: value.clone().double() for key, value in module.state_dict().items()}
    state["tables.a.weight"][3, 1] = float("nan")
    module.load_state_dict(state)
    torch.testing.assert_close(
        module.state_dict()["tables.a.weight"].double(), state["tables.a.weight"], equal_nan=True
    )


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda module: torch.save(module, BytesIO())]
)
@pytest.mark.parametrize("inside", [False, True])
def test_copies_are_refused(duplicate, inside):
    module = make("sgd")
    state = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(TypeError, match=r"must not be copied or pickled.*second module and call its load_state_dict"):
        duplicate({"model": module} if inside and duplicate is not copy.copy else module)
    second = make("sgd", seed=9)
    second.load_state_dict(module.state_dict())
    step(second)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("kind", NAMES)
def test_weights_alone_load_where_asked_for(kind):
    """For evaluation, or another optimizer: ``strict=False`` takes the weights and lists what it did not find."""
    source = make(kind)
    step(source)
    weights = {key: value.clone() for key, value in source.state_dict().items() if key.endswith("weight")}
    module = make(kind, seed=9)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert sorted(missing) == sorted(set(before) - set(weights))
    assert unexpected == []
    for key, value in module.state_dict().items():
        assert torch.equal(value, weights.get(key, before[key])), key
    if kind == "sgd":
        return
    with pytest.raises(RuntimeError, match=r"Missing key.*tables\.a\."):
        module.load_state_dict(weights)


def test_another_optimizer_takes_the_weights_and_names_the_rest():
    source, module = make("adam"), make("rowwise_adagrad", seed=9)
    step(source)
    missing, unexpected = module.load_state_dict(source.state_dict(), strict=False)
    assert sorted(missing) == ["tables.a.sum", "tables.b.sum"]
    assert sorted(unexpected) == sorted(
        f"tables.{table}.{name}" for table in "ab" for name in ("exp_avg", "exp_avg_sq", "step")
    )
    assert torch.equal(module.state_dict()["tables.a.weight"], source.state_dict()["tables.a.weight"])


@pytest.mark.parametrize("key", ["x", "tables", "tables.c.weight", "tables.a.weight.x"])
def test_an_unknown_key_is_refused_and_changes_nothing(key):
    source, module = make("adam"), make("adam", seed=9)
    state = dict(source.state_dict()) | {key: torch.zeros(1)}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=f'Unexpected key.*"{key}"'):
        module.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.load_state_dict(state, strict=False).unexpected_keys == [key]


def test_the_keys_of_neighbours_are_none_of_the_tables():
    model = torch.nn.ModuleDict({"tables": make("sgd"), "tables2": torch.nn.Linear(2, 2)})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"tables\.x"'):
        model.load_state_dict(state | {"tables.x": torch.zeros(1)})
