"""The plan's bytes are those that ranks send: every collective of a step is counted, on two and on four ranks."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from param_wires import ByteWire
from recorder import Recorder
from torch import nn

from gem_parallel import (
    FeatureConfig,
    ParallelDims,
    ParallelPlan,
    ShardedEmbeddings,
    SparseOptimizerConfig,
    TableConfig,
    Topology,
    grad_norm,
    parallelize,
)
from gem_parallel._src.collectives.base import DefaultCollectives
from gem_parallel.experts import ExpertParallel
from gem_parallel.planner import DenseUnit, ModelDescription, SparseTable, Workload, explain, plan_record

pytestmark = pytest.mark.dist
SAMPLES = 16


@dataclass(frozen=True)
class Case:
    id: str
    dims: ParallelDims
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    sizes: dict = field(default_factory=lambda: {"gather_bytes": 4, "reduce_bytes": 4})
    wire: ByteWire | None = None


CASES = [
    Case("fsdp 2", ParallelDims.for_world(2)),
    Case("replicas 2", ParallelDims.for_world(2, dp_replicate=2)),
    Case("fsdp 4", ParallelDims.for_world(4)),
    Case("hsdp 2x2", ParallelDims.for_world(4, dp_replicate=2)),
    Case("fsdp 2 beside ep 2", ParallelDims.for_world(4, ep=2)),
    Case(
        "bf16 gathers, fp32 sums",
        ParallelDims.for_world(4),
        torch.bfloat16,
        torch.float32,
        {"gather_bytes": 2, "reduce_bytes": 4},
    ),
    Case("wire 2", ParallelDims.for_world(2), wire=ByteWire()),
    Case("wire 4 in blocks of 3", ParallelDims.for_world(4), wire=ByteWire(rows_per_block=3)),
    Case(
        "wire hsdp 2x2, bf16",
        ParallelDims.for_world(4, dp_replicate=2),
        torch.bfloat16,
        torch.float32,
        {"gather_bytes": 2, "reduce_bytes": 4},
        ByteWire(),
    ),
]
TABLES = (
    # name, rows, dim, ids of a sample, distinct ids of a rank's batch, pooling
    SparseTable(name="user", num_rows=64, dim=8, ids_per_sample=4, unique_fraction=0.5, kind="row_wise", pooling="sum"),
    SparseTable(name="ad", num_rows=40, dim=8, ids_per_sample=2, unique_fraction=0.25, kind="table_wise"),
    SparseTable(name="page", num_rows=16, dim=8, ids_per_sample=1, unique_fraction=1, kind="table_wise"),
    SparseTable(name="word", num_rows=32, dim=16, ids_per_sample=1, unique_fraction=0.5, kind="row_wise"),
)


class Net(nn.Module):
    """Odd sizes, a parameter of fewer rows than ranks, and parameters that only the root owns."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3, bias=False))
        self.gain = nn.Parameter(torch.ones(1, 3))

    def forward(self, x):
        return self.second(self.first(x)) * self.gain


def describe(net, tables, *more):
    def shapes(module):
        return tuple(tuple(parameter.shape) for parameter in module.parameters())

    units = (
        DenseUnit(name="", shapes=(tuple(net.gain.shape),), reshard_after_forward=False),
        DenseUnit(name="first", shapes=shapes(net.first)),
        DenseUnit(name="second", shapes=shapes(net.second)),
        *more,
    )
    return ModelDescription(name="net", units=units, tables=tables)


def rank_dense(rank, world_size, folder):
    results = {}
    for case in CASES:
        if case.dims.world_size != world_size:
            continue
        torch.manual_seed(0)
        net = Net()
        plan = ParallelPlan(
            shard_units=("first", "second"),
            param_dtype=case.param_dtype,
            reduce_dtype=case.reduce_dtype,
            param_wire=case.wire,
        )
        net = parallelize(net, plan, case.dims.build_mesh("cpu"))
        with Recorder() as recorder:
            for _ in range(2):
                net(torch.randn(3, 5)).float().sum().backward()
        results[case.id] = recorder.calls
    return results


def make_tables(mesh, **options):
    """(TABLES over a mesh, ids of one rank's batch)"""
    tables = [TableConfig(name=t.name, num_rows=t.num_rows, dim=t.dim, placement=t.kind) for t in TABLES]
    features = [FeatureConfig(name=t.name, table=t.name, pooling=t.pooling) for t in TABLES]
    embeddings = ShardedEmbeddings(tables, features, optimizer=SparseOptimizerConfig(), mesh=mesh, **options)
    ids = {}
    for table in TABLES:
        count = int(SAMPLES * table.ids_per_sample)
        distinct = int(count * table.unique_fraction)
        # Equally many of every rank's rows, and repeated.
        values = (torch.arange(count) % distinct) * (table.num_rows // distinct)
        ids[table.name] = (values, torch.arange(0, count + 1, int(table.ids_per_sample)))
    return embeddings, ids


def rank_sparse(rank, world_size, folder, replicas, gather, wire_dtype):
    mesh = ParallelDims.for_world(world_size, sparse_replicate=replicas).build_mesh("cpu").sparse
    embeddings, ids = make_tables(mesh, gather=gather, wire_dtype=wire_dtype)
    with Recorder() as recorder:
        outputs = embeddings.lookup(embeddings.exchange(ids))
        sum(output.sum() for output in outputs.values()).backward()
    return recorder.calls


@pytest.fixture(scope="module", params=[2, 4])
def dense(request, ranks):
    return request.param, ranks("rank_dense", request.param)


GRIDS = [
    # ranks, copies, what is gathered, bytes of an element on the wire
    (2, 1, "tables", 4),
    (4, 1, "tables", 2),
    (4, 2, "tables", 4),
    (4, 2, "rows", 2),
    (2, 2, "tables", 4),
]


@pytest.fixture(scope="module", params=GRIDS, ids=lambda param: "{}, {} copies, {}, {} bytes".format(*param))
def sparse(request, ranks):
    world_size, replicas, gather, row_bytes = request.param
    dims = ParallelDims.for_world(world_size, sparse_replicate=replicas)
    dtype = {4: torch.float32, 2: torch.bfloat16}[row_bytes]
    results = ranks("rank_sparse", world_size, replicas=replicas, gather=gather, wire_dtype=dtype)
    return dims, predict(dims, TABLES, table_gather=gather, row_bytes=row_bytes), results


def predict(dims, tables=(), **sizes):
    model = describe(Net(), tables)
    workload = Workload(samples_per_rank=SAMPLES, **sizes)
    return explain(model, Topology(gpus_per_host=dims.world_size), dims, workload)


def test_dense_bytes(dense):
    world_size, results = dense
    for case in (case for case in CASES if case.dims.world_size == world_size):
        report = predict(case.dims, param_wire=case.wire, **case.sizes)
        expected = sorted((each.kind, each.payload) for each in report.collectives)
        for calls in (result[case.id] for result in results):
            # Two steps, each of which sends what was predicted for one.
            assert sorted((kind, sent) for kind, sent, _ in calls) == sorted(expected * 2), case.id


def test_the_prediction_depends_on_padding():
    """Bytes without padding would differ, so that equality above means something."""
    report = predict(ParallelDims.for_world(4))
    gather = next(each for each in report.collectives if each.name == "first parameters" and each.when == "forward")
    assert gather.payload == 4 * (8 * 5 + 8) * 3 / 4
    assert gather.payload != 4 * (7 * 5 + 7) * 3 / 4


def test_the_prediction_depends_on_the_wire():
    """Of rows that a byte is the element of, and on four ranks only where a shard's rows are whole blocks."""

    def payload(unit, **work):
        report = predict(ParallelDims.for_world(4), **work)
        (gather,) = (
            each for each in report.collectives if each.name == f"{unit} parameters" and each.when == "forward"
        )
        return gather.payload

    # (7, 5), (7,): two rows of five elements and two bytes each a rank; biases as they are.
    assert payload("first", param_wire=ByteWire()) == 3 * (2 * 7 + 2 * 4)
    assert payload("first", param_wire=ByteWire(rows_per_block=3)) == payload("first") == 3 * (2 * 5 + 2) * 4
    # (9, 7), (9,), (3, 9): three rows a rank are a block, one is not.
    assert payload("second", param_wire=ByteWire(rows_per_block=3)) == 3 * (3 * 9 + 3 * 4 + 9 * 4)
    wired = predict(ParallelDims.for_world(4), param_wire=ByteWire())
    assert "casts of parameters on the wire" in wired.losses()
    assert sum(wired.losses().values()) == pytest.approx(wired.step.seconds)
    assert wired.compute.wire > 0 == predict(ParallelDims.for_world(4)).compute.wire
    assert plan_record(wired)["workload"]["param_wire"] == "byte"


def test_a_wire_is_a_change_where_gathers_are_waited_for():
    unit = DenseUnit(name="wide", shapes=((8192, 8192),), gemm_flops=1e6)
    model = ModelDescription(name="wide", units=(unit,))
    dims = ParallelDims.for_world(64)
    work = Workload(samples_per_rank=1, gather_bytes=2)
    report = explain(model, Topology(hosts_per_zone=8), dims, work, wires=(ByteWire(),))
    (found,) = (change for change in report.changes if change.name == "gather parameters as byte")
    assert found.seconds < 0.95 * report.step.seconds
    wired = explain(model, Topology(hosts_per_zone=8), dims, replace(work, param_wire=ByteWire()), wires=(ByteWire(),))
    assert wired.step.seconds == found.seconds
    assert not any("byte" in change.name for change in wired.changes)


def by_kind(calls, kind):
    return [(sent, received) for found, sent, received in calls if found == kind]


def test_sparse_bytes(sparse):
    dims, report, results = sparse
    expected = report.sparse.all()
    assert {each.axis for each in expected} == {
        axis for axis in ("sparse_shard", "sparse_replicate") if getattr(dims, axis) > 1
    }
    for kind in {each.kind for each in expected}:
        planned = [each for each in expected if each.kind == kind]
        calls = [by_kind(each, kind) for each in results]
        assert all(len(each) == len(calls[0]) for each in calls)
        # Table-wise rows make ranks unequal: the plan has the mean of what is sent and the longest of what is gathered.
        if kind == "all_to_all":
            total = sum(sent for each in calls for sent, _ in each)
            assert total == pytest.approx(dims.world_size * sum(each.payload for each in planned), rel=1e-12)
            if dims.sparse_shard > 1:  # a group of one calls, and sends nothing
                assert len(calls[0]) == sum(sum(each.tier_rounds) for each in planned)
        else:
            assert max(sum(sent for sent, _ in each) for each in calls) == sum(each.payload for each in planned)
    assert sum(len(each) for each in results) == sum(
        len(by_kind(each, kind)) for each in results for kind in ("all_to_all", "all_gather")
    )


def test_what_each_rank_serves(sparse):
    dims, report, results = sparse
    plan, replicas = report.tables, dims.sparse_replicate
    if dims.sparse_shard == 1:
        return
    assert len(set(plan.served_bytes)) > 1, "ranks should differ"
    for rank, calls in enumerate(results):
        shard = rank // replicas
        # Calls in order: counts, ids of both dims, rows of both, gradients of both; those between copies in between.
        received = [size for _, size in by_kind(calls, "all_to_all")]
        if replicas == 1:
            ids, rows, gradients = sum(received[1:3]), sum(received[3:5]), sum(received[5:7])
            assert ids == 8 * plan.served_ids[shard]
            assert 4 * rows == report.workload.row_bytes * plan.requested_bytes
            assert 4 * gradients == report.workload.row_bytes * plan.served_bytes[shard]
        else:
            assert sum(received[2:4]) == 8 * plan.served_ids[shard]


def test_replicated_tables(ranks):
    report = predict(ParallelDims.for_world(2), (replace(TABLES[0], kind="replicated"),))
    (planned,) = report.sparse.all()
    for calls in ranks("rank_copied", 2):
        assert [(kind, sent) for kind, sent, _ in calls if kind == "all_reduce"] == [("all_reduce", planned.payload)]


def rank_copied(rank, world_size, folder):
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu").sparse
    table = TableConfig(name="user", num_rows=64, dim=8, placement="replicated")
    embeddings = ShardedEmbeddings(
        [table], [FeatureConfig(name="user", table="user")], optimizer=SparseOptimizerConfig(), mesh=mesh
    )
    with Recorder() as recorder:
        outputs = embeddings.lookup(embeddings.exchange({"user": (torch.arange(64), torch.arange(65))}))
        outputs["user"].sum().backward()
    return recorder.calls


class Counting(DefaultCollectives):
    """The default engine, counting like Recorder."""

    def __init__(self):
        self.calls = []

    def all_gather(self, output, tensor, group, **options):
        self.calls.append(("all_gather", output.nbytes - tensor.nbytes, output.nbytes))
        return super().all_gather(output, tensor, group, **options)

    def reduce_scatter(self, output, tensor, group, **options):
        self.calls.append(("reduce_scatter", tensor.nbytes - output.nbytes, output.nbytes))
        return super().reduce_scatter(output, tensor, group, **options)


def rank_experts(rank, world_size, folder):
    mesh = ParallelDims.for_world(world_size, ep=world_size).build_mesh("cpu")
    counting = Counting()
    layer = ExpertParallel([nn.Linear(6, 3) for _ in range(world_size)], mesh.ep_group, collectives=counting)
    x = torch.ones(SAMPLES, 6, requires_grad=True)
    layer(x, rows=[[SAMPLES] * world_size]).sum().backward()
    return counting.calls


def test_expert_bytes(ranks):
    unit = DenseUnit(
        name="e", shapes=((3, 6), (3,)), num_experts=2, expert_input_bytes=6 * 4, expert_output_bytes=3 * 4
    )
    model = ModelDescription(name="experts", units=(unit,))
    dims = ParallelDims.for_world(2, ep=2)
    report = explain(model, Topology(gpus_per_host=2), dims, Workload(samples_per_rank=SAMPLES))
    expected = sorted((each.kind, each.payload) for each in report.collectives)
    assert len(expected) == 4
    for calls in ranks("rank_experts", 2):
        assert sorted((kind, sent) for kind, sent, _ in calls) == expected


class WithExperts(Net):
    """Experts between the two units, and tables beside them."""

    def __init__(self, mesh):
        super().__init__()
        self.tables, self.ids = make_tables(mesh.sparse)
        self.counting = Counting()
        self.experts = ExpertParallel([nn.Linear(7, 7) for _ in range(4)], mesh.ep_group, collectives=self.counting)

    def forward(self, x):
        ep = self.experts.degree
        return self.second(self.experts(self.first(x), rows=[[len(x)] * ep])) * self.gain


ALL_FIVE = ParallelDims.for_world(8, dp_replicate=2, ep=2, sparse_replicate=2)


def rank_all_five(rank, world_size, folder):
    torch.manual_seed(0)
    mesh = ALL_FIVE.build_mesh("cpu")
    net = parallelize(WithExperts(mesh), ParallelPlan(shard_units=("first", "second")), mesh)
    phases = []
    for _ in range(2):
        with Recorder() as recorder:
            rows = net.tables.lookup(net.tables.exchange(net.ids))
        with Recorder() as rest:
            (net(torch.randn(SAMPLES, 5)).sum() + sum(each.sum() for each in rows.values())).backward()
        with Recorder() as norm:
            grad_norm(net.parameters(), mesh)
        phases.append((recorder.calls, rest.calls + net.counting.calls, norm.calls))
        net.counting.calls = []
    return phases


def test_all_five_axes_at_once(ranks):
    """8 ranks: number and bytes of everything that a step sends, dense, experts' and tables' together."""
    experts = DenseUnit(
        name="experts", shapes=((7, 7), (7,)), num_experts=4, expert_input_bytes=28, expert_output_bytes=28
    )
    model = describe(Net(), TABLES, experts)
    sizes = {"gather_bytes": 4, "reduce_bytes": 4}
    report = explain(model, Topology(gpus_per_host=8), ALL_FIVE, Workload(samples_per_rank=SAMPLES, **sizes))
    sparse = report.sparse.all()
    dense = sorted((each.kind, each.payload) for each in report.collectives if each not in sparse)
    axes = {"dp_replicate", "dp_shard", "dp_shard_ep", "ep", "sparse_shard", "sparse_replicate"}
    assert {each.axis for each in report.collectives} == axes
    results = ranks("rank_all_five", 8)
    for step in range(2):
        exchanged, gathered = [], []
        for lookup, rest, norm in (result[step] for result in results):
            assert sorted((kind, sent) for kind, sent, _ in rest if kind != "all_to_all") == dense
            # one number, over dp_shard x ep
            assert [(kind, sent) for kind, sent, _ in norm] == [("all_reduce", 2 * 8 * 3 / 4)]
            exchanged.append(by_kind(lookup + rest, "all_to_all"))
            gathered.append(by_kind(lookup, "all_gather"))
            assert len(lookup) == len(by_kind(lookup, "all_to_all")) + len(gathered[-1])
        planned = [each for each in sparse if each.kind == "all_to_all"]
        # Table-wise rows make ranks unequal: the plan has the mean of what is sent, the longest of what is gathered.
        total = sum(sent for each in exchanged for sent, _ in each)
        assert total == pytest.approx(8 * sum(each.payload for each in planned), rel=1e-12)
        assert {len(each) for each in exchanged} == {sum(sum(each.tier_rounds) for each in planned)}
        slices = [each.payload for each in sparse if each.kind == "all_gather"]
        assert max(sum(sent for sent, _ in each) for each in gathered) == sum(slices)
