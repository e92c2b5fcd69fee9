"""One process: all features in one lookup per dim, against plain PyTorch, and a check that finds every fault."""

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import batch_layout as layout_source
from gem_parallel._src.embeddings import build as build_source
from gem_parallel._src.embeddings import combined_engine as combined_source
from gem_parallel._src.embeddings import flat_batch as flat_source
from gem_parallel._src.embeddings.combined_engine import CombinedEngine, split_tables

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
ROWS = {"a": 40, "b": 7, "c": 1, "wide": 25}
DIMS = {"wide": 16}
# Several features per table, of every pooling, in an order that no engine keeps.
FEATURES = [
    ("a_sum", "a", "sum"),
    ("wide_mean", "wide", "mean"),
    ("b_mean", "b", "mean"),
    ("a_none", "a", "none"),
    ("c_sum", "c", "sum"),
    ("b_none", "b", "none"),
    ("a_mean", "a", "mean"),
    ("wide_mean_again", "wide", "mean"),
    ("a_sum_again", "a", "sum"),
]


def make(features=FEATURES, device="cpu", **options):
    used = {table for _, table, _ in features}
    tables = [TableConfig(name=t, num_rows=n, dim=DIMS.get(t, 8)) for t, n in ROWS.items() if t in used]
    options.setdefault("optimizer", SparseOptimizerConfig(kind="sgd", learning_rate=0.1))
    configs = [FeatureConfig(name=name, table=table, pooling=pooling) for name, table, pooling in features]
    return ShardedEmbeddings(tables, configs, device=device, **options)


def random_batch(generator, features=FEATURES, longest=5, most_bags=6, device="cpu"):
    """Bags of each feature in different numbers, some features empty, some left out."""
    batch = {}
    for name, table, _ in features:
        kind = int(torch.randint(0, 8, (1,), generator=generator))
        if kind == 0:
            continue
        num_bags = 0 if kind == 1 else int(torch.randint(1, most_bags, (1,), generator=generator))
        lengths = torch.randint(0, 1 if kind == 2 else longest, (num_bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.randint(0, ROWS[table], (int(offsets[-1]),), generator=generator)
        batch[name] = values.to(device), offsets.to(device)
    return batch


def plain_outputs(weights, batch, features=FEATURES):
    found = {}
    for name, table, pooling in features:
        if name not in batch:
            continue
        values, offsets = batch[name]
        rows = weights[table][values]
        if pooling != "none":
            lengths = offsets.diff()
            bag = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
            rows = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, bag, rows)
            if pooling == "mean":
                rows = rows / lengths.clamp(min=1).unsqueeze(1)
        found[name] = rows
    return found


def steps_match(device, num_steps=12, ahead=False, **options):
    """SGD over random batches equals autograd of plain tensors; some outputs are not used by the loss."""
    module = make(device=device, **options)
    weights = {table: module.state_dict()[f"tables.{table}.weight"].double().clone().requires_grad_() for table in ROWS}
    generator = torch.Generator().manual_seed(3)
    batches = [random_batch(generator, device=device) for _ in range(num_steps)]
    side = torch.cuda.Stream() if ahead else None
    for step, batch in enumerate(batches):
        if side is not None:
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                pending = module.exchange(batch)
        else:
            pending = module.exchange(batch)
        if step % 2:
            module.start_lookup(pending)
        outputs, expected = module.lookup(pending), plain_outputs(weights, batch)
        assert list(outputs) == list(expected)
        loss, plain_loss = 0.0, 0.0
        for at, (name, value) in enumerate(expected.items()):
            torch.testing.assert_close(outputs[name].double(), value, rtol=1e-5, atol=1e-5)
            if (at + step) % 4:
                factor = torch.linspace(-1, 2, value.numel(), device=device).view_as(value)
                loss = loss + (outputs[name] * factor).sum() + 0.01 * outputs[name].square().sum()
                plain_loss = plain_loss + (value * factor).sum() + 0.01 * value.square().sum()
        if not isinstance(loss, float):
            loss.backward()
            plain_loss.backward()
        with torch.no_grad():
            for weight in weights.values():
                if weight.grad is not None:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    for table, weight in weights.items():
        torch.testing.assert_close(
            module.state_dict()[f"tables.{table}.weight"].double(), weight.detach(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
def test_random_batches(device, policy):
    steps_match(device, id_policy=policy)


@gpu
def test_random_batches_from_another_stream():
    steps_match("cuda", num_steps=40, ahead=True)


@pytest.mark.parametrize("layouts", [(1, 2**20), (4, 0), (4, 40)])
def test_layouts_are_not_kept_for_ever(monkeypatch, layouts):
    monkeypatch.setattr(flat_source, "MAX_LAYOUTS", layouts[0])
    monkeypatch.setattr(flat_source, "MAX_LAYOUT_ELEMENTS", layouts[1])
    steps_match("cpu")
    module = make()
    generator = torch.Generator().manual_seed(4)
    for _ in range(8):
        module.exchange(random_batch(generator))
    assert len(module._local._flattener._layouts) <= layouts[0]
    assert all(each.num_elements <= layouts[1] for each in module._local._flattener._layouts.values())


@pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
def test_large_batches_without_written_bounds(monkeypatch, policy):
    """As batches of more than 2^25 ids and offsets are checked."""
    monkeypatch.setattr(layout_source, "MAX_EXPANDED", 3)
    steps_match("cpu", id_policy=policy)
    check_variants("cpu", policy)


def test_a_layout_is_used_again():
    module = make()
    batches = [{"a_sum": (torch.full((3,), each), torch.tensor([0, 1, 3]))} for each in range(4)]
    outputs = [module.lookup(module.exchange(batch))["a_sum"] for batch in batches]
    assert len(module._local._flattener._layouts) == 1
    rows = module.state_dict()["tables.a.weight"]
    for each, output in enumerate(outputs):
        torch.testing.assert_close(output, torch.stack([rows[each], 2 * rows[each]]))


def test_tables_beyond_one_engine(monkeypatch):
    """A dim whose tables have more rows together than fbgemm can index gets several engines."""
    monkeypatch.setattr(combined_source, "MAX_LOCAL_ROWS", 47)
    assert split_tables([40, 6, 1, 47, 3]) == [2, 1, 1, 1]
    module = make()
    assert [[engine.num_tables for engine in engines] for engines in module._engines] == [[1, 2], [1]]
    assert all(isinstance(engine, CombinedEngine) for engines in module._engines for engine in engines)
    steps_match("cpu")


# ---------------------------------------------------------------- the check


def faults_of(values, offsets, num_rows):
    """(out of range ids, whether the offsets are bags), by the definition."""
    bad = sum(not 0 <= each < num_rows for each in values)
    rising = all(after >= before for before, after in itertools.pairwise(offsets))
    return bad, rising and offsets[0] == 0 and offsets[-1] == len(values)


BASE = {"a_sum": ((5, 39, 0), (0, 2, 2, 3)), "b_none": ((6, 0), (0, 1, 2)), "wide_mean": ((24, 3), (0, 0, 2))}
EMPTY = {"a_mean": ((), (0, 0)), "c_sum": ((), (0,))}


def variants():
    """Each id and each offset of a batch of three features replaced by everything near and far."""
    for name, (values, offsets) in BASE.items():
        rows = ROWS[next(table for feature, table, _ in FEATURES if feature == name)]
        for at in range(len(values)):
            for new in (-1, 0, rows - 1, rows, rows + 1, 2**31, 2**63 - 1, -(2**63)):
                yield name, (*values[:at], new, *values[at + 1 :]), offsets
        for at in range(len(offsets)):
            for new in (-(2**63), -1, 0, 1, 2, 3, 4, 2**31, 2**63 - 1):
                yield name, values, (*offsets[:at], new, *offsets[at + 1 :])
        yield name, values, (0,)
        yield name, values, (len(values),)
        yield name, (), (0,)


def check_variants(device, policy):
    module = make(device=device, id_policy=policy)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    counted = Counter()
    checked = 0
    for name, values, offsets in variants():
        checked += 1
        batch = {
            key: (torch.tensor(pair[0], dtype=torch.int64, device=device), torch.tensor(pair[1], device=device))
            for key, pair in {**BASE, **EMPTY, name: (values, offsets)}.items()
        }
        table = next(table for feature, table, _ in FEATURES if feature == name)
        bad, bags = faults_of(values, offsets, ROWS[table])
        counted[name] += bad
        if not bags:
            with pytest.raises(ValueError, match=f"feature '{name}': offsets must start at 0"):
                module.lookup(module.exchange(batch))
        elif bad and policy == "error":
            with pytest.raises(IndexError, match=f"feature '{name}': ids of table '{table}'.*{bad} such id"):
                module.lookup(module.exchange(batch))
        else:
            outputs = module.lookup(module.exchange(batch))
            assert set(outputs) == set(batch)
        assert module.out_of_range_counts()[table, name] == counted[name]
    assert checked > 100
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
def test_every_fault_is_found(policy):
    check_variants("cpu", policy)


@gpu
@pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
def test_every_fault_is_found_on_cuda(policy):
    check_variants("cuda", policy)


@pytest.mark.parametrize("device", DEVICES)
def test_a_refused_batch_is_no_step(device):
    """Adam's count and the other features of a refused batch stay; the next batch is a first step."""
    optimizer = SparseOptimizerConfig(kind="adagrad", learning_rate=0.1)
    module, twin = (make(device=device, optimizer=optimizer) for _ in range(2))
    good = {"a_sum": (torch.tensor([1, 2], device=device), torch.tensor([0, 1, 2], device=device))}
    bad = {**good, "b_none": (torch.tensor([7], device=device), torch.tensor([0, 1], device=device))}
    with pytest.raises(IndexError, match=r"feature 'b_none'.*got 7 "):
        module.lookup(module.exchange(bad))
    assert module._step == 0
    for each in (module, twin):
        each.lookup(each.exchange(good))["a_sum"].sum().backward()
        assert each._step == 1
    for left, right in zip(module.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(left, right)


# ---------------------------------------------------------------- fbgemm's call, and how many there are


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        *[("cpu", kind) for kind in ("sgd", "adagrad", "rowwise_adagrad")],
        # fbgemm has no Adam on the CPU.
        *[pytest.param("cuda", kind, marks=gpu) for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam")],
    ],
)
def test_the_short_call_is_fbgemms_forward(device, kind):
    """The same bits with the Python of its forward and without."""
    short, long = (
        CombinedEngine(
            num_rows=[50, 9],
            dim=8,
            optimizer=SparseOptimizerConfig(kind=kind, learning_rate=0.1),
            weight_dtype=torch.float32,
            device=torch.device(device),
        )
        for _ in range(2)
    )
    assert short._inner._call is not None
    long._inner._call = None
    generator = torch.Generator().manual_seed(0)
    initial = [torch.randn(rows, 8, generator=generator) for rows in (50, 9)]
    for engine in (short, long):
        for weight, value in zip(engine.weights(), initial, strict=True):
            weight.copy_(value)
    for step in range(1, 5):
        rows = torch.randint(0, 59, (30,), generator=generator).to(device)
        bags = torch.arange(0, 31, 3).to(device)
        upstream = torch.randn(10, 8, generator=generator).to(device)
        outputs = [engine.pooled(rows, bags, step) for engine in (short, long)]
        assert torch.equal(*outputs)
        for engine, output in zip((short, long), outputs, strict=True):
            assert not engine.pooled(rows, bags, None).requires_grad
            if step == 3:
                engine.set_learning_rate(0.3)
            output.backward(upstream)
    for left, right in zip(short.weights() + short.states(), long.weights() + long.states(), strict=True):
        pairs = zip(left.values(), right.values(), strict=True) if isinstance(left, dict) else [(left, right)]
        assert all(torch.equal(*pair) for pair in pairs)


class Ops(TorchDispatchMode):
    """Counts operators that compute, or all."""

    def __init__(self, views=False):
        super().__init__()
        self.count = Counter()
        self.views = views

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.views or not func.is_view:
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(pooling, num_features, mesh=None):
    """Counts of exchange and lookup, and of backward without the dense part's own, once the sizes are known."""
    names = [f"f{index}" for index in range(num_features)]
    module = ShardedEmbeddings(
        [TableConfig(name=name, num_rows=20, dim=8, placement="row_wise") for name in names],
        [FeatureConfig(name=name, table=name, pooling=pooling) for name in names],
        optimizer=SparseOptimizerConfig(),
        mesh=mesh,
    )
    batch = {name: (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])) for name in names}
    module.lookup(module.exchange(batch))
    with Ops() as forward:
        outputs = module.lookup(module.exchange(batch))
    grads = [torch.ones_like(each) for each in outputs.values()]
    with Ops() as backward:
        torch.autograd.backward(list(outputs.values()), grads)
    return forward.count, backward.count


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Most calls of the dispatcher, views included."""

    id: str
    features: tuple[tuple[int, int, str], ...]
    """(features, dim, pooling), each with a table of its own."""
    forward: int
    backward: int
    policy: str = "error"
    new_sizes: bool = False
    """No batch before had as many ids per feature."""


# fbgemm's module alone takes 7 and 1 for one dim and pooling. A batch costs 8 more: a copy, bounds, comparison, shifts,
# falls, their number and its way to the host, and views; a second feature two: bags in one run, and an output each.
CALLS = [
    Calls(id="one", features=((1, 64, "sum"),), forward=15, backward=1),
    Calls(id="26", features=((26, 64, "sum"),), forward=17, backward=2),
    Calls(id="26 dropped", features=((26, 64, "sum"),), forward=20, backward=2, policy="drop"),
    Calls(id="26 clamped", features=((26, 64, "sum"),), forward=17, backward=2, policy="clamp"),
    Calls(id="26 of new sizes", features=((26, 64, "sum"),), forward=28, backward=2, new_sizes=True),
    Calls(id="means", features=((8, 64, "mean"),), forward=24, backward=3),
    Calls(id="histories", features=((3, 64, "none"),), forward=17, backward=2),
    Calls(id="histories and bags", features=((3, 64, "none"), (6, 64, "sum")), forward=17, backward=2),
    Calls(id="three dims", features=((9, 16, "sum"), (9, 64, "sum"), (8, 128, "sum")), forward=27, backward=6),
]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.id)
def test_calls_of_the_dispatcher(case):
    tables, features, batch = [], [], {}
    for number, dim, pooling in case.features:
        for _ in range(number):
            name = f"f{len(tables)}"
            tables.append(TableConfig(name=name, num_rows=20, dim=dim))
            features.append(FeatureConfig(name=name, table=name, pooling=pooling))
            batch[name] = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    module = ShardedEmbeddings(tables, features, optimizer=SparseOptimizerConfig(), id_policy=case.policy)
    module.lookup(module.exchange(batch))
    if case.new_sizes:
        batch["f0"] = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    with Ops(views=True) as forward:
        outputs = module.lookup(module.exchange(batch))
    grads = [torch.ones_like(each) for each in outputs.values()]
    with Ops(views=True) as backward:
        torch.autograd.backward(list(outputs.values()), grads)
    assert forward.count.total() <= case.forward, forward.count
    assert backward.count.total() <= case.backward, backward.count


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_the_number_of_operators_does_not_depend_on_the_features(pooling):
    few, many = (operators(pooling, num_features) for num_features in (3, 30))
    assert few == many
    assert few[0].total() <= 12 + 3 * (pooling == "mean"), few[0]


def rank_operators(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("sparse_shard",))
    return {pooling: [operators(pooling, count, mesh) for count in (3, 30)] for pooling in ("sum", "none")}


@pytest.mark.dist
def test_nor_over_several_ranks(ranks):
    for result in ranks("rank_operators", 2):
        for few, many in result.values():
            assert few == many
            assert few[0].total() < 100


@gpu
def test_the_device_is_not_waited_for():
    """No operator of a step makes the host wait; the only wait is for the check, on an event before the lookup."""
    module = make(device="cuda", optimizer=SparseOptimizerConfig(kind="rowwise_adagrad"))
    generator = torch.Generator().manual_seed(5)
    batches = [random_batch(generator, device="cuda") for _ in range(6)]
    module.lookup(module.exchange(batches[0]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches * 2:
            outputs = module.lookup(module.exchange(batch))
            if outputs:
                torch.stack([each.sum() for each in outputs.values()]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tables_without_a_common_engine_take_the_long_way(monkeypatch):
    """As tables with a cache do on CUDA."""
    monkeypatch.setattr(build_source, "combines", lambda memory: False)
    assert make()._local is None
    steps_match("cpu")
