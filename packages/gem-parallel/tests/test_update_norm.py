"""What an update did to each table: equal to the difference of whole tables, over placements, copies and dtypes."""

import pytest
import torch
from sparse_cases import SparseCase, full_state, make, rank_batch, train_step

from gem_parallel import FeatureConfig, ParallelDims, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

CASE = SparseCase("mixed", "mixed", "rowwise_adagrad", False)
STEPS = 6


def differences(before, after):
    return {
        key.split(".")[1]: float((after[key].double() - value.double()).norm())
        for key, value in before.items()
        if key.endswith("weight")
    }


def test_one_process():
    tables = [TableConfig(name=name, num_rows=10, dim=8) for name in ("moves", "still")]
    tables.append(TableConfig(name="hashed", num_rows=10, dim=8, hashed=True))
    features = [FeatureConfig(name=table.name, table=table.name) for table in tables]
    options = {"optimizer": SparseOptimizerConfig(kind="sgd", learning_rate=0.5), "id_policy": "drop"}
    module = ShardedEmbeddings(tables, features, measure_updates=True, **options)
    with pytest.raises(RuntimeError, match="last_update_norm: a training lookup must come first, got none"):
        module.last_update_norm()
    before = full_state(module)
    pair = (torch.tensor([3, 3, 99, -1]), torch.tensor([0, 4]))
    rows = module.lookup(module.exchange(dict.fromkeys(("moves", "hashed"), pair)))
    with pytest.raises(RuntimeError, match=r"last_update_norm: backward of the last training lookup must have run"):
        module.last_update_norm()
    (rows["moves"] + rows["hashed"]).sum().backward()
    norms = module.last_update_norm()
    # 0.5 times the gradient 2 of one row of 8; 99 and -1 are dropped
    assert norms["moves"] == pytest.approx(8**0.5, rel=1e-6)
    assert norms["still"] == 0.0
    assert norms == pytest.approx(differences(before, full_state(module)), rel=1e-6)
    with torch.no_grad():
        module.lookup(module.exchange({"still": pair}))
    assert module.last_update_norm() == norms, "evaluation is no update"
    late = module.lookup(module.exchange({"still": pair}))
    late["still"].sum().backward()
    module.start_lookup(module.exchange({"still": pair}))
    with pytest.raises(RuntimeError, match=r"call it after backward, and before start_lookup or lookup of the next"):
        module.last_update_norm()
    assert module.lookup(module.exchange({})) == {}
    assert set(module.last_update_norm().values()) == {0.0}, "no output, no backward to wait for"


def test_it_is_asked_for():
    module = ShardedEmbeddings(
        [TableConfig(name="t", num_rows=4, dim=8)], [], optimizer=SparseOptimizerConfig(), device="cpu"
    )
    with pytest.raises(RuntimeError, match="got measure_updates=False; construct"):
        module.last_update_norm()


def rank_measure(rank, world_size, folder):
    found = {}
    for replicas, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.bfloat16)):
        mesh = ParallelDims.for_world(world_size, sparse_replicate=replicas).build_mesh("cpu").sparse
        module = make(CASE, mesh, weight_dtype=dtype, measure_updates=True, id_policy="clamp")
        steps = []
        module.lookup(module.exchange({name: pair[:2] for name, pair in rank_batch(CASE, 0, rank, world_size).items()}))
        with pytest.raises(RuntimeError, match="backward of the last training lookup must have run"):
            module.last_update_norm()
        for step in range(STEPS):
            before = full_state(module)
            train_step(module, CASE, rank_batch(CASE, step, rank, world_size))
            steps.append((module.last_update_norm(), differences(before, full_state(module))))
        found[replicas, dtype] = steps
    return found


@pytest.mark.dist
def test_over_ranks_it_is_the_change_of_whole_tables(ranks):
    """Also where one rank, or all, name no row; a table that this rank has no part of is in the answer, too."""
    results = ranks("rank_measure", 4)
    for key in results[0]:
        for step in range(STEPS):
            expected = {}
            for result in results:
                expected |= result[key][step][1]
            norms = results[0][key][step][0]
            assert norms == pytest.approx(expected, rel=1e-5, abs=1e-12), (key, step)
            assert all(result[key][step][0] == norms for result in results)
            assert any(norms.values()) == (step != 3), "step 3 is empty on all ranks"


@pytest.mark.gpu
def test_one_process_on_cuda():
    tables, features = [TableConfig(name="t", num_rows=50, dim=8)], [FeatureConfig(name="x", table="t")]
    module = ShardedEmbeddings(
        tables, features, optimizer=SparseOptimizerConfig(kind="adagrad"), device="cuda", measure_updates=True
    )
    before = full_state(module)
    pair = (torch.tensor([3, 7, 3], device="cuda"), torch.tensor([0, 2, 3], device="cuda"))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        pending = module.exchange({"x": pair})
    module.lookup(pending)["x"].sum().backward()
    assert module.last_update_norm() == pytest.approx(differences(before, full_state(module)), rel=1e-6)
