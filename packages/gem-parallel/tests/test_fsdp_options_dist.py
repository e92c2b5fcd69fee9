"""Options of a plan on every shape of mesh: equal results, and the collectives that each option should change."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gem_parallel import ExpertParallel, ParallelDims, ParallelPlan, parallelize
from gem_parallel.plan import defer_all_reduce

pytestmark = pytest.mark.dist
UNITS = ("blocks.?", "head")
NUM_BLOCKS = 3


@dataclass(frozen=True)
class Case:
    id: str
    dp_replicate: int = 1
    ep: int = 1
    options: dict = field(default_factory=dict)
    world_sizes: tuple = (2, 4)
    gathers_in_backward: bool = True
    """Units gather again in backward."""


CASES = [
    Case("default"),
    Case("keep", options={"reshard_after_forward": False}, gathers_in_backward=False),
    Case("reshard", options={"reshard_after_forward": True}),
    Case("reshard to 2", options={"reshard_after_forward": 2}, world_sizes=(4,)),
    Case("prefetch", options={"forward_prefetch": 1, "backward_prefetch": 1}),
    Case("prefetch far", options={"forward_prefetch": 9, "backward_prefetch": 2}),
    Case("hsdp prefetch", dp_replicate=2, options={"forward_prefetch": 2, "backward_prefetch": 2}),
    Case("ep prefetch", ep=2, options={"forward_prefetch": 1, "backward_prefetch": 1}),
    Case("ep reshard to 2", ep=2, options={"reshard_after_forward": 2}, world_sizes=(4,)),
]


class Net(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(NUM_BLOCKS)])
        self.experts = ExpertParallel([nn.Linear(5, 5) for _ in range(2)], group)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.experts(x) * self.gain).squeeze(1)


class Gather:
    """fully_shard's own all-gather, noted in a log under the unit's name."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def allocate(self, size, *, dtype, device):
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.log.append(f"gather {self.name}")
        function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return function(output_tensor, input_tensor, group=group, async_op=async_op)


def inputs(rank, micro):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * rank + micro))


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(net):
    return {name: full(parameter.grad) for name, parameter in net.named_parameters()}


def rank_options(rank, world_size, folder):
    found = {}
    for case in (case for case in CASES if world_size in case.world_sizes):
        mesh = ParallelDims.for_world(world_size, dp_replicate=case.dp_replicate, ep=case.ep).build_mesh("cpu")
        net = parallelize(Net(mesh.ep_group), ParallelPlan(shard_units=UNITS, **case.options), mesh)
        log = []
        for name, module in net.named_modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gather(name or "root", log))
                if name:
                    module.register_forward_pre_hook(lambda *_, name=name, log=log: log.append(f"forward {name}"))
        net(inputs(rank, 0)).square().sum().backward()
        found[case.id] = (gradients(net), log)
    for ranks, dp_replicate, ep in ACCUMULATIONS:
        if ranks == world_size:
            found[dp_replicate, ep] = accumulate(rank, world_size, dp_replicate, ep)
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def outcome(request, ranks):
    return request.param, ranks("rank_options", request.param)


def one_process(world_size, num_micro=1):
    net = Net()
    for micro in range(num_micro):
        for rank in range(world_size):
            net(inputs(rank, micro)).square().sum().backward()
    return gradients(net)


def close(found, expected):
    for name, gradient in found.items():
        # Twelve samples' gradients of size about 10 added in another order.
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equal_to_one_process(outcome, case):
    world_size, results = outcome
    if world_size not in case.world_sizes:
        assert all(case.id not in result for result in results)
        return
    expected = one_process(world_size)
    names = set()
    for result in results:
        close(result[case.id][0], expected)
        names |= set(result[case.id][0])
    assert names == set(expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_each_unit_gathers_as_often_as_the_option_says(outcome, case):
    world_size, results = outcome
    units = [f"blocks.{index}" for index in range(NUM_BLOCKS)] + ["head"] + (["experts"] if case.ep > 1 else [])
    for result in results:
        if world_size not in case.world_sizes:
            continue
        calls = [entry for entry in result[case.id][1] if entry.startswith("gather")]
        # gather in a group of one rank is no call; the root is kept for backward unless the plan says otherwise
        for unit in units:
            alone = world_size == (case.ep if unit == "experts" else 1) * case.dp_replicate
            assert calls.count(f"gather {unit}") == (0 if alone else 1 + case.gathers_in_backward), (unit, calls)
        again = bool(case.options.get("reshard_after_forward"))
        assert calls.count("gather root") == (0 if world_size == case.dp_replicate else 1 + again), calls


def test_forward_prefetch_gathers_before_the_unit_ahead_runs(outcome):
    _, results = outcome
    for result in results:
        plain, ahead = result["default"][1], result["prefetch"][1]
        for index in range(NUM_BLOCKS - 1):
            assert plain.index(f"forward blocks.{index}") < plain.index(f"gather blocks.{index + 1}")
            assert ahead.index(f"gather blocks.{index + 1}") < ahead.index(f"forward blocks.{index}")
        far = result["prefetch far"][1]
        assert far.index("gather head") < far.index("forward blocks.0")


def test_backward_prefetch_gathers_in_reverse_order(outcome):
    _, results = outcome
    for result in results:
        for case in ("default", "prefetch", "prefetch far"):
            log = result[case][1]
            backward = [entry for entry in log[log.index("forward head") + 1 :] if entry != "gather head"]
            assert backward == [f"gather blocks.{index}" for index in reversed(range(NUM_BLOCKS))], case


ACCUMULATIONS = [(2, 2, 1), (4, 2, 1), (4, 2, 2), (2, 1, 1)]
"""world size, dp_replicate, ep"""


def accumulate(rank, world_size, dp_replicate, ep):
    mesh = ParallelDims.for_world(world_size, dp_replicate=dp_replicate, ep=ep).build_mesh("cpu")
    net = parallelize(Net(mesh.ep_group), ParallelPlan(shard_units=UNITS), mesh)
    calls = []
    all_reduce = dist.all_reduce

    def counted(tensor, *arguments, **options):
        calls.append(tensor.numel())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counted
    counts = []
    for micro in range(3):
        with defer_all_reduce(net) if micro < 2 else nullcontext():
            net(inputs(rank, micro)).square().sum().backward()
        counts.append(len(calls))
    dist.all_reduce = all_reduce
    deferred = gradients(net)
    net.zero_grad()
    dist.all_reduce = counted
    for micro in range(3):
        net(inputs(rank, micro)).square().sum().backward()
    dist.all_reduce = all_reduce
    units = sum(isinstance(module, FSDPModule) for module in net.modules())
    return deferred, gradients(net), counts, len(calls) - counts[-1], units


def test_deferred_all_reduce(outcome):
    world_size, results = outcome
    expected = one_process(world_size, num_micro=3)
    found = {key: [result[key] for result in results] for key in results[0] if isinstance(key, tuple)}
    assert len(found) == 2
    for dp_replicate, deferred, each_time, counts, without, units in (
        (key[0], *result) for key, per_rank in found.items() for result in per_rank
    ):
        close(deferred, expected)
        close(each_time, expected)
        if dp_replicate == 1:
            assert counts == [0, 0, 0]
            assert without == 0
        else:
            assert counts == [0, 0, units]
            assert without == 3 * units


def test_deferring_without_shards_changes_nothing():
    net = Net()
    with defer_all_reduce(net):
        net(inputs(0, 0)).square().sum().backward()
    close(gradients(net), one_process(1))
