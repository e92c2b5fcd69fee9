"""The meshes of four ranks: who meets whom, and FSDP over each of them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gem_parallel import ParallelDims, ParallelPlan, parallelize

pytestmark = pytest.mark.dist

DIMS = {
    "fsdp": {"dp_shard": 4, "sparse_shard": 4},
    "experts": {"ep": 4, "sparse_replicate": 4},
    "ep": {"dp_shard": 2, "ep": 2, "sparse_replicate": 2, "sparse_shard": 2},
    "hsdp": {"dp_replicate": 2, "ep": 2, "sparse_shard": 4},
    "wide": {"dp_replicate": 2, "dp_shard": 2, "sparse_replicate": 4, "sparse_shard": 1},
}


def group_names(mesh):
    """Names of the groups of more than one rank: of the dense axes beside FSDP's, of FSDP's, of the tables'."""
    kinds = ([mesh.ep_group], mesh.shared.get_all_groups(), mesh.sparse.get_all_groups())
    return [{group.group_name for group in groups if group.size() > 1} for groups in kinds]


def rank_meshes(rank, world_size, folder):
    results = {}
    for name, degrees in DIMS.items():
        mesh = ParallelDims(**degrees).build_mesh("cpu")
        found = {axis: dist.get_process_group_ranks(mesh.dense[axis].get_group()) for axis in mesh.dense.mesh_dim_names}
        for axis in mesh.sparse.mesh_dim_names:
            found[axis] = dist.get_process_group_ranks(mesh.sparse[axis].get_group())
        found["ep_group"] = dist.get_process_group_ranks(mesh.ep_group)
        # Integer gradients over each mesh for FSDP: the sum over its ranks is exact.
        summed = {}
        for kind, axes in (("shared", mesh.fsdp), ("expert", mesh.expert_fsdp)):
            unit = fully_shard(nn.Linear(3, 5, bias=False), mesh=axes)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit(torch.full((1, 3), float(10**rank))).sum().backward()
            assert isinstance(unit.weight, DTensor)
            summed[kind] = unit.weight.grad.full_tensor()[0, 0].item()
        whole = parallelize(nn.Linear(3, 5, bias=False), ParallelPlan(shard_units=()), mesh)
        whole(torch.full((1, 3), float(10**rank))).sum().backward()
        summed["parallelize"] = whole.weight.grad.full_tensor()[0, 0].item()
        results[name] = (found, summed, group_names(mesh))
    with pytest.raises(ValueError, match=r"got 4 ranks; ParallelDims.for_world\(4\) fits; nearest: \(dp_replicate=1"):
        ParallelDims.for_world(8, ep=2).build_mesh("cpu")
    return results


@pytest.fixture(scope="module")
def meshes(ranks):
    return ranks("rank_meshes", 4)


@pytest.mark.parametrize(
    ("name", "axis", "groups"),
    [
        ("ep", "ep", [[0, 1], [2, 3]]),
        ("ep", "ep_group", [[0, 1], [2, 3]]),
        ("ep", "dp_shard", [[0, 2], [1, 3]]),
        ("ep", "sparse_replicate", [[0, 1], [2, 3]]),
        ("ep", "sparse_shard", [[0, 2], [1, 3]]),
        ("hsdp", "dp_replicate", [[0, 2], [1, 3]]),
        ("hsdp", "ep", [[0, 1], [2, 3]]),
        ("hsdp", "sparse_shard", [[0, 1, 2, 3]]),
        ("wide", "dp_shard", [[0, 1], [2, 3]]),
        ("wide", "dp_replicate", [[0, 2], [1, 3]]),
        ("wide", "sparse_replicate", [[0, 1, 2, 3]]),
        ("wide", "sparse_shard", [[0], [1], [2], [3]]),
    ],
)
def test_groups(meshes, name, axis, groups):
    for rank, result in enumerate(meshes):
        expected = next(group for group in groups if rank in group)
        assert result[name][0][axis] == expected


@pytest.mark.parametrize("name", DIMS)
def test_tables_and_experts_wait_for_no_gather_of_parameters(meshes, name):
    """What shares a group is enqueued in one order: none of FSDP's is one of the experts' or of the tables'."""
    for result in meshes:
        experts, shared, tables = result[name][2]
        assert shared
        assert tables
        assert not experts & shared
        assert not tables & (experts | shared)


@pytest.mark.parametrize("name", DIMS)
def test_who_sums_with_whom(meshes, name):
    """Shared parameters sum over all ranks, an expert's over the ranks of equal ep coordinate."""
    for rank, result in enumerate(meshes):
        degrees = DIMS[name]
        ep = degrees.get("ep", 1)
        assert result[name][1]["shared"] == result[name][1]["parallelize"] == 1111.0
        assert result[name][1]["expert"] == sum(10**other for other in range(4) if other % ep == rank % ep)
