"""FSDP and HSDP equal one process: parameters after optimizer steps, gradients summed, norms and clipping."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_parallel import ExpertParallel, ParallelDims, ParallelPlan, clip_grad_norm_, grad_norm, parallelize
from gem_parallel.collectives import choose_collectives

pytestmark = pytest.mark.dist
NUM_SAMPLES = 12


@dataclass(frozen=True)
class MeshCase:
    dp_replicate: int
    dp_shard: int

    @property
    def id(self):
        return f"{self.dp_replicate}x{self.dp_shard}"

    @property
    def world_size(self):
        return self.dp_replicate * self.dp_shard


MESHES = [MeshCase(1, 1), MeshCase(1, 2), MeshCase(2, 1), MeshCase(2, 2), MeshCase(1, 4), MeshCase(4, 1)]


class Net(nn.Module):
    """Odd sizes, a parameter smaller than any world, a scalar-like one, two levels of units."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)])
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 1, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.gain).squeeze(1)


def make_net():
    torch.manual_seed(0)
    return Net()


def samples(split):
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(NUM_SAMPLES, 5, generator=generator), torch.randn(NUM_SAMPLES, generator=generator)
    return x[split], y[split]


def rank_slice(rank, world_size, uneven):
    if uneven:
        # rank 0 holds no sample
        edges = [0, 0, *[NUM_SAMPLES * each // (world_size - 1) for each in range(1, world_size)]]
        return slice(edges[rank], edges[rank + 1])
    return slice(NUM_SAMPLES * rank // world_size, NUM_SAMPLES * (rank + 1) // world_size)


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_steps(net, x, y, mesh, max_norm):
    """Three SGD steps; the loss is a sum divided by the global number of samples."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    records = []
    for _ in range(3):
        optimizer.zero_grad()
        (((net(x) - y) ** 2).sum() / NUM_SAMPLES).backward()
        gradients = {name: full(parameter.grad) for name, parameter in net.named_parameters()}
        norm = grad_norm(net.parameters(), mesh)
        clipped = clip_grad_norm_(net.parameters(), max_norm, mesh)
        after = grad_norm(net.parameters(), mesh)
        optimizer.step()
        records.append((gradients, float(norm), float(clipped), float(after)))
    return records, {name: full(parameter) for name, parameter in net.named_parameters()}


def rank_all(rank, world_size, folder, dp_replicate):
    mesh = ParallelDims.for_world(world_size, dp_replicate=dp_replicate).build_mesh("cpu")
    results = {"even": train(rank, world_size, mesh, uneven=False), "summed": summed(rank, mesh)}
    if world_size > 1:
        results["uneven"] = train(rank, world_size, mesh, uneven=True)
    return results


def train(rank, world_size, mesh, uneven):
    net = make_net()
    wrapped = parallelize(net, ParallelPlan(shard_units=("blocks.*", "blocks.0.0")), mesh)
    assert wrapped is net
    sharded = world_size > 1
    assert isinstance(net, FSDPModule) == sharded
    assert isinstance(net.blocks[0][0], FSDPModule) == sharded
    assert all(isinstance(parameter, DTensor) == sharded for parameter in net.parameters())
    x, y = samples(rank_slice(rank, world_size, uneven))
    return run_steps(net, x, y, mesh, 0.5)


def summed(rank, mesh):
    """Integer gradients: their sum over ranks must be exact, so that no factor was applied and taken back."""
    net = parallelize(nn.Linear(3, 5, bias=False), ParallelPlan(shard_units=()), mesh)
    net(torch.full((1, 3), float(3 * rank + 1))).sum().backward()
    return full(net.weight.grad)


def check(results):
    expected_records, expected = run_steps(make_net(), *samples(slice(None)), None, 0.5)
    # Sums of 12 sample gradients in another order; sizes are about 1.
    bound = {"rtol": 1e-5, "atol": 1e-6}
    for records, parameters in results:
        for (gradients, *norms), (expected_gradients, *expected_norms) in zip(records, expected_records, strict=True):
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected_gradients[name], **bound)
            torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), **bound)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[name], **bound)
    assert any(norms[0] > 0.5 for _, *norms in expected_records), "no step was clipped"


@pytest.fixture(scope="module", params=MESHES, ids=lambda case: case.id)
def trained(request, ranks):
    return request.param, ranks("rank_all", request.param.world_size, dp_replicate=request.param.dp_replicate)


def test_equal_to_one_process(trained):
    check([result["even"] for result in trained[1]])


def test_a_rank_without_samples(trained):
    case, results = trained
    check([result["uneven" if case.world_size > 1 else "even"] for result in results])


def test_gradients_are_summed_exactly(trained):
    case, results = trained
    total = sum(3 * rank + 1 for rank in range(case.world_size))
    for result in results:
        assert torch.equal(result["summed"], torch.full((5, 3), float(total)))


class Towers(nn.Module):
    """A tower over the tokens of a jagged history, added up per sample, beside one over samples; each is a unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.history = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
        self.sample = nn.Linear(5, 4)

    def forward(self, x, tokens, lengths):
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        pooled = x.new_zeros(len(x), 4).index_add(0, owner, self.history(tokens))
        return (self.sample(x) + pooled).square().sum()


LENGTHS = {"one rank has no tokens": ((0, 0, 0), (2, 0, 4)), "no rank has tokens": ((0,), (0, 0))}


def towers_batch(lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    size = torch.tensor(lengths)
    return (
        torch.randn(len(lengths), 5, generator=generator),
        torch.randn(int(size.sum()), 5, generator=generator),
        size,
    )


def towers(rank, mesh):
    """Gradients of a step per case; a unit whose tower has nothing to do on this rank takes part all the same."""
    found = {}
    for name, lengths in LENGTHS.items():
        net = parallelize(Towers(), ParallelPlan(shard_units=("history", "sample")), mesh)
        net(*towers_batch(lengths[rank])).backward()
        found[name] = {key: full(parameter.grad) for key, parameter in net.named_parameters()}
    return found


def rank_mixed(rank, world_size, folder):
    """bf16 compute over fp32 shards, beside a plain replicated parameter."""
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu")
    plan = ParallelPlan(shard_units=("0",), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = parallelize(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False)), plan, mesh)
    plain = nn.Parameter(torch.ones(2))
    out = net(torch.ones(1, 4))
    (out.float().sum() + (plain * 3).sum()).backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    expected = sum(float(full(gradient).double().square().sum()) for gradient in gradients) + 18.0
    norm = float(grad_norm([*net.parameters(), plain], mesh))
    return out.dtype, norm, expected**0.5, towers(rank, mesh)


@pytest.fixture(scope="module")
def mixed(ranks):
    return ranks("rank_mixed", 2)


def test_mixed_precision_and_replicated_parameters(mixed):
    for dtype, norm, expected, _ in mixed:
        assert dtype == torch.bfloat16
        assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_tower_without_tokens_does_not_hang_and_counts_as_zero(mixed, name):
    net = Towers()
    for lengths in LENGTHS[name]:
        net(*towers_batch(lengths)).backward()
    expected = {key: parameter.grad for key, parameter in net.named_parameters()}
    assert bool(expected["history.0.weight"].any()) == (name == "one rank has no tokens")
    for *_, found in mixed:
        assert found[name].keys() == expected.keys()
        for key, gradient in found[name].items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-5, atol=1e-6)


def rank_refusals(rank, world_size, folder):
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu")
    texts = []
    for call in (
        lambda: parallelize(make_net(), ParallelPlan(shard_units=("nothing.*",)), mesh),
        lambda: ParallelDims.for_world(world_size + 1).build_mesh("cpu"),
        lambda: clip_grad_norm_([], 0.0, mesh),
    ):
        with pytest.raises(ValueError) as info:
            call()
        texts.append(str(info.value))
    net = parallelize(make_net(), ParallelPlan(shard_units=()), mesh)
    net(torch.ones(1, 5)).sum().backward()
    with pytest.raises(ValueError) as info:
        grad_norm(net.parameters())
    texts.append(str(info.value))
    plan = ParallelPlan(shard_units=(), reshard_after_forward=3)
    for call in (
        lambda: parallelize(make_net(), plan, mesh),
        lambda: parallelize(net, ParallelPlan(shard_units=()), mesh),
        lambda: parallelize(make_net(), ParallelPlan(shard_units=()), mesh.sparse),
        lambda: parallelize(make_net(), ParallelPlan(shard_units=()), mesh, collectives="default"),
        lambda: ExpertParallel([nn.Linear(1, 1) for _ in range(2)], mesh),
        lambda: choose_collectives(dist.group.WORLD, "warp" if rank else "default"),
        lambda: choose_collectives(dist.group.WORLD, "auto" if rank else "default"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as info:
            call()
        texts.append(str(info.value))
    # A gradient that one rank refuses: nobody waits, and the others' norm says that it is none.
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2).to_sparse() if rank else torch.ones(2, 2)
    for call in (
        lambda: grad_norm([weight], mesh),
        lambda: clip_grad_norm_([weight], 1.0, mesh, sparse_params=[nn.Parameter(torch.zeros(1))]),
    ):
        try:
            texts.append(str(float(call())))
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_refusals(ranks):
    results = ranks("rank_refusals", 2)
    for pattern, ranks_text, bound, mesh, reshard, twice, sparse, engine, group, warp, auto, *_ in results:
        assert "got 'nothing.*'" in pattern
        assert "got 2 ranks; ParallelDims.for_world(2) fits" in ranks_text
        assert "`max_norm` must be above 0, got 0.0" in bound
        assert "grad_norm: `mesh` must be given" in mesh
        assert "got 3; no number of ranks does, pass True, False or None" in reshard
        assert "`module` must not be sharded yet, got a module that is; parallelize a module once" in twice
        assert "`mesh` must be a ParallelMesh, got DeviceMesh; pass what ParallelDims.build_mesh returned" in sparse
        assert "`collectives` must be an engine or None, got str 'default'" in engine
        assert "ExpertParallel: `group` must be a process group, " in group
        assert "got ParallelMesh; pass mesh.ep_group" in group
        assert "`engine` must be " in warp
        assert "`engine` must be equal on all ranks of the group, got " in auto
    assert "must be right on every rank of the group, and ranks [1] refused theirs" in results[0][9]
    assert "got 'warp'" in results[1][9]
    assert results[0][-2:] == ["nan", "nan"]
    for text, owner in zip(results[1][-2:], ("grad_norm", "clip_grad_norm_"), strict=True):
        assert f"{owner}: gradients of `params` must be dense" in text
