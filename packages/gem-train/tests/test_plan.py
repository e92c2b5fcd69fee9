"""`gem plan`: descriptions from recipes, the two commands, the picture, and mistakes."""

from __future__ import annotations

import errno
import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gem_model import RankingModel, presets
from gem_parallel import Topology
from gem_parallel.planner import explain, sweep
from gem_train.cli.main import main
from gem_train.recipes import RunConfig, describe_dense, describe_run, get, get_plan, names, plan_names
from gem_train.recipes import describe as describe_module
from gem_train.recipes.build import build_source
from gem_train.world import World

SMALL = presets.small(
    context_features=("user", "ad"),
    num_dense=4,
    event_features=("history.item", "history.kind"),
    num_event_dense=2,
    tasks=("click",),
)
LENGTHS = {"history": (0, 3, 40, 17)}


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("num_experts", [1, 3])
def test_dense_description_is_complete(num_experts):
    config = replace(SMALL, num_experts=num_experts)
    units = describe_dense(config, LENGTHS)
    model = RankingModel(config)
    assert sum(unit.num_parameters for unit in units) == sum(p.numel() for p in model.parameters())
    batch = describe_module._lengths_only(4, LENGTHS)
    total = model.flops(batch).total
    assert 4 * sum(3 * unit.gemm_flops + 3.5 * unit.attention_flops for unit in units) == pytest.approx(total, rel=1e-6)
    mixture = ".mixture" if num_experts > 1 else ""
    assert {unit.name for unit in units} >= {"heads", f"layers.0.interaction{mixture}", "layers.2.towers.history"}
    assert all(unit.activation_bytes > 0 for unit in units)
    experts = [unit for unit in units if unit.num_experts > 1]
    assert [unit.name for unit in experts] == list(model.expert_layers)
    for layer, unit in enumerate(experts):
        expert = model.get_submodule(unit.name).experts[0]
        assert unit.expert_input_bytes == 4 * config.dim * expert.interaction.residual.linear.in_features, layer
        assert unit.expert_output_bytes == 4 * config.dim * expert.interaction.residual.linear.out_features, layer


def test_experts_of_a_recipe_are_planned_over_ep(capsys):
    arguments = ("explain", "synthetic", "--ranks", "8", "--set", "model.num_experts=4", "--dims", "ep=4", "--json")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    plan = json.loads(out)
    assert plan["dims"]["ep"] == 4
    moved = [each["bytes"] for each in plan["collectives"] if each["axis"] == "ep"]
    assert len(moved) >= 4
    assert all(moved)


def test_what_is_saved_is_linear_in_the_widths():
    """So that a model too large to run can be described from two small ones."""
    events = {"history": 20}
    whole = describe_module._saved_bytes(SMALL, events)
    quarter = describe_module._saved_bytes(describe_module._narrowed(SMALL, 4), events)
    half = describe_module._saved_bytes(describe_module._narrowed(SMALL, 2), events)
    for name, measured in whole.items():
        assert quarter[name] + 3 * (half[name] - quarter[name]) == pytest.approx(measured, rel=1e-6), name


def test_measuring_leaves_the_random_state():
    state = torch.get_rng_state()
    describe_module.measure_activations(SMALL, LENGTHS)
    assert torch.equal(state, torch.get_rng_state())


def test_run_description_is_that_of_the_first_batch():
    recipe = get("synthetic")
    log = recipe.load(None)
    config = RunConfig.resolve(recipe, log, {"data.global_batch_size": "48", "data.prefetch_batches": "0"})
    model = describe_run(config, log, 48)
    batch = next(iter(build_source(config, log, World(), "train")))
    assert {table.name for table in model.tables} == {table.name for table in log.tables}
    for table in model.tables:
        values = torch.cat([batch.ids[f.name][0] for f in log.features if f.table == table.name])
        assert table.ids_per_sample * 48 == pytest.approx(values.numel())
        assert table.ids_per_sample * 48 * table.unique_fraction == pytest.approx(values.unique().numel())
    assert model.model_flops * 48 == pytest.approx(RankingModel(config.model).flops(batch).total)


def test_explain_prints_every_section(capsys):
    code, out, err = run(capsys, "explain", "synthetic", "--ranks", "16")
    assert (code, err) == (0, "")
    for text in (
        "16 ranks, 8 per host, 16 per zone",
        "memory of the heaviest rank at its peak",
        "row gradients",
        "E2E MFU",
        "scaling ratio",
        "what limits it",
        "fbgemm-gpu 1.6.0 TBE",
    ):
        assert text in out


def test_explain_as_json(capsys):
    code, out, _ = run(
        capsys,
        "explain",
        "synthetic",
        "--ranks",
        "8",
        "--json",
        "--dims",
        "dp_replicate=2,sparse_replicate=4",
        "--gather",
        "bfloat16",
        "--samples",
        "32",
    )
    assert code == 0
    record = json.loads(out)
    assert (record["schema"], record["ranks"]) == (2, 8)
    assert record["dims"] == {"dp_replicate": 2, "dp_shard": 4, "ep": 1, "sparse_replicate": 4, "sparse_shard": 2}
    assert record["workload"]["gather_bytes"] == 2
    assert record["workload"]["samples_per_rank"] == 32


def test_parameters_in_mxfp8_on_the_wire(capsys):
    """A row of K elements of 4 bytes becomes K bytes and a byte per 32, 0.258 of it; vectors stay."""
    sent = {}
    for gather in ("float32", "mxfp8"):
        code, out, _ = run(capsys, "explain", "synthetic", "--ranks", "2", "--gather", gather, "--json")
        assert code == 0
        record = json.loads(out)
        sent[gather] = sum(each["bytes"] for each in record["collectives"] if each["name"].endswith(" parameters"))
    assert record["workload"]["param_wire"] == "mxfp8"
    assert record["workload"]["gather_bytes"] == 4
    assert record["step"]["losses"]["casts of parameters on the wire"] > 0
    assert 0.2578 < sent["mxfp8"] / sent["float32"] < 0.28
    code, out, _ = run(capsys, "explain", "synthetic", "--ranks", "8", "--set", "parallel.dense_wire=mxfp8")
    assert code == 0
    assert "parameters, mxfp8 " in out


def test_tables_in_host_memory(capsys):
    code, out, _ = run(capsys, "explain", "synthetic", "--ranks", "8", "--location", "uvm_caching")
    assert code == 0
    assert "row_wise, uvm_caching" in out
    assert "table caches" in out
    assert "host memory" in out
    # What the device has room for stays there.
    code, out, _ = run(capsys, "explain", "synthetic", "--ranks", "8", "--location", "auto")
    assert code == 0
    assert "uvm" not in out
    code, _, err = run(
        capsys, "explain", "synthetic", "--ranks", "8", "--location", "uvm", "--dims", "sparse_replicate=2"
    )
    assert code != 0
    assert "use table_gather='rows'" in err


def test_one_rank(capsys):
    code, out, _ = run(capsys, "explain", "synthetic", "--ranks", "1")
    assert code == 0
    assert "nothing: one rank" in out


def test_topology_file(capsys, tmp_path):
    path = tmp_path / "pod.toml"
    Topology(gpus_per_host=2, hosts_per_zone=2, zones=2).save(path)
    code, out, _ = run(capsys, "explain", "synthetic", "--topology", str(path))
    assert code == 0
    assert "8 ranks, 2 per host, 4 per zone" in out
    assert "dp_replicate 2: ranks 0, 4; across zones" in out


def test_more_ranks_than_the_topology_has_are_said(capsys, tmp_path):
    path = tmp_path / "pod.toml"
    Topology(gpus_per_host=2, hosts_per_zone=2, zones=3).save(path)
    for ranks, note in (("12", ""), ("4", ""), ("24", "planned as 6 such zones of 4 GPUs, where it has 3")):
        code, out, err = run(capsys, "explain", "synthetic", "--topology", str(path), "--ranks", ranks)
        assert code == 0
        assert f"{ranks} ranks, 2 per host, 4 per zone" in out
        assert bool(err) == bool(note)
        assert note in err
    assert f"--ranks 24 is more than the 12 GPUs of {path}" in err


def test_a_picture_is_replaced_and_a_mistake_leaves_it(capsys, tmp_path):
    path = tmp_path / "step.svg"
    path.write_text("old")
    assert run(capsys, "explain", "synthetic", "--picture", str(path), "--ranks", "12")[0] == 2
    assert path.read_text() == "old"
    assert run(capsys, "explain", "synthetic", "--picture", str(path))[0] == 0
    assert path.read_text().startswith("<?xml")
    new = tmp_path / "new.svg"
    assert run(capsys, "explain", "synthetic", "--picture", str(new), "--ranks", "12")[0] == 2
    assert not new.exists()


def test_a_picture_that_fails_to_be_written_names_its_option(capsys, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gem_train.plan_picture.draw_plan", full)
    code, _, err = run(capsys, "explain", "synthetic", "--picture", str(tmp_path / "step.svg"))
    assert code == 2
    assert "--picture: must be a file that can be written, got " in err
    assert "(No space left on device); name another" in err


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_picture(capsys, tmp_path, suffix):
    path = tmp_path / f"step.{suffix}"
    code, _, err = run(capsys, "explain", "synthetic", "--ranks", "16", "--picture", str(path))
    assert code == 0
    assert str(path) in err
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        assert b"links in zones" in content
        assert b"links between" not in content
        assert b"parameters" in content


def test_a_small_plan_shows_digits_and_no_empty_lane(capsys, tmp_path):
    path = tmp_path / "step.svg"
    code, out, _ = run(capsys, "explain", "synthetic", "--ranks", "8", "--picture", str(path))
    assert code == 0
    content = path.read_text()
    assert "links in hosts" in content
    assert "links in zones" not in content
    (mfu,) = re.findall(r"E2E MFU \S+ % = local MFU \S+ % x scaling ratio \S+", out)
    assert mfu in content
    assert all(len(number.strip("0.")) >= 3 for number in re.findall(r"[\d.]+(?= %)|[\d.]+$", mfu))
    # The lowest label ends above the numbers of the axis.
    (label,) = re.findall(r' ([\d.]+)\)">\(NVLink\)<', content)
    (tick,) = re.findall(r' ([\d.]+)\)">0\.0<', content)
    assert float(tick) - float(label) > 15


def test_rates_have_units(capsys):
    _, out, _ = run(capsys, "explain", "synthetic")
    table = out.split("\nrates and ")[1]
    values = dict(re.findall(r"^  (gemm, width 256|\w+) +(\d[\d.]* \S+(?: moved / saved)?)  ", table, re.MULTILINE))
    assert values["gemm, width 256"] == "567.00 TFLOP/s"
    assert values["peak_flops"] == "989.00 TFLOP/s"
    assert values["memory_bytes"] == "149.00 GB"
    assert values["copy"] == "4.25 TB/s"
    assert values["activation_passes"] == "1.4 bytes moved / saved"


def test_sweep(capsys):
    code, out, _ = run(capsys, "sweep", "synthetic", "--ranks", "8", "--recompute", "0")
    assert code == 0
    assert "layouts are not beaten" in out
    code, out, _ = run(capsys, "sweep", "synthetic", "--ranks", "8", "--json")
    record = json.loads(out)
    assert record["layouts"] > len(record["front"]) > 0
    seconds = [each["step"]["seconds"] for each in record["front"]]
    assert seconds == sorted(seconds)
    peaks = [each["memory"]["peak_bytes"] for each in record["front"]]
    assert peaks == sorted(peaks, reverse=True)


def fields(record, path=""):
    """Paths of all values in JSON; ``[]`` stands for the entries of a list of objects."""
    if isinstance(record, dict):
        return {each for name, value in record.items() for each in fields(value, f"{path}.{name}" if path else name)}
    if isinstance(record, list) and record and isinstance(record[0], dict):
        return {each for value in record for each in fields(value, f"{path}[]")}
    return {path}


def listed_fields(page):
    """Those of the table in the planning page, with names in braces written out."""
    (section,) = re.findall(r"^## The JSON\n(.*?)^## ", page, flags=re.MULTILINE | re.DOTALL)
    found = []
    for row in re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE):
        parts = re.split(r"\{(.*?)\}", row)
        choices = [part.split(", ") if at % 2 else [part] for at, part in enumerate(parts)]
        found += map("".join, itertools.product(*choices))
    assert len(set(found)) == len(found)
    return set(found)


def test_the_page_lists_the_fields_of_the_json(capsys):
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    listed = listed_fields(page)
    plan = json.loads(run(capsys, "explain", "cluster-4096", "--json")[1])
    assert fields(plan) == listed
    assert f"| `schema` | | version of the object, {plan['schema']} |" in page
    front = json.loads(run(capsys, "sweep", "synthetic", "--ranks", "8", "--json")[1])
    assert set(front) == {"schema", "layouts", "front"}
    missing = ("step.timeline", "limiting", "changes")
    left = {each for each in listed if not each.startswith(missing)}
    assert fields(front["front"][0]) == left | {"limiting", "changes"}


def test_a_layout_that_leaves_its_tier_is_explained_with_a_note(capsys):
    code, out, err = run(capsys, "explain", "synthetic", "--ranks", "16", "--dims", "sparse_replicate=16")
    assert code == 0
    assert "`sparse_replicate` must stay inside a host" in err
    assert "should stay inside a host" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("explain", "nothing"), "there is no recipe 'nothing'"),
        (("explain", "xxxxxx"), ", synthetic, cluster-4096"),
        (("sweep", "cluster-496"), "did you mean cluster-4096"),
        (
            ("explain", "synthetic", "--ranks", "12"),
            "error: --ranks: must fill hosts of 8 GPUs and, above 256, zones of",
        ),
        (("explain", "synthetic", "--ranks", "12"), "got 12; nearest: 8, 16"),
        (("explain", "synthetic", "--ranks", "1000000000"), "--ranks: must be at most 65,536, got 1000000000"),
        (("sweep", "cluster-4096", "--ranks", "1000000000"), "--ranks: must be at most 65,536, got 1000000000"),
        (("explain", "synthetic", "--samples", str(2**40)), "--samples: must be at most 2,147,483,646, got 1099511"),
        (("explain", "synthetic", "--ranks", "0"), "--ranks: must be at least 1, got 0"),
        (("explain", "synthetic", "--dims", "tp=2"), "--dims: must be AXIS=N,... with axes dp_replicate, ep"),
        (
            ("explain", "synthetic", "--dims", "dp_replicate=3"),
            "error: --dims: the number of GPUs must be a positive multiple ",
        ),
        (
            ("explain", "synthetic", "--dims", "dp_replicate=3"),
            "of dp_replicate (3), got 8; nearest: (dp_replicate=4) or (dp_replicate=2) or (dp_replicate=",
        ),
        (
            ("explain", "synthetic", "--dims", "ep=3"),
            "has model.num_experts=1; add --set model.num_experts=3, or leave",
        ),
        (
            ("explain", "synthetic", "--dims", "ep=3", "--set", "model.num_experts=3"),
            "multiple of dp_replicate * ep (3), got 8; nearest: (dp_replicate=1, ep=2) or",
        ),
        (("explain", "synthetic", "--dims", "ep=2,ep=4"), "--dims: ep is given twice, got 'ep=2,ep=4'; give it once"),
        (("explain", "synthetic", "--dims", "ep=-2"), "--dims: ep must be at least 1, got -2; leave it out"),
        (("explain", "synthetic", "--dims", "ep=0"), "--dims: ep must be at least 1, got 0; leave it out"),
        (("explain", "synthetic", "--picture", "x.pdf"), "must end with .svg or .png, got 'x.pdf'"),
        (
            ("explain", "synthetic", "--picture", f"{__file__}/x.svg"),
            "--picture: the file must lie in a directory, got",
        ),
        (("explain", "synthetic", "--recompute", "2"), "error: --recompute: must be below 1 or 1, got 2"),
        (("explain", "synthetic", "--topology", "missing.toml"), "--topology: must be a file that can be read, got 'm"),
        (
            ("explain", "synthetic", "--rates", "missing.json"),
            "--rates: must be a file that can be read, got 'missing.j",
        ),
        (
            ("explain", "synthetic", "--picture", "missing/x.svg"),
            "--picture: the directory of the file must exist, got",
        ),
        (
            ("explain", "synthetic", "--dims", "ep=8"),
            "has model.num_experts=1; add --set model.num_experts=8, or leave",
        ),
        (
            ("explain", "cluster-4096", "--dims", "ep=16"),
            "--dims: each of the 16 ranks of ep needs an expert of its own",
        ),
        (("explain", "cluster-4096", "--set", "model.dim=3"), "is numbers without data"),
        (
            ("explain", "synthetic", "--picture", "/proc/x.svg"),
            "--picture: must be a file that can be written, got '/pr",
        ),
        (("explain", "synthetic", "--picture", f"{'x' * 300}.svg"), "x.svg' (File name too long); name another"),
    ],
)
def test_mistakes(capsys, arguments, text):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert text in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "suffix", "content", "text"),
    [
        (
            "--rates",
            "json",
            "[]",
            "--rates: the file must hold a JSON object, one field per rate, got something else",
        ),
        ("--rates", "json", "{", "must be valid JSON"),
        ("--rates", "json", "{}", "must hold "),
        ("--topology", "json", '{"zones": "x"}', "Topology: `zones` must be an int, got str"),
        ("--topology", "toml", "zones = ", "must be valid TOML"),
        ("--topology", "json", b"\xff\xfe", "Topology.load: "),
        ("--topology", "toml", b"\xff\xfe", "must be valid TOML, got 'utf-8' codec "),
        ("--rates", "json", b"\xff\xfe", "must hold a JSON object"),
        ("--topology", "toml", "zones = 100_000_000", "a plan is of at most 65,536 GPUs, got 800,000,000; add --ranks"),
    ],
)
def test_mistakes_in_files(capsys, tmp_path, option, suffix, content, text):
    path = tmp_path / f"it.{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run(capsys, "explain", "cluster-4096", option, str(path))
    assert (code, out) == (2, "")
    assert text in err
    assert err.startswith(f"gem: error: {option}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("--dims", "foo=3"), ("--dims", "ep"), ("--dims", "ep=-1"), ("--recompute", "2"), ("--set", "x")]
)
def test_what_arguments_alone_decide_comes_before_the_data(capsys, arguments):
    """The directory does not exist, and that would be the mistake found next."""
    code, _, err = run(capsys, "explain", "ml-latest-small", "--data", "/nonexistent", *arguments)
    assert code == 2
    assert arguments[0].strip("-") in err
    assert "/nonexistent" not in err
    assert run(capsys, "explain", "ml-latest-small", "--data", "/nonexistent")[2].count("/nonexistent") == 1


def test_plan_recipes_cannot_be_trained(capsys):
    assert plan_names() == ("cluster-4096",)
    assert not set(plan_names()) & set(names())
    assert main(["train", "cluster-4096"]) == 2
    assert "can only be planned; use `gem plan explain cluster-4096`" in capsys.readouterr().err
    assert main(["recipes"]) == 0
    assert "cluster-4096" in capsys.readouterr().out


def test_cluster_4096():
    recipe = get_plan("cluster-4096")
    start = time.process_time()
    model = recipe.describe()
    report = explain(model, recipe.topology, recipe.dims, recipe.workload)
    # Some 5 s of one core; that it does not take minutes is all that a test on a shared machine can say.
    assert time.process_time() - start < 60
    recipe.dims.check(recipe.topology)
    assert report.dims.world_size == 4096
    assert model.num_sparse_parameters > 1e12
    assert 5e9 < model.num_dense_parameters < 5e10
    assert report.memory.fits
    assert {each.tier for each in report.collectives if each.axis == "ep"} == {"host"}
    assert {each.tier for each in report.collectives if each.axis in ("dp_shard", "dp_shard_ep")} == {"zone"}
    assert {each.tier for each in report.collectives if each.axis == "dp_replicate"} == {"cluster"}
    assert 0.02 < report.mfu < report.local_mfu < 0.6
    few = sweep(model, recipe.topology, recipe.workload, strategies=("size",), recompute=(0.4,))
    assert min(each.step.seconds for each in few) <= report.step.seconds
