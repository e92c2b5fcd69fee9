"""float16 tables on CUDA: fbgemm rounds each update up or down at random, so that small steps add up."""

import pytest
import torch
from reference_optimizers import ReferenceTable

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

DIM, ROWS = 8, 4000


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_float16_updates_are_unbiased(kind):
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=0.01, eps=1e-6)
    module = ShardedEmbeddings(
        [TableConfig(name="t", num_rows=ROWS, dim=DIM)],
        [FeatureConfig(name="x", table="t", pooling="none")],
        optimizer=optimizer,
        weight_dtype=torch.float16,
        device="cuda",
    )
    before = module.state_dict()["tables.t.weight"].cpu().double()
    reference = ReferenceTable(before, optimizer)
    ids = torch.arange(ROWS)
    upstream = torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM)
    rows = module.lookup(module.exchange({"x": (ids.cuda(), torch.tensor([0, ROWS], device="cuda"))}))["x"]
    assert rows.dtype == torch.float32
    rows.backward(upstream.cuda())
    reference.update(ids, upstream.double())
    after = module.state_dict()["tables.t.weight"].cpu()
    assert after.dtype == torch.float16
    # away from the subnormal numbers
    normal = reference.weight.abs() > 2**-10
    error = ((after.double() - reference.weight) / reference.weight)[normal]
    # either neighbour: a spacing is at most 2^-10 of a value
    assert float(error.abs().max()) <= 2**-10 * 1.001
    # some go to the farther one, which rounding to the nearest never does
    assert float(error.abs().max()) > 2**-11 * 1.1
    # unbiased: errors of deviation below 2^-11
    assert abs(float(error.mean())) < 5 * 2**-11 / len(error) ** 0.5
    if kind == "sgd":
        lost = (reference.weight - before).abs() < 2**-13 * before.abs()
        assert int(lost.sum()) > 100
        assert bool((after.double() != before)[lost].any())
