"""Experts over ranks equal one process that holds them all; 2 and 4 gloo processes; calls and bytes counted."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gem_parallel import ParallelDims, ParallelPlan, parallelize
from gem_parallel._src.collectives.base import DefaultCollectives
from gem_parallel._src.embeddings.wire import bytes_per_row, pack_rows, unpack_rows
from gem_parallel.experts import ExpertParallel, exchange_counts

pytestmark = pytest.mark.dist
WIDTH = 6


class Recorder(DefaultCollectives):
    """Counts what it is asked to move."""

    def __init__(self, log, name="ep"):
        self.log, self.name = log, name

    def all_gather(self, output, tensor, group, *, async_op=False):
        self.log.append((f"{self.name} AG", output.numel() * output.element_size(), str(tensor.dtype)))
        return super().all_gather(output, tensor, group, async_op=async_op)

    def reduce_scatter(self, output, tensor, group, *, op=dist.ReduceOp.SUM, async_op=False):
        self.log.append((f"{self.name} RS", tensor.numel() * tensor.element_size(), str(tensor.dtype)))
        return super().reduce_scatter(output, tensor, group, op=op, async_op=async_op)


class FullyShardComm:
    """The same for fully_shard's own collectives."""

    def __init__(self, log, kind):
        self.recorder, self.kind = Recorder(log, "fsdp"), kind

    def allocate(self, size, *, dtype, device):
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        if self.kind == "AG":
            return self.recorder.all_gather(output_tensor, input_tensor, group, async_op=async_op)
        return self.recorder.reduce_scatter(output_tensor, input_tensor, group, op=op, async_op=async_op)


class Masked(nn.Module):
    def forward(self, x, keep):
        return x * keep[:, None]


class JaggedExpert(nn.Module):
    """Reads rows of samples, packed tokens with lengths, and a constant; odd experts ignore the tokens."""

    def __init__(self, position):
        super().__init__()
        torch.manual_seed(10 + position)
        self.sample, self.token = nn.Linear(WIDTH, 4), nn.Linear(3, 4)
        self.position = position

    def forward(self, x, values, lengths, *, scale):
        out = torch.tanh(self.sample(x))
        if self.position % 2 == 0:
            owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            pooled = torch.zeros(len(lengths), 4, dtype=x.dtype).index_add(0, owner, self.token(values))
            out = out + scale * pooled
        else:
            # touched with weight zero, so that its gradient is zeros and not None
            out = out + 0 * self.token.weight.sum() + 0 * self.token.bias.sum()
        return out


@dataclass(frozen=True)
class Case:
    id: str
    lengths: tuple
    """Per rank, the lengths of its samples' sequences."""
    num_experts: int = 5
    known: bool = False
    """The caller knows the rows."""


def cases(world_size):
    even = ((2, 0, 5), (1, 3, 3)) * (world_size // 2)
    uneven = ((2, 0, 5, 1, 1), (), (4,), (0, 0))[:world_size]
    return [
        Case("even", even),
        Case("even-known", even, known=True),
        Case("one-expert-each", even, num_experts=world_size),
        Case("uneven", uneven),
        Case("uneven-known", uneven, known=True),
        Case("no-tokens", ((0, 0), (0,)) * (world_size // 2)),
        Case("all-empty", ((),) * world_size),
    ]


def samples(case):
    """Per rank (x, values, lengths, weights of the outputs)."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return [
        (normal(len(each), WIDTH), normal(sum(each), 3), torch.tensor(each, dtype=torch.int64), normal(len(each), 4))
        for each in case.lengths
    ]


def make(num_experts):
    return [JaggedExpert(position) for position in range(num_experts)]


def run(layer, x, values, lengths, weight, **arguments):
    x, values = x.clone().requires_grad_(), values.clone().requires_grad_()
    out = layer(x, values, lengths, scale=0.5, **arguments)
    (out * weight).sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return out.detach(), x.grad, values.grad, grads


def rank_cases(rank, world_size, folder):
    # Uninitialised memory holds NaN, so that padding which enters a sum is seen.
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    found = {}
    for case in cases(world_size):
        log = []
        layer = ExpertParallel(make(case.num_experts), dist.group.WORLD, collectives=Recorder(log))
        rows = None
        if case.known:
            samples_here, tokens_here = len(case.lengths[rank]), sum(case.lengths[rank])
            rows = exchange_counts([samples_here, tokens_here, samples_here], dist.group.WORLD)
            counts = tuple(len(each) for each in case.lengths)
            assert rows == (counts, tuple(sum(each) for each in case.lengths), counts)
        found[case.id] = (run(layer, *samples(case)[rank], rows=rows), log)
    for dtype in NARROW:
        log = []
        layer = ExpertParallel(make(5), dist.group.WORLD, collectives=Recorder(log), gather_dtype=dtype)
        found[dtype] = (run(layer, *samples(uneven(world_size))[rank]), log)
    if world_size == 2:
        found["refusals"] = refusals(rank)
        found["one refuses"] = one_rank_refuses(rank)
        found["compiled"] = compiled(rank)
        layer = ExpertParallel([Masked(), Masked(), Masked()], dist.group.WORLD)
        found["mask"] = layer(torch.ones(2 + rank, 1), torch.arange(2 + rank) % 2 == rank)
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def outcome(request, ranks):
    return request.param, ranks("rank_cases", request.param)


# Four or five outputs of size about 1 added in another order.
BOUND = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("index", range(7), ids=[case.id for case in cases(2)])
def test_equal_to_one_process(outcome, index):
    world_size, results = outcome
    case = cases(world_size)[index]
    joined = [torch.cat(each) for each in zip(*samples(case), strict=True)]
    out, dx, dvalues, grads = run(ExpertParallel(make(case.num_experts)), *joined)
    counts = [len(each) for each in case.lengths]
    tokens = [sum(each) for each in case.lengths]
    seen = {}
    for rank, result in enumerate(results):
        (rank_out, rank_dx, rank_dvalues, rank_grads), _ = result[case.id]
        torch.testing.assert_close(rank_out, out.split(counts)[rank], **BOUND)
        torch.testing.assert_close(rank_dx, dx.split(counts)[rank], **BOUND)
        torch.testing.assert_close(rank_dvalues, dvalues.split(tokens)[rank], **BOUND)
        assert not set(seen) & set(rank_grads), "an expert on two ranks"
        seen |= rank_grads
    assert set(seen) == set(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(seen[name], grad, **BOUND)


def test_calls_and_bytes(outcome):
    world_size, results = outcome
    for case in cases(world_size):
        rows = world_size * max(len(each) for each in case.lengths)
        tokens = world_size * max(sum(each) for each in case.lengths)
        forward = [("ep AG", rows * WIDTH * 4, "torch.float32")]
        forward += [("ep AG", tokens * 3 * 4, "torch.float32"), ("ep AG", rows * 8, "torch.int64")]
        forward += [("ep RS", rows * 4 * 4, "torch.float32")]
        backward = [("ep AG", rows * 4 * 4, "torch.float32"), ("ep RS", rows * WIDTH * 4, "torch.float32")]
        backward += [("ep RS", tokens * 3 * 4, "torch.float32")]
        for result in results:
            # No call where no rank has anything to send.
            assert result[case.id][1] == [call for call in forward + backward if call[1] > 0], case.id


NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def uneven(world_size):
    return next(case for case in cases(world_size) if case.id == "uneven")


def rounded(tensor, dtype):
    """As it arrives."""
    out = torch.empty_like(tensor)
    unpack_rows(pack_rows(tensor, dtype), dtype, out)
    return out


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_gathers_round_once_and_sum_in_full(outcome, dtype):
    """Equal to one process on rounded inputs and output gradients; the bytes are those of the rounded rows."""
    world_size, results = outcome
    case = uneven(world_size)
    x, values, lengths, weight = (torch.cat(each) for each in zip(*samples(case), strict=True))
    assert not torch.equal(rounded(x, dtype), x)
    layer = ExpertParallel(make(5))
    out, dx, dvalues, grads = run(layer, rounded(x, dtype), rounded(values, dtype), lengths, rounded(weight, dtype))
    counts, tokens = [len(each) for each in case.lengths], [sum(each) for each in case.lengths]
    seen = {}
    for rank, result in enumerate(results):
        (rank_out, rank_dx, rank_dvalues, rank_grads), log = result[dtype]
        torch.testing.assert_close(rank_out, out.split(counts)[rank], **BOUND)
        torch.testing.assert_close(rank_dx, dx.split(counts)[rank], **BOUND)
        torch.testing.assert_close(rank_dvalues, dvalues.split(tokens)[rank], **BOUND)
        seen |= rank_grads
        rows, num_tokens = world_size * max(counts), world_size * max(tokens)
        assert log == [
            ("ep AG", rows * bytes_per_row(WIDTH, dtype), "torch.uint8"),
            ("ep AG", num_tokens * bytes_per_row(3, dtype), "torch.uint8"),
            ("ep AG", rows * 8, "torch.int64"),
            ("ep RS", rows * 4 * 4, "torch.float32"),
            ("ep AG", rows * bytes_per_row(4, dtype), "torch.uint8"),
            ("ep RS", rows * WIDTH * 4, "torch.float32"),
            ("ep RS", num_tokens * 3 * 4, "torch.float32"),
        ]
    for name, grad in grads.items():
        torch.testing.assert_close(seen[name], grad, **BOUND)


def compiled(rank):
    """Gradients of a compiled model over two calls with other numbers of rows, and of the same model in eager mode."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 3), nn.ReLU(), ExpertParallel([nn.Linear(3, 3) for _ in range(3)], dist.group.WORLD)
    )
    found = []
    for forward in (torch.compile(model, backend="eager"), model):
        model.zero_grad()
        for rows in (2 + rank, 5 - rank):
            x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
            forward(x).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def test_compiled(outcome):
    world_size, results = outcome
    for result in results if world_size == 2 else []:
        for fast, plain in zip(*result["compiled"], strict=True):
            assert torch.equal(fast, plain)


def rank_fsdp(rank, world_size, folder, where):
    results = {}
    for dtype in (None, torch.float64):
        results[str(dtype)] = run_fsdp(rank, world_size, dtype)
    results["wire"] = wire(rank)
    results["saved"] = save(rank, where)
    return results


def run_fsdp(rank, world_size, reduce_dtype):
    """dp_shard 2 x ep 2: two groups of two ranks with different samples; FSDP of the rank's experts over dp_shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "ep"))
    log = []
    case = cases(world_size)[3]
    layer = ExpertParallel(make(case.num_experts), mesh["ep"], collectives=Recorder(log), reduce_dtype=reduce_dtype)
    # Alone it is a root, which by default keeps its parameters after forward.
    fully_shard(layer, mesh=mesh["dp_shard"], reshard_after_forward=True)
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    layer.set_custom_all_gather(FullyShardComm(log, "AG"))
    layer.set_custom_reduce_scatter(FullyShardComm(log, "RS"))
    out, dx, dvalues, grads = run(layer, *samples(case)[rank])
    assert all(isinstance(grad, DTensor) for grad in grads.values())
    return out, dx, dvalues, {name: grad.full_tensor() for name, grad in grads.items()}, log


def wire(rank):
    """dtypes that the experts' group sees when FSDP computes in bfloat16 and the sums should be float32."""
    mesh = ParallelDims.for_world(4, ep=2).build_mesh("cpu")
    log = []
    experts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    layer = ExpertParallel(experts, mesh.ep_group, collectives=Recorder(log), reduce_dtype=torch.float32)
    plan = ParallelPlan(shard_units=(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = parallelize(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), plan, mesh)
    out = net(torch.ones(3, WIDTH))
    out.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in net.parameters())
    return out.dtype, log


def saved_model(group):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 3), ExpertParallel([nn.Linear(3, 1 + each) for each in range(5)], group))


def save(rank, where):
    """A checkpoint of dp_shard 2 x ep 2, loaded with ep 4."""
    mesh = ParallelDims.for_world(4, ep=2).build_mesh("cpu")
    net = parallelize(saved_model(mesh.ep_group), ParallelPlan(shard_units=()), mesh)
    checkpoint.save({"model": net.state_dict()}, checkpoint_id=where)
    other = ParallelDims.for_world(4, ep=4).build_mesh("cpu")
    again = parallelize(saved_model(other.ep_group), ParallelPlan(shard_units=()), other)
    for parameter in again.parameters():
        nn.init.zeros_(parameter)
    state = {"model": again.state_dict()}
    checkpoint.load(state, checkpoint_id=where)
    again.load_state_dict(state["model"])
    return {name: parameter.full_tensor().detach() for name, parameter in again.named_parameters()}


@pytest.fixture(scope="module")
def sharded(ranks, tmp_path_factory):
    where = str(tmp_path_factory.mktemp("experts") / "checkpoint")
    return where, ranks("rank_fsdp", 4, where=where)


def test_bfloat16_on_the_wire_and_float32_sums(sharded):
    for result in sharded[1]:
        dtype, log = result["wire"]
        assert dtype == torch.bfloat16
        kinds = [(call, of) for call, _, of in log]
        bf16, fp32 = "torch.bfloat16", "torch.float32"
        assert kinds == [("ep AG", bf16), ("ep RS", fp32), ("ep AG", bf16), ("ep RS", fp32)]


# Loading without a process group is meant.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoint_loads_at_another_ep_degree_and_in_one_process(sharded):
    where, results = sharded
    expected = dict(saved_model(None).named_parameters())
    seen = set()
    for result in results:
        seen |= set(result["saved"])
        for name, value in result["saved"].items():
            assert torch.equal(value, expected[name]), name
    assert seen == set(expected)
    net = saved_model(None)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    state = {"model": net.state_dict()}
    checkpoint.load(state, checkpoint_id=where, no_dist=True)
    for name, value in state["model"].items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64], ids=["own", "float64"])
def test_with_fsdp_over_dp_shard(sharded, reduce_dtype):
    case = cases(4)[3]
    results = [result[str(reduce_dtype)] for result in sharded[1]]
    joined = [torch.cat(each) for each in zip(*samples(case), strict=True)]
    expected = run(ExpertParallel(make(case.num_experts)), *joined)
    counts, tokens = [len(each) for each in case.lengths], [sum(each) for each in case.lengths]
    seen = set()
    for rank, (out, dx, dvalues, grads, log) in enumerate(results):
        torch.testing.assert_close(out, expected[0].split(counts)[rank], **BOUND)
        torch.testing.assert_close(dx, expected[1].split(counts)[rank], **BOUND)
        torch.testing.assert_close(dvalues, expected[2].split(tokens)[rank], **BOUND)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[3][name], **BOUND)
        seen |= set(grads)
        # The order of the published example, with two inputs that need a gradient and one that does not.
        order = [call[0] for call in log]
        forward = ["fsdp AG", "ep AG", "ep AG", "ep AG", "ep RS"]
        assert order == [*forward, "fsdp AG", "ep AG", "ep RS", "ep RS", "fsdp RS"]
        wire = {str(reduce_dtype or torch.float32)}
        assert {call[2] for call in log if call[0] == "ep RS"} == wire
    assert seen == set(expected[3])


def refusals(rank):
    texts = []
    layer = ExpertParallel([nn.Linear(2, 2), nn.Linear(2, 2)], dist.group.WORLD)
    x = torch.ones(rank + 1, 2)
    for call in (
        lambda: layer(x.clone().requires_grad_(rank == 0)),
        lambda: layer(x.double() if rank else x),
        lambda: layer(torch.ones(1, 2 + rank)),
        lambda: layer(x, rows=[[7, 7]]),
        lambda: layer(x, rows=[[1, 2], [1, 2]]),
        lambda: ExpertParallel([nn.Linear(2, 2)], dist.group.WORLD),
        lambda: ExpertParallel([nn.Linear(2, 2)], init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep"))),
    ):
        try:
            call()
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def one_rank_refuses(rank):
    """id -> error of this rank, where only rank 1 was given something wrong; nobody waits."""

    def built(num_experts=2, **options):
        return ExpertParallel([nn.Linear(2, 2) for _ in range(num_experts)], dist.group.WORLD, **options)

    layer = built()
    x = torch.ones(3, 2)
    calls = {
        "rows of this rank": lambda: layer(x, rows=[[3, 4]] if rank else [[3, 3]]),
        "rows of the other": lambda: layer(x, rows=[[9, 3]] if rank else None),
        "a list": lambda: layer([1.0] if rank else x),
        "a scalar": lambda: layer(torch.tensor(1.0) if rank else x),
        "no input": lambda: layer(*([] if rank else [x])),
        "more inputs": lambda: layer(*[x] * (12 if rank else 1)),
        "negative count": lambda: exchange_counts([-1 if rank else 1], dist.group.WORLD),
        "count of another kind": lambda: exchange_counts([1.5 if rank else 1], dist.group.WORLD),
        "more counts": lambda: exchange_counts(range(40 if rank else 30), dist.group.WORLD),
        "another gather_dtype": lambda: built(gather_dtype=torch.bfloat16 if rank else None)(x),
        "another reduce_dtype": lambda: built(reduce_dtype=torch.float64 if rank else torch.float32)(x),
        "more experts": lambda: built(num_experts=2 + rank)(x),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = (type(error).__name__, str(error))
    assert exchange_counts([rank + each for each in range(30)], dist.group.WORLD)[29] == (29, 30)
    # After all of it the ranks are still in step.
    assert layer(x, rows=[[3, 3]]).shape == (3, 2)
    return found


def test_masks_are_gathered(outcome):
    world_size, results = outcome
    if world_size == 2:
        assert [result["mask"].flatten().tolist() for result in results] == [[3.0, 0.0], [0.0, 3.0, 0.0]]


def test_refusals(outcome):
    world_size, results = outcome
    if world_size != 2:
        assert all("refusals" not in result for result in results)
        return
    first, second = (result["refusals"] for result in results)
    for texts, other in ((first, 1), (second, 0)):
        assert f"in whether it needs a gradient, got {other == 1} here and another on ranks [{other}]" in texts[0]
        assert "in dtype or in a dim after the first, got torch.float" in texts[1]
        assert "in dtype or in a dim after the first, got torch.float32 (1, " in texts[2]
        assert "`rows` must hold, for each of 1 inputs, the rows of 2 ranks" in texts[4]
        assert "for each of the 2 ranks of `group`, got 1" in texts[5]
        assert "must be a mesh of one axis, got 2 axes" in texts[6]
    assert "at rank 1 those given, [2], got ((7, 7),)" in second[3]


STOPS = "must be right on every rank of the group, and ranks [1] refused theirs"
ONE_REFUSES = {
    "rows of this rank": (STOPS, "`rows` must hold, for each of 1 inputs, the rows of 2 ranks"),
    "rows of the other": ("`rows` must be those of every rank, ((3, 3),), got others on ranks [1]",) * 2,
    "a list": (STOPS, "`inputs` must be tensors, got list at position 0"),
    "a scalar": (STOPS, "got a scalar at position 0"),
    "no input": (STOPS, "at least one tensor, got none"),
    "more inputs": ("got 1 here and 12 on ranks [1]", "got 12 here and 1 on ranks [0]"),
    "negative count": (STOPS, "`counts` must be at least 0, got [-1]"),
    "count of another kind": (STOPS, "`counts` must be a list of ints, got [1.5]"),
    "more counts": ("got 30 here and 40 on ranks [1]", "got 40 here and 30 on ranks [0]"),
    "another gather_dtype": (
        "`gather_dtype` must be equal on all ranks of the group, got None on ranks [0], "
        "torch.bfloat16 on ranks [1] of the group",
    )
    * 2,
    "another reduce_dtype": ("got torch.float32 on ranks [0], torch.float64 on ranks [1] of the group",) * 2,
    "more experts": ("number of `experts` must be equal on all ranks of the group, got 2 on ranks [0], 3 on ranks",)
    * 2,
}


@pytest.mark.parametrize("name", ONE_REFUSES)
def test_what_one_rank_refuses_all_refuse(outcome, name):
    world_size, results = outcome
    if world_size != 2:
        assert all("one refuses" not in result for result in results)
        return
    for result, text in zip(results, ONE_REFUSES[name], strict=True):
        kind, said = result["one refuses"][name]
        assert text in said
        assert (kind == "RuntimeError") == (text == STOPS)
