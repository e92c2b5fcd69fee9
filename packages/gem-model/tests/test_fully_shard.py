"""The model under torch's fully_shard, cut at its own shard units, on a mesh of one CPU rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gem_model import RankingModel, random_batch
from gem_model._src import fused

LENGTHS = (3, 0, 20, 64)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def shard(model, mesh, **policy):
    sharded = copy.deepcopy(model)
    for unit in sharded.shard_units:
        fully_shard(sharded.get_submodule(unit), mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return fully_shard(sharded, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


@pytest.mark.parametrize("lengths", [LENGTHS, (), (0, 0)], ids=["four", "no-samples", "all-empty"])
def test_gradients_are_those_of_the_plain_model(two_towers, mesh, lengths):
    torch.manual_seed(0)
    model = RankingModel(two_towers)
    sharded = shard(model, mesh)
    batch, embeddings = random_batch(two_towers, len(lengths), lengths={"clicks": lengths, "visits": lengths})
    for candidate in (model, sharded):
        candidate.loss(candidate(batch, embeddings), batch).total.backward()
    for (name, plain), cut in zip(model.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(cut.grad.full_tensor(), plain.grad), name


def test_fused_feed_forward_layers_have_the_same_gradients(two_towers, mesh, monkeypatch):
    monkeypatch.setattr(fused, "_DEVICES", ("cpu",))
    test_gradients_are_those_of_the_plain_model(two_towers, mesh, LENGTHS)


def test_bfloat16_compute(two_towers, mesh):
    torch.manual_seed(0)
    model = RankingModel(two_towers)
    sharded = shard(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    batch, embeddings = random_batch(two_towers, len(LENGTHS), lengths={"clicks": LENGTHS, "visits": LENGTHS})
    exact, outputs = model(batch, embeddings), sharded(batch, embeddings)
    sharded.loss(outputs, batch).total.backward()
    for task in two_towers.tasks:
        assert outputs[task].dtype == torch.float32
        torch.testing.assert_close(outputs[task], exact[task], rtol=0.1, atol=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in sharded.parameters())
