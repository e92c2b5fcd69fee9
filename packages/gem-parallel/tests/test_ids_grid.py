"""Bad and unbounded ids over copies of tables: ranks agree, nothing is counted twice, one process is equalled."""

import pytest
import torch
from sparse_cases import full_state

from gem_parallel import FeatureConfig, ParallelDims, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel.embeddings import hash_ids

pytestmark = pytest.mark.dist
ROWS, DIM, BAD_RANK = 10, 8, 3
PLACEMENTS = ("row_wise", "table_wise", "column_wise", "replicated")
FAULTS = ("id", "offsets", "dtype", "sparse", "no mapping")


def make(mesh, policy, **options):
    """One table per placement, and one that hashes; the same features for all."""
    tables = [TableConfig(name=name, num_rows=ROWS, dim=DIM, placement=name) for name in PLACEMENTS]
    tables.append(TableConfig(name="hashed", num_rows=ROWS, dim=DIM, placement="row_wise", hashed=True))
    features = [FeatureConfig(name=f"f_{table.name}", table=table.name) for table in tables]
    optimizer = SparseOptimizerConfig(kind="adagrad", learning_rate=0.5)
    return ShardedEmbeddings(tables, features, optimizer=optimizer, mesh=mesh, id_policy=policy, **options)


def good(rank):
    return torch.tensor([rank, 9, rank, 2]), torch.tensor([0, 2, 4])


def faulty(kind):
    if kind == "id":
        return torch.tensor([3, ROWS, -7, 1]), torch.tensor([0, 2, 4])
    if kind == "offsets":
        return torch.tensor([3, 4]), torch.tensor([0, 2, 1])
    if kind == "sparse":
        return torch.tensor([3, 4]).to_sparse(), torch.tensor([0, 1, 2])
    return torch.tensor([3, 4]).int(), torch.tensor([0, 1, 2])


def policy_batch(rank):
    """Ids out of range on every rank, of all tables."""
    values = torch.tensor([rank, ROWS + rank, -1, 2**63 - 1, 4, 4])
    return {f"f_{name}": (values, torch.tensor([0, 3, 6])) for name in (*PLACEMENTS, "hashed")}


def train(module, batch):
    outputs = module.lookup(module.exchange(batch))
    loss = sum(
        (each * torch.tensor([1.0, 0.5])[:, None].repeat(each.shape[0] // 2, 1)).sum() for each in outputs.values()
    )
    # takes effect at the next lookup, whatever backward runs
    module.set_learning_rate(0.25)
    loss.backward()
    return {name: each.detach() for name, each in outputs.items()}


def rank_settings(rank, world_size, folder):
    mesh = ParallelDims.for_world(world_size, sparse_replicate=2).build_mesh("cpu").sparse
    found = {}
    for name, options in {"seed": {"seed": int(rank == 2)}, "rows": {}, "more": {}, "equal": {}}.items():
        tables = [TableConfig(name="a", num_rows=4, dim=8)]
        tables.append(TableConfig(name="t", num_rows=10 + (name == "rows" and rank in (1, 3)), dim=8))
        tables += [TableConfig(name="b", num_rows=4, dim=8)] * (name == "more" and rank == 3)
        optimizer = SparseOptimizerConfig(learning_rate=0.5 if name == "rows" and rank == 3 else 0.25)
        try:
            ShardedEmbeddings(tables, [], optimizer=optimizer, mesh=mesh, **options)
            found[name] = None
        except ValueError as error:
            found[name] = str(error)
    return found


def test_settings_that_differ_between_ranks_are_refused_on_all(ranks):
    for found in ranks("rank_settings", 4):
        assert "`seed` must be equal on all ranks, got 0 on ranks [0, 1, 3], 1 on rank 2; make" in found["seed"]
        for part in (
            "`tables[1]` must be equal on all ranks, got TableConfig(name='t', num_rows=10,",
            "on ranks [0, 2], TableConfig(name='t', num_rows=11,",
            "on ranks [1, 3]; different, too: `optimizer`; make",
        ):
            assert part in found["rows"], found["rows"]
        for part in (
            "`tables[2]` must be equal",
            "no such entry on ranks [0, 1, 2], TableConfig(name='b'",
            "on rank 3",
        ):
            assert part in found["more"], found["more"]
        assert found["equal"] is None


def rank_ids(rank, world_size, folder):
    mesh = ParallelDims.for_world(world_size, sparse_replicate=2).build_mesh("cpu").sparse
    module = make(mesh, "error")
    before = full_state(module)
    errors = {}
    for name in PLACEMENTS:
        for kind in FAULTS:
            pair = faulty(kind) if rank == BAD_RANK else good(rank)
            try:
                module.exchange(None if rank == BAD_RANK and kind == "no mapping" else {f"f_{name}": pair})
                errors[name, kind] = "none"
            except (IndexError, ValueError, TypeError, RuntimeError) as error:
                errors[name, kind] = f"{type(error).__name__}: {error}"
    unchanged = all(torch.equal(value, before[key]) for key, value in full_state(module).items())
    counts = module.out_of_range_counts()
    found = {}
    for policy in ("drop", "clamp"):
        module = make(mesh, policy)
        outputs = [train(module, policy_batch(rank)) for _ in range(2)]
        found[policy] = outputs, full_state(module), module.out_of_range_counts()
    return errors, unchanged, counts, found


@pytest.fixture(scope="module")
def results(ranks):
    return ranks("rank_ids", 4)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_errors_agree_on_all_ranks_of_all_copies(results, name):
    for rank, (errors, unchanged, counts, _) in enumerate(results):
        assert unchanged
        for part in ("IndexError: exchange: rank 3:", f"'f_{name}'", f"table '{name}'", f"got {ROWS} ", "2 such ids"):
            assert part in errors[name, "id"], errors[name, "id"]
        assert errors[name, "offsets"].startswith(f"ValueError: exchange: rank 3: feature 'f_{name}': offsets must")
        assert "got 2 places" in errors[name, "offsets"]
        # the values are known where they are
        assert (f"'f_{name}' has 2, then 1 at bag 1" in errors[name, "offsets"]) == (rank == BAD_RANK), errors[
            name, "offsets"
        ]
        for kind, what in (("dtype", "values of"), ("sparse", "values of"), ("no mapping", "`ids` must be a mapping")):
            text = f"TypeError: exchange: {what}" if rank == BAD_RANK else "RuntimeError: exchange: rank 3: refused its"
            assert errors[name, kind].startswith(text), errors[name, kind]
        # once, not once per column shard
        assert counts[name, f"f_{name}"] == (2 if rank == BAD_RANK else 0)


@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_policies_equal_one_process(results, policy):
    module = make(None, policy)
    parts = [policy_batch(rank) for rank in range(4)]
    batch = {
        name: (torch.cat([part[name][0] for part in parts]), torch.tensor([0, *[3] * 8]).cumsum(0)) for name in parts[0]
    }
    expected = [train(module, batch) for _ in range(2)]
    state = full_state(module)
    for rank, result in enumerate(results):
        outputs, last, counts = result[3][policy]
        for one, all_bags in zip(outputs, expected, strict=True):
            for name, value in one.items():
                assert torch.equal(value, all_bags[name][2 * rank : 2 * rank + 2]), name
        for key, value in last.items():
            assert torch.equal(value, state[key]), key
        assert {feature: count for (_, feature), count in counts.items()} == {
            **{f"f_{name}": 2 * 3 for name in PLACEMENTS},
            "f_hashed": 0,
        }
    rows = make(None, policy).state_dict()["tables.hashed.weight"]
    values = parts[0]["f_hashed"][0]
    torch.testing.assert_close(expected[0]["f_hashed"][0], rows[hash_ids(values[:3], ROWS)].sum(0))
