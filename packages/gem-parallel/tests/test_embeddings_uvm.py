"""Tables in host memory: what is refused, the cache's size, and updates that no eviction loses."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sparse_cases import full_state
from torch.distributed.device_mesh import init_device_mesh

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import memory as memory_module
from gem_parallel._src.embeddings.cached_engine import CachedEngine
from gem_parallel._src.embeddings.engine import FbgemmEngine
from gem_parallel._src.embeddings.layout import make_groups, make_shards
from gem_parallel._src.embeddings.memory import (
    cache_bytes,
    cache_sets,
    check_cache_fits,
    check_host_fits,
    check_locations,
)

gpu = pytest.mark.gpu
KINDS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
UVM = {"location": "uvm_caching", "cache_load_factor": 0.05}


# ---------------------------------------------------------------- what is asked for


@dataclass(frozen=True)
class Refusal:
    id: str
    options: dict
    error: type
    text: str


REFUSED_TABLES = [
    Refusal(
        "location", {"location": "ssd"}, ValueError, "`location` must be one of device, uvm, uvm_caching, got 'ssd'"
    ),
    Refusal("algorithm", {**UVM, "cache_algorithm": "fifo"}, ValueError, "`cache_algorithm` must be one of lru, lfu"),
    Refusal(
        "zero", {"location": "uvm_caching", "cache_load_factor": 0.0}, ValueError, r"must lie in \(0, 1\].*got 0.0"
    ),
    Refusal(
        "large", {"location": "uvm_caching", "cache_load_factor": 1.5}, ValueError, r"must lie in \(0, 1\].*got 1.5"
    ),
    Refusal("type", {"location": "uvm_caching", "cache_load_factor": "a"}, TypeError, "must be a number, got str"),
    Refusal(
        "no_cache", {"location": "uvm", "cache_load_factor": 0.1}, ValueError, "left out for location 'uvm'.*uvm_cach"
    ),
    Refusal(
        "device", {"cache_algorithm": "lfu"}, ValueError, "`cache_algorithm` must be left out for location 'device'"
    ),
]


@pytest.mark.parametrize("case", REFUSED_TABLES, ids=lambda case: case.id)
def test_table_config_refuses(case):
    with pytest.raises(case.error, match=f"TableConfig 't': .*{case.text}"):
        TableConfig(name="t", num_rows=10, dim=4, **case.options)


def test_defaults_of_the_cache():
    table = TableConfig(name="t", num_rows=10, dim=4, location="uvm_caching")
    assert (table.memory.cache_load_factor, table.memory.cache_algorithm) == (0.2, "lru")
    assert (
        table.memory
        == TableConfig(
            name="u", num_rows=9, dim=4, location="uvm_caching", cache_load_factor=0.2, cache_algorithm="lru"
        ).memory
    )
    assert TableConfig(name="t", num_rows=10, dim=4).memory.location == "device"


def refusals(
    device="cuda", kind="sgd", placement="row_wise", world_size=4, replicas=1, gather="tables", dtype="float32"
):
    tables = [TableConfig(name="t", num_rows=64, dim=32, placement=placement, **UVM)]
    groups = make_groups(
        make_shards(tables, world_size, replicas),
        [FeatureConfig(name="f", table="t")],
        joint_columns=kind == "rowwise_adagrad",
    )
    check_locations(
        groups,
        optimizer=SparseOptimizerConfig(kind=kind),
        weight_dtype=getattr(torch, dtype),
        device=torch.device(device),
        gather=gather,
        num_replicas=replicas,
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"device": "cpu"},
            "on a CPU device, where tables lie in host memory anyway, got 'uvm_caching'; leave `location`",
        ),
        ({"dtype": "bfloat16"}, "with bfloat16 weights.*use weight_dtype=torch.float16"),
        ({"dtype": "float16", "kind": "adam"}, "or 'uvm' with float16 weights under adam.*weight_dtype=torch.float32"),
        ({"placement": "replicated"}, "for a replicated table.*use placement='row_wise'"),
        ({"placement": "column_wise", "kind": "rowwise_adagrad"}, "for a column_wise table under rowwise_adagrad"),
        ({"replicas": 2}, "with 2 copies whose lookup gathers whole tables on the device.*use gather='rows'"),
    ],
    ids=lambda each: "-".join(map(str, each.values())) if isinstance(each, dict) else "",
)
def test_combinations_that_are_refused(options, text):
    with pytest.raises(ValueError, match=f"table 't': `location` must be 'device' {text}"):
        refusals(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"placement": "table_wise"},
        {"placement": "column_wise", "kind": "adam"},
        {"replicas": 2, "gather": "rows"},
        {"dtype": "float16"},
        {"placement": "replicated", "world_size": 1},
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)
def test_combinations_that_are_taken(options):
    refusals(**options)


def test_a_cpu_device_names_the_remedy():
    with pytest.raises(ValueError, match=r"table 't'.*got 'uvm'; leave `location` out"):
        ShardedEmbeddings(
            [TableConfig(name="t", num_rows=10, dim=4, location="uvm")],
            [FeatureConfig(name="f", table="t")],
            optimizer=SparseOptimizerConfig(kind="sgd"),
            device="cpu",
        )


def test_tables_that_share_a_cache_follow_each_other():
    """Tables on the device and cached ones of a dim alternate as configured; one exchange, one engine per memory."""
    tables = [TableConfig(name=f"t{index}", num_rows=9, dim=4, **(UVM if index % 2 else {})) for index in range(4)]
    features = [FeatureConfig(name=f"f{index}", table=f"t{index}") for index in range(4)]
    (group,) = make_groups(make_shards(tables, 1), features)
    assert [shard.config.name for shard in group.tables] == ["t0", "t2", "t1", "t3"]
    assert [slot.config.name for slot in group.features] == ["f0", "f2", "f1", "f3"]


# ---------------------------------------------------------------- the size of the cache


def test_bytes_of_a_cache():
    memory = TableConfig(name="t", num_rows=1000, dim=16, location="uvm_caching", cache_load_factor=0.1).memory
    assert cache_sets(1000, 0.1) == 4
    assert cache_sets(3, 0.1) == 1
    # 128 places: rows of 16 float16, and 8 bytes each for what a place holds and when it was used; 4 bytes per row.
    assert cache_bytes(1000, 16, 2, memory) == 128 * (32 + 8 + 8) + 4 * 1000
    lfu = TableConfig(
        name="t", num_rows=1000, dim=16, location="uvm_caching", cache_load_factor=0.1, cache_algorithm="lfu"
    ).memory
    assert cache_bytes(1000, 16, 2, lfu) == 128 * (32 + 8) + 8 * 1001 + 4 * 1000
    assert cache_bytes(1000, 16, 4, TableConfig(name="t", num_rows=1000, dim=16, location="uvm").memory) == 0


def test_a_cache_larger_than_the_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 10**8)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 10**8)
    tables = [TableConfig(name=name, num_rows=10**7, dim=32, **UVM) for name in "ab"]
    device = torch.device("cuda", 0)
    check_cache_fits(tables, [9 * 10**6] * 2, 32, torch.float16, device)
    with pytest.raises(ValueError, match=r"tables a, b .*0.05.* fit in the 1.2 GB.*got 2.0 GB; lower `cache_load_f"):
        check_cache_fits(tables, [9 * 10**7] * 2, 32, torch.float32, device)


def test_tables_larger_than_the_free_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr(memory_module, "_free_host_bytes", lambda: 10**9)
    host, device = (TableConfig(name="t", num_rows=10**8, dim=32, location=each) for each in ("uvm", "device"))
    check_host_fits([device], [10**8], 32, torch.float32, "adam")
    check_host_fits([host], [10**7], 32, torch.float16, "rowwise_adagrad")
    with pytest.raises(ValueError, match=r"tables t in host memory must fit in the 1.0 GB .* got 3.8 GB .* more hosts"):
        check_host_fits([host], [10**7], 32, torch.float32, "adam")
    monkeypatch.setattr(memory_module, "_free_host_bytes", lambda: None)
    check_host_fits([host], [10**7], 32, torch.float32, "adam")


def test_free_host_memory_is_read_where_linux_says_it():
    free = memory_module._free_host_bytes()
    assert free is None or 0 < free < 2**60


# ---------------------------------------------------------------- updates, without a GPU


def cached(kind, num_rows):
    """The engine over fbgemm's CPU kernels: no cache, but the same choice of the way back."""
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=0.1, eps=1e-6)
    inner = FbgemmEngine(
        num_rows=num_rows,
        dim=8,
        optimizer=optimizer,
        weight_dtype=torch.float32,
        device=torch.device("cpu"),
        pools=False,
    )
    generator = torch.Generator().manual_seed(1)
    for weight in inner.weights():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    engine = CachedEngine(inner, num_rows=num_rows, learning_rate=0.1, device=torch.device("cpu"))
    return engine, inner


@pytest.mark.parametrize("between", ["nothing", "lookup", "evaluation", "state_dict"])
def test_a_lookup_in_between_makes_the_update_look_up_again(between, monkeypatch):
    engine, inner = cached("adagrad", [50, 7])
    _, plain = cached("adagrad", [50, 7])
    again = []
    update = inner.update
    monkeypatch.setattr(inner, "update", lambda *arguments: (again.append(1), update(*arguments)))
    generator = torch.Generator().manual_seed(2)
    ids = [torch.cat([torch.randint(0, 50, (20,), generator=generator), torch.tensor([3, 3, 6])]) for _ in range(2)]
    grads = [torch.randn(23, 8, generator=generator) for _ in range(2)]
    first, expected = engine.lookup(ids[0], [20, 3], None, 1), plain.lookup(ids[0], [20, 3], None, 1)
    assert torch.equal(first, expected)
    assert first.requires_grad
    second = None
    if between == "lookup":
        second = engine.lookup(ids[1], [20, 3], None, 2), plain.lookup(ids[1], [20, 3], None, 2)
    elif between == "evaluation":
        assert not engine.lookup(ids[1], [20, 3], None, None).requires_grad
    elif between == "state_dict":
        engine.weights()
    engine.set_learning_rate(7.0)
    first.backward(grads[0])
    expected.backward(grads[0])
    assert len(again) == (between != "nothing")
    if second is not None:
        for each in second:
            each.backward(grads[1])
        # The first one's update has moved rows.
        assert len(again) == 2
    for left, right in zip(engine.weights(), plain.weights(), strict=True):
        assert torch.equal(left, right)
    for left, right in zip(engine.states(), plain.states(), strict=True):
        assert torch.equal(left["sum"], right["sum"])


@pytest.mark.parametrize("kind", ["sgd", "rowwise_adagrad"])
def test_dropped_ids_teach_nothing(kind):
    """The scratch row, which stands for them, stays zero."""
    engine, inner = cached(kind, [50, 7])
    ids = torch.tensor([1, 50, 1, 7, 3])
    for step in (1, 2):
        engine.clear_scratch()
        rows = engine.lookup(ids, [3, 2], None, step)
        assert torch.equal(rows[[1, 3]], torch.zeros(2, 8))
        rows.backward(torch.ones(5, 8))
    assert all(float(scratch.abs().max()) == 0 for scratch in inner._scratch)
    assert all(bool((state["sum"] >= 0).all()) for state in engine.states() if state)


# ---------------------------------------------------------------- on a GPU

ROWS = {"cached": 5000, "plain": 300, "other": 2000, "wide": 700}


def make(kind, memory, **options):
    """Cached tables of two factors and one on the device of one dim, and one of another dim."""
    quarter = {**memory, "cache_load_factor": 0.25} if memory.get("location") == "uvm_caching" else memory
    tables = [
        TableConfig(name="cached", num_rows=ROWS["cached"], dim=16, **memory),
        TableConfig(name="plain", num_rows=ROWS["plain"], dim=16),
        TableConfig(name="other", num_rows=ROWS["other"], dim=16, **quarter),
        TableConfig(name="wide", num_rows=ROWS["wide"], dim=64, **memory),
    ]
    features = [FeatureConfig(name=name, table=name, pooling=("sum", "none")[i % 2]) for i, name in enumerate(ROWS)]
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=0.05, eps=1e-6)
    return ShardedEmbeddings(tables, features, optimizer=optimizer, device="cuda", **options)


def batch_of(step, size=1500):
    """Half of the ids are skewed; a batch has more distinct ones than the small cache has rows."""
    generator = torch.Generator().manual_seed(50 + step)
    batch = {}
    for name, rows in ROWS.items():
        values = torch.randint(0, rows, (size,), generator=generator)
        values[::2] = (rows ** torch.rand(size // 2, generator=generator, dtype=torch.float64) - 1).long()
        batch[name] = (values.cuda(), torch.arange(0, size + 1, 5, device="cuda"))
    return batch


def loss_of(outputs):
    return sum(torch.tanh(each).square().sum() for each in outputs.values())


def trained(module, steps=range(5)):
    outputs = []
    for step in steps:
        rows = module.lookup(module.exchange(batch_of(step)))
        loss_of(rows).backward()
        outputs.append({name: each.detach() for name, each in rows.items()})
    return outputs


def assert_same(module, other):
    left, right = module.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), f"{key}: {(value - right[key]).abs().max()}"


MEMORIES = [
    pytest.param({"location": "uvm"}, id="uvm"),
    pytest.param(UVM, id="lru"),
    pytest.param({**UVM, "cache_algorithm": "lfu"}, id="lfu"),
    pytest.param({"location": "uvm_caching", "cache_load_factor": 1.0}, id="whole"),
]


@gpu
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_tables_on_the_device(kind, memory):
    """Outputs, weights and moments after five steps are the same bits, with a cache smaller than a batch."""
    plain, module = make(kind, {}), make(kind, memory)
    for left, right in zip(trained(plain), trained(module), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert_same(module, plain)


@gpu
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_id_policies(policy, memory):
    modules = [make("rowwise_adagrad", each, id_policy=policy) for each in ({}, memory)]
    for step in range(4):
        batch = batch_of(step)
        for values, _ in batch.values():
            values[::7] = -3
            values[1::11] = 10**9
        outputs = []
        for module in modules:
            outputs.append(module.lookup(module.exchange(batch)))
            loss_of(outputs[-1]).backward()
        assert all(torch.equal(value, outputs[1][name]) for name, value in outputs[0].items())
    assert_same(*modules)


@gpu
@pytest.mark.parametrize("memory", MEMORIES)
def test_several_lookups_in_flight(memory):
    """Two training lookups, an evaluation and a state dict before the first backward; evictions in between."""
    modules = [make("adam", each) for each in ({}, memory)]
    for module in modules:
        trained(module, range(2))
        first = module.lookup(module.exchange(batch_of(7)))
        second = module.lookup(module.exchange(batch_of(8)))
        with torch.no_grad():
            module.lookup(module.exchange(batch_of(9)))
        module.state_dict()
        loss_of(first).backward()
        loss_of(second).backward()
        trained(module, range(2))
    assert_same(*modules)


@gpu
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("memory", MEMORIES)
def test_checkpoint_roundtrip(memory, tmp_path):
    """Saved from the cache and loaded into one that is full of other rows; a device table's state loads, too."""
    source = make("adam", memory)
    trained(source)
    dcp.save(source.state_dict(), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    copied = {key: value.clone() for key, value in source.state_dict().items()}
    loaded, given, plain = make("adam", memory, seed=3), make("adam", memory, seed=4), make("adam", {}, seed=5)
    for module in (loaded, given):
        trained(module, range(20, 23))
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    loaded.load_state_dict(state)
    for module in (given, plain):
        module.load_state_dict(copied)
    for module in (loaded, given, plain):
        assert_same(module, source)
    for module in (source, loaded, given, plain):
        trained(module, range(30, 33))
    for module in (loaded, given, plain):
        assert_same(module, source)


@gpu
def test_memory_on_the_device():
    """A cached table takes its cache and row-wise moments there, and nothing else of its size."""
    table = TableConfig(name="t", num_rows=400_000, dim=64, location="uvm_caching", cache_load_factor=0.05)
    before = torch.cuda.memory_allocated()
    module = ShardedEmbeddings(
        [table],
        [FeatureConfig(name="f", table="t")],
        optimizer=SparseOptimizerConfig(kind="rowwise_adagrad"),
        device="cuda",
    )
    used = torch.cuda.memory_allocated() - before
    expected = cache_bytes(400_001, 64, 4, table.memory) + 4 * 400_001
    assert expected <= used < 1.02 * expected
    weight = module.state_dict()["tables.t.weight"]
    assert weight.device.type == "cuda"
    assert used < 0.1 * weight.numel() * 4


@gpu
@pytest.mark.parametrize("memory", MEMORIES)
def test_float16_tables(memory):
    """An update rounds stochastically, as on the device: to a neighbour of the same value, also after evictions."""
    plain, module = (make("sgd", each, weight_dtype=torch.float16) for each in ({}, memory))
    before = module.state_dict()["tables.cached.weight"].clone()
    for each in (plain, module):
        trained(each, range(1))
        with torch.no_grad():
            for step in range(20, 23):
                each.lookup(each.exchange(batch_of(step)))
    for key, value in module.state_dict().items():
        assert value.dtype == torch.float16
        # neighbours lie 2^-10 of the larger one apart, below 2^-14 they lie 2^-24 apart
        torch.testing.assert_close(value.double(), plain.state_dict()[key].double(), rtol=2**-9.99, atol=2**-23.9)
    assert not torch.equal(module.state_dict()["tables.cached.weight"], before)


@dataclass(frozen=True)
class RankCase:
    placement: str
    kind: str
    replicas: int
    memory: tuple

    @property
    def id(self):
        return f"{self.placement}-{self.kind}-{self.replicas}-{dict(self.memory)['location']}"


RANK_CASES = [
    RankCase(placement, kind, replicas, tuple(memory.items()))
    for memory in (UVM, {"location": "uvm"})
    for placement, kind, replicas in (
        ("row_wise", "rowwise_adagrad", 1),
        ("table_wise", "adam", 1),
        ("column_wise", "adagrad", 1),
        ("row_wise", "rowwise_adagrad", 2),
    )
]


def make_rank(case, mesh, memory):
    tables = [
        TableConfig(name=name, num_rows=rows, dim=16, placement=case.placement, **memory) for name, rows in ROWS.items()
    ]
    features = [FeatureConfig(name=name, table=name, pooling=("sum", "none")[i % 2]) for i, name in enumerate(ROWS)]
    optimizer = SparseOptimizerConfig(kind=case.kind, learning_rate=0.05, eps=1e-6)
    return ShardedEmbeddings(tables, features, optimizer=optimizer, mesh=mesh, device="cuda", gather="rows")


def rank_compare(rank, world_size, folder):
    """Differences of state and outputs between tables in host memory and on the device, over the same ranks."""
    torch.cuda.set_device(rank)
    found = {}
    for case in RANK_CASES:
        shape, names = ((world_size,), ("sparse_shard",))
        if case.replicas > 1:
            shape, names = (world_size // 2, 2), ("sparse_shard", "sparse_replicate")
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
        modules = [make_rank(case, mesh, memory) for memory in ({}, dict(case.memory))]
        outputs = [trained(module, range(rank, 5 * world_size, world_size)) for module in modules]
        states = [full_state(module) for module in modules]
        found[case.id] = [key for key, value in states[0].items() if not torch.equal(value, states[1][key])] + [
            f"{step}: {name}"
            for step, (left, right) in enumerate(zip(*outputs, strict=True))
            for name in left
            if not torch.equal(left[name], right[name])
        ]
    return found


@gpu
@pytest.mark.dist
def test_ranks_equal_tables_on_the_device(ranks):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for result in ranks("rank_compare", 2, backend="nccl"):
        assert result == {case.id: [] for case in RANK_CASES}
