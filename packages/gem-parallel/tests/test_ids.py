"""Bad ids, bad offsets, bad arguments: what is refused, dropped, clamped and counted."""

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

from gem_parallel import FeatureConfig, ParallelMesh, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings import build as build_source
from gem_parallel._src.embeddings import hashing
from gem_parallel._src.embeddings import plan as plan_source
from gem_parallel._src.embeddings.hashing import hash_ids
from gem_parallel._src.embeddings.ids import flatten_ids
from gem_parallel._src.embeddings.layout import make_groups, make_shards

BIG = 2**63 - 1
ROWS = 10


def ids_of(*bags):
    values = torch.tensor([each for bag in bags for each in bag], dtype=torch.int64)
    return values, torch.tensor([0, *[len(bag) for bag in bags]]).cumsum(0)


def make(policy, kind="sgd", pooling="none", **options):
    """The checked table `t` lies between two canaries of the same dim, so before and after it in one engine's order."""
    tables = [
        TableConfig(name="before", num_rows=3, dim=8),
        TableConfig(name="t", num_rows=ROWS, dim=8),
        TableConfig(name="after", num_rows=3, dim=8),
    ]
    features = [FeatureConfig(name=name, table=name) for name in ("before", "after")]
    features += [FeatureConfig(name=name, table="t", pooling=pooling) for name in ("x", "y")]
    optimizer = SparseOptimizerConfig(kind=kind, learning_rate=0.5, **options)
    return ShardedEmbeddings(tables, features, optimizer=optimizer, id_policy=policy)


def copied(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("bad", [-1, ROWS, BIG, -BIG - 1])
def test_error_names_everything_and_changes_nothing(bad):
    module = make("error")
    before = copied(module)
    with pytest.raises(IndexError) as info:
        module.exchange({"x": ids_of([1], [ROWS - 1]), "y": ids_of([2, bad, 3, bad])})
    text = str(info.value)
    for part in ("exchange:", "feature 'y'", "table 't'", f"num_rows={ROWS}", f"got {bad} ", "2 such ids", "id_policy"):
        assert part in text, text
    assert module.out_of_range_counts() == {
        ("before", "before"): 0,
        ("after", "after"): 0,
        ("t", "x"): 0,
        ("t", "y"): 2,
    }
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    # the module goes on
    module.lookup(module.exchange({"x": ids_of([ROWS - 1, 0])}))


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_drop_gives_zeros_and_no_gradient(kind, pooling):
    """A dropped id leaves all rows as if its occurrence were a zero row; twice, so that moments are met again."""
    decay = {"weight_decay": 0.1} if kind in ("adam", "rowwise_adagrad") else {}
    module = make("drop", kind, pooling, **decay)
    twin = make("drop", kind, pooling, **decay)
    table = module.state_dict()["tables.t.weight"]
    for step in range(2):
        rows = table.clone()
        out = module.lookup(module.exchange({"x": ids_of([4, -1, ROWS], [BIG])}))["x"]
        if pooling == "none":
            assert torch.equal(out.detach(), torch.stack([rows[4], *[torch.zeros(8)] * 3]))
            upstream = torch.ones_like(out)
        else:
            divisor = 3 if pooling == "mean" else 1
            assert torch.equal(out.detach(), torch.stack([rows[4] / divisor, torch.zeros(8)]))
            upstream = torch.ones_like(out) * divisor
        out.backward(upstream)
        twin_out = twin.lookup(twin.exchange({"x": ids_of([4])}))["x"]
        twin_out.backward(torch.ones_like(twin_out))
        assert module.out_of_range_counts()["t", "x"] == 3 * (step + 1)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[key])
    assert not torch.equal(module.state_dict()["tables.t.weight"][4], make("drop").state_dict()["tables.t.weight"][4])


def test_clamp_takes_the_nearest_row():
    module = make("clamp")
    rows = module.state_dict()["tables.t.weight"].clone()
    out = module.lookup(module.exchange({"x": ids_of([-5, 3, ROWS, BIG])}))["x"]
    assert torch.equal(out.detach(), rows[[0, 3, ROWS - 1, ROWS - 1]])
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(rows - module.state_dict()["tables.t.weight"], _moved({0: 0.5, 3: 0.5, ROWS - 1: 1.0}))
    assert module.out_of_range_counts()["t", "x"] == 3


def _moved(by_row):
    found = torch.zeros(ROWS, 8)
    for row, amount in by_row.items():
        found[row] = amount
    return found


@pytest.mark.parametrize("policy", ["drop", "clamp"])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_neighbouring_tables_are_not_touched(policy, kind):
    module = make(policy, kind)
    before = copied(module)
    out = module.lookup(module.exchange({"x": ids_of([-1, ROWS, BIG, -BIG - 1])}))["x"]
    out.square().sum().backward()
    after = module.state_dict()
    for key in before:
        if "before" in key or "after" in key:
            assert key.endswith("step") or torch.equal(after[key], before[key]), key


@dataclass(frozen=True)
class Refused:
    id: str
    ids: object
    error: type
    text: str


REFUSED = [
    Refused("unknown feature", {"z": ids_of([1])}, ValueError, r"got 'z'; the features are after, before, x, y"),
    Refused("not a mapping", [("x", ids_of([1]))], TypeError, "`ids` must be a mapping .*got list; .*pass {}"),
    Refused("none", None, TypeError, "`ids` must be a mapping .*got NoneType"),
    Refused("three", {"x": (*ids_of([1]), None)}, TypeError, r"must be a pair \(values, offsets\), got tuple of 3"),
    Refused(
        "float ids",
        {"x": (torch.tensor([1.5]), torch.tensor([0, 1]))},
        TypeError,
        "got torch.float32; keep integers as int64",
    ),
    Refused(
        "sparse values",
        {"x": (torch.tensor([1]).to_sparse(), torch.tensor([0, 1]))},
        TypeError,
        r"values of feature 'x' must be a dense tensor, got one of layout torch.sparse_coo; use .to_dense\(\)",
    ),
    Refused(
        "all sparse",
        {"x": (torch.tensor([1]).to_sparse(), torch.tensor([0, 1]).to_sparse())},
        TypeError,
        "values of feature 'x' must be a dense tensor",
    ),
    Refused("not a pair", {"x": torch.zeros(2)}, TypeError, r"`ids\['x'\]` must be a pair"),
    Refused("list", {"x": ([1], torch.tensor([0, 1]))}, TypeError, "values of feature 'x' must be a Tensor, got list"),
    Refused("int32", {"x": (torch.zeros(1).int(), torch.tensor([0, 1]))}, TypeError, "must be int64, got torch.int32"),
    Refused("float offsets", {"x": (torch.tensor([1]), torch.tensor([0.0, 1.0]))}, TypeError, "offsets of feature 'x'"),
    Refused("2-D", {"x": (torch.zeros(1, 1).long(), torch.tensor([0, 1]))}, ValueError, r"got shape \(1, 1\)"),
    Refused(
        "meta", {"x": (torch.zeros(1, device="meta").long(), torch.tensor([0, 1]))}, ValueError, "device cpu, got meta"
    ),
    Refused("no offsets", {"x": (torch.zeros(0).long(), torch.zeros(0).long())}, ValueError, r"hold num_bags \+ 1"),
    Refused(
        "start",
        {"x": (torch.tensor([1, 2]), torch.tensor([1, 2]))},
        ValueError,
        r"got 1 place in .* \('x' starts at 1\)",
    ),
    Refused("end", {"x": (torch.tensor([1, 2]), torch.tensor([0, 1]))}, ValueError, "'x' ends at 1 for 2 values"),
    Refused("past the end", {"x": (torch.tensor([1, 2]), torch.tensor([0, 3]))}, ValueError, "'x' ends at 3 for 2"),
    Refused(
        "falling",
        {"x": (torch.tensor([1, 2]), torch.tensor([0, 2, 1, 2]))},
        ValueError,
        "feature 'x': .*got 1 place in .*'x' has 2, then 1 at bag 1",
    ),
    Refused(
        "second feature",
        {"x": ids_of([1], [2]), "y": (torch.tensor([1, 2]), torch.tensor([1, 0, 3]))},
        ValueError,
        "feature 'y': offsets must start at 0.*got 3 places.*'y' starts at 1",
    ),
]


@pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_refused_batches(case, policy):
    module = make(policy)
    with pytest.raises(case.error, match=case.text):
        module.exchange(case.ids)


def test_a_feature_left_out_is_absent_and_one_without_values_is_zero():
    module = make("error", pooling="sum")
    empty = (torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    rows = module.lookup(module.exchange({"x": empty}))
    assert list(rows) == ["x"]
    assert rows["x"].shape == (2, 8)
    assert not rows["x"].any()


TABLE = {"name": "t", "num_rows": 4, "dim": 8}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"dim": 6}, ValueError, "`dim` must be a multiple of 4 .* got 6; use 8"),
        ({"dim": 1028}, ValueError, "`dim` must be at most 1024 .* got 1028; split the columns over 2 tables"),
        ({"dim": 0}, ValueError, r"`dim` must be a multiple of 4 in \[4, 1024\], got 0"),
        ({"dim": 4.0}, TypeError, "`dim` must be an int, got float"),
        ({"init_std": "x"}, TypeError, "TableConfig 't': `init_std` must be a number, got str 'x'"),
        ({"init_std": True}, TypeError, "`init_std` must be a number, got bool True"),
        ({"num_rows": 0}, ValueError, r"`num_rows` must lie in \[1, 1152921504606846976\], got 0"),
        ({"hashed": 1}, TypeError, "`hashed` must be a bool, got int"),
        ({"num_rows": 1.5}, TypeError, "`num_rows` must be an int, got float"),
        ({"placement": "rows"}, ValueError, "`placement` must be one of auto, table_wise, row_wise, .*, got 'rows'"),
        ({"init_std": -1.0}, ValueError, "`init_std` must be finite and at least 0, got -1.0"),
        ({"name": ""}, ValueError, "`name` must be a non-empty name"),
        ({"name": 3}, TypeError, "`name` must be a str, got int"),
    ],
)
def test_table_refuses(changes, error, text):
    with pytest.raises(error, match=text):
        TableConfig(**{**TABLE, **changes})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "rmsprop"}, "`kind` must be one of rowwise_adagrad, adagrad, adam, sgd, got 'rmsprop'"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be finite"),
        ({"eps": 0.0}, "`eps` must be finite and above 0"),
        ({"beta1": 1.0}, r"`beta1` must lie in \[0, 1\), got 1.0"),
        ({"kind": "sgd", "beta1": 0.5}, "`beta1` must be left out for kind 'sgd', .*got 0.5; use kind='adam'"),
        ({"beta2": 0.5}, "`beta2` must be left out for kind 'rowwise_adagrad'"),
        ({"kind": "sgd", "weight_decay": 0.1}, "`weight_decay` must be 0 for kind 'sgd', got 0.1"),
    ],
)
def test_optimizer_refuses(arguments, text):
    with pytest.raises(ValueError, match=text):
        SparseOptimizerConfig(**arguments)


@pytest.mark.parametrize("argument", ["learning_rate", "eps", "beta1", "beta2", "weight_decay"])
@pytest.mark.parametrize(
    ("value", "name"),
    [(True, "bool True"), ("0.1", "str '0.1'"), (None, "NoneType None"), (Fraction(1, 2), r"Fraction .*pass a float")],
)
def test_optimizer_takes_numbers(argument, value, name):
    with pytest.raises(TypeError, match=f"SparseOptimizerConfig: `{argument}` must be a number, got {name}"):
        SparseOptimizerConfig(kind="adam", **{argument: value})


def test_optimizer_defaults():
    """Documented; another library's eps makes another run of the same numbers."""
    config = SparseOptimizerConfig()
    assert (config.kind, config.eps, config.weight_decay) == ("rowwise_adagrad", 1e-8, 0.0)
    assert (config.beta1, config.beta2) == (0.9, 0.999)


@pytest.mark.parametrize(
    ("tables", "features", "options", "text"),
    [
        ([], [], {}, "`tables` must hold at least one"),
        (["t", "t"], [], {}, "names in `tables` must be unique, got 't' twice"),
        (["t"], [("f", "t"), ("f", "t")], {}, "names in `features` must be unique, got 'f' twice"),
        (["t"], [("f", "u")], {}, "feature 'f' must name a table of `tables`, got 'u'; the tables are t"),
        (["t"], [], {"id_policy": "ignore"}, "`id_policy` must be one of error, drop, clamp, got 'ignore'"),
        (
            ["t"],
            [],
            {"weight_dtype": torch.float64},
            "`weight_dtype` must be torch.float32, torch.float16 or .*got torch.float64",
        ),
        (["t"], [], {"device": "meta"}, "`device` must be a CPU or CUDA device, got meta"),
        (["t"], [], {"device": "cupu"}, "`device` must name a device as in 'cpu' or 'cuda:0', got 'cupu'"),
        (["t"], [], {"device": "cuda:99"}, "`device` must be one that torch sees.*got cuda:99; use device='cpu'"),
        (["t"], [], {"weight_dtype": "float32"}, "`weight_dtype` must be .*got 'float32'"),
        (["t"], [], {"seed": -1}, r"`seed` must lie in \[0, 9223372036854775807\], got -1"),
        (["t"], [], {"seed": 2**70}, "`seed` must lie in"),
        (["t"], [], {"timeout_s": float("inf")}, "`timeout_s` must be finite and above 0, got inf"),
        (["t"], [], {"timeout_s": float("nan")}, "`timeout_s` must be finite and above 0, got nan"),
    ],
)
def test_module_refuses(tables, features, options, text):
    with pytest.raises(ValueError, match=text):
        ShardedEmbeddings(
            [TableConfig(**{**TABLE, "name": name}) for name in tables],
            [FeatureConfig(name=name, table=table) for name, table in features],
            optimizer=SparseOptimizerConfig(),
            **options,
        )
    with pytest.raises(ValueError, match="`pooling` must be one of sum, mean, none, got 'max'"):
        FeatureConfig(name="f", table="t", pooling="max")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tables": ["item"]}, r"`tables\[0\]` must be a TableConfig, got str"),
        ({"tables": TableConfig(**TABLE)}, "`tables` must be a sequence of TableConfig, got TableConfig; pass a list"),
        ({"tables": "item"}, "`tables` must be a sequence of TableConfig, got str"),
        ({"features": {"f": "t"}}, "`features` must be a sequence of FeatureConfig, got dict"),
        ({"features": [TableConfig(**TABLE)]}, r"`features\[0\]` must be a FeatureConfig, got TableConfig"),
        ({"optimizer": None}, "`optimizer` must be a SparseOptimizerConfig, got NoneType"),
        ({"optimizer": "adam"}, "`optimizer` must be a SparseOptimizerConfig, got str"),
        ({"mesh": 2}, "`mesh` must be a DeviceMesh or None, got int; pass `.sparse`"),
        (
            {"mesh": object.__new__(ParallelMesh)},
            "`mesh` must be a DeviceMesh or None, got ParallelMesh; pass `.sparse`",
        ),
        ({"device": 0}, "`device` must be a torch.device or a str, got int 0"),
        ({"timeout_s": "3"}, "`timeout_s` must be a number, got str '3'"),
        ({"timeout_s": True}, "`timeout_s` must be a number, got bool True"),
        ({"seed": 1.5}, "`seed` must be an int, got float"),
        ({"seed": "x"}, "`seed` must be an int, got str"),
        ({"keep_gathered": "no"}, "`keep_gathered` must be a bool, got str 'no'"),
        ({"measure_updates": 1}, "`measure_updates` must be a bool, got int 1"),
    ],
)
def test_module_refuses_other_kinds(options, text):
    good = {"tables": [TableConfig(**TABLE)], "features": [], "optimizer": SparseOptimizerConfig()}
    with pytest.raises(TypeError, match=f"ShardedEmbeddings: {text}"):
        ShardedEmbeddings(**{**good, **options})


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, torch.OutOfMemoryError])
def test_tables_that_do_not_fit_are_named(monkeypatch, kind):
    def full(**options):
        raise kind("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(build_source, "CombinedEngine", full)
    expected = torch.OutOfMemoryError if kind is torch.OutOfMemoryError else RuntimeError
    text = "the tables of dim 8 must fit on cpu, got 128 bytes of weights.*'t' 4 x 8.*fewer rows.*can't allocate memory"
    with pytest.raises(expected, match=text):
        ShardedEmbeddings([TableConfig(**TABLE)], [], optimizer=SparseOptimizerConfig())


def test_rows_of_one_rank_are_limited():
    table = TableConfig(name="huge", num_rows=2**33, dim=4)
    with pytest.raises(
        ValueError, match=r"'huge' must have at most 2147483646 rows on one rank .*over 5 ranks or more"
    ):
        ShardedEmbeddings([table], [], optimizer=SparseOptimizerConfig())


def test_positions_beyond_32_bits():
    """Owner and local row of ids of tables with 2^33 rows in all, from the plan of 8 ranks; no table is made."""
    tables = [TableConfig(name=name, num_rows=2**33, dim=4, placement="row_wise") for name in "ab"]
    features = [FeatureConfig(name=f"f{name}", table=name, pooling="none") for name in "ab"]
    (group,) = make_groups(make_shards(tables, 8), features)
    plan = plan_source.GroupPlan(group, 8, 1, torch.device("cpu"))
    ids = torch.tensor([2**33 - 1, 0, 2**32, 2**31 + 5, 2**33 - 1])
    pair = (ids, torch.tensor([0, 5]))
    batch = flatten_ids({"fb": pair}, [group], features, policy="error", device=torch.device("cpu"))
    assert batch.summary.tolist() == [0, -1, -1, -1, 0, 0]
    found = plan_source.find_distinct(batch.groups[0], plan)
    counts = found.send_counts.view(8, 2)
    # chunks of 2^30 rows: 0 on rank 0, 2^31 + 5 on 2, 2^32 on 4, 2^33 - 1 on 7
    assert counts[:, 1].tolist() == [1, 0, 1, 0, 1, 0, 0, 1]
    assert not counts[:, 0].any()
    starts = plan.boundaries[torch.searchsorted(plan.boundaries, found.sorted_positions, right=True) - 1]
    assert (found.sorted_positions - starts).tolist() == [0, 5, 0, 2**30 - 1, 2**30 - 1]


def test_hash_is_splitmix64():
    """Published outputs of splitmix64 for seed 1234567, whose states are seed + k * golden; and its reduction."""
    golden = hashing.GOLDEN
    states = [(1234567 + k * golden) % 2**64 for k in range(3)]
    words = torch.tensor([hashing._signed(state) for state in states])
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [word % 2**64 for word in hashing.mix64(words).tolist()] == expected
    assert hash_ids(words, 1000).tolist() == [each % 2**63 % 1000 for each in expected]
    with pytest.raises(TypeError, match=r"`values` must be int64, got torch.int32"):
        hash_ids(words.int(), 3)
    with pytest.raises(TypeError, match=r"got torch.float64; keep integers as int64"):
        hash_ids(words.double(), 3)
    with pytest.raises(TypeError, match=r"`values` must be a Tensor, got list"):
        hash_ids([1], 3)
    with pytest.raises(ValueError, match=r"hash_ids: `num_rows` must lie in \[1, .*got 0"):
        hash_ids(words, 0)
    for bad, name in ((2.5, "float"), (True, "bool")):
        with pytest.raises(TypeError, match=f"hash_ids: `num_rows` must be an int, got {name}"):
            hash_ids(words, bad)


def test_hash_fills_a_table_evenly():
    """Chi-square of 100,000 consecutive ids, and of ids 2^40 apart, over 1,000 rows: within 5 of its deviations."""
    for step in (1, 2**40):
        rows = hash_ids(torch.arange(-50_000, 50_000) * step, 1000)
        counts = torch.bincount(rows, minlength=1000).double()
        chi_square = float(((counts - 100) ** 2 / 100).sum())
        assert abs(chi_square - 999) < 5 * (2 * 999) ** 0.5, chi_square


@pytest.mark.parametrize("policy", ["error", "drop", "clamp"])
def test_hashed_table_takes_any_id(policy):
    tables = [TableConfig(name="t", num_rows=ROWS, dim=8, hashed=True), TableConfig(name="plain", num_rows=ROWS, dim=8)]
    features = [FeatureConfig(name=name, table=name, pooling="none") for name in ("t", "plain")]
    module = ShardedEmbeddings(tables, features, optimizer=SparseOptimizerConfig(), id_policy=policy)
    values = torch.tensor([-1, BIG, 3, -BIG - 1])
    out = module.lookup(module.exchange({"t": (values, torch.tensor([0, 4])), "plain": ids_of([2])}))
    rows = module.state_dict()["tables.t.weight"]
    with pytest.raises(TypeError, match="values of feature 't' must be a dense tensor"):
        module.exchange({"t": (values.to_sparse(), torch.tensor([0, 4]))})
    assert torch.equal(out["t"], rows[hash_ids(values, ROWS)])
    assert torch.equal(out["plain"], module.state_dict()["tables.plain.weight"][[2]])
    assert set(module.out_of_range_counts().values()) == {0}
