"""``python -m gem_kernels``: the conformance run finds what is wrong, and warming the cache goes rank by rank."""

import dataclasses
import json
import re
import subprocess
import sys
import threading

import pytest
import torch

import gem_kernels
from gem_kernels.__main__ import main
from gem_kernels._src.conformance.cases import (
    ATTENTION_OPS,
    FIELDS,
    LINEAR_OPS,
    ConformanceCase,
    default_cases,
    load_cases,
)
from gem_kernels._src.conformance.run import measure
from gem_kernels._src.conformance.warm import in_turn, marker_path

SMALL = [
    {"op": "gdpa", "dtype": "float32", "lengths_q": [0, 3, 9], "lengths_k": [2, 0, 5], "num_heads": 2, "head_dim": 8},
    {"op": "linear_norm", "dtype": "float32", "rows": 5, "in_features": 8, "out_features": 6, "affine": True},
]


@pytest.fixture
def shapes(tmp_path):
    def write(content):
        path = tmp_path / "shapes.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_built_in_cases_name_every_op_and_pass_on_the_cpu(capsys):
    cases = default_cases(torch.device("cpu"))
    assert set(FIELDS) == {case.op for case in cases} == set(ATTENTION_OPS + LINEAR_OPS)
    # Every field of every op has another value than its default in one case at least.
    for op, names in FIELDS.items():
        for name in names - {"op", "num_heads"}:
            default = next(field.default for field in dataclasses.fields(ConformanceCase) if field.name == name)
            assert any(getattr(case, name) != default for case in cases if case.op == op), (op, name)
    assert main(["check", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    assert text.rstrip().endswith("tensors within their bounds")


def test_runs_as_a_program(shapes):
    command = [sys.executable, "-m", "gem_kernels", "check", "--device", "cpu", "--shapes", shapes(SMALL)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "10 of 10 tensors within their bounds" in done.stdout


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_wrong_result_is_found(factor, shapes, capsys, monkeypatch):
    right = gem_kernels.gdpa
    monkeypatch.setattr(gem_kernels, "gdpa", lambda *args, **options: right(*args, **options) * factor)
    assert main(["check", "--device", "cpu", "--shapes", shapes(SMALL)]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert [line.split()[0] for line in rows] == ["gdpa"] * 4


def test_a_wrong_gradient_is_found(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.01

    right = gem_kernels.gdpa
    monkeypatch.setattr(gem_kernels, "gdpa", lambda q, k, v, **options: right(q, Wrong.apply(k), v, **options))
    rows = measure(ConformanceCase(op="gdpa", dtype="float32", lengths_q=(9, 3)), torch.device("cpu"))
    assert [row.tensor for row in rows if not row.passed] == ["dk"]


def test_an_op_that_raises_is_a_failure_and_the_others_still_run(shapes, capsys, monkeypatch):
    def refuse(**_):
        raise ValueError("gdpa: no room")

    monkeypatch.setattr(gem_kernels, "gdpa", refuse)
    assert main(["check", "--device", "cpu", "--shapes", shapes(SMALL[:2])]) == 1
    text = capsys.readouterr().out
    assert "FAILED ValueError: gdpa: no room" in text
    assert "6 of 7 tensors within their bounds" in text


WRONG = [
    ({"activation": "swish"}, r"`activation` must be one of raw, .*, got 'swish'"),
    ({"activation": ["gelu"]}, r"`activation` must be one of raw, .*, got \('gelu',\)"),
    ({"num_heads": 3, "num_heads_kv": 2}, "`num_heads_kv` must divide `num_heads`, 3, got 2"),
    ({"lengths_k": [5]}, "`lengths_k` must have an entry for each of the 3 of `lengths_q`, got 1"),
    ({"request_index": [0, 1]}, "`request_index` must have an entry for each of the 3 of `lengths_q`, got 2"),
    (
        {"request_index": [0, 1, 5]},
        r"`request_index` must be key sequences .*, below 3, got \[0, 1, 5\]",
    ),
    ({"request_index": [1, 0, 2]}, "`request_index` must be key sequences in ascending order"),
    ({"num_targets": [0, 99, 0]}, "`num_targets` must have an entry for each of `lengths_q`, at most its tokens"),
    ({"op": "block_attention", "block_size": 16}, "`block_size` must be one of 32, 64, 128, got 16"),
    ({"op": "block_attention", "rotary": True, "head_dim": 9}, "`head_dim` must be even with `rotary`, got 9"),
    ({"op": "linear_norm", "norm": "batch"}, "`norm` must be one of layer, rms, got 'batch'"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_values_that_an_op_refuses_are_named_before_any_case_runs(fields, message, shapes, capsys):
    linear = {"op": "linear_norm", "rows": 3, "in_features": 8, "out_features": 8}
    common = linear if fields.get("op") == "linear_norm" else {"op": "gdpa", "lengths_q": [4, 2, 3]}
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--device", "cpu", "--shapes", shapes([SMALL[0], common | fields])])
    text = capsys.readouterr()
    assert re.search(f"case 1 of .*: ConformanceCase: {message}.*; ", text.err)
    assert not text.out


BAD = [
    ("{", "must be JSON, got an error in line 1"),
    ("[]", "must hold a list of at least one case, got an empty one; write"),
    ([3], "case 0 .* must be an object, got int"),
    ([{"op": "gdpa", "heads": 3}], "case 0 .* must have known fields only, got 'heads'; fields are "),
    ([{"op": "gdpa"}], "case 0 .* must have `lengths_q`, .*, got none; add"),
    (
        [{"op": "gdpa", "lengths_q": [5], "in_features": 7}],
        "case 0 .* must have fields that gdpa takes, got 'in_features'",
    ),
    (
        [{"op": "block_attention", "lengths_q": [5], "causal": True}],
        "case 0 .* must have fields that block_attention takes, got 'causal'; leave",
    ),
    ([{"op": "gdpa", "num_seeds": -1}], "`num_seeds` must be an int >= 0, got -1"),
    ([SMALL[0] | {"num_seeds": 3}], "`num_seeds` must be 0 with `lengths_q`, or without `lengths_k`, .* got 3"),
    ([SMALL[0] | {"num_targets": [0, -1, 2]}], "`num_targets` must be a list of ints >= 0, rows per sequence, got"),
    ([{"op": "linear_norm", "head_dim": 5}], "case 0 .* must have fields that linear_norm takes, got 'head_dim'"),
    ([SMALL[0], {"dtype": "float32"}], "case 1 .* must name its `op`, got none"),
    ([{"op": "softmax"}], "case 0 .*`op` must be one of .*, got 'softmax'"),
    ([{"op": "gdpa", "dtype": "int8"}], "`dtype` must be one of .*, got 'int8'"),
    ([SMALL[0] | {"lengths_q": [-3]}], r"`lengths_q` must be a list of ints >= 0, .*, got \(-3,\)"),
    ([SMALL[0] | {"lengths_q": 3}], "`lengths_q` must be a list of ints >= 0, .*, got 3"),
    ([SMALL[0] | {"lengths_k": [1.5]}], r"`lengths_k` must be a list of ints >= 0, .*, got \(1.5,\)"),
    ([SMALL[0] | {"head_dim": "64"}], "`head_dim` must be an int >= 1, got '64'"),
    ([SMALL[0] | {"num_heads_kv": 0}], "`num_heads_kv` must be an int >= 1, got 0"),
    ([SMALL[0] | {"window_size": [1]}], r"`window_size` must be two ints >= -1, .*, got \(1,\)"),
    ([SMALL[0] | {"causal": "no"}], "`causal` must be true or false, got 'no'"),
    ([SMALL[1] | {"rows": -1}], "`rows` must be an int >= 0, got -1"),
    ([{"op": "linear_norm", "rows": 3}], "`in_features` and `out_features` of linear_norm must be at least 1"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_a_bad_file_is_named(content, message, shapes, tmp_path, capsys):
    path = shapes(content)
    with pytest.raises(ValueError, match=f"--shapes: .*{message}"):
        load_cases(tmp_path / "shapes.json")
    with pytest.raises(SystemExit) as stop:
        main(["check", "--device", "cpu", "--shapes", path])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m gem_kernels check [-h] [--shapes FILE]")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "must be a file that can be read, got '{}' (No such file or directory); name a JSON list of cases"),
        ("directory", "must be a file that can be read, got '{}' (Is a directory); name a JSON list of cases"),
        (b"\xff\xfe\x00", "`{}` must be JSON, got bytes that are no text; write it in UTF-8"),
    ],
    ids=["none", "directory", "bytes"],
)
def test_a_file_that_cannot_be_read_is_named(content, text, tmp_path, capsys):
    path = tmp_path / "shapes.json"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        main(["check", "--device", "cpu", "--shapes", str(path)])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"python -m gem_kernels check: error: --shapes: {text.format(path)}."


@pytest.mark.parametrize(
    ("arguments", "usage", "last"),
    [
        (
            [],
            "usage: python -m gem_kernels [-h] COMMAND ...",
            "the following arguments are required: COMMAND; `python -m gem_kernels --help` lists what there is",
        ),
        (
            ["check", "--shape", "x", "--all"],
            "usage: python -m gem_kernels check ",
            "arguments: --all; `python -m gem_kernels check",
        ),
        (
            ["warm"],
            "usage: python -m gem_kernels warm ",
            "the following arguments are required: --shapes; `python -m gem_kernels warm --help` lists",
        ),
        (
            ["warm", "x", "--shapes", "y"],
            "usage: python -m gem_kernels warm ",
            "unrecognized arguments: x; `python -m gem_k",
        ),
    ],
)
def test_wrong_arguments_show_the_usage_of_their_command(arguments, usage, last, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(usage)
    assert last in err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is then there")
@pytest.mark.parametrize("command", [["check", "--device", "cuda"], ["warm"]], ids=lambda command: command[0])
def test_a_gpu_that_is_not_there_is_one_line(command, shapes, capsys):
    for extra in ([], ["--shapes", shapes(SMALL)]):
        with pytest.raises(SystemExit) as stop:
            main([*command, *extra])
        assert stop.value.code == 2
        if command != ["warm"] or extra:
            assert "needs a CUDA device, found none" in capsys.readouterr().err.splitlines()[-1]


# ---------------------------------------------------------------- warm


def test_marker_is_of_the_cases_and_versions(tmp_path):
    cases = [ConformanceCase(op="gdpa"), ConformanceCase(op="gdpa", head_dim=128)]
    markers = {
        marker_path(tmp_path, cases, ("1", "sm_90")),
        marker_path(tmp_path, cases[:1], ("1", "sm_90")),
        marker_path(tmp_path, cases, ("2", "sm_90")),
    }
    assert len(markers) == 3
    assert marker_path(tmp_path, list(cases), ("1", "sm_90")) in markers


def test_other_ranks_run_after_rank_0(tmp_path):
    marker, order = tmp_path / "cache" / "x.warm", []
    others = [
        threading.Thread(
            target=in_turn, args=(lambda rank=rank: order.append(rank), marker, rank), kwargs={"timeout": 60}
        )
        for rank in (1, 2)
    ]
    for thread in others:
        thread.start()
    assert order == []
    assert in_turn(lambda: order.append(0), marker, 0, timeout=60) < 1
    for thread in others:
        thread.join()
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]
    assert [path.name for path in marker.parent.iterdir()] == ["x.warm"]


def test_a_rank_does_not_wait_for_ever(tmp_path):
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0 s for rank 0 to write x\.warm .*TRITON_CACHE_DIR"):
        in_turn(lambda: None, tmp_path / "x.warm", 1, timeout=0.0)


def test_a_failing_rank_0_leaves_no_marker(tmp_path):
    def fail():
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        in_turn(fail, tmp_path / "x.warm", 0, timeout=0.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_warm_needs_a_gpu(shapes, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["warm", "--shapes", shapes(SMALL)])
    assert stop.value.code == 2
    assert "warm needs a CUDA device" in capsys.readouterr().err


# ---------------------------------------------------------------- CUDA


@pytest.mark.gpu
def test_cuda_warm_ranks_agree_on_the_kernels(shapes, monkeypatch, tmp_path):
    path = shapes([case | {"dtype": "bfloat16"} for case in SMALL])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    digests = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        command = [sys.executable, "-m", "gem_kernels", "warm", "--shapes", path, "--timeout", "5", "--no-tune"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout.rstrip().splitlines()[-1].split("digest ")[1].split(",")[0])
    assert digests[0] == digests[1]
