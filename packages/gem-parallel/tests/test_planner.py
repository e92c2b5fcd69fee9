"""Plans: sizes that add up, times by hand, placement against the runtime's, memory, what-ifs, sweeps, refusals."""

import json
import random
import time
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise

import pytest
import torch

from gem_parallel import Link, ParallelDims, TableConfig, Topology
from gem_parallel._src.embeddings.layout import make_shards
from gem_parallel._src.planner.network import Group, all_gather, all_reduce, all_to_all, reduce_scatter
from gem_parallel.planner import (
    CATEGORIES,
    DenseUnit,
    Hardware,
    ModelDescription,
    SparseTable,
    Workload,
    explain,
    layouts,
    pareto_front,
    place_tables,
    plan_record,
    sweep,
)

POD = Topology(
    gpus_per_host=4,
    hosts_per_zone=4,
    zones=2,
    host=Link(bandwidth=100, latency=10, per_message=1),
    zone=Link(bandwidth=10, latency=20, per_message=2),
    cluster=Link(bandwidth=1, latency=40, per_message=4),
)
H200 = Hardware.load()
H200_FILE = files("gem_parallel") / "_src" / "planner" / "nvidia-h200.json"


def make_model(num_units=4, num_tables=6, experts=1):
    units = [DenseUnit(name="", shapes=((64, 3),), reshard_after_forward=False)]
    for index in range(num_units):
        units.append(
            DenseUnit(
                name=f"unit{index}",
                shapes=((1024, 1024), (1024,)),
                gemm_flops=2e9,
                attention_flops=1e8,
                activation_bytes=1e5,
                num_experts=experts,
                expert_input_bytes=4096.0 if experts > 1 else 0.0,
                expert_output_bytes=2048.0 if experts > 1 else 0.0,
            )
        )
    tables = [
        SparseTable(name=f"table{index}", num_rows=10 ** (2 + index), dim=64, ids_per_sample=1 + index)
        for index in range(num_tables)
    ]
    return ModelDescription(name="test", units=tuple(units), tables=tuple(tables))


WORK = Workload(samples_per_rank=256)


@pytest.mark.parametrize("make", [all_gather, reduce_scatter, all_reduce, all_to_all])
@pytest.mark.parametrize(
    ("degree", "stride"), [(2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (4, 4), (8, 4), (2, 16), (16, 2)]
)
def test_tiers_add_up_to_the_payload(make, degree, stride):
    found = make("x", "forward", Group(axis="a", degree=degree, stride=stride), 1e6, POD)
    assert sum(found.tier_bytes) == pytest.approx(found.payload, rel=1e-12)
    assert found.payload == pytest.approx({all_reduce: 2}.get(make, 1) * 1e6 * (degree - 1) / degree)
    # What crosses a tier is what the group's ranks, looked at one by one, must send through it.
    ranks = [index * stride for index in range(degree)]
    hosts, zones = len({rank // 4 for rank in ranks}), len({rank // 16 for rank in ranks})
    assert (found.tier_bytes[2] > 0) == (zones > 1)
    assert (found.tier_bytes[1] > 0) == (hosts > zones)
    assert (found.tier_bytes[0] > 0) == (degree > hosts)


def test_times_by_hand():
    gather = all_gather("x", "forward", Group(axis="a", degree=8), 8e6, POD)
    # 4 in a host, 2 hosts: 6 MB at 100 GB/s beside 1 MB at 10 GB/s, after two rounds of 10 us and one of 20 us.
    assert gather.tier_bytes == (6e6, 1e6, 0)
    assert gather.seconds(POD) == pytest.approx(40e-6 + 1e-4)
    exchange = all_to_all("x", "forward", Group(axis="a", degree=32), 32e6, POD)
    # 3 MB in the host, 12 MB in the zone, 16 MB to the other zone, which pass the zone's link, too.
    assert exchange.tier_bytes == (3e6, 12e6, 16e6)
    assert exchange.busy(POD) == pytest.approx((3e-5, 28e-4, 16e-3))
    assert exchange.seconds(POD) == pytest.approx(16e-3 + (10 + 20 + 40 + 3 * 1 + 12 * 2 + 16 * 4) * 1e-6)


def random_tables(seed):
    generator = random.Random(seed)
    kinds = ("auto", "auto", "table_wise", "row_wise")
    return [
        SparseTable(
            name=f"t{index}",
            num_rows=generator.randint(1, 10 ** generator.randint(1, 5)),
            dim=4 * generator.randint(1, 32),
            kind=generator.choice(kinds),
        )
        for index in range(generator.randint(1, 20))
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_placement_is_that_of_the_runtime(seed, ranks):
    tables = random_tables(seed)
    shards = make_shards(
        [TableConfig(name=t.name, num_rows=t.num_rows, dim=t.dim, placement=t.kind) for t in tables], ranks
    )
    plan = place_tables(tables, ranks, WORK, H200)
    for rank in range(ranks):
        rows = [(shard.rows_of(rank), shard.config.dim) for shard in shards]
        assert plan.rest_bytes[rank] == pytest.approx(sum((end - start) * dim * 4 for (start, end), dim in rows))
        assert plan.state_bytes[rank] == pytest.approx(sum((end - start) * 4 for (start, end), _ in rows), abs=1e-6)
    for shard, placed in zip(shards, plan.placed, strict=True):
        if placed.kind == "table_wise":
            assert shard.rows_of(placed.owners[0]) == (0, placed.table.num_rows)
        else:
            assert sum(shard.rows_of(rank)[1] > shard.rows_of(rank)[0] for rank in range(ranks)) == placed.num_owners


def test_cost_balances_what_size_does_not():
    tables = [SparseTable(name="hot", num_rows=10**5, dim=64, ids_per_sample=50)]
    tables += [SparseTable(name=f"cold{index}", num_rows=10**6, dim=64, ids_per_sample=1) for index in range(16)]
    size = place_tables(tables, 8, WORK, H200)
    cost = place_tables(tables, 8, WORK, H200, strategy="cost")
    assert size.balance > 3
    assert cost.balance < 1.05
    assert next(each.kind for each in cost.placed if each.table.name == "hot") == "row_wise"
    assert sum(cost.served_bytes) == pytest.approx(sum(size.served_bytes))
    assert sum(cost.rest_bytes) == pytest.approx(sum(size.rest_bytes)) == sum(table.rest_bytes for table in tables)


def test_other_kinds():
    tables = [
        SparseTable(name="tiny", num_rows=10, dim=64, ids_per_sample=5),
        SparseTable(name="wide", num_rows=10**5, dim=1024, ids_per_sample=4),
        *(SparseTable(name=f"t{index}", num_rows=10**5, dim=64, ids_per_sample=20) for index in range(8)),
    ]
    plan = place_tables(
        tables, 4, WORK, H200, strategy="cost", kinds=("table_wise", "row_wise", "column_wise", "replicated")
    )
    kinds = {each.table.name: each for each in plan.placed}
    assert kinds["wide"].kind == "column_wise"
    assert kinds["wide"].owners == (0, 1, 2, 3)
    assert sum(plan.rest_bytes) == pytest.approx(sum(table.rest_bytes for table in tables))
    # Every owner of columns gets all the ids.
    ids = sum(256 * table.ids_per_sample for table in tables[2:]) + 4 * 1024 + 10
    assert plan.requested_ids == pytest.approx(ids)
    copied = place_tables([replace(tables[0], kind="replicated"), *tables[1:]], 4, WORK, H200)
    assert copied.replicated_bytes == 10 * (64 + 1) * 4  # a flag says whether a row was named
    assert sum(copied.rest_bytes) - sum(plan.rest_bytes) == pytest.approx(3 * tables[0].rest_bytes)


def test_no_more_distinct_ids_than_rows():
    plan = place_tables([SparseTable(name="t", num_rows=7, dim=4, ids_per_sample=3)], 1, WORK, H200)
    assert plan.requested_ids == 7


def test_memory_of_one_rank_by_hand():
    unit = DenseUnit(name="u", shapes=((10, 4),), activation_bytes=100.0)
    model = ModelDescription(
        name="m", units=(unit,), tables=(SparseTable(name="t", num_rows=50, dim=8, ids_per_sample=2),)
    )
    report = explain(model, Topology(gpus_per_host=1), ParallelDims(), Workload(samples_per_rank=3))
    moments = {moment.when: dict(zip(CATEGORIES, moment.bytes, strict=True)) for moment in report.memory.moments}
    backward = moments["backward u"]
    assert backward["dense weights"] == backward["dense gradients"] == 160
    assert backward["dense optimizer"] == 320
    assert backward["activations"] == 300
    assert backward["tables"] == 1600
    assert backward["table optimizer"] == 200
    assert backward["gathered parameters"] == 0
    # Six rows of eight float32 each and their gradients, and the ids twice.
    assert backward["embedding rows"] == 2 * 6 * 8 * 4 + 2 * 6 * 8
    assert report.memory.peak.total == max(moment.total for moment in report.memory.moments)
    assert report.memory.fits


def test_sharding_divides_memory_and_recomputation_frees_activations():
    model = make_model()
    one = explain(model, Topology(gpus_per_host=1), ParallelDims(), WORK)
    eight = explain(model, Topology(gpus_per_host=8), ParallelDims.for_world(8), WORK)
    index = CATEGORIES.index("dense weights")
    assert eight.memory.peak.bytes[index] == pytest.approx(one.memory.peak.bytes[index] / 8, rel=1e-3)
    less = explain(model, Topology(gpus_per_host=8), ParallelDims.for_world(8), replace(WORK, recompute=1.0))
    assert less.memory.peak.total < eight.memory.peak.total
    assert less.step.compute == pytest.approx(eight.step.compute + sum(eight.compute.forward))


@dataclass(frozen=True)
class Layout:
    id: str
    dims: ParallelDims
    experts: int = 1


LAYOUTS = [
    Layout("fsdp everywhere", ParallelDims.for_world(32)),
    Layout("replicas per zone", ParallelDims.for_world(32, dp_replicate=2)),
    Layout("experts", ParallelDims.for_world(32, dp_replicate=2, ep=4), experts=4),
    Layout("2d sparse", ParallelDims.for_world(32, dp_replicate=4, sparse_replicate=4)),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.id)
def test_the_parts_of_a_step_add_up(case):
    work = Workload(samples_per_rank=256, imbalance=1.1, contention=0.15)
    report = explain(make_model(experts=case.experts), POD, case.dims, work)
    assert sum(report.losses().values()) == pytest.approx(report.step.seconds, rel=1e-9)
    assert report.mfu == pytest.approx(report.local_mfu * report.scaling_ratio)
    assert 0 < report.mfu < report.local_mfu < 1
    assert report.step.seconds >= report.compute.total
    # No shorter than what any link must carry, no longer than everything one after the other.
    busy = [sum(seconds) for seconds in zip(*(each.busy(POD) for each in report.collectives), strict=True)]
    assert report.step.seconds >= max(busy)
    assert report.step.seconds <= report.step.compute + 1e-3 + sum(each.seconds(POD) for each in report.collectives)
    lanes = [each for each in report.step.intervals if each.lane == "compute"]
    assert all(a.end <= b.start + 1e-12 for a, b in pairwise(lanes))
    sent = {each.name for each in report.step.intervals if each.lane != "compute"}
    assert sent == {each.name for each in report.collectives} | {"gradient norm"}
    assert len([i for i in report.step.intervals if i.lane != "compute"]) == len(report.collectives) + 1


def test_replicas_across_zones_keep_gathers_inside():
    flat = explain(make_model(), POD, LAYOUTS[0].dims, WORK)
    zoned = explain(make_model(), POD, LAYOUTS[1].dims, WORK)

    def crossing(report):
        return sum(each.tier_bytes[2] for each in report.collectives if each.axis != "sparse_shard")

    assert all(each.tier == "cluster" for each in flat.collectives if each.kind == "all_gather")
    assert all(each.tier == "zone" for each in zoned.collectives if each.kind == "all_gather")
    assert crossing(zoned) < crossing(flat)


def test_ep_divides_the_experts_parameters():
    model = make_model(experts=4)
    plain = explain(model, POD, ParallelDims.for_world(32, dp_replicate=2), WORK)
    cut = explain(model, POD, ParallelDims.for_world(32, dp_replicate=2, ep=4), WORK)

    def gathered(report):
        return sum(each.payload for each in report.collectives if each.kind == "all_gather" and each.axis != "ep")

    # A quarter of the elements, of which a rank of 4 gathers 3/4 from others, a rank of 16 gathers 15/16.
    assert gathered(cut) == pytest.approx(gathered(plain) / 4 * (3 / 4) / (15 / 16), rel=0.01)
    assert {each.tier for each in cut.collectives if each.axis == "ep"} == {"host"}


def test_the_limiting_term_follows_what_is_slow():
    model = make_model(num_units=12)
    slow_links = replace(POD, zone=Link(bandwidth=2, latency=1), cluster=Link(bandwidth=1, latency=1))
    few = replace(WORK, samples_per_rank=16)
    assert explain(model, slow_links, LAYOUTS[1].dims, few).terms[0].name == "links inside zones"
    fast = replace(POD, host=Link(bandwidth=1e5, latency=0), zone=Link(bandwidth=1e5, latency=0))
    fast = replace(fast, cluster=Link(bandwidth=1e5, latency=0))
    assert explain(model, fast, LAYOUTS[1].dims, WORK).terms[0].name == "dense compute"


def test_changes_keep_what_they_promise():
    model = make_model(num_units=12)
    work = replace(WORK, samples_per_rank=16, imbalance=1.3)
    report = explain(model, POD, LAYOUTS[0].dims, work)
    assert report.changes
    assert all(change.seconds < report.step.seconds for change in report.changes)
    names = [change.name for change in report.changes]
    assert "gather parameters in bfloat16" in names
    half = explain(model, POD, LAYOUTS[0].dims, replace(work, gather_bytes=2), changes=False)
    promised = next(change for change in report.changes if change.name == "gather parameters in bfloat16")
    assert promised.seconds == half.step.seconds
    # A layout that leaves its tier is not proposed.
    assert "dp_replicate 2, dp_shard 16" in names
    assert not any("ep 2" in name for name in names)


def test_sweep_and_front():
    model = make_model(experts=4)
    reports = sweep(model, POD, WORK, recompute=(0.0, 1.0))
    dense, sparse = layouts(model, POD)
    assert {report.dims.ep for report in reports} == {1, 2, 4}
    assert {report.dims.sparse_replicate for report in reports} == {1, 2, 4}
    assert len(reports) == len(dense) * len(sparse) * 2 * 2
    for report in reports:
        report.dims.check(POD)
    front = pareto_front(reports)
    assert front[0].step.seconds == min(report.step.seconds for report in reports)
    assert front[-1].memory.peak.total == min(report.memory.peak.total for report in reports)
    for report in reports:
        assert any(
            best.step.seconds <= report.step.seconds and best.memory.peak.total <= report.memory.peak.total
            for best in front
        )


def test_sweep_leaves_out_what_cannot_be_placed():
    table = SparseTable(name="t", num_rows=3 * 2**31, dim=4, kind="table_wise")
    model = replace(make_model(), tables=(table,))
    host = Topology(gpus_per_host=4)
    reports = sweep(model, host, WORK)
    assert {report.dims.sparse_replicate for report in reports} == {4}
    with pytest.raises(ValueError, match="table 't' must have at most"):
        sweep(model, Topology(gpus_per_host=2), WORK)


def test_8192_ranks_in_time():
    pod = Topology(gpus_per_host=8, hosts_per_zone=32, zones=32)
    start = time.monotonic()
    report = explain(
        make_model(num_units=48, num_tables=6, experts=8),
        pod,
        ParallelDims.for_world(8192, dp_replicate=32, ep=8, sparse_replicate=8),
        WORK,
    )
    assert time.monotonic() - start < 10
    assert len(report.tables.served_bytes) == 1024


def test_record_is_json_and_complete():
    report = explain(make_model(), POD, LAYOUTS[3].dims, WORK)
    record = json.loads(json.dumps(plan_record(report)))
    assert record["schema"] == 2
    assert set(record) == {
        "schema",
        "model",
        "ranks",
        "dims",
        "placement",
        "topology",
        "workload",
        "hardware",
        "tables",
        "memory",
        "collectives",
        "step",
        "mfu",
        "limiting",
        "changes",
    }
    assert record["step"]["seconds"] == report.step.seconds
    assert all(rate["source"] for rate in record["hardware"]["gemm"])
    assert {each["axis"] for each in record["collectives"]} >= {"dp_shard", "dp_replicate", "sparse_shard"}


def test_rates_between_measured_widths():
    (low, slow), (high, fast) = H200.gemm[0], H200.gemm[1]
    assert H200.gemm_rate(low) == slow.value
    assert H200.gemm_rate(low // 2) == slow.value / 2
    assert slow.value < H200.gemm_rate((low + high) // 2) < fast.value
    assert H200.gemm_rate(10**6) == H200.gemm[-1][1].value
    (narrow, forward), (wide, faster) = H200.attention_forward[0], H200.attention_forward[-1]
    assert H200.attention_rates(narrow) == (forward.value, H200.attention_backward[0][1].value)
    assert H200.attention_rates(2 * wide)[0] == faster.value


def test_bad_rates(tmp_path):
    path = tmp_path / "rates.json"
    for text, message in (
        ('{"name": "x"}', r"must hold the fields activation_passes, .*, peak_flops, got none of activation_passes, "),
        (
            json.dumps(json.loads(H200_FILE.read_text()) | {"extra": 1}),
            r"must hold the fields .*, got unknown extra; add what is missing",
        ),
        (
            '{"peak_flop": 1, "x": 2}',
            r"must .*, got unknown peak_flop \(did you mean peak_flops\?\), x and none of activation_passes, ",
        ),
        ("[]", r"must hold a JSON object with a field for each rate, got a list; begin with a copy of .*nvidia-h200"),
        ("null", r"must hold a JSON .* got a null; begin"),
        ("{", r"must be valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"^Hardware\.load: .*rates\.json {message}"):
            Hardware.load(path)
    with pytest.raises(TypeError, match=r"Hardware\.load: `path` must be a path or None, got list \[\]; name a .json"):
        Hardware.load([])
    values = json.loads(H200_FILE.read_text())
    values["copy"] = {"value": 1e12, "source": ""}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="`source` must say where"):
        Hardware.load(path)
    values["attention_backward"] = [values["gemm"][0]] * 2
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="`source` must say where"):
        Hardware.load(path)
    values["copy"] = {"value": 1e12, "source": "x"}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="`attention_backward` must hold rates at different widths, got 2"):
        Hardware.load(path)
    values["copy"] = {"value": 1e12}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="every rate must hold value and source"):
        Hardware.load(path)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DenseUnit(name="u", shapes=((),)), ValueError, "none of them empty"),
        (lambda: DenseUnit(name="u", shapes=((2,),), gemm_flops=-1), ValueError, "`gemm_flops` must be finite and at"),
        (lambda: DenseUnit(name="u", shapes=((2,),), num_experts=0), ValueError, "`num_experts` must be finite and at"),
        (
            lambda: DenseUnit(name="u", shapes=((2,),), attention_width=0),
            ValueError,
            "`attention_width` must be finite",
        ),
        (lambda: SparseTable(name="t", num_rows=0, dim=4), ValueError, "`num_rows` must be finite and at least 1"),
        (lambda: SparseTable(name="t", num_rows=1, dim=4, unique_fraction=2), ValueError, "must be at most 1, got 2"),
        (lambda: SparseTable(name="t", num_rows=1, dim=4, kind="x"), ValueError, "`kind` must be one of auto"),
        (
            lambda: SparseTable(name="t", num_rows=1, dim=6),
            ValueError,
            "multiple of 4 and at most 1024 .* got 6; use 8",
        ),
        (lambda: SparseTable(name="t", num_rows=1, dim=3000), ValueError, "got 3000; split the columns over 3 tables"),
        (
            lambda: explain(
                replace(make_model(), tables=(SparseTable(name="t", num_rows=5 * 2**31, dim=4),)),
                Topology(gpus_per_host=1),
                ParallelDims(),
                WORK,
            ),
            ValueError,
            "table 't' must have at most 2147483646 rows on one rank .* cut it by rows over 6 ranks or more",
        ),
        (lambda: SparseTable(name="t", num_rows=1.5, dim=4), TypeError, "`num_rows` must be an int, got float"),
        (lambda: ModelDescription(name="m", units=()), ValueError, "at least one DenseUnit"),
        (lambda: ModelDescription(name="m", units=(1,)), TypeError, "must be a tuple of DenseUnit"),
        (lambda: Workload(samples_per_rank=0), ValueError, "`samples_per_rank` must be finite and at least 1"),
        (lambda: Workload(samples_per_rank=1, imbalance=0.5), ValueError, "`imbalance` must be finite and at least 1"),
        (lambda: Workload(samples_per_rank=1, recompute=2), ValueError, "`recompute` must be below 1 or 1, got 2"),
        (lambda: Workload(samples_per_rank=1, table_gather="x"), ValueError, "`table_gather` must be one of tables"),
        (lambda: Workload(samples_per_rank=1, gather_bytes=3), ValueError, "`gather_bytes` must be 1, 2 or 4, got 3"),
        (lambda: explain(make_model(), POD, ParallelDims(), WORK), ValueError, "as many GPUs as `dims` has ranks, 1"),
        (
            lambda: explain(make_model(experts=2), POD, LAYOUTS[2].dims, WORK),
            ValueError,
            "`dims.ep` must be at most the 2 experts",
        ),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_more_gpus_than_a_plan_is_made_for_are_refused_at_once():
    model = ModelDescription(name="m", units=(DenseUnit(name="u", shapes=((4, 4),)),), tables=())
    topology = Topology(hosts_per_zone=2, zones=10**8)
    workload = Workload(samples_per_rank=1)
    text = "`topology` must have at most 65,536 GPUs, got 1,600,000,000; plan a smaller cluster"
    with pytest.raises(ValueError, match=text):
        explain(model, topology, ParallelDims.for_world(topology.num_gpus), workload)
    with pytest.raises(ValueError, match=text):
        sweep(model, topology, workload)
    with pytest.raises(ValueError, match=r"`samples_per_rank` must be at most 2,147,483,646, got 1,000,000,000,000"):
        Workload(samples_per_rank=10**12)
    with pytest.raises(ValueError, match="positive multiple of dp_replicate"):
        ParallelDims.for_world(10**12, dp_replicate=7)


def test_repeated_names_are_refused():
    unit = DenseUnit(name="u", shapes=((2,),))
    with pytest.raises(ValueError, match=r"names in `units` must be unique, got \['u'\] twice"):
        ModelDescription(name="m", units=(unit, unit))


def test_nothing_touches_torch():
    """A plan is arithmetic: it leaves no process group and draws no random number."""
    state = torch.get_rng_state()
    explain(make_model(), POD, LAYOUTS[0].dims, WORK)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.distributed.is_initialized()


def test_column_shards_are_those_of_the_runtime():
    tables = [
        SparseTable(name="a", num_rows=1000, dim=64, kind="table_wise"),
        SparseTable(name="b", num_rows=300, dim=24, kind="column_wise"),
        SparseTable(name="c", num_rows=500, dim=32, kind="row_wise"),
        SparseTable(name="d", num_rows=20, dim=8, kind="replicated"),
    ]
    shards = make_shards(
        [TableConfig(name=t.name, num_rows=t.num_rows, dim=t.dim, placement=t.kind) for t in tables], 4
    )
    plan = place_tables(tables, 4, WORK, H200)
    for rank in range(4):
        spans = [(shard.rows_of(rank), shard.dim) for shard in shards]
        assert plan.rest_bytes[rank] == pytest.approx(sum((end - start) * dim * 4 for (start, end), dim in spans))


def test_copies_keep_slices():
    model = make_model()
    one = explain(model, POD, ParallelDims.for_world(32, dp_replicate=2), WORK)
    four = explain(model, POD, ParallelDims.for_world(32, dp_replicate=2, sparse_replicate=4), WORK)
    at = CATEGORIES.index("tables")
    # The same bytes at rest whatever the number of copies, up to imbalance; the gathered copies come and go.
    assert four.memory.peak.bytes[at] < 1.5 * one.memory.peak.bytes[at]
    copies = [moment.bytes[CATEGORIES.index("table copies")] for moment in four.memory.moments]
    assert copies[0] > 0
    assert set(copies[1:]) == {0.0}
    fetched = explain(
        model, POD, ParallelDims.for_world(32, dp_replicate=2, sparse_replicate=4), replace(WORK, table_gather="rows")
    )
    assert all(moment.bytes[CATEGORIES.index("table copies")] == 0 for moment in fetched.memory.moments)
    names = {each.name for each in fetched.collectives}
    assert "rows between copies" in names
    assert "table slices" not in names
    assert {each.tier for each in four.collectives if each.axis == "sparse_replicate"} == {"host"}
    exchanged = [each for each in four.collectives if each.name == "rows"]
    assert exchanged[0].tier_messages[1] < 8  # one rank per host of a zone, where one copy has all of them
