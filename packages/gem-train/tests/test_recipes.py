from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from gem_precision import MXFP8Wire
from gem_train.data import EventLog, generate
from gem_train.errors import ConfigError
from gem_train.overrides import apply_overrides, field_values, parse_assignments
from gem_train.recipes import ParallelConfig, RunConfig, build, get, names, parallel
from gem_train.recipes.parallel import AXES
from gem_train.run_dir import CHANGEABLE, RunDirectory, RunRecord
from gem_train.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    name: str = "a"
    size: int = 2
    kinds: tuple[Literal["x", "y"], ...] = ("x", "y")

    def __post_init__(self) -> None:
        if len(self.kinds) != self.size:
            raise ValueError(f"Inner: `kinds` must have `size` = {self.size} entries, got {len(self.kinds)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    rate: float = 0.1
    steps: int | None = None
    on: bool = False
    mode: Literal["fast", "slow"] = "fast"
    pair: tuple[int, float] = (1, 2.0)
    text: str = ""
    inner: Inner = Inner()
    several: tuple[Inner, ...] = (Inner(), Inner(name="b"))


@dataclass(frozen=True)
class Good:
    assignment: str
    path: str
    value: object


GOOD = [
    Good("rate=1e-3", "rate", 1e-3),
    Good("steps=12", "steps", 12),
    Good("steps=none", "steps", None),
    Good("on=true", "on", True),
    Good("mode=slow", "mode", "slow"),
    Good("pair=3,4.5", "pair", (3, 4.5)),
    Good("text=a=b", "text", "a=b"),
    Good("several.b.name=c", "several.c.name", "c"),
    Good("several.1.name=c", "several.c.name", "c"),
]


@pytest.mark.parametrize("case", GOOD, ids=lambda c: c.assignment)
def test_overrides_are_typed(case: Good) -> None:
    values = field_values(apply_overrides(Outer(), parse_assignments([case.assignment])))
    assert values[case.path] == case.value
    assert type(values[case.path]) is type(case.value)


def test_fields_that_must_fit_change_together() -> None:
    changed = apply_overrides(Outer(), {"inner.size": "3", "inner.kinds": "x,x,y", "rate": "2"})
    assert changed.inner == Inner(size=3, kinds=("x", "x", "y"))
    assert changed.rate == 2.0
    with pytest.raises(ConfigError, match=r"--set inner\.size=3: `kinds` must have `size` = 3 entries, got 2"):
        apply_overrides(Outer(), {"inner.size": "3"})


BAD = [
    ("il=1", r"no field `il`; the fields are"),
    ("rat=1", r"no field `rat`; the nearest are rate"),
    ("inner.sise=1", r"no field `inner\.sise`; the nearest are inner\.size"),
    ("inner=1", "no field `inner`"),
    ("rate.x=1", r"no field `rate\.x`"),
    ("several.z.name=1", r"no field `several\.z\.name`"),
    ("several.9.name=1", r"no field `several\.9\.name`"),
    ("size=1", r"the nearest are .*inner\.size"),
    ("rate=fast", "--set rate=fast: `rate` must be a finite number, got 'fast'; the recipe has 0.1"),
    ("rate=nan", "--set rate=nan: `rate` must be a finite number, got 'nan'"),
    ("rate=-inf", "`rate` must be a finite number, got '-inf'"),
    ("steps=1.5", r"`steps` must be a whole number or none, got '1\.5'; the recipe has none"),
    ("inner.size=9223372036854775808", r"`size` must lie in \[-9223372036854775807, 9223372036854775807\], got 922"),
    ("on=1", "`on` must be true or false, got '1'; the recipe has false"),
    ("mode=medium", "`mode` must be one of fast, slow, got 'medium'; the recipe has fast"),
    ("pair=1", "`pair` must be 2 values separated by commas, got '1'; the recipe has 1,2.0"),
    ("inner.kinds=x,z", "--set inner.kinds=x,z: `kinds` must be one of x, y, got 'z'; the recipe has x,y"),
    ("rate", "must be NAME=VALUE, got 'rate'"),
    ("=1", "must be NAME=VALUE"),
]


@pytest.mark.parametrize(("assignment", "message"), BAD, ids=[case[0] for case in BAD])
def test_bad_overrides_say_what_is_wrong(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(Outer(), parse_assignments([assignment]))


def test_an_element_has_two_names_and_one_value() -> None:
    changed = apply_overrides(Outer(), {"several.1.size": "1", "several.b.kinds": "y"})
    assert changed.several == (Inner(), Inner(name="b", size=1, kinds=("y",)))
    with pytest.raises(
        ConfigError, match=r"--set several\.1\.name=c and --set several\.b\.name=d are the same setting"
    ):
        apply_overrides(Outer(), {"several.1.name": "c", "several.b.name": "d"})


def test_values_may_be_given_as_they_are() -> None:
    schema = get("synthetic").schema
    values = {"trainer.max_steps": 5, "trainer.max_seconds": None, "trainer.select_best": True,
              "trainer.learning_rate": 0.5, "model.context_features": ("item",),
              "model.sequences.0.event_features": []}  # fmt: skip
    config = RunConfig.resolve(get("synthetic"), schema, values)
    assert (config.trainer.max_steps, config.trainer.max_seconds, config.trainer.select_best) == (5, None, True)
    assert (config.model.context_features, config.model.sequences[0].event_features) == (("item",), ())
    with pytest.raises(ConfigError, match=r"^there is no field `trainer.max_step`; the nearest are trainer.max_steps"):
        RunConfig.resolve(get("synthetic"), schema, {"trainer.max_step": 5})
    with pytest.raises(ConfigError, match="`max_steps` must be a whole number or none, got 'true'"):
        RunConfig.resolve(get("synthetic"), schema, {"trainer.max_steps": True})


@pytest.mark.parametrize(("ours", "set_to", "kept"), [(5, None, 5), (64, None, 64), (500, None, 64), (5, "100", 100)])
def test_a_history_keeps_what_the_schema_says_at_most(ours: int, set_to: str | None, kept: int) -> None:
    schema = replace(get("synthetic").schema, max_history=ours)
    config = RunConfig.resolve(get("synthetic"), schema, {} if set_to is None else {"data.max_history": set_to})
    assert config.data.max_history == kept


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"recipe": "synthetic"}, "`recipe` must be of type Recipe, got 'synthetic'; name one"),
        ({"log": "log"}, "`log` must be of type EventLog or DatasetSchema, got 'log'; make one with load_events"),
        ({"assignments": None}, "`assignments` must be of type Mapping, got None; for example"),
    ],
)
def test_arguments_of_another_type_are_refused(change: dict[str, Any], text: str) -> None:
    given = {"recipe": get("synthetic"), "log": get("synthetic").schema, "assignments": {}} | change
    with pytest.raises(TypeError, match=f"^RunConfig.resolve: {text}"):
        RunConfig.resolve(**given)


def test_a_task_may_be_left_out_of_the_model() -> None:
    recipe = get("ml-latest-small")
    model = RunConfig.resolve(recipe, recipe.schema, {"model.tasks": "like", "model.priors": 0.5}).model
    assert (model.tasks, model.priors) == (("like",), (0.5,))


def test_errors_blame_what_was_given_and_how() -> None:
    with pytest.raises(ConfigError, match=r"^--set inner\.size=3: `kinds` must have `size` = 3 .*; the recipe has 2"):
        apply_overrides(Outer(), {"inner.name": "n", "inner.size": "3"})
    with pytest.raises(ConfigError, match=r"^--steps x: `steps` must be a whole number or none"):
        apply_overrides(Outer(), {"steps": "x"}, flags={"steps": "--steps"})


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="`rate` is given twice"):
        parse_assignments(["rate=1", "rate=2"])


@pytest.fixture(scope="module")
def log() -> EventLog:
    return generate(num_users=30, num_items=20, mean_events=10.0)


def test_recipes_are_found_by_name() -> None:
    assert names() == ("ml-latest-small", "ml-latest-2149u", "online-retail", "synthetic")
    for name in names():
        recipe = get(name)
        assert recipe.name == name
        assert recipe.summary
    with pytest.raises(ConfigError, match="no recipe 'ml-latest-smal'; did you mean ml-latest-small"):
        get("ml-latest-smal")
    with pytest.raises(ConfigError, match="no recipe 'x'; the recipes are ml-latest-small,"):
        get("x")


def test_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"directory of ml-latest-small must exist, got 'data/ml-latest-small'; name"):
        get("ml-latest-small").directory(None)
    (tmp_path / "data" / "ml-latest-small").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"must hold events.parquet and items.parquet, got .* without events.parquet a"
    ):
        get("ml-latest-small").directory(None)
    for directory in (tmp_path, tmp_path / "data" / "ml-latest-small"):
        (directory / "events.parquet").touch()
        with pytest.raises(ConfigError, match=r"without items.parquet; name the directory that holds them"):
            get("ml-latest-small").directory(str(directory))
        (directory / "items.parquet").touch()
    assert get("ml-latest-small").directory(None) == Path("data/ml-latest-small")
    assert get("ml-latest-small").directory(str(tmp_path)) == tmp_path
    assert get("synthetic").directory(None) is None
    with pytest.raises(ConfigError, match="recipe synthetic generates its data"):
        get("synthetic").directory("here")


def test_every_setting_of_a_recipe_can_be_listed_and_set(log: EventLog) -> None:
    config = RunConfig.resolve(get("synthetic"), log, {})
    values = field_values(config)
    assert {path.split(".")[0] for path in values} == {"trainer", "data", "sparse", "model", "parallel"}
    texts = {p: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for p, v in values.items()}
    assert RunConfig.resolve(get("synthetic"), log, texts) == config
    json.dumps(config.to_dict())


def test_model_fields_are_set_by_name(log: EventLog) -> None:
    changes = {"model.num_layers": "1", "model.sequences.history.self_attention": "none", "trainer.seed": "5"}
    config = RunConfig.resolve(get("synthetic"), log, changes)
    assert config.model.num_layers == 1
    assert config.trainer.seed == 5
    with pytest.raises(ConfigError, match=r"`model\.num_layer`; the nearest are model\.num_layers"):
        RunConfig.resolve(get("synthetic"), log, {"model.num_layer": "1"})


def test_weights_follow_from_the_seed(log: EventLog) -> None:
    def state(seed: int) -> dict[str, torch.Tensor]:
        config = RunConfig.resolve(get("synthetic"), log, {"trainer.seed": str(seed)})
        torch.manual_seed(123 + seed)
        parts = build(config, log, World())
        return {**parts.model.state_dict(), **parts.embeddings.state_dict()}

    first, again, other = state(1), state(1), state(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tables.item.weight"], other["tables.item.weight"])
    assert any(not torch.equal(first[name], other[name]) for name in first if not name.startswith("tables."))


def test_scores_of_other_predictors_belong_to_their_split(movielens_log: EventLog) -> None:
    recipe = get("ml-latest-small")
    assert recipe.reference_for(movielens_log) is recipe.reference
    note = get("ml-latest-2149u").reference_for(movielens_log)
    assert isinstance(note, str)
    assert "a test split of 20,659 samples with 10,872 positives (like), this one has 10,084 with 4,128." in note
    assert get("synthetic").reference_for(movielens_log) is None


RECORD = RunRecord(
    recipe="synthetic",
    precision="fp32",
    data=None,
    assignments={"trainer.seed": "1"},
    settings={"trainer": {"seed": 1, "max_steps": 5}, "model": {"towers": [{"dim": 4}], "tasks": ["a", "b"]}},
    versions={"torch": "2"},
)


def test_run_directory_round_trip(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.check(resume=False, overwrite=False)
    directory.write(RECORD)
    assert directory.read() == RECORD
    directory.compare(RECORD.settings)
    other = {"trainer": {"seed": 2, "max_steps": 9}, "model": {"towers": [{"dim": 8}], "tasks": ("a", "b")}}
    with pytest.raises(ConfigError, match=r"model\.towers\.0\.dim: run 4, now 8; trainer\.seed: run 1, now 2; use"):
        directory.compare(other, changeable=CHANGEABLE)


def test_run_directory_guards_what_is_there(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    for flags in ({"resume": False, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(ConfigError, match="exists and holds no run of gem"):
            RunDirectory(foreign).check(**flags)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run; leave --resume out"):
        run.check(resume=True, overwrite=False)
    with pytest.raises(ConfigError, match="exclude each other"):
        run.check(resume=True, overwrite=True)
    run.write(RECORD)
    with pytest.raises(ConfigError, match="holds a run already; --resume continues it, --overwrite replaces it"):
        run.check(resume=False, overwrite=False)
    run.check(resume=True, overwrite=False)
    (run.path / "notes.txt").write_text("mine")
    (run.checkpoints / "step-00000001").mkdir(parents=True)
    (run.checkpoints / ".tmp-step-00000002").mkdir()
    (run.path / "tensorboard").mkdir()
    (run.path / "tensorboard" / "events.out.tfevents.1").touch()
    run.check(resume=False, overwrite=True)
    run.clear()
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]


def test_clearing_leaves_what_no_run_wrote(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write(RECORD)
    mine = [tmp_path / name for name in ("checkpoints/notes.txt", "checkpoints/kept/x", "tensorboard/notes.txt")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (run.checkpoints / "step-00000001").mkdir()
    run.clear()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(mine)
    assert not (run.checkpoints / "step-00000001").exists()


def test_one_process_at_a_time_holds_a_run_directory(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with (
        RunDirectory(path).hold(),
        pytest.raises(ConfigError, match=r"another process is training in .*deep/run; w"),
    ):
        RunDirectory(path).hold().__enter__()
    with RunDirectory(path).hold():
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out: .*file/run cannot be made \(Not a directory\)"):
        RunDirectory(tmp_path / "file" / "run").hold().__enter__()
    with pytest.raises(ConfigError, match=r"--out: .*file/run cannot be made in .*/file, which is no directory"):
        RunDirectory(tmp_path / "file" / "run").check(resume=False, overwrite=False)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', '{"format": 9}', "{"])
def test_a_damaged_record_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is"):
        RunDirectory(tmp_path).read()


@pytest.mark.parametrize(("name", "value"), [("settings", "x"), ("assignments", None), ("recipe", 3)])
def test_a_record_of_another_type_is_named(tmp_path: Path, name: str, value: object) -> None:
    directory = RunDirectory(tmp_path)
    directory.write(RECORD)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ConfigError, match=rf"config\.json is damaged \(.*`{name}` must be .*, got {value!r}"):
        directory.read()


@dataclass(frozen=True)
class Layout:
    processes: int
    given: dict[str, int]
    degrees: tuple[int, ...]
    """dp_replicate, dp_shard, ep, sparse_replicate, sparse_shard."""


LAYOUTS = [
    Layout(1, {}, (1, 1, 1, 1, 1)),
    Layout(8, {}, (1, 8, 1, 1, 8)),
    Layout(8, {"ep": 2}, (1, 4, 2, 1, 8)),
    Layout(8, {"dp_replicate": 2, "sparse_replicate": 4}, (2, 4, 1, 4, 2)),
    Layout(8, {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "sparse_replicate": 2, "sparse_shard": 4}, (2, 2, 2, 2, 4)),
    Layout(6, {"dp_shard": 3, "ep": 2}, (1, 3, 2, 1, 6)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.degrees)))
def test_what_is_left_out_of_a_layout_takes_the_rest(layout: Layout) -> None:
    config = ParallelConfig(**layout.given)
    dims = config.dims(layout.processes, num_experts=2)
    assert tuple(getattr(dims, axis) for axis in AXES) == layout.degrees
    assert config.without_degrees().dims(layout.processes).dp_shard == layout.processes


def test_expert_parallelism_stays_inside_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelConfig(ep=4)
    assert config.dims(8, num_experts=4).ep == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # as torchrun says on hosts of two GPUs
    with pytest.raises(ConfigError, match=r"--ep 4 on 8 processes: .*`ep` must stay inside a host.*nearest: .*ep=2"):
        config.dims(8, num_experts=4)


def test_an_engine_that_the_ranks_lack_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mesh:
        """Two ranks that share dense parameters; no process is started."""

        mesh_dim_names = ("dp_replicate", "dp_shard_ep")
        dims = SimpleNamespace(ep=1)

        @property
        def shared(self) -> Mesh:
            return self

        def __getitem__(self, _: str) -> Mesh:
            return self

        def get_group(self) -> SimpleNamespace:
            return SimpleNamespace(size=lambda: 2)

    def refuse(*_: object) -> None:
        raise ValueError("no CUDA device")

    monkeypatch.setattr(parallel, "choose_collectives", refuse)
    with pytest.raises(ConfigError, match=r"--set parallel\.collectives=nccl_zero_cta: no CUDA device"):
        parallel._engine(ParallelConfig(collectives="nccl_zero_cta"), Mesh())
    assert parallel._engine(ParallelConfig(), Mesh()) is None


def test_options_of_the_tables_are_those_of_the_run(log: EventLog) -> None:
    changes = {"parallel.wire_dtype": "bfloat16", "parallel.sharded_at_rest": "false"}
    parallel = RunConfig.resolve(get("synthetic"), log, changes).parallel
    assert parallel.table_options() == {"wire_dtype": torch.bfloat16, "gather": "tables", "keep_gathered": True}
    assert ParallelConfig().table_options() == {
        "wire_dtype": torch.float32, "gather": "tables", "keep_gathered": False
    }  # fmt: skip


def test_dense_parameters_travel_as_the_precision_quantises(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.resolve(get("synthetic"), log, {"parallel.dense_wire": "mxfp8"})
    assert ParallelConfig().param_wire("mxfp8") is None
    assert config.parallel.without_degrees().dense_wire == "mxfp8"
    blocks = {"fp32": (1, 32), "bf16": (1, 32), "bf16_activations": (1, 32), "mxfp8": (32, 32)}
    for precision, shape in blocks.items():
        assert config.parallel.param_wire(precision) == MXFP8Wire(block_shape=shape)
    wire = MXFP8Wire()
    layer = torch.nn.Linear(64, 32)
    assert parallel.describe_wire(layer, wire) == "mxfp8 in blocks of 1x32: 1 of 2 parameters, 98.5% of elements"
    narrow = torch.nn.Module()
    narrow.head, narrow.shard_units, narrow.expert_layers = torch.nn.Linear(64, 31), (), ()
    mesh = SimpleNamespace(dims=SimpleNamespace(ep=1))
    with pytest.raises(
        ConfigError, match=r"--set parallel\.dense_wire=mxfp8: the model must have a matrix of 32 or more"
    ):
        parallel.spread(narrow, config.parallel, mesh, wire=wire)
    monkeypatch.setattr(parallel.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"`dense_wire` must be param_dtype where gem-precision is not installed, got"
    ):
        ParallelConfig(dense_wire="mxfp8")


def test_data_config_is_checked() -> None:
    data = get("synthetic").data
    for name, value in (("global_batch_size", 0), ("max_history", 0), ("epochs", -1), ("prefetch_batches", -1)):
        with pytest.raises(ConfigError, match=f"DataConfig: `{name}` must be >= "):
            dataclasses.replace(data, **{name: value})
    with pytest.raises(TypeError, match=r"DataConfig: `epochs` must be a whole number, got 1\.5"):
        dataclasses.replace(data, epochs=1.5)
    with pytest.raises(ConfigError, match="DataConfig: `balance` must be one of reader, exchange, none, got 'no'"):
        dataclasses.replace(data, balance="no")
    with pytest.raises(TypeError, match="ParallelConfig: `sharded_at_rest` must be true or false, got 1"):
        ParallelConfig(sharded_at_rest=1)
