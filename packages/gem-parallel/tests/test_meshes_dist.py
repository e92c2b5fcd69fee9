"""A model with experts equals one process on every mesh: gradients, parameters, norm and clipping.

Every axis alone (2 ranks), every pair (4 ranks), all three (8 ranks), on gloo.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_parallel import ExpertParallel, ParallelDims, ParallelPlan, clip_grad_norm_, grad_norm, parallelize

pytestmark = pytest.mark.dist
NUM_SAMPLES = 15
MAX_NORM = 0.5


@dataclass(frozen=True)
class MeshCase:
    dp_replicate: int
    dp_shard: int
    ep: int
    sparse_replicate: int = 1

    @property
    def id(self):
        return f"{self.dp_replicate}x{self.dp_shard}x{self.ep}"

    @property
    def world_size(self):
        return self.dp_replicate * self.dp_shard * self.ep


MESHES = [
    MeshCase(2, 1, 1, sparse_replicate=2),
    MeshCase(1, 2, 1),
    MeshCase(1, 1, 2),
    MeshCase(2, 2, 1),
    MeshCase(2, 1, 2),
    MeshCase(1, 2, 2, sparse_replicate=2),
    MeshCase(1, 1, 4),
    MeshCase(2, 2, 2, sparse_replicate=2),
]


class Net(nn.Module):
    """Two layers of experts, five experts of two kinds in the first, between shared parameters of odd sizes."""

    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, 7)
        first = [nn.Sequential(nn.Linear(7, 3 + each), nn.Tanh(), nn.Linear(3 + each, 7)) for each in range(5)]
        self.first = ExpertParallel(first, group)
        self.gain = nn.Parameter(torch.ones(1))
        self.second = ExpertParallel([nn.Linear(7, 7) for _ in range(4)], group)
        self.head = nn.Linear(7, 1, bias=False)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        x = x + self.first(x)
        x = x * self.gain + self.second(x)
        return self.head(x).squeeze(1)


class Beside:
    """Gradients that no plan covers: replicated ones, experts without FSDP, rows of tables."""

    def __init__(self, group, owner=0, num_owners=1):
        self.plain = nn.Parameter(torch.zeros(3))
        self.plain.grad = torch.tensor([0.5, -1.0, 0.25])
        self.layer = ExpertParallel([nn.Linear(2, 1, bias=False) for _ in range(6)], group)
        for name, expert in self.layer.experts.items():
            expert.weight.grad = torch.tensor([[0.25, 0.125 * int(name)]])
        table = torch.arange(11, dtype=torch.float32) * 0.125
        self.rows = nn.Parameter(table[owner::num_owners].clone())
        self.rows.grad = self.rows.detach().clone()

    def params(self):
        return [self.plain, *self.layer.parameters()]

    def grads(self):
        experts = {f"layer.{name}": expert.weight.grad for name, expert in self.layer.experts.items()}
        return {"plain": self.plain.grad.clone(), **{key: grad.clone() for key, grad in experts.items()}}


def samples(split):
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(NUM_SAMPLES, 5, generator=generator), torch.randn(NUM_SAMPLES, generator=generator)
    return x[split], y[split]


def rank_slice(rank, world_size):
    """Rank 0 has no sample, the last has the rest."""
    edges = [0, 0, *[NUM_SAMPLES * each // world_size for each in range(1, world_size)]]
    edges[-1] = NUM_SAMPLES
    return slice(edges[rank], edges[rank + 1])


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_steps(net, x, y, mesh, beside):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    records = []
    for _ in range(2):
        optimizer.zero_grad()
        (((net(x) - y) ** 2).sum() / NUM_SAMPLES).backward()
        gradients = {name: full(parameter.grad) for name, parameter in net.named_parameters()}
        norm = grad_norm(net.parameters(), mesh)
        every = grad_norm([*net.parameters(), *beside.params()], mesh, sparse_params=[beside.rows])
        clipped = clip_grad_norm_(net.parameters(), MAX_NORM, mesh)
        after = grad_norm(net.parameters(), mesh)
        optimizer.step()
        records.append((gradients, [float(each) for each in (norm, every, clipped, after)]))
    clip_grad_norm_(beside.params(), MAX_NORM, mesh, sparse_params=[beside.rows])
    return records, {name: full(parameter) for name, parameter in net.named_parameters()}, beside.grads()


def rank_meshes(rank, world_size, folder):
    calls = []
    all_reduce = dist.all_reduce

    def counted(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    found = {}
    for case in (case for case in MESHES if case.world_size == world_size):
        dims = ParallelDims.for_world(
            world_size, dp_replicate=case.dp_replicate, ep=case.ep, sparse_replicate=case.sparse_replicate
        )
        mesh = dims.build_mesh("cpu")
        net = parallelize(Net(mesh.ep_group), ParallelPlan(shard_units=("stem", "head")), mesh)
        units = [name for name, module in net.named_modules() if isinstance(module, FSDPModule)]
        assert units == (["", "stem", "first", "second", "head"] if case.ep > 1 else ["", "stem", "head"])
        assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
        beside = Beside(mesh.ep_group, mesh.sparse.get_local_rank("sparse_shard"), dims.sparse_shard)
        found[case.id] = run_steps(net, *samples(rank_slice(rank, world_size)), mesh, beside)
        dist.all_reduce = counted
        try:
            grad_norm(net.parameters(), mesh)
            dense = len(calls)
            grad_norm(net.parameters(), mesh, sparse_params=[])
        finally:
            dist.all_reduce = all_reduce
        assert all(numel == 1 for numel in calls)
        counts = (dense, len(calls) - dense)
        calls.clear()
        found[case.id] += (counts,)
    if world_size == 2:
        found["refusals"] = refusals(world_size)
    return found


@pytest.fixture(scope="module")
def expected():
    return run_steps(Net(None), *samples(slice(None)), None, Beside(None))


@pytest.fixture(scope="module")
def outcome(ranks):
    """World size -> results per rank; started when first asked for."""
    found = {}

    def get(world_size):
        if world_size not in found:
            found[world_size] = ranks("rank_meshes", world_size)
        return found[world_size]

    return get


# Sums of 15 sample gradients and 5 experts in another order; sizes are about 1.
BOUND = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("case", MESHES, ids=lambda case: case.id)
def test_equal_to_one_process(outcome, expected, case):
    records, parameters, beside = expected
    assert records[0][1][0] > MAX_NORM, "nothing is clipped"
    seen, seen_beside = set(), set()
    for result in outcome(case.world_size):
        rank_records, rank_parameters, rank_beside, counts = result[case.id]
        for (rank_gradients, rank_norms), (gradients, norms) in zip(rank_records, records, strict=True):
            for name, gradient in rank_gradients.items():
                torch.testing.assert_close(
                    gradient, gradients[name], **BOUND, msg=lambda text, name=name: f"{name}: {text}"
                )
            torch.testing.assert_close(torch.tensor(rank_norms), torch.tensor(norms), rtol=2e-6, atol=0.0)
        for name, parameter in rank_parameters.items():
            torch.testing.assert_close(parameter, parameters[name], **BOUND)
        for name, gradient in rank_beside.items():
            torch.testing.assert_close(gradient, beside[name], **BOUND)
        seen |= set(rank_parameters)
        seen_beside |= set(rank_beside)
        sharded = case.dp_shard * case.ep > 1
        assert counts == (int(sharded), int(sharded) + int(case.world_size > case.sparse_replicate))
    assert seen == set(parameters)
    assert seen_beside == set(beside)


@pytest.mark.parametrize("case", MESHES, ids=lambda case: case.id)
def test_all_ranks_have_the_same_norm(outcome, case):
    results = [[norms for _, norms in result[case.id][0]] for result in outcome(case.world_size)]
    assert all(each == results[0] for each in results)


def refusals(world_size):
    mesh = ParallelDims.for_world(world_size, ep=2).build_mesh("cpu")
    flat = ParallelDims.for_world(world_size).build_mesh("cpu")
    texts = []
    for call in (
        lambda: parallelize(Net(mesh.ep_group), ParallelPlan(shard_units=()), flat),
        lambda: parallelize(nn.Linear(2, 2), ParallelPlan(shard_units=(), reshard_after_forward=2), mesh),
    ):
        with pytest.raises(ValueError) as info:
            call()
        texts.append(str(info.value))
    return texts


def test_refusals(outcome):
    for degree, reshard in (result["refusals"] for result in outcome(2)):
        assert "got ep 1 and 2 in first; build the layer with mesh.ep_group" in degree
        assert "must divide the 2 ranks of a shard group and be fewer, got 2" in reshard
