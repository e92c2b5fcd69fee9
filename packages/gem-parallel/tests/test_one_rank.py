"""A process group of one rank: the same meshes and calls as over many, and the results of no group at all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_parallel import (
    ExpertParallel,
    FeatureConfig,
    ParallelDims,
    ParallelPlan,
    ShardedEmbeddings,
    SparseOptimizerConfig,
    TableConfig,
    clip_grad_norm_,
    parallelize,
)


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ParallelDims.for_world(1).build_mesh("cpu")
    dist.destroy_process_group()


def build(group=None):
    torch.manual_seed(0)
    # A scalar and a parameter of one element, which no sharding would cut.
    model = nn.Sequential(
        nn.Linear(3, 4), ExpertParallel([nn.Linear(4, 4) for _ in range(2)], group), nn.Linear(4, 1, bias=False)
    )
    model.register_parameter("gain", nn.Parameter(torch.tensor(2.0)))
    return model


def norm_and_gradients(model, mesh):
    x = torch.linspace(-1, 1, 15).view(5, 3)
    (model(x) * model.gain).square().sum().backward()
    norm = clip_grad_norm_(model.parameters(), 0.5, mesh)
    return norm, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_dense(mesh):
    model = build(mesh.ep_group)
    same = parallelize(model, ParallelPlan(shard_units=("0", "2")), mesh)
    assert same is model
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    norm, gradients = norm_and_gradients(model, mesh)
    expected_norm, expected = norm_and_gradients(build(), None)
    assert torch.equal(norm, expected_norm)
    assert norm > 0.5
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
        assert gradient.any(), name


@pytest.mark.parametrize("placement", ["auto", "table_wise", "row_wise", "column_wise", "replicated"])
def test_tables(mesh, placement):
    def trained(mesh):
        tables = ShardedEmbeddings(
            [TableConfig(name="t", num_rows=7, dim=8, placement=placement)],
            [FeatureConfig(name="x", table="t", pooling="mean")],
            optimizer=SparseOptimizerConfig(learning_rate=0.5),
            mesh=mesh,
            seed=3,
        )
        first = {name: value.clone() for name, value in tables.state_dict().items()}
        out = tables.lookup(tables.exchange({"x": (torch.tensor([1, 6, 1, 2]), torch.tensor([0, 3, 3, 4]))}))["x"]
        out.square().sum().backward()
        return first, out.detach(), tables.state_dict()

    (first, out, last), (_, expected_out, expected) = trained(mesh.sparse), trained(None)
    assert torch.equal(out, expected_out)
    assert last.keys() == expected.keys()
    for name, value in last.items():
        assert not isinstance(value, DTensor)
        assert torch.equal(value, expected[name]), name
    assert not torch.equal(last["tables.t.weight"], first["tables.t.weight"])
