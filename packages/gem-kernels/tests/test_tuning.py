"""Tuning: the file of choices and what is chosen from it."""

import importlib
import json
import os
import random
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch
from packed_ops import sizes
from test_compile_keys import VARIANTS, Recorder, kernels, random_batch
from tuning_choices import DEFAULT, FAST, HERE, KEY, choice

import gem_kernels
from gem_kernels import tuning
from gem_kernels.__main__ import choice_row
from gem_kernels._src.attention.configs import TileConfig, fit_lengths, length_class
from gem_kernels._src.attention.hopper.launch import portable_only
from gem_kernels._src.conformance.cases import ConformanceCase
from gem_kernels._src.conformance.run import make_calls
from gem_kernels._src.conformance.tune import agree, choose_fastest, tune
from gem_kernels._src.gdpa import configs as gdpa_configs
from gem_kernels._src.jagged_attention import configs as jagged_configs
from gem_kernels._src.norm_linear import configs as linear_configs
from gem_kernels._src.tables.attention import CANDIDATES
from gem_kernels._src.tuning import choices, state
from gem_kernels._src.tuning.choices import Key, StaleError
from gem_kernels._src.tuning.state import Question, as_numbers, asking, choose, trying
from gem_kernels.testing import attention_inputs


@pytest.fixture
def use_choices(monkeypatch):
    """These choices hold in this process, as if a file had been read."""

    def use(*given):
        monkeypatch.setattr(state, "table", lambda: {each.key: each for each in given})

    return use


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "cache" / "tuning.json"
    other = choice(KEY._replace(kernel="dq"), DEFAULT, 1.0)
    assert choices.add(path, HERE, [choice(), other]) == {KEY: choice(), other.key: other}
    assert choices.read(path, HERE) == {KEY: choice(), other.key: other}
    assert [entry.name for entry in path.parent.iterdir() if entry.suffix != ".lock"] == ["tuning.json"]


def test_the_file_can_be_read_by_people(tmp_path):
    path = tmp_path / "tuning.json"
    choices.add(path, HERE, [choice()])
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert content["made_for"]["gpu"] == "NVIDIA H200"
    assert content["choices"] == [{**KEY._asdict(), "config": FAST, "ms": 0.5, "default": DEFAULT, "default_ms": 1.0}]
    assert choices.file_name("NVIDIA H200") == "gem_kernels-tuning-NVIDIA-H200.json"


def test_a_choice_that_is_there_stays(tmp_path):
    path = tmp_path / "tuning.json"
    choices.add(path, HERE, [choice()])
    other = choice(KEY._replace(kernel="dkdv"))
    assert choices.add(path, HERE, [choice(config=DEFAULT), other]) == {KEY: choice(), other.key: other}


CHANGES = [
    ("gpu", "NVIDIA A100"),
    ("capability", (8, 0)),
    ("triton", "3.9.0"),
    ("gem_kernels", "9"),
    ("candidates", "z"),
]


@pytest.mark.parametrize(("field", "value"), CHANGES, ids=[f"other-{name}" for name, _ in CHANGES])
def test_a_stale_file_is_ignored_with_one_warning_and_replaced(field, value, tmp_path):
    path = tmp_path / "tuning.json"
    choices.add(path, HERE._replace(**{field: value}), [choice()])
    with pytest.raises(StaleError):
        choices.read(path, HERE)
    with pytest.warns(UserWarning, match="is ignored, it was made for") as caught:
        assert state.load(path, HERE, must_exist=True) == {}
    assert len(caught) == 1
    text = str(caught[0].message)
    assert str(path) in text
    assert (
        f"made for {field} {value!r}, here {getattr(HERE, field)!r}; `python -m gem_kernels warm` replaces it" in text
    )
    other = choice(KEY._replace(kernel="dq"))
    assert choices.add(path, HERE, [other]) == {other.key: other}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert state.load(path, HERE, must_exist=True) == {other.key: other}


def test_another_format_is_stale(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"format": 2, "anything": "else"}))
    with pytest.raises(StaleError, match="format 2, here 1"):
        choices.read(path, HERE)


def damaged(**changes):
    content = {"format": 1, "made_for": HERE._asdict(), "choices": [{**KEY._asdict(), "config": FAST, "ms": 1}]}
    return json.dumps(content | changes)


DAMAGED = {
    "empty": "",
    "cut": damaged()[:-20],
    "list": "[]",
    "no-format": "{}",
    "no-gpu": damaged(made_for={"capability": [9, 0]}),
    "unknown-field": damaged(made_for={**HERE._asdict(), "host": "x"}),
    "no-default": damaged(),
    "no-number": damaged(
        choices=[{**KEY._asdict(), "config": {"block_m": "x"}, "default": DEFAULT, "ms": 1, "default_ms": 1}]
    ),
    "no-list": damaged(choices=3),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_an_error_that_names_it(content, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(content)
    for read in (lambda: choices.read(path, HERE), lambda: choices.add(path, HERE, [choice()])):
        with pytest.raises(
            ValueError, match=r"tuning: `.*tuning.json` must be a tuning file .*; delete it and warm again"
        ):
            read()
    assert path.read_text() == content


def test_a_file_that_was_named_must_be_there(tmp_path):
    path = tmp_path / "tuning.json"
    assert state.load(path, HERE, must_exist=False) == {}
    with pytest.raises(ValueError, match=r"GEM_KERNELS_TUNING must be off or name a file, got .*tuning\.json"):
        state.load(path, HERE, must_exist=True)


def test_the_digest_is_of_what_is_chosen():
    one, other = choice(), choice(KEY._replace(kernel="dq"))
    digest = choices.digest({KEY: one, other.key: other})
    assert digest == choices.digest({other.key: other, KEY: choice(ms=0.7)})
    assert digest != choices.digest({KEY: choice(config=DEFAULT), other.key: other})
    assert digest != choices.digest({KEY: one})


def write_many(path, process, count):
    """Choices of its own, and some that the other process makes too, with other results."""
    kept = {}
    for i in range(count):
        own = choice(KEY._replace(sizes=f"D{i}", op=f"op{process}"))
        shared = choice(KEY._replace(sizes=f"D{i}"), {**FAST, "num_stages": process + 1})
        kept = choices.add(path, HERE, [own, shared])
    return kept


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path):
    path, count = tmp_path / "tuning.json", 25
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from test_tuning import write_many\n"
        "write_many(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))\n"
    )
    folder = os.path.dirname(__file__)
    commands = [[sys.executable, "-c", program, folder, str(path), str(i), str(count)] for i in range(2)]
    writers = [subprocess.Popen(command) for command in commands]
    seen = {}
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            found = choices.read(path, HERE)
            # What a reader has seen stays.
            assert seen.items() <= found.items()
            seen = found
        time.sleep(0.01)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(choices.read(path, HERE)) == 3 * count


# ---------------------------------------------------------------- where it comes from


def test_the_variable_names_a_file_or_switches_off(monkeypatch, tmp_path):
    monkeypatch.setenv("GEM_KERNELS_TUNING", "off")
    assert state.tuning_path() is None
    monkeypatch.setenv("GEM_KERNELS_TUNING", str(tmp_path / "mine.json"))
    assert state.tuning_path() == tmp_path / "mine.json"
    monkeypatch.delenv("GEM_KERNELS_TUNING")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    assert state.tuning_path() == tmp_path / "gem_kernels-tuning-NVIDIA-H200.json"


@pytest.fixture
def h200(monkeypatch, tmp_path):
    """Selection as on an H200, whose Triton cache is an empty folder."""
    monkeypatch.delenv("GEM_KERNELS_TUNING", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    state.forget()
    yield tmp_path / "gem_kernels-tuning-NVIDIA-H200.json"
    state.forget()


def test_the_file_is_read_once_in_a_process(h200, monkeypatch):
    choices.add(h200, state.made_for(), [choice()])
    reads = []
    read = state.read
    monkeypatch.setattr(state, "read", lambda *args: reads.append(args) or read(*args))
    for _ in range(3):
        config = gdpa_configs.select_fitting("forward", (128, 128), torch.bfloat16, (9, 0), 500, 500, indexed=False)
        assert as_numbers(config) == FAST
    h200.unlink()
    assert tuning.digest() == choices.digest({KEY: choice()})
    assert len(reads) == 1


@pytest.mark.parametrize("value", [None, "off"])
def test_without_a_file_or_switched_off_the_defaults_hold(value, h200, monkeypatch):
    if value:
        choices.add(h200, state.made_for(), [choice()])
        monkeypatch.setenv("GEM_KERNELS_TUNING", value)
    config = gdpa_configs.select_fitting("forward", (128, 128), torch.bfloat16, (9, 0), 500, 500, indexed=False)
    assert as_numbers(config) == DEFAULT
    assert tuning.digest() == choices.digest({})


def test_a_damaged_file_stops_a_launch(h200):
    h200.write_text("{")
    with pytest.raises(ValueError, match="must be a tuning file"):
        gdpa_configs.select_fitting("forward", (128, 128), torch.bfloat16, (9, 0), 500, 500, indexed=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_without_a_gpu_nothing_is_read(monkeypatch, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text("{")
    monkeypatch.setenv("GEM_KERNELS_TUNING", str(path))
    state.forget()
    assert state.table() == {}
    state.forget()


# ---------------------------------------------------------------- what is chosen


def test_choose_takes_the_choice_among_those_that_ship(use_choices, monkeypatch):
    monkeypatch.setenv("GEM_KERNELS_TUNING", "mine.json")
    default, fast = TileConfig(**DEFAULT), TileConfig(**FAST)
    use_choices()
    assert choose(KEY, default, (fast,)) is default
    use_choices(choice())
    assert choose(KEY, default, (fast,)) is fast
    assert choose(KEY._replace(shape="short-long"), default, (fast,)) is default
    with trying(KEY, default):
        assert choose(KEY, default, (fast,)) is default
    with pytest.raises(
        ValueError, match=r"`mine\.json` must choose one of 1 configurations for gdpa forward bfloat16 D128 long-long"
    ):
        choose(KEY, default, ())


def test_what_launches_ask_for_is_seen(use_choices):
    use_choices()
    default, fast = TileConfig(**DEFAULT), TileConfig(**FAST)
    with asking() as outer:
        with asking() as inner:
            choose(KEY, default, (fast,))
        choose(KEY._replace(kernel="dq"), default, ())
    choose(KEY._replace(kernel="dkdv"), default, ())
    assert inner == {KEY: Question(default, (fast,))}
    assert outer == {KEY._replace(kernel="dq"): Question(default, ())}


def test_classes_of_lengths():
    expected = {(1, 1): "short-short", (64, 65): "short-long", (65, 64): "long-short", (128, 4096): "long-long"}
    assert {lengths: length_class(*lengths) for lengths in expected} == expected


OPS = {"gdpa": gdpa_configs, "jagged_attention": jagged_configs}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kernel", CANDIDATES)
@pytest.mark.parametrize("op", OPS)
def test_lengths_choose_a_class_and_then_shrink_the_tile(op, kernel, dim, use_choices):
    default = OPS[op].select(kernel, dim, torch.float16, (9, 0))
    key = Key(op, kernel, "float16", f"D{dim}", "long-long")
    assert default.tunable[:4] == key[:4]
    assert len(set(default.tunable.others) | {default}) == len(default.tunable.others) + 1 > 1
    for config in default.tunable.others:
        use_choices(choice(key, as_numbers(config)))
        assert fit_lengths(default, 4096, 4096) == config
        assert fit_lengths(default, 4096, 32) == fit_lengths(replace(default, tunable=None), 4096, 32)
        use_choices(choice(key._replace(shape="long-short"), as_numbers(config)))
        assert fit_lengths(default, 4096, 32) == fit_lengths(config, 4096, 32)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("configs", OPS.values(), ids=OPS)
def test_a_kernel_that_needs_all_keys_in_one_tile_keeps_its_width(configs, dim):
    default = configs.select("dqdkdv", dim, torch.bfloat16, (9, 0))
    assert {config.block_n for config in default.tunable.others} == {default.block_n}


def test_what_is_not_built_cannot_be_chosen():
    for configs in OPS.values():
        assert configs.select("forward", 128, torch.float32, (9, 0)).tunable is None
        assert configs.select("forward", 128, torch.bfloat16, (8, 9)).tunable is None
        assert configs.select("forward", 256, torch.bfloat16, (9, 0)).tunable is None
    for options in ({"has_bias": True}, {"shared_rows": True}, {"requests": True}):
        assert jagged_configs.select("dkdv", 128, torch.bfloat16, (9, 0), **options).tunable is None
    lengths = (torch.bfloat16, (9, 0), 4096, 4096)
    with asking() as asked:
        gdpa_configs.select_fitting("dkdv", (128, 128), *lengths, indexed=True)
        linear_configs.select("linear_norm", 512, 512, (8, 9))
    assert asked == {}


@pytest.mark.parametrize("kernel", linear_configs.CANDIDATES)
def test_linear_layers_choose_by_their_features(kernel, use_choices):
    use_choices()
    with asking() as asked:
        default = linear_configs.select(kernel, 512, 384, (9, 0))
    ((key, question),) = asked.items()
    assert key == Key("norm_linear", kernel, "half", "K512 N384", "any")
    for config in question.others:
        assert config != default
        use_choices(choice(key, as_numbers(config)))
        assert linear_configs.select(kernel, 512, 384, (9, 0)) == config
        assert linear_configs.select(kernel, 512, 512, (9, 0)) == linear_configs._fit(
            linear_configs.LARGE[kernel], 512, 512
        )
    # A choice that makes no difference for a narrow layer is not offered.
    with asking() as asked:
        linear_configs.select("rmsnorm_linear", 512, 64, (9, 0))
    assert all(len(set(q.others) | {q.default}) == len(q.others) + 1 for q in asked.values())


@pytest.mark.parametrize("op", VARIANTS)
def test_tuned_kernels_keep_the_bound_on_variants(op, monkeypatch, interpreter):
    """Every class of lengths has chosen another tile, where there is one."""
    found, draw = {}, random.Random(1)

    def choosing(key, default, others):
        if key not in found:
            found[key] = draw.choice((default, *others))
        return found[key]

    monkeypatch.setattr("gem_kernels._src.attention.configs.choose", choosing)
    forward, backward = (importlib.import_module(f"gem_kernels._src.{op}.{name}") for name in ("forward", "backward"))
    keys = set()
    for source in kernels():
        if source.module.split(".")[2] == op and source.function.args.args[0].arg.endswith("_ptr"):
            monkeypatch.setattr(f"{source.module}.{source.function.name}", Recorder(source, keys))
    for seed in range(3):
        found.clear()
        keys.clear()
        draw.seed(seed)
        batches = random.Random(0)
        for _ in range(200):
            q, k, v, lengths = random_batch(batches)
            if op == "gdpa":
                options = (*lengths, "silu", 1.0, 1.0, -1, -1)
                saved = (forward.launch_forward(q, k, v, *options), q, k, v)
            else:
                options = (*lengths, 1.0, -1, -1)
                out, lse = forward.launch_forward(q, k, v, *options)
                saved = (out, None, q, k, v, out, lse)
            backward.launch_backward(*saved, *options)
        assert len(found) >= 10
        assert len(keys) <= VARIANTS[op]


# ---------------------------------------------------------------- how it is chosen


def fake_question():
    names = ("default", "same", "fast", "fast-and-wrong", "nan", "fails")
    configs = {name: TileConfig(block_m=16 << i, block_n=16, num_warps=4, num_stages=1) for i, name in enumerate(names)}
    default, *others = configs.values()
    return configs, Question(default, tuple(others))


def fake_call(configs, x, seen):
    """A kernel whose configuration says how long it takes and what is wrong with it."""

    def call():
        config = choose(KEY, configs["default"], ())
        seen.append(config)
        name = next(name for name, each in configs.items() if each == config)
        if name == "fails":
            raise RuntimeError("out of resource: shared memory\nRequired: 300000")
        time.sleep(0.001 if name.startswith("fast") else 0.003)
        return (x * {"fast-and-wrong": 1.01, "nan": float("nan")}.get(name, 1.0), x.new_empty(0))

    return call


def test_the_fastest_that_is_right_is_chosen(use_choices):
    use_choices()
    configs, question = fake_question()
    x, seen, lines = torch.randn(100), [], []
    made = choose_fastest(KEY, question, [fake_call(configs, x, seen)], torch.device("cpu"), log=lines.append)
    assert made.config == as_numbers(configs["fast"])
    assert made.default == as_numbers(configs["default"])
    assert 0 < made.ms < made.default_ms
    assert [line.split(" left out, ")[1] for line in lines] == [
        "its results differ from the default's",
        "its results differ from the default's",
        "RuntimeError: out of resource: shared memory",
    ]
    # What is wrong is run once, and not timed.
    assert [seen.count(configs[name]) for name in ("fast-and-wrong", "nan", "fails")] == [1, 1, 1]
    assert seen.count(configs["fast"]) == seen.count(configs["default"]) > 10


def test_the_default_stays_where_nothing_is_faster(use_choices):
    use_choices()
    configs, question = fake_question()
    question = question._replace(others=(configs["same"], configs["fast-and-wrong"]))
    call = fake_call(configs, torch.randn(8), [])
    made = choose_fastest(KEY, question, [call], torch.device("cpu"), log=lambda line: None)
    assert made.config == made.default
    assert made.ms == made.default_ms


def test_a_failing_default_is_an_error(use_choices):
    use_choices()
    configs, question = fake_question()
    call = fake_call(configs, torch.randn(8), [])
    with pytest.raises(RuntimeError, match="out of resource"):
        choose_fastest(KEY, question._replace(default=configs["fails"]), [call], torch.device("cpu"), log=print)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_agree_up_to_rounding(dtype):
    exact = torch.randn(64, 64, dtype=torch.float64)
    x = exact.to(dtype)
    assert agree([x], [x])
    assert agree([(exact * (1 + torch.finfo(dtype).eps / 3)).to(dtype)], [x])
    assert not agree([x * 1.05], [x])
    one_wrong = x.clone()
    one_wrong[3, 5] += 2
    assert not agree([one_wrong], [x])
    assert not agree([x, torch.full_like(x, float("nan"))], [x, x])
    assert agree([x[:0]], [x[:0]])
    assert agree([torch.zeros(3)], [torch.zeros(3)])


def test_a_case_is_called_forward_and_backward():
    case = ConformanceCase(op="gdpa", dtype="float32", lengths_q=(3, 9), num_heads=2, head_dim=8)
    forward, backward = make_calls(case, torch.device("cpu"))
    (out,) = forward()
    assert out.shape == (12, 2, 8)
    assert [x.shape for x in backward()] == [x.shape for x in backward()] == [(12, 2, 8)] * 3


def test_cpu_kernels_have_nothing_to_choose():
    case = ConformanceCase(op="gdpa", lengths_q=(3, 9), num_heads=2, head_dim=8)
    assert tune([case], torch.device("cpu"), {}, log=print) == []


def test_the_table_says_what_was_chosen():
    row = choice_row(choice())
    assert row.split()[:5] == ["gdpa", "forward", "bfloat16", "D128", "long-long"]
    assert row.split()[5:8] == ["1.0000", "0.5000", "50.0%"]
    assert row.endswith("block_m 128, block_n 128, num_warps 8, num_stages 2")
    assert choice_row(choice(config=DEFAULT, ms=1.0)).endswith("0.0%  default")


@pytest.mark.parametrize("kernel", CANDIDATES)
@pytest.mark.parametrize("op", OPS)
def test_interpreted_alternatives_compute_the_same(op, kernel, interpreter):
    lengths = (130, 0, 1, 65), (64, 3, 0, 65)
    forward, backward = (importlib.import_module(f"gem_kernels._src.{op}.{name}") for name in ("forward", "backward"))
    x = attention_inputs(*lengths, num_heads=1, head_dim=128, dtype=torch.float16)
    sides = tuple(sizes(x).values())
    causal = (-1, 0) if kernel != "dqdkdv" else (-1, -1)

    def run():
        if op == "gdpa":
            options = (*sides, "silu", 0.1, 0.1, *causal)
            out = forward.launch_forward(x.q, x.k, x.v, *options)
            return [out, *backward.launch_backward(x.do, x.q, x.k, x.v, *options)]
        options = (*sides, 0.1, *causal)
        out, lse = forward.launch_forward(x.q, x.k, x.v, *options)
        return [out, *backward.launch_backward(x.do, None, x.q, x.k, x.v, out, lse, *options)]

    with pytest.MonkeyPatch.context() as patch:
        if kernel == "dqdkdv":
            patch.setattr("gem_kernels._src.attention.launch._MIN_PROGRAMS", 1)
        with asking() as asked:
            expected = run()
        ((key, question),) = [item for item in asked.items() if item[0].kernel == kernel]
        for config in question.others:
            with trying(key, config):
                assert agree(run(), expected)


# ---------------------------------------------------------------- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("op", ["gdpa", "jagged_attention"])
def test_cuda_alternatives_compute_the_same(op, head_dim, use_choices):
    use_choices()
    case = ConformanceCase(op=op, lengths_q=(700, 300, 65, 1, 0), causal=True, head_dim=head_dim)
    with portable_only():
        for call in make_calls(case, torch.device("cuda")):
            with asking() as asked:
                expected = call()
            assert asked
            for key, question in asked.items():
                for config in question.others:
                    with trying(key, config):
                        assert agree(call(), expected), (key, config)


def test_versions_are_those_of_the_package(h200):
    assert state.made_for().gem_kernels == gem_kernels.__version__
