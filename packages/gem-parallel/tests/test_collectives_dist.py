"""Engines on gloo: the choice, the data flow of the low-contention engine in shared memory, and fully_shard's hooks."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_parallel import ExpertParallel, ParallelDims, ParallelPlan, grad_norm, parallelize
from gem_parallel._src.collectives.low_contention import pull, push
from gem_parallel.collectives import DefaultCollectives, choose_collectives, group_status

pytestmark = pytest.mark.dist
NUM_BYTES = 4096
BENCH = Path(__file__).parent.parent / "benchmarks" / "bench_collectives.py"


class SharedFiles:
    """Memory of every rank, as a symmetric memory handle shows it, in files that all ranks map."""

    def __init__(self, folder, rank, ranks):
        if rank == 0:
            for each in range(ranks):
                (folder / f"workspace{each}").write_bytes(bytes([255]) * NUM_BYTES)
        dist.barrier()
        self.buffers = [
            torch.from_file(str(folder / f"workspace{each}"), shared=True, size=NUM_BYTES, dtype=torch.uint8)
            for each in range(ranks)
        ]

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        start = storage_offset * dtype.itemsize
        return self.buffers[rank][start : start + torch.Size(sizes).numel() * dtype.itemsize].view(dtype).view(sizes)

    def barrier(self, channel=0):
        dist.barrier()


class Counter(DefaultCollectives):
    def __init__(self):
        self.gathers = self.scatters = self.allocations = 0

    def allocate(self, size, *, dtype, device):
        self.allocations += 1
        return super().allocate(size, dtype=dtype, device=device)

    def all_gather(self, output, tensor, group, *, async_op=False):
        self.gathers += 1
        return super().all_gather(output, tensor, group, async_op=async_op)

    def reduce_scatter(self, output, tensor, group, *, op=dist.ReduceOp.SUM, async_op=False):
        assert op == dist.ReduceOp.SUM
        self.scatters += 1
        return super().reduce_scatter(output, tensor, group, op=op, async_op=async_op)


class Net(nn.Module):
    def __init__(self, group=None, collectives=None):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(3, 3)
        self.experts = ExpertParallel([nn.Linear(3, 3), nn.Linear(3, 3)], group, collectives=collectives)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.experts(torch.tanh(self.block(x))))


def inputs(rank):
    return torch.randn(2 + rank, 3, generator=torch.Generator().manual_seed(rank))


def gradients(net):
    full = {name: each.grad for name, each in net.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in full.items()}


def rank_all(rank, world_size, folder):
    workspace = SharedFiles(folder, rank, world_size)
    group, plain = dist.group.WORLD, DefaultCollectives()
    flows = []
    for turn, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.float32)):
        generator = torch.Generator().manual_seed(100 * turn + rank)
        mine = torch.randint(-9, 9, (5, 3), generator=generator).to(dtype)
        expected, output = (torch.zeros((5 * world_size, 3), dtype=dtype) for _ in range(2))
        plain.all_gather(expected, mine, group)
        pull(workspace, mine, output, rank, world_size)
        inplace = torch.zeros_like(expected)
        inplace[5 * rank : 5 * rank + 5] = mine
        pull(workspace, inplace[5 * rank : 5 * rank + 5], inplace, rank, world_size)
        whole = torch.randint(-9, 9, (5 * world_size, 3), generator=generator).to(dtype)
        # gloo adds bfloat16, too; the numbers are small integers, so exactly.
        summed, found = torch.zeros_like(mine), torch.zeros_like(mine)
        plain.reduce_scatter(summed, whole, group)
        push(workspace, whole, found, rank, world_size)
        flows.append([torch.equal(output, expected), torch.equal(inplace, expected), torch.equal(found, summed)])
    mesh = ParallelDims.for_world(world_size, ep=2).build_mesh("cpu")
    counter, experts = Counter(), Counter()
    net = parallelize(
        Net(mesh.ep_group, experts), ParallelPlan(shard_units=("block", "head")), mesh, collectives=counter
    )
    net(inputs(rank)).sum().backward()
    units = sum(isinstance(module, FSDPModule) for module in net.modules())
    engines = {name: (each.available, each.reason) for name, each in group_status(group).items()}
    refusal = ""
    try:
        choose_collectives(group, "nccl_zero_cta")
    except ValueError as error:
        refusal = str(error)
    chosen = [choose_collectives(group).name, choose_collectives(group, "default").name]
    counts = (counter.gathers, counter.scatters, counter.allocations, experts.gathers, experts.scatters)
    bench = benchmark() if world_size == 2 else []
    return flows, gradients(net), units, counts, engines, chosen, refusal, bench


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def outcome(request, ranks):
    return request.param, ranks("rank_all", request.param)


def test_pull_and_push_equal_the_default(outcome):
    for result in outcome[1]:
        assert all(all(flow) for flow in result[0])


def test_fully_shard_and_experts_go_through_the_engine(outcome):
    world_size, results = outcome
    net = Net()
    for rank in range(world_size):
        net(inputs(rank)).sum().backward()
    expected = gradients(net)
    for _, found, units, counts, *_ in results:
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
        # Units: root without parameters of its own, block, experts, head. With ep 2 of 2 ranks the experts are whole.
        assert units == 4
        sharded = 2 if world_size == 2 else 3
        gathers, scatters, allocations, expert_gathers, expert_scatters = counts
        assert (gathers, scatters) == (2 * sharded, sharded), counts
        assert allocations >= gathers
        assert (expert_gathers, expert_scatters) == (2, 2)


def test_the_choice_and_its_reasons(outcome):
    for *_, engines, chosen, refusal, _ in outcome[1]:
        assert engines["default"][0]
        assert not engines["nccl_zero_cta"][0]
        assert not engines["symm_mem_low_contention"][0]
        assert chosen == ["default", "default"]
        assert "must be one that the group can use, got nccl_zero_cta: " in refusal
        assert engines["nccl_zero_cta"][1] in refusal


def benchmark():
    spec = importlib.util.spec_from_file_location("bench_collectives", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measure([], [2**10, 2**12], 2, 16, torch.device("cpu"))


def test_the_benchmark_measures_every_operation_and_size(outcome):
    world_size, results = outcome
    for rows in (result[-1] for result in results if world_size == 2):
        assert [(row["op"], row["bytes"]) for row in rows] == [
            (op, size) for op in ("all_gather", "reduce_scatter") for size in (2**10, 2**12)
        ]
        for row in rows:
            assert row["engine"] == "default"
            assert row["gb_per_s"] == pytest.approx(row["bytes"] / 2 / row["ms"]["median"] / 1e6)
            assert row["slowdown"] > 0


# On CUDA: as many ranks as GPUs, at most 4; with an even number the experts are spread over pairs.


def rank_train_cuda(rank, world_size, folder, engine):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    # The engine asks for it; a group that another engine uses is none the worse.
    engine = engine if world_size > 1 else "default"
    monkey = pytest.MonkeyPatch()
    monkey.setenv("NCCL_CTA_POLICY", "2" if engine == "nccl_zero_cta" else "0")
    mesh = ParallelDims.for_world(world_size, ep=2 if world_size % 2 == 0 else 1).build_mesh("cuda")
    collectives = choose_collectives(mesh.shared[(mesh.shared.mesh_dim_names or ())[1]].get_group(), engine)
    net = Net(mesh.ep_group, collectives).to(device)
    net = parallelize(
        net, ParallelPlan(shard_units=("block", "head"), forward_prefetch=1), mesh, collectives=collectives
    )
    norms = []
    for _ in range(2):
        net(inputs(rank).to(device)).sum().backward()
        norms.append(float(grad_norm(net.parameters(), mesh)))
    monkey.undo()
    return {name: gradient.cpu() for name, gradient in gradients(net).items()}, norms


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["default", "nccl_zero_cta", "symm_mem_low_contention"])
def test_training_through_engines_on_cuda(ranks, engine):
    world_size = min(torch.cuda.device_count(), 4)
    results = ranks("rank_train_cuda", world_size, backend="nccl", engine=engine)
    net = Net()
    norms = []
    for _ in range(2):
        for rank in range(world_size):
            net(inputs(rank)).sum().backward()
        norms.append(float(grad_norm(net.parameters())))
    expected, seen = gradients(net), set()
    for found, found_norms in results:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
        seen |= set(found)
    assert seen == set(expected)
