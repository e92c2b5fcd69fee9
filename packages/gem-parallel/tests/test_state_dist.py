"""Checkpoints of sharded tables: saved at one world size, loaded at others; and errors that all ranks share."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from gem_parallel import FeatureConfig, ParallelDims, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

pytestmark = pytest.mark.dist
# 3 rows over 2 ranks: 2 and 1; over 4 ranks: 1, 1, 1 and none. 5 rows over 4 ranks: 2, 2, 1 and none.
TABLES = {"wide": 50, "five": 5, "three": 3, "one": 1}
KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def make(kind, placement, mesh=None, seed=0, policy="error"):
    tables = [TableConfig(name=name, num_rows=rows, dim=8, placement=placement) for name, rows in TABLES.items()]
    features = [FeatureConfig(name=f"f_{name}", table=name) for name in TABLES]
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=0.1)
    return ShardedEmbeddings(tables, features, optimizer=optimizer, mesh=mesh, seed=seed, id_policy=policy)


def batch(rank, step):
    """Every rank's bags name every row of every table; ranks and steps weigh them differently."""
    found = {}
    for name, rows in TABLES.items():
        values = torch.arange(rows).repeat(1 + rank)
        found[f"f_{name}"] = (values, torch.tensor([0, len(values) // 2, len(values)]))
    return found, float(1 + step)


def train(module, ranks, first, last):
    """Steps [first, last) on the batches of `ranks`, joined."""
    for step in range(first, last):
        parts = [batch(rank, step) for rank in ranks]
        joined = {}
        for name in parts[0][0]:
            values = torch.cat([part[0][name][0] for part in parts])
            lengths = torch.cat([part[0][name][1].diff() for part in parts])
            joined[name] = (values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
        outputs = module.lookup(module.exchange(joined))
        sum(each.sum() * parts[0][1] * 0.25 for each in outputs.values()).backward()


def whole(module):
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for key, value in module.state_dict().items()
    }


def mesh_of(world_size):
    return ParallelDims.for_world(world_size).build_mesh("cpu").sparse


@dataclass(frozen=True)
class Reshard:
    kind: str
    saved_as: str
    loaded_as: str

    @property
    def id(self):
        return f"{self.kind}-{self.saved_as}-{self.loaded_as}"


RESHARDS = [
    Reshard("adam", "row_wise", "row_wise"),
    Reshard("adam", "table_wise", "row_wise"),
    Reshard("rowwise_adagrad", "row_wise", "table_wise"),
    Reshard("rowwise_adagrad", "table_wise", "table_wise"),
    Reshard("adagrad", "auto", "auto"),
    Reshard("sgd", "row_wise", "auto"),
]


def rank_save(rank, world_size, folder):
    found = {}
    for case in RESHARDS:
        module = make(case.kind, case.saved_as, mesh_of(world_size))
        train(module, [rank], 0, 2)
        dcp.save({"embeddings": module.state_dict()}, checkpoint_id=folder / case.id)
        found[case.id] = whole(module)
    return found


def rank_load(rank, world_size, folder):
    found = {}
    for case in RESHARDS:
        module = make(case.kind, case.loaded_as, mesh_of(world_size), seed=1)
        state = {"embeddings": module.state_dict()}
        dcp.load(state, checkpoint_id=folder / case.id)
        module.load_state_dict(state["embeddings"])
        loaded = whole(module)
        # Rank 0 takes the batches of both saving ranks, so that the next step is theirs.
        if rank == 0:
            train(module, [0, 1], 2, 3)
        else:
            empty_step(module)
        found[case.id] = (loaded, whole(module))
    return found


def empty_step(module):
    outputs = module.lookup(module.exchange({f"f_{name}": _no_bags() for name in TABLES}))
    sum(each.sum() for each in outputs.values()).backward()


def _no_bags():
    return torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


@pytest.fixture(scope="module")
def saved(ranks):
    return ranks("rank_save", 2)


@pytest.fixture(scope="module", params=[1, 2, 4], ids=["1 rank", "2 ranks", "4 ranks"])
def loaded(request, ranks, saved):
    return ranks("rank_load", request.param)


@pytest.mark.parametrize("case", RESHARDS, ids=lambda case: case.id)
def test_saved_at_two_ranks_and_loaded(saved, loaded, case):
    expected = {key: value for result in saved for key, value in result[case.id].items()}
    assert {key.split(".")[1] for key in expected} == set(TABLES)
    reference = make(case.kind, "table_wise", seed=3)
    reference.load_state_dict(expected)
    train(reference, [0, 1], 2, 3)
    after = whole(reference)
    seen = set()
    for result in loaded:
        first, last = result[case.id]
        seen |= set(first)
        for key, value in first.items():
            assert torch.equal(value, expected[key]), key
        for key, value in last.items():
            torch.testing.assert_close(value, after[key], rtol=1e-6, atol=1e-7)
    assert seen == set(expected)


def rank_plain(rank, world_size, folder, state):
    """Whole plain tensors go into any placement."""
    found = []
    for placement in ("row_wise", "table_wise"):
        module = make("adam", placement, mesh_of(world_size), seed=1)
        module.load_state_dict(state)
        found.append(whole(module))
    shapes = {
        key: tuple(value.to_local().shape)
        for key, value in make("adam", "row_wise", mesh_of(world_size)).state_dict().items()
        if isinstance(value, DTensor)
    }
    return found, shapes


def test_plain_tensors_load_into_shards(ranks):
    source = make("adam", "auto")
    train(source, [0], 0, 2)
    state = {key: value.clone() for key, value in source.state_dict().items()}
    results = ranks("rank_plain", 4, state=state)
    for found, _ in results:
        for each in found:
            assert all(torch.equal(value, state[key]) for key, value in each.items())
    assert [shapes["tables.three.weight"] for _, shapes in results] == [(1, 8), (1, 8), (1, 8), (0, 8)]
    assert [shapes["tables.five.exp_avg"] for _, shapes in results] == [(2, 8), (2, 8), (1, 8), (0, 8)]


def rank_faults(rank, world_size, folder):
    return {policy: faults(rank, world_size, policy) for policy in ("error", "drop", "clamp")}


def faults(rank, world_size, policy):
    """Errors of one rank reach all; afterwards the module still works."""
    module = make("sgd", "row_wise", mesh_of(world_size), policy=policy)
    good = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    bad = {
        "id": (torch.tensor([3, 50, -7]), torch.tensor([0, 3])),
        "offsets": (torch.tensor([3, 4]), torch.tensor([0, 1])),
        "dtype": (torch.tensor([3, 4]).int(), torch.tensor([0, 2])),
        "unknown": (torch.tensor([3, 4]), torch.tensor([0, 2])),
    }
    found = {}
    for name, pair in bad.items():
        feature = "f_nothing" if name == "unknown" else "f_wide"
        try:
            module.exchange({feature: pair} if rank == 1 else {"f_wide": good})
            found[name] = "none"
        except (IndexError, ValueError, TypeError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    before = whole(module)
    module.lookup(module.exchange({"f_wide": good}))["f_wide"].sum().backward()
    after = whole(module)
    moved = {key: int((after[key] != before[key]).any(1).sum()) for key in after}
    return found, moved, module.out_of_range_counts()["wide", "f_wide"]


@pytest.fixture(scope="module")
def faulty(ranks):
    return ranks("rank_faults", 4)


def test_errors_agree_on_all_ranks(faulty):
    for rank, result in enumerate(faulty):
        found, moved, count = result["error"]
        for part in ("IndexError", "rank 1", "'f_wide'", "'wide'", "num_rows=50", "got 50 ", "2 such ids"):
            assert part in found["id"], found["id"]
        assert found["offsets"].startswith("ValueError: exchange: rank 1: feature 'f_wide': offsets must start at 0")
        if rank == 1:
            assert found["dtype"].startswith("TypeError: exchange: values of feature 'f_wide' must be int64")
            assert found["unknown"].startswith("ValueError: exchange: `ids` must name configured features")
        else:
            assert found["dtype"].startswith("RuntimeError: exchange: rank 1: refused its batch")
            assert found["unknown"].startswith("RuntimeError: exchange: rank 1: refused its batch")
        assert moved["tables.wide.weight"] == 2
        assert count == (2 if rank == 1 else 0)


@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_policies_raise_for_offsets_only(faulty, policy):
    for rank, result in enumerate(faulty):
        found, _, count = result[policy]
        assert found["id"] == "none"
        assert "rank 1: feature 'f_wide': offsets" in found["offsets"]
        assert count == (2 if rank == 1 else 0)


def rank_policy(rank, world_size, folder, policy):
    module = make("adam", "row_wise", mesh_of(world_size), policy=policy)
    values = torch.tensor([3, 50, -7, 2**63 - 1] if rank == 0 else [3, 49])
    ids = {"f_wide": (values, torch.tensor([0, 1, len(values)]))}
    outputs = []
    for _ in range(2):
        out = module.lookup(module.exchange(ids))["f_wide"]
        out.sum().backward()
        outputs.append(out.detach())
    return outputs, whole(module)


@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_policy_over_ranks_equals_one_process(ranks, policy):
    module = make("adam", "auto", policy=policy)
    values = torch.tensor([3, 50, -7, 2**63 - 1, 3, 49])
    expected = []
    for _ in range(2):
        out = module.lookup(module.exchange({"f_wide": (values, torch.tensor([0, 1, 4, 5, 6]))}))["f_wide"]
        out.sum().backward()
        expected.append(out.detach())
    for rank, (outputs, state) in enumerate(ranks("rank_policy", 2, policy=policy)):
        for output, each in zip(outputs, expected, strict=True):
            assert torch.equal(output, each[2 * rank : 2 * rank + 2])
        for key, value in whole(module).items():
            if key in state:
                assert torch.equal(value, state[key]), key


def rank_uneven_use(rank, world_size, folder):
    """A rank whose loss uses one feature only still meets the others in every exchange; with no_grad in between."""
    module = make("sgd", "row_wise", mesh_of(world_size))
    before = whole(module)
    ids, _ = batch(rank, 0)
    outputs = module.lookup(module.exchange(ids))
    used = outputs.values() if rank == 0 else [outputs["f_three"]]
    sum(each.sum() for each in used).backward()
    with torch.no_grad():
        module.lookup(module.exchange(ids))
    after = whole(module)
    return {key: float((after[key] - before[key]).abs().max()) for key in after}


def test_unused_outputs_do_not_hang(ranks):
    for moved in ranks("rank_uneven_use", 2):
        # learning rate 0.1; rank 0 names each row once, rank 1 twice, but uses f_three only
        assert moved["tables.wide.weight"] == pytest.approx(0.1, rel=1e-5)
        assert moved["tables.three.weight"] == pytest.approx(0.3, rel=1e-5)
