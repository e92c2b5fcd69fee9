"""ShardedEmbeddings in one process, against plain PyTorch."""

from dataclasses import dataclass

import pytest
import torch
from reference_optimizers import ReferenceTable

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import build as build_source
from gem_parallel._src.embeddings import engine as engine_source

DIM = 8


def ids_of(*bags):
    """(values, offsets) of bags given as lists of ids."""
    values = torch.tensor([each for bag in bags for each in bag], dtype=torch.int64)
    return values, torch.tensor([0, *[len(bag) for bag in bags]]).cumsum(0)


def make(features, *, tables=None, device="cpu", **options):
    tables = tables or [TableConfig(name="t", num_rows=10, dim=DIM)]
    options.setdefault("optimizer", SparseOptimizerConfig(kind="sgd", learning_rate=0.1))
    return ShardedEmbeddings(tables, features, device=device, **options)


def copied(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


@dataclass(frozen=True)
class OptimizerCase:
    kind: str
    weight_decay: float = 0.0

    @property
    def id(self):
        return f"{self.kind}-decay{self.weight_decay}"


OPTIMIZERS = [
    OptimizerCase("sgd"),
    OptimizerCase("adagrad"),
    OptimizerCase("rowwise_adagrad"),
    OptimizerCase("rowwise_adagrad", 0.05),
    OptimizerCase("adam"),
    OptimizerCase("adam", 0.05),
]


def check_against_reference(case, device, seed=0):
    """Six steps of a table shared by three features, with duplicates across and inside them."""
    optimizer = SparseOptimizerConfig(kind=case.kind, learning_rate=0.1, eps=1e-6, weight_decay=case.weight_decay)
    features = [
        FeatureConfig(name="sum", table="t", pooling="sum"),
        FeatureConfig(name="mean", table="t", pooling="mean"),
        FeatureConfig(name="none", table="t", pooling="none"),
    ]
    tables = [TableConfig(name="t", num_rows=30, dim=DIM), TableConfig(name="unused", num_rows=4, dim=DIM)]
    module = make(features, tables=tables, optimizer=optimizer, device=device)
    initial = module.state_dict()["tables.t.weight"].cpu().double()
    table = ReferenceTable(initial, optimizer)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(6):
        batch, rows, gradients = {}, [], []
        expected = {}
        for feature in features:
            lengths = torch.randint(0, 5, (7,), generator=generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            values = torch.randint(0, 30, (int(offsets[-1]),), generator=generator)
            values[values > 20] = 3
            batch[feature.name] = (values.to(device), offsets.to(device))
            bag = torch.repeat_interleave(torch.arange(7), lengths)
            found = table.weight[values]
            size = len(values) if feature.pooling == "none" else 7
            upstream = torch.randn(size, DIM, generator=generator)
            if feature.pooling == "none":
                expected[feature.name] = (found, upstream)
                each = upstream.double()
            else:
                pooled = torch.zeros(7, DIM, dtype=torch.float64).index_add_(0, bag, found)
                divisor = lengths.clamp(min=1).unsqueeze(1) if feature.pooling == "mean" else torch.ones(7, 1)
                expected[feature.name] = (pooled / divisor, upstream)
                each = (upstream.double() / divisor)[bag]
            rows.append(values)
            gradients.append(each)
        outputs = module.lookup(module.exchange(batch))
        loss = 0.0
        for name, (value, upstream) in expected.items():
            torch.testing.assert_close(outputs[name].detach().cpu().double(), value, rtol=1e-5, atol=1e-5)
            loss = loss + (outputs[name] * upstream.to(device)).sum()
        loss.backward()
        table.update(torch.cat(rows), torch.cat(gradients))
    state = {key: value.cpu().double() for key, value in module.state_dict().items()}
    # float32 against float64 over six steps of size about 0.1: a few hundred roundings of 6e-8.
    bound = {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(state["tables.t.weight"], table.weight, **bound)
    if case.kind == "adam":
        torch.testing.assert_close(state["tables.t.exp_avg"], table.first, **bound)
        torch.testing.assert_close(state["tables.t.exp_avg_sq"], table.second, **bound)
        assert int(state["tables.t.step"]) == 6
    if case.kind == "adagrad":
        torch.testing.assert_close(state["tables.t.sum"], table.second, **bound)
    if case.kind == "rowwise_adagrad":
        torch.testing.assert_close(state["tables.t.sum"], table.second.squeeze(1), **bound)
    # ids stop at 20
    assert torch.equal(state["tables.t.weight"][21:], initial[21:])


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.id)
def test_optimizer_equals_reference(case):
    check_against_reference(case, "cpu")


def test_duplicates_are_summed_before_squaring():
    optimizer = SparseOptimizerConfig(kind="adagrad", learning_rate=1.0, eps=1e-8)
    module = make([FeatureConfig(name="x", table="t", pooling="none")], optimizer=optimizer)
    module.lookup(module.exchange({"x": ids_of([4, 4, 4])}))["x"].sum().backward()
    state = module.state_dict()
    # (1 + 1 + 1) ** 2, not 1 + 1 + 1
    assert torch.equal(state["tables.t.sum"][4], torch.full((DIM,), 9.0))


def test_weights_move_and_only_where_named():
    module = make([FeatureConfig(name="x", table="t")], optimizer=SparseOptimizerConfig())
    before = copied(module)
    module.lookup(module.exchange({"x": ids_of([1, 2], [], [7])}))["x"].square().sum().backward()
    moved = (module.state_dict()["tables.t.weight"] != before["tables.t.weight"]).any(1)
    assert moved.nonzero().flatten().tolist() == [1, 2, 7]
    assert list(module.parameters()) == []


def test_several_dims_and_a_table_without_features():
    tables = [
        TableConfig(name="a", num_rows=5, dim=4),
        TableConfig(name="b", num_rows=6, dim=12),
        TableConfig(name="c", num_rows=7, dim=4),
        TableConfig(name="idle", num_rows=3, dim=16),
    ]
    features = [FeatureConfig(name=f"f{name}", table=name, pooling="none") for name in "cba"]
    module = make(features, tables=tables)
    before = copied(module)
    out = module.lookup(module.exchange({"fb": ids_of([5]), "fa": ids_of([4, 0]), "fc": ids_of([6])}))
    assert list(out) == ["fc", "fb", "fa"]
    for name, row in (("a", 4), ("b", 5), ("c", 6)):
        assert torch.equal(out[f"f{name}"][0], before[f"tables.{name}.weight"][row])
    (out["fa"].sum() + 2 * out["fb"].sum()).backward()
    after = module.state_dict()
    torch.testing.assert_close(after["tables.a.weight"][4], before["tables.a.weight"][4] - 0.1)
    torch.testing.assert_close(after["tables.b.weight"][5], before["tables.b.weight"][5] - 0.2)
    # fc had no gradient: SGD leaves it
    assert torch.equal(after["tables.c.weight"], before["tables.c.weight"])
    assert torch.equal(after["tables.idle.weight"], before["tables.idle.weight"])


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_empty_batches(kind):
    module = make(
        [FeatureConfig(name=pooling, table="t", pooling=pooling) for pooling in ("sum", "mean", "none")],
        optimizer=SparseOptimizerConfig(kind=kind),
    )
    before = copied(module)
    for batch in (
        {name: ids_of() for name in ("sum", "mean", "none")},
        {name: ids_of([], []) for name in ("sum", "mean", "none")},
        {"sum": ids_of([])},
    ):
        out = module.lookup(module.exchange(batch))
        assert set(out) == set(batch)
        sum(each.sum() for each in out.values()).backward()
        assert all(not each.any() for each in out.values())
        assert {name: each.shape[0] for name, each in out.items() if name != "none"} == {
            name: len(batch[name][1]) - 1 for name in batch if name != "none"
        }
    assert module.lookup(module.exchange({})) == {}
    after = module.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before if not key.endswith("step"))


def test_evaluation_changes_nothing():
    module = make([FeatureConfig(name="x", table="t")], optimizer=SparseOptimizerConfig(kind="adam"))
    before = copied(module)
    with torch.no_grad():
        out = module.lookup(module.exchange({"x": ids_of([1, 2])}))
    assert not out["x"].requires_grad
    module.eval()
    assert not module.lookup(module.exchange({"x": ids_of([1, 2])}))["x"].requires_grad
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    module.train()
    module.lookup(module.exchange({"x": ids_of([1, 2])}))["x"].sum().backward()
    assert int(module.state_dict()["tables.t.step"]) == 1


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_set_learning_rate(kind):
    slow = make([FeatureConfig(name="x", table="t")], optimizer=SparseOptimizerConfig(kind=kind, learning_rate=0.5))
    fast = make([FeatureConfig(name="x", table="t")], optimizer=SparseOptimizerConfig(kind=kind, learning_rate=0.25))
    before = copied(slow)["tables.t.weight"]
    slow.set_learning_rate(0.25)
    for module in (slow, fast):
        module.lookup(module.exchange({"x": ids_of([1, 2])}))["x"].square().sum().backward()
    assert torch.equal(slow.state_dict()["tables.t.weight"], fast.state_dict()["tables.t.weight"])
    assert not torch.equal(slow.state_dict()["tables.t.weight"], before)
    with pytest.raises(ValueError, match=r"set_learning_rate: `learning_rate` .*got -1"):
        slow.set_learning_rate(-1.0)
    for wrong, name in (("x", "str 'x'"), (None, "NoneType None"), (True, "bool True"), (torch.tensor(0.1), "Tensor")):
        with pytest.raises(TypeError, match=f"set_learning_rate: `learning_rate` must be a number, got {name}"):
            slow.set_learning_rate(wrong)


def test_exchange_may_run_ahead():
    """Ids leave a batch early, rows are read late: the same as in turn."""
    early, plain = (make([FeatureConfig(name="x", table="t")]) for _ in range(2))
    batches = [{"x": ids_of([1, 2], [2])}, {"x": ids_of([2, 3])}, {"x": ids_of([3], [1])}]
    pending = early.exchange(batches[0])
    for at, batch in enumerate(batches):
        following = early.exchange(batches[at + 1]) if at + 1 < len(batches) else None
        early.lookup(pending)["x"].square().sum().backward()
        plain.lookup(plain.exchange(batch))["x"].square().sum().backward()
        pending = following
    assert torch.equal(early.state_dict()["tables.t.weight"], plain.state_dict()["tables.t.weight"])


@pytest.mark.parametrize("function", ["start_lookup", "lookup"])
def test_lookup_takes_batches_of_its_own_module(function):
    features = [FeatureConfig(name="x", table="t")]
    first, second = (make(features) for _ in range(2))
    pending = first.exchange({"x": ids_of([1])})
    with pytest.raises(
        ValueError, match=f"{function}: `pending` must come from this module's exchange, got a batch of"
    ):
        getattr(second, function)(pending)
    for wrong, name in ((None, "NoneType"), ({}, "dict")):
        with pytest.raises(TypeError, match=f"{function}: `pending` must be a Pending, got {name}; pass what exchange"):
            getattr(first, function)(wrong)
    assert first.lookup(pending)["x"].shape == (1, DIM)


def test_initial_weights_do_not_depend_on_neighbours():
    alone = make([], tables=[TableConfig(name="big", num_rows=65536 + 40, dim=4)], seed=3)
    both = make(
        [],
        tables=[TableConfig(name="a", num_rows=9, dim=4), TableConfig(name="big", num_rows=65536 + 40, dim=4)],
        seed=3,
    )
    first, second = alone.state_dict()["tables.big.weight"], both.state_dict()["tables.big.weight"]
    assert torch.equal(first, second)
    assert abs(float(first.std()) - 0.5) < 0.01
    assert not torch.equal(first[:40], first[65536:])
    assert not torch.equal(first, make([], tables=alone.tables, seed=4).state_dict()["tables.big.weight"])


@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.id)
def test_float16_step_is_a_rounded_float32_step(case):
    """On the CPU to the nearest: one step is within half a spacing, 2^-11, of the reference; moments are float32."""
    optimizer = SparseOptimizerConfig(kind=case.kind, learning_rate=0.01, eps=1e-6, weight_decay=case.weight_decay)
    module = make([FeatureConfig(name="x", table="t")], optimizer=optimizer, weight_dtype=torch.float16)
    reference = ReferenceTable(module.state_dict()["tables.t.weight"].double(), optimizer)
    upstream = torch.linspace(-1, 1, 2 * DIM).view(2, DIM)
    module.lookup(module.exchange({"x": ids_of([1, 2, 2], [4])}))["x"].backward(upstream)
    reference.update(torch.tensor([1, 2, 2, 4]), upstream.double()[[0, 0, 0, 1]])
    state = module.state_dict()
    # half a spacing of float16 where the steps end, and of its subnormal numbers
    error = (state["tables.t.weight"].double() - reference.weight).abs()
    assert bool((error <= 2**-11 * 1.001 * reference.weight.abs() + 2**-25).all())
    if "tables.t.sum" in state:
        torch.testing.assert_close(state["tables.t.sum"].double().view(10, -1), reference.second, rtol=1e-6, atol=1e-7)


def test_half_precision_tables():
    module = make(
        [FeatureConfig(name="x", table="t")],
        weight_dtype=torch.float16,
        optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.25),
    )
    before = copied(module)["tables.t.weight"]
    out = module.lookup(module.exchange({"x": ids_of([1, 2])}))["x"]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.detach()[0], before[1].float() + before[2].float())
    out.sum().backward()
    after = module.state_dict()["tables.t.weight"]
    assert after.dtype == torch.float16
    torch.testing.assert_close(after[1], before[1] - 0.25, rtol=0, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.id)
def test_bfloat16_tables(case, device):
    """Each step lands on a bfloat16 neighbour of the float32 step, in the mean on the step itself; it repeats."""
    optimizer = SparseOptimizerConfig(kind=case.kind, learning_rate=0.01, eps=1e-6, weight_decay=case.weight_decay)
    tables = [TableConfig(name="t", num_rows=4000, dim=DIM)]
    features = [FeatureConfig(name="x", table="t", pooling="none")]
    options = {"tables": tables, "optimizer": optimizer, "weight_dtype": torch.bfloat16, "device": device}
    first, second = (make(features, **options) for _ in range(2))
    reference = ReferenceTable(first.state_dict()["tables.t.weight"].cpu().double(), optimizer)
    ids = torch.arange(4000)
    upstream = torch.linspace(-1, 1, 4000 * DIM).view(4000, DIM)
    for module in (first, second):
        pair = (ids.to(device), torch.tensor([0, 4000], device=device))
        out = module.lookup(module.exchange({"x": pair}))["x"]
        assert out.dtype == torch.float32
        out.backward(upstream.to(device))
    before = reference.weight.clone()
    reference.update(ids, upstream.double())
    after = first.state_dict()["tables.t.weight"].cpu()
    assert after.dtype == torch.bfloat16
    assert torch.equal(after, second.state_dict()["tables.t.weight"].cpu())
    error = (after.double() - reference.weight) / reference.weight.abs().clamp(min=2**-20)
    # spacing of bfloat16: 2^-7 of the value below it
    assert float(error.abs().max()) <= 2**-7 * 1.001
    # unbiased: 32,000 errors of deviation below 2^-8 have a mean below 5 * 2^-8 / 179
    assert abs(float(error.mean())) < 5 * 2**-8 / 179
    small = (reference.weight - before).abs() < 2**-9 * before.abs()
    if case.kind == "sgd":
        # steps that rounding to the nearest would lose
        assert int(small.sum()) > 1000
        assert bool((after.double() != before)[small].any())


def test_bfloat16_resumes_as_if_never_stopped():
    """The rounding's random bits go on from the saved step."""
    options = {"weight_dtype": torch.bfloat16, "optimizer": SparseOptimizerConfig(learning_rate=0.01)}
    features = [FeatureConfig(name="x", table="t")]
    plain, saved, loaded = (make(features, **options) for _ in range(3))

    def step(module):
        module.lookup(module.exchange({"x": ids_of([1, 2], [3])}))["x"].square().sum().backward()

    step(plain)
    step(saved)
    loaded.load_state_dict(copied(saved))
    assert int(copied(saved)["tables.t.step"]) == 1
    step(plain)
    step(loaded)
    assert torch.equal(copied(plain)["tables.t.weight"], copied(loaded)["tables.t.weight"])


def test_non_contiguous_ids():
    module = make([FeatureConfig(name="x", table="t", pooling="none")])
    values = torch.arange(10)[::3]
    out = module.lookup(module.exchange({"x": (values, torch.tensor([0, 4]))}))["x"]
    assert torch.equal(out.detach(), module.state_dict()["tables.t.weight"][[0, 3, 6, 9]])


@pytest.mark.parametrize(
    "case",
    [case for case in OPTIMIZERS if case.id in ("sgd-decay0.0", "adagrad-decay0.0", "rowwise_adagrad-decay0.0")],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("ids_per_bag", [1, 8, 10_000])
def test_unpooled_engine_of_several_tables(monkeypatch, case, ids_per_bag):
    """The way of tables with a cache, on the CPU: one unpooled engine per dim, pooling outside of it."""
    monkeypatch.setattr(build_source, "combines", lambda memory: False)
    monkeypatch.setattr(engine_source, "IDS_PER_BAG", ids_per_bag)
    check_against_reference(case, "cpu")
    test_several_dims_and_a_table_without_features()
    test_empty_batches(case.kind)


@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_unpooled_engine_drops(monkeypatch, pooling):
    monkeypatch.setattr(build_source, "combines", lambda memory: False)
    module = make([FeatureConfig(name="x", table="t", pooling=pooling)], id_policy="drop")
    before = copied(module)["tables.t.weight"]
    for _ in range(2):
        out = module.lookup(module.exchange({"x": ids_of([-1, 99], [99])}))["x"]
        assert not out.any()
        out.sum().backward()
    assert torch.equal(module.state_dict()["tables.t.weight"], before)


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case.id)
def test_optimizer_equals_reference_on_cuda(case):
    check_against_reference(case, "cuda")


@gpu
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_cuda_equals_cpu_and_repeats_bitwise(kind):
    """Same initial weights; ten steps within float32 rounding of the CPU's; two CUDA runs are equal bit for bit.

    The hot id occurs about 400 times in a batch. Beyond 1,024 times fbgemm sums an id's gradients in no fixed order.
    """
    tables = [TableConfig(name="a", num_rows=5000, dim=64), TableConfig(name="b", num_rows=7, dim=64)]
    features = [
        FeatureConfig(name="s", table="a", pooling="sum"),
        FeatureConfig(name="m", table="b", pooling="mean"),
        FeatureConfig(name="n", table="a", pooling="none"),
    ]
    results = []
    for device in ("cpu", "cuda", "cuda"):
        module = make(
            features, tables=tables, device=device, optimizer=SparseOptimizerConfig(kind=kind, learning_rate=0.05)
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            batch = {}
            for name, rows in (("s", 5000), ("m", 7), ("n", 5000)):
                lengths = torch.randint(0, 40, (300,), generator=generator)
                values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
                values[::30] = 1
                batch[name] = (values.to(device), torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]).to(device))
            out = module.lookup(module.exchange(batch))
            weight = torch.linspace(0.5, 1.5, 64, device=device)
            sum((each * weight).sum() + 0.01 * each.square().sum() for each in out.values()).backward()
        results.append({key: value.cpu() for key, value in module.state_dict().items()})
    for key, value in results[0].items():
        assert torch.equal(results[1][key], results[2][key])
        # Sums of hundreds of gradients in another order.
        torch.testing.assert_close(results[1][key], value, rtol=1e-3, atol=1e-4)


@gpu
@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_id_policy_on_cuda(policy):
    features = [FeatureConfig(name="x", table="t", pooling="none")]
    results = []
    for device in ("cpu", "cuda"):
        module = make(features, device=device, id_policy=policy)
        values, offsets = ids_of([-1, 3, 10, 2**63 - 1])
        out = module.lookup(module.exchange({"x": (values.to(device), offsets.to(device))}))["x"]
        out.square().sum().backward()
        results.append((out.detach().cpu(), module.state_dict()["tables.t.weight"].cpu()))
        assert module.out_of_range_counts() == {("t", "x"): 3}
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)


@gpu
def test_id_error_on_cuda_comes_before_any_row_is_written():
    module = make([FeatureConfig(name="x", table="t")], device="cuda")
    before = copied(module)
    values, offsets = ids_of([1, 10])
    pending = module.exchange({"x": (values.cuda(), offsets.cuda())})
    with pytest.raises(IndexError, match=r"feature 'x'.*table 't'.*num_rows=10.*got 10"):
        module.lookup(pending)
    with pytest.raises(ValueError, match="must be a batch that was not looked up"):
        module.lookup(pending)
    torch.cuda.synchronize()
    assert torch.equal(module.state_dict()["tables.t.weight"], before["tables.t.weight"])


@gpu
def test_exchange_on_another_stream():
    plain, early = (make([FeatureConfig(name="x", table="t")], device="cuda") for _ in range(2))
    side = torch.cuda.Stream()
    for step in range(5):
        values, offsets = ids_of([step, step + 1], [3])
        batch = {"x": (values.cuda(), offsets.cuda())}
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            pending = early.exchange(batch)
        early.lookup(pending)["x"].square().sum().backward()
        plain.lookup(plain.exchange(batch))["x"].square().sum().backward()
    assert torch.equal(early.state_dict()["tables.t.weight"], plain.state_dict()["tables.t.weight"])
