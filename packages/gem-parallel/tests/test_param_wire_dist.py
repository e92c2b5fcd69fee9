"""Parameters that travel in a form of their own: what compute reads, what is sent, and what stays as it was."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from param_wires import ByteWire, rounded
from recorder import Recorder
from torch import nn
from torch.distributed.tensor import DTensor

from gem_parallel import ExpertParallel, ParallelDims, ParallelPlan, clip_grad_norm_, grad_norm, parallelize
from gem_parallel._src import wired_param

pytestmark = pytest.mark.dist
UNITS = ("blocks.[01]", "head")


@dataclass(frozen=True)
class Case:
    id: str
    wire: ByteWire = field(default_factory=ByteWire)
    dp_replicate: int = 1
    ep: int = 1
    options: dict = field(default_factory=dict)
    world_sizes: tuple[int, ...] = (1, 2, 4)

    @property
    def dtype(self):
        return self.options.get("param_dtype", torch.float32)


CASES = [
    Case("rows"),
    Case("blocks of rows", ByteWire(rows_per_block=4)),
    Case("bf16 compute", options={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    Case("gathered once", options={"reshard_after_forward": False}),
    Case("gathered again", options={"reshard_after_forward": True, "forward_prefetch": 2, "backward_prefetch": 2}),
    Case("hsdp", dp_replicate=2, world_sizes=(2, 4)),
    Case("experts", ep=2, world_sizes=(2, 4)),
]


class Net(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, three dims, vectors, a tied weight, small ones."""

    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 8)) for _ in range(2)])
        self.experts = ExpertParallel([nn.Linear(8, 8) for _ in range(2)], group)
        self.mix = nn.Parameter(torch.randn(3, 2, 8))
        self.gain = nn.Parameter(torch.ones(8))
        self.narrow = nn.Parameter(torch.randn(8, 2))
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.again = nn.Linear(8, 8, bias=False)
        self.tied.again.weight = self.tied.weight
        self.head = nn.Linear(8, 3, bias=False)
        self.read = {}

    def forward(self, x):
        self.read = {"mix": self.mix, "tied.weight": self.tied.again.weight, "narrow": self.narrow}
        self.read = {name: each.detach().clone() for name, each in self.read.items()}
        for block in self.blocks:
            x = x + block(x)
        x = self.tied.again(self.tied(self.experts(x) * self.gain))
        return self.head(x * self.mix.sum((0, 1)) + self.narrow.sum())


def make_net(mesh):
    net = Net(mesh.ep_group)
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, _, name=name: note(net, name, module))
    return net


def note(net, name, module):
    # A tied weight has its first name only.
    net.read[f"{name}.weight".replace(".again", "")] = module.weight.detach().clone()


def inputs(rank, step=0):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * rank + step))


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_case(rank, world_size, case, folder):
    mesh = ParallelDims.for_world(world_size, dp_replicate=case.dp_replicate, ep=case.ep).build_mesh("cpu")
    plan = ParallelPlan(shard_units=UNITS, param_wire=case.wire, **case.options)
    net = parallelize(make_net(mesh), plan, mesh)
    assert all(type(each.to_local()) in (torch.Tensor, nn.Parameter) for each in net.parameters())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    records = []
    for step in range(3):
        optimizer.zero_grad()
        masters = {name: full(parameter) for name, parameter in net.named_parameters()}
        with Recorder() as recorder:
            out = net(inputs(rank, step).to(case.dtype))
            out.float().square().sum().backward()
        gradients = {name: full(parameter.grad) for name, parameter in net.named_parameters()}
        norms = [float(grad_norm(net.parameters(), mesh)), float(clip_grad_norm_(net.parameters(), 0.5, mesh))]
        optimizer.step()
        sent = sorted(bytes_ for kind, bytes_, _ in recorder.calls if kind == "all_gather")
        records.append((masters, net.read, out.detach().clone(), gradients, norms, sent))
    if case.id == "rows":
        resumed = resume(net, mesh, folder)
        return records, resumed
    return records, None


def resume(net, mesh, folder):
    """A checkpoint of a wired net, read by one without a wire and back; parameters that `to_empty` makes."""
    state = net.state_dict()
    world = mesh.dims.world_size
    dcp.save(state, checkpoint_id=str(folder / f"wired-{world}"))
    plain = Net(mesh.ep_group)
    plain = parallelize(plain, ParallelPlan(shard_units=UNITS), mesh)
    target = plain.state_dict()
    dcp.load(target, checkpoint_id=str(folder / f"wired-{world}"))
    same = all(torch.equal(full(target[name]), full(value)) for name, value in state.items())
    # Made on meta, filled later: what replaces a parameter's data does not lose its wire.
    with torch.device("meta"):
        empty = Net(mesh.ep_group)
    empty = parallelize(empty, ParallelPlan(shard_units=UNITS, param_wire=ByteWire()), mesh)
    empty.to_empty(device="cpu")
    empty.load_state_dict(state)
    # fully_shard itself takes no inference mode in a group of one.
    with torch.inference_mode() if world > 1 else torch.no_grad():
        equal = torch.equal(empty(inputs(7)), net(inputs(7)))
        equal = equal and torch.equal(empty(inputs(7)), net(inputs(7)))
    assigned = parallelize(Net(mesh.ep_group), ParallelPlan(shard_units=UNITS, param_wire=ByteWire()), mesh)
    assigned.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    equal_assigned = torch.equal(assigned(inputs(7)), net(inputs(7)))
    differs = not torch.equal(plain(inputs(7)), net(inputs(7)))
    return same, equal, equal_assigned, differs, [type(value) for value in state.values()]


def rank_cases(rank, world_size, folder):
    found = {}
    for case in (case for case in CASES if world_size in case.world_sizes):
        found[case.id] = run_case(rank, world_size, case, folder)
    return found


@pytest.fixture(scope="module", params=[1, 2, 4], ids="{} ranks".format)
def outcome(request, ranks):
    return request.param, ranks("rank_cases", request.param)


def chosen(outcome):
    world_size, results = outcome
    for case in CASES:
        if world_size in case.world_sizes:
            yield case, world_size, [result[case.id][0] for result in results]


def test_compute_reads_what_the_wire_keeps(outcome):
    for case, _, results in chosen(outcome):
        for records in results:
            for masters, read, *_ in records:
                for name, value in read.items():
                    assert torch.equal(value, rounded(case.wire, masters[name], case.dtype)), (case.id, name)
                assert not torch.equal(read["mix"], masters["mix"].to(case.dtype))


def test_equal_to_one_process_that_rounds(outcome):
    """Master weights, gradients and norms are those of a process that computes with rounded copies."""
    for case, world_size, results in chosen(outcome):
        if case.dtype != torch.float32:
            continue
        net = Net()
        masters = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        for name, parameter in net.named_parameters():
            parameter.data = rounded(case.wire, masters[name], torch.float32)
        for rank in range(world_size):
            net(inputs(rank)).square().sum().backward()
        # Sums over ranks in another order.
        bound = {"rtol": 1e-5, "atol": 1e-4}
        seen = set()
        for records in results:
            first, _, _, gradients, norms, _ = records[0]
            for name, gradient in gradients.items():
                assert torch.equal(first[name], masters[name])
                torch.testing.assert_close(gradient, net.get_parameter(name).grad, **bound)
            assert norms[0] == pytest.approx(norms[1])
            expected = torch.nn.utils.get_total_norm([each.grad for each in net.parameters()])
            assert norms[0] == pytest.approx(float(expected), rel=1e-5)
            seen |= set(gradients)
        assert seen == set(masters)


def sizes_sent(case, world_size):
    """(bytes of a unit's gather by its parameters' shapes, how often) by hand."""
    item = torch.finfo(case.dtype).bits // 8
    shards = world_size // case.dp_replicate

    def size(*shapes, ranks=shards):
        total = 0
        for shape in shapes:
            held = -(-shape[0] // ranks)
            rows = held * (shape[1] if len(shape) == 3 else 1)
            whole = held >= shape[0] or rows % case.wire.rows_per_block == 0
            if case.wire.covers(shape) and whole:
                total += rows * (shape[-1] + 2)
            else:
                total += rows * (shape[-1] if len(shape) > 1 else 1) * item
        return total * (ranks - 1)

    block, head = size((13, 8), (13,), (8, 13), (8,)), size((3, 8))
    rest = [(3, 2, 8), (8,), (8, 2), (8, 8)]
    again = case.options.get("reshard_after_forward")
    times = 1 if again is False else 2
    expected = [block] * 2 * times + [head] * times
    if case.ep == 1:
        rest += [(8, 8), (8,), (8, 8), (8,)]
    expected += [size(*rest)] * (2 if again else 1)
    return [each for each in expected if each], size((8, 8), (8,), ranks=max(1, shards // case.ep))


def test_bytes(outcome):
    for case, world_size, results in chosen(outcome):
        expected, expert = sizes_sent(case, world_size)
        if case.ep > 1:
            # Experts' rows are gathered through torch.distributed, too; what they send is not the wire's.
            for records in results:
                for *_, sent in records:
                    for each in [*expected, *([expert] * 2 if expert else [])]:
                        sent.remove(each)
            continue
        for records in results:
            for *_, sent in records:
                assert sent == sorted(expected), case.id


def test_every_number_of_ranks_reads_the_same(outcome):
    _, results = outcome
    first = {name: rounded(ByteWire(), weight, torch.float32) for name, weight in Net().named_parameters()}
    for result in results:
        read = result["rows"][0][0][1]
        assert {"mix", "tied.weight", "head.weight", "blocks.0.2.weight"} <= set(read)
        for name, value in read.items():
            assert torch.equal(value, first[name]), name
        same, equal, assigned, differs, kinds = result["rows"][1]
        assert same
        assert equal
        assert assigned
        assert differs
        assert set(kinds) == {DTensor}


def rank_refusals(rank, world_size, folder):
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu")

    class Wrong(ByteWire):
        def encode(self, x):
            return super().encode(x)[:, :-1]

    def forward():
        net = parallelize(Net(mesh.ep_group), ParallelPlan(shard_units=UNITS, param_wire=Wrong()), mesh)
        net(inputs(rank))

    texts = []
    for call in (
        lambda: parallelize(nn.Linear(2, 8), ParallelPlan(shard_units=(), param_wire=ByteWire()), mesh),
        lambda: parallelize(nn.Linear(8, 8).double(), ParallelPlan(shard_units=(), param_wire=ByteWire()), mesh),
        lambda: parallelize(
            nn.Linear(8, 8), ParallelPlan(shard_units=(), param_wire=ByteWire(), param_dtype=torch.float16), mesh
        ),
        forward,
    ):
        with pytest.raises(ValueError) as info:
            call()
        texts.append(str(info.value))
    texts += [refusal_of(plan, rank, mesh) for plan in (other_wire, other_units, unfit_on_one)]
    dist.barrier()
    return texts


def other_wire(rank):
    return ParallelPlan(shard_units=UNITS, param_wire=ByteWire(rows_per_block=1 + 3 * rank))


def other_units(rank):
    return ParallelPlan(shard_units=UNITS[rank:], param_wire=ByteWire() if rank else None)


def unfit_on_one(rank):
    return ParallelPlan(shard_units=("nothing",) if rank else UNITS)


def refusal_of(plan, rank, mesh):
    with pytest.raises((RuntimeError, ValueError)) as info:
        parallelize(Net(mesh.ep_group), plan(rank), mesh)
    return f"{info.type.__name__}: {info.value}"


def test_refusals(ranks):
    results = ranks("rank_refusals", 2)
    for none, double, compute, wrong, *_ in results:
        assert none == (
            "parallelize: `plan.param_wire` (byte) must cover a parameter, got a module of 2 that all travel as they "
            "are; leave it out"
        )
        assert "`module`'s parameters must be float32, bfloat16 to travel as byte, got torch.float64 for " in double
        assert "`plan.param_dtype` must be float32, bfloat16 to travel as byte, got torch.float16" in compute
        assert "`encode` of `plan.param_wire` must return contiguous uint8 of shape (" in wrong
    for *_, wire, units, _ in results:
        assert wire == (
            "ValueError: parallelize: `plan.param_wire` must be equal on all ranks, got ByteWire(rows_per_block=1) on "
            "rank 0, ByteWire(rows_per_block=4) on rank 1; make the plan from the same values on every rank"
        )
        assert (
            "`plan.shard_units` must be equal on all ranks, got ('blocks.[01]', 'head') on rank 0, ('head',)" in units
        )
        assert "; different, too: `plan.param_wire`; make" in units
    assert results[0][-1].startswith("RuntimeError: parallelize: `module` and `plan` must be right on every rank of ")
    assert "and ranks [1] refused theirs" in results[0][-1]
    assert results[1][-1].startswith("ValueError: parallelize: every pattern of `plan.shard_units` must match a module")


class Counting(ByteWire):
    """Notes how many rows each cast has."""

    casts: ClassVar[list[tuple[str, int]]] = []

    def encode(self, x):
        self.casts.append(("encode", len(x)))
        return super().encode(x)

    def decode(self, rows, num_columns, dtype):
        self.casts.append(("decode", len(rows)))
        return super().decode(rows, num_columns, dtype)


def rank_casts(rank, world_size, folder):
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu")
    found = {}
    for name, most, rows_per_block in (("all", 2**25, 1), ("two", 128, 1), ("blocks", 2**25, 4)):
        wired_param.MAX_TOGETHER = most
        net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(5)], nn.Linear(8, 6), nn.Linear(6, 8))
        masters = {key: full(each) for key, each in net.named_parameters()}
        net = parallelize(net, ParallelPlan(shard_units=(), param_wire=Counting(rows_per_block=rows_per_block)), mesh)
        for _ in range(3):
            Counting.casts.clear()
            net.unshard()
            read = {key: full(each) for key, each in net.named_parameters()}
            casts = list(Counting.casts)
            net.reshard()
            wire = ByteWire(rows_per_block=rows_per_block)
            assert all(torch.equal(each, rounded(wire, masters[key], torch.float32)) for key, each in read.items())
        found[name] = casts
    return found


def test_matrices_of_a_unit_are_cast_together(ranks):
    for found in ranks("rank_casts", 2):
        # Four rows of each of five matrices and three of the sixth on a rank; the last has rows of another length.
        assert found["all"] == [("encode", 23), ("encode", 4), ("decode", 46), ("decode", 8)]
        assert found["two"] == [
            *[("encode", 8)] * 2,
            ("encode", 7),
            ("encode", 4),
            *[("decode", 16)] * 2,
            ("decode", 14),
            ("decode", 8),
        ]
        # A border would cut a block of the sixth: it travels as it is and is rounded by itself.
        assert found["blocks"][:2] == [("encode", 20), ("encode", 4)]
        assert sorted(found["blocks"][2:]) == [("decode", 6), ("decode", 8), ("decode", 40), ("encode", 6)]
