"""Plans of tables in host memory: bytes by hand and against the runtime's cuts, times, choice, refusals."""

from dataclasses import replace

import pytest

from gem_parallel import ParallelDims, TableConfig, Topology
from gem_parallel._src.embeddings.layout import make_shards
from gem_parallel._src.embeddings.memory import cache_bytes
from gem_parallel.planner import (
    CATEGORIES,
    DenseUnit,
    Hardware,
    ModelDescription,
    Rate,
    SparseTable,
    Workload,
    explain,
    place_tables,
    plan_record,
    sweep,
)

WORK = Workload(samples_per_rank=256)
H200 = Hardware.load()
HOST = Topology(gpus_per_host=4)


def hardware(device, host=1e15):
    return replace(
        H200, memory_bytes=Rate(value=device, source="test"), host_memory_bytes=Rate(value=host, source="test")
    )


def model_of(*tables, activation_bytes=100.0):
    return ModelDescription(
        name="m", units=(DenseUnit(name="u", shapes=((10, 4),), activation_bytes=activation_bytes),), tables=tables
    )


def one(table, **options):
    return explain(model_of(table), Topology(gpus_per_host=1), ParallelDims(), replace(WORK, **options))


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
@pytest.mark.parametrize("location", ["device", "uvm", "uvm_caching"])
def test_memory_by_hand(location, optimizer):
    """Weights of 100,000 x 16; a tenth cached: 10,016 places of a row and 16 bytes, 4 bytes per row of the table."""
    # fbgemm has no cache of float16 weights under adam.
    weight = 4 if optimizer == "adam" else 2
    table = SparseTable(
        name="t",
        num_rows=10**5,
        dim=16,
        weight_bytes=weight,
        location=location,
        cache_load_factor=0.1 if location == "uvm_caching" else None,
    )
    report = one(table, sparse_optimizer=optimizer)
    peak = dict(zip(CATEGORIES, report.memory.moments[-1].bytes, strict=True))
    state = {"sgd": 0, "rowwise_adagrad": 4, "adagrad": 64, "adam": 128}[optimizer] * 10**5
    state_on_device = location == "device" or optimizer == "rowwise_adagrad"
    assert peak["tables"] == (1_600_000 * weight if location == "device" else 0)
    assert peak["table caches"] == (10_016 * (16 * weight + 16) + 400_000 if location == "uvm_caching" else 0)
    assert peak["table optimizer"] == (state if state_on_device else 0)
    assert report.memory.host_bytes == (location != "device") * (1_600_000 * weight + (0 if state_on_device else state))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_caches_are_those_of_the_runtime(ranks):
    """What the planner counts on a rank is what the module's engines take there, but for the last set of a cache."""
    options = {"location": "uvm_caching", "cache_load_factor": 0.05}
    tables = [
        SparseTable(name="a", num_rows=100_000, dim=64, kind="table_wise", **options),
        SparseTable(name="b", num_rows=300_000, dim=24, kind="column_wise", **options),
        SparseTable(name="c", num_rows=500_001, dim=32, kind="row_wise", cache_algorithm="lfu", **options),
        SparseTable(name="d", num_rows=20, dim=8),
    ]
    plan = place_tables(tables, ranks, replace(WORK, sparse_optimizer="adagrad"), H200)
    configs = [
        TableConfig(
            name=t.name,
            num_rows=t.num_rows,
            dim=t.dim,
            placement=t.kind,
            location=t.location,
            cache_load_factor=t.cache_load_factor,
            cache_algorithm=t.cache_algorithm,
        )
        for t in tables
    ]
    shards = make_shards(configs, ranks)
    for rank in range(ranks):
        rows = [(shard, shard.rows_of(rank)[1] - shard.rows_of(rank)[0]) for shard in shards]
        expected = sum(cache_bytes(count, shard.dim, 4, shard.config.memory) for shard, count in rows if count)
        assert plan.cache_bytes[rank] == pytest.approx(expected, rel=0.01)
        weights = sum(count * shard.dim * 4 for shard, count in rows if shard.config.location != "device")
        assert plan.host_rest_bytes[rank] == pytest.approx(weights)
        assert plan.host_state_bytes[rank] == pytest.approx(weights)


def test_times_by_hand():
    """A batch of 512 distinct rows of 16 float32; the cache has a quarter of them."""
    device = SparseTable(name="t", num_rows=10**5, dim=16, ids_per_sample=2)
    reports = {
        name: one(table, sparse_optimizer="adam").compute
        for name, table in {
            "device": device,
            "uvm": replace(device, location="uvm"),
            "even": replace(device, location="uvm_caching", cache_load_factor=0.25),
            "told": replace(device, location="uvm_caching", cache_hit_rate=1.0),
        }.items()
    }
    rows = 512 * 16 * 4
    read, update = (getattr(H200, name).value for name in ("host_read", "host_update"))
    added = {
        name: (each.lookup - reports["device"].lookup, each.update - reports["device"].update)
        for name, each in reports.items()
    }
    moments = 2 * rows / update
    assert added["uvm"] == pytest.approx((rows / read, rows / update + moments))
    # Each of the 384 missed rows comes in, and a changed one goes out.
    assert added["even"] == pytest.approx((2 * 0.75 * rows / read, moments))
    assert added["told"] == pytest.approx((0.0, moments), abs=1e-15)


TABLES = [
    SparseTable(name=f"t{index}", num_rows=10**6 * (1 + index), dim=64, ids_per_sample=1 + index % 3)
    for index in range(6)
]
LEFT = [replace(table, location="auto") for table in TABLES]
DIMS = ParallelDims.for_world(4)


def locations(report):
    return [each.table.memory.location for each in report.tables.placed]


@pytest.mark.parametrize("strategy", ["size", "cost"])
def test_auto_moves_the_least_used_tables_and_no_more(strategy):
    on_device = explain(model_of(*TABLES), HOST, DIMS, WORK, strategy=strategy)
    enough = explain(model_of(*LEFT), HOST, DIMS, WORK, strategy=strategy)
    assert locations(enough) == ["device"] * 6
    assert enough.step == on_device.step
    small = hardware(device=0.7 * on_device.memory.peak.total)
    assert not explain(model_of(*TABLES), HOST, DIMS, WORK, strategy=strategy, hardware=small).memory.fits
    report = explain(model_of(*LEFT), HOST, DIMS, WORK, strategy=strategy, hardware=small)
    assert report.memory.fits
    assert report.memory.host_bytes > 0
    assert report.step.seconds > on_device.step.seconds
    found = locations(report)
    count = found.count("uvm_caching")
    # Whole tables that are packed onto ranks may leave the heaviest rank for last.
    assert 0 < count < (6 if strategy == "cost" else 7)
    # The part of a table's rows that a batch names, smallest first.
    order = sorted(range(6), key=lambda index: TABLES[index].ids_per_sample / TABLES[index].num_rows)
    assert {order[index] for index in range(count)} == {i for i, each in enumerate(found) if each == "uvm_caching"}
    fewer = [replace(t, location="uvm_caching") if i in order[: count - 1] else t for i, t in enumerate(TABLES)]
    assert not explain(model_of(*fewer), HOST, DIMS, WORK, strategy=strategy, hardware=small).memory.fits


def test_auto_moves_all_where_no_choice_fits():
    report = explain(model_of(*LEFT, activation_bytes=1e9), HOST, DIMS, WORK, hardware=hardware(device=1e10))
    assert locations(report) == ["uvm_caching"] * 6
    assert not report.memory.fits
    assert report.memory.host_fits


def test_auto_keeps_what_cannot_move():
    """A copied table, and one whose cache would be larger than it is."""
    tables = [
        SparseTable(name="copied", num_rows=10**5, dim=64, kind="replicated", location="auto"),
        SparseTable(name="tiny", num_rows=20, dim=4, location="auto"),
        replace(LEFT[3], kind="row_wise"),
    ]
    report = explain(model_of(*tables), HOST, DIMS, WORK, hardware=hardware(device=1e6))
    assert locations(report) == ["device", "device", "uvm_caching"]
    half, adam = [replace(table, weight_bytes=2) for table in LEFT], replace(WORK, sparse_optimizer="adam")
    assert locations(explain(model_of(*half), HOST, DIMS, adam, hardware=hardware(device=1e6))) == ["device"] * 6


def test_what_would_help():
    """A plan that does not fit with tables on the device names the cache, and keeps its promise."""
    on_device = explain(model_of(*TABLES), HOST, DIMS, WORK)
    small = hardware(device=0.7 * on_device.memory.peak.total)
    report = explain(model_of(*TABLES), HOST, DIMS, WORK, hardware=small)
    change = next(each for each in report.changes if "uvm_caching" in each.name)
    assert change.fits
    assert change.seconds == explain(model_of(*LEFT), HOST, DIMS, WORK, hardware=small).step.seconds
    assert not any("uvm_caching" in each.name for each in on_device.changes)
    # No remedy where the host is too small.
    tight = hardware(device=0.7 * on_device.memory.peak.total, host=1e6)
    assert not any(
        "uvm_caching" in each.name for each in explain(model_of(*TABLES), HOST, DIMS, WORK, hardware=tight).changes
    )


def test_sweep_chooses_for_each_layout():
    on_device = explain(model_of(*TABLES), HOST, DIMS, WORK)
    work = replace(WORK, table_gather="rows")
    reports = sweep(model_of(*LEFT), HOST, work, hardware=hardware(device=0.7 * on_device.memory.peak.total))
    assert {report.dims.sparse_replicate for report in reports} == {1, 2, 4}
    assert all("uvm_caching" in locations(report) for report in reports if report.memory.fits)
    assert any(report.memory.fits for report in reports)


def test_record_names_the_locations():
    table = SparseTable(name="t", num_rows=10**5, dim=16, location="uvm_caching", cache_load_factor=0.1)
    record = plan_record(one(table))
    placed = record["tables"]["placed"][0]
    assert (placed["location"], placed["cache_load_factor"]) == ("uvm_caching", 0.1)
    assert record["memory"]["host_bytes"] == 10**5 * 64
    assert record["memory"]["host_capacity_bytes"] == H200.host_memory_bytes.value


UVM = SparseTable(name="t", num_rows=10**5, dim=64, location="uvm")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: replace(UVM, location="ssd"), "`location` must be one of device, uvm, uvm_caching, got 'ssd'"),
        (lambda: replace(UVM, cache_load_factor=0.1), "`cache_load_factor` must be left out for location 'uvm'"),
        (lambda: replace(UVM, cache_hit_rate=0.5), "`cache_hit_rate` must be left out for location 'uvm'"),
        (lambda: replace(UVM, location="auto", cache_hit_rate=1.5), "`cache_hit_rate` must be at most 1, got 1.5"),
        (
            lambda: explain(model_of(replace(UVM, kind="replicated")), HOST, DIMS, WORK),
            "table 't': `location` must be 'device' for a replicated table, got 'uvm'; place it row_wise",
        ),
        (
            lambda: one(replace(UVM, location="uvm_caching", weight_bytes=2), sparse_optimizer="adam"),
            "'device' or 'uvm' for weights of 2 bytes under adam, got 'uvm_caching'; use weights of 4 bytes",
        ),
        (
            lambda: explain(model_of(replace(UVM, kind="column_wise")), HOST, DIMS, WORK),
            "for a column_wise table under rowwise_adagrad",
        ),
        (
            lambda: explain(model_of(UVM), HOST, ParallelDims.for_world(4, sparse_replicate=2), WORK),
            "with 2 copies whose lookup gathers whole tables, got 'uvm'; use table_gather='rows'",
        ),
        (
            lambda: explain(model_of(replace(UVM, kind="row_wise")), HOST, DIMS, WORK, hardware=hardware(1e11, 1e6)),
            r"at most 0.9 of the 0.0 GB of host memory .* over 29 ranks or more",
        ),
    ],
)
def test_refusals(make, text):
    with pytest.raises(ValueError, match=text):
        make()
