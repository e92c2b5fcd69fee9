"""Tuning: that the ranks of a job choose alike."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from tuning_choices import DEFAULT, FAST, HERE, KEY, choice

from gem_kernels import tuning
from gem_kernels.__main__ import choice_row, main
from gem_kernels._src.attention.configs import TileConfig
from gem_kernels._src.conformance import ranks, warm
from gem_kernels._src.conformance.warm import DEFAULTS, choices_state, in_turn, is_ready
from gem_kernels._src.tuning import choices, state
from gem_kernels._src.tuning.state import choose

# ---------------------------------------------------------------- what ranks tell each other


def test_numbers_of_the_launcher():
    assert ranks.number_in({}, "WORLD_SIZE") is None
    assert ranks.number_in({"WORLD_SIZE": "8"}, "WORLD_SIZE") == 8
    with pytest.raises(ValueError, match="`WORLD_SIZE` must be a number, got 'x'"):
        ranks.number_in({"WORLD_SIZE": "x"}, "WORLD_SIZE")


def compare_all(marker, digests, world_size):
    """What each rank finds: None, or the error."""
    found = {}

    def rank(number):
        try:
            found[number] = ranks.compare(digests[number], marker, number, world_size=world_size, timeout=20)
        except ranks.RanksDifferError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(len(digests)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_with_one_digest_agree(tmp_path):
    assert compare_all(tmp_path / "x.warm", ["aa"] * 3, 3) == {0: None, 1: None, 2: None}


def test_ranks_that_differ_are_named(tmp_path):
    found = compare_all(tmp_path / "x.warm", ["aa", "bb", "aa", "cc"], 4)
    assert "warm: all ranks must have the hash of rank 0, aa, got rank 1 bb, rank 3 cc; give them one" in found[0]
    assert "got rank 1 bb; give" in found[1]
    assert found[2] is None
    assert "got rank 3 cc; give" in found[3]


def test_rank_0_waits_only_for_ranks_that_it_knows_of(tmp_path):
    marker = tmp_path / "x.warm"
    ranks.compare("aa", marker, 0, world_size=None, timeout=0)
    ranks.compare("aa", marker, 5, world_size=None, timeout=0)
    with pytest.raises(TimeoutError, match=r"rank 0 waited in vain for rank 1 to write x\.rank1"):
        ranks.compare("aa", marker, 0, world_size=2, timeout=0)


def test_digests_of_an_earlier_job_are_forgotten(tmp_path):
    marker, other = tmp_path / "x.warm", tmp_path / "y.warm"
    for number in range(3):
        ranks.compare("aa", marker, number, world_size=None, timeout=0)
    ranks.compare("aa", other, 0, world_size=None, timeout=0)
    ranks.forget_digests(marker, "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.rank0", "x.rank2", "y.rank0"]
    ranks.forget_digests(marker, "*")
    assert [path.name for path in tmp_path.iterdir()] == ["y.rank0"]
    with pytest.raises(TimeoutError, match="rank 1 waited in vain for rank 0"):
        ranks.compare("aa", marker, 1, world_size=None, timeout=0)


def test_a_marker_of_other_choices_is_no_marker(tmp_path):
    marker = tmp_path / "x.warm"
    in_turn(lambda: None, marker, 0, timeout=0, state=lambda: "choices 1")
    in_turn(lambda: None, marker, 1, timeout=0, state=lambda: "choices 1")
    for state_of_rank in ("choices 2", None):
        with pytest.raises(TimeoutError, match="rank 1 waited"):
            in_turn(lambda: None, marker, 1, timeout=0, state=lambda text=state_of_rank: text)
    # A rank that does not tune runs, and the digests tell; rank 0 is not misled.
    in_turn(lambda: None, marker, 1, timeout=0, state=lambda: DEFAULTS)
    assert not is_ready(marker, lambda: DEFAULTS, 0)


def test_the_marker_is_of_the_choices(tmp_path):
    path = tmp_path / "tuning.json"
    assert choices_state(None, HERE, tunes=True) == choices_state(path, HERE, tunes=False) == DEFAULTS
    assert choices_state(path, HERE, tunes=True) is None
    choices.add(path, HERE, [choice()])
    assert choices_state(path, HERE, tunes=True) == f"choices {choices.digest({KEY: choice()})}"
    assert choices_state(path, HERE, tunes=False) == choices_state(path, HERE, tunes=True)
    assert choices_state(path, HERE._replace(triton="4"), tunes=True) is None
    assert choices_state(path, HERE._replace(triton="4"), tunes=False) == DEFAULTS


def check_in_a_group(rank, folder):
    """What a rank of two finds where each has its own choices, and then where both have the same."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tuning.table = lambda: {KEY: choice(config=DEFAULT if rank else FAST)}
    try:
        line = tuning.check_ranks()
    except tuning.RanksDifferError as error:
        line = str(error)
    tuning.table = lambda: {KEY: choice()}
    sys.stdout.write(f"{line}\n{tuning.check_ranks()}\n")
    torch.distributed.destroy_process_group()


def test_ranks_of_a_process_group_are_compared(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_tuning_ranks import check_in_a_group\n"
        "check_in_a_group(int(sys.argv[3]), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", program, os.path.dirname(__file__), str(tmp_path)]
    started = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    for process in started:
        differ, same = process.communicate(timeout=120)[0].splitlines()
        assert process.returncode == 0
        assert "check_ranks: all ranks must have the hash of rank 0" in differ
        assert "got rank 1 " in differ
        assert same == choices.digest({KEY: choice()})


def warm_without_a_gpu(arguments):
    """``main`` of a rank whose GPU, kernels and measurements are made up, but not what ranks tell each other."""
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    default, fast = TileConfig(**DEFAULT), TileConfig(**FAST)
    kernels_of = {default.block_m: "default", fast.block_m: "fast"}
    launched = []

    def tune_in_a_process(path, cases, device):
        time.sleep(0.5)
        sys.stdout.write("tuned\n")
        choices.add(path, state.made_for(), [choice()])

    warm.tune_in_a_process = tune_in_a_process
    warm.run_cases = lambda cases, device: launched.append(choose(KEY, default, (fast,)))
    warm.compiled_kernels = lambda: [warm.CompiledKernel("0", kernels_of[config.block_m]) for config in launched]
    return main(arguments)


@pytest.fixture
def warm_ranks(tmp_path):
    """Runs both ranks of a job and returns their (exit code, output, errors)."""
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps([{"op": "gdpa", "lengths_q": [3]}]))
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_tuning_ranks import warm_without_a_gpu\n"
        "sys.exit(warm_without_a_gpu(sys.argv[2:]))\n"
    )
    command = [
        sys.executable,
        "-c",
        program,
        os.path.dirname(__file__),
        "warm",
        "--shapes",
        str(shapes),
        "--timeout",
        "60",
    ]

    def run(*options, **of_rank_1):
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "WORLD_SIZE": "2"}
        environment.pop("GEM_KERNELS_TUNING", None)
        started = [
            subprocess.Popen(
                [*command, *options],
                env=environment | {"RANK": rank} | (of_rank_1 if rank == "1" else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ("1", "0")
        ]
        return [(process.returncode, *output) for process, output in ((p, p.communicate(timeout=90)) for p in started)][
            ::-1
        ]

    return run


def test_rank_0_tunes_and_both_ranks_take_its_choice(warm_ranks, tmp_path):
    for first in (True, False):
        ranks_of_job = warm_ranks()
        assert [code for code, *_ in ranks_of_job] == [0, 0], ranks_of_job
        outputs = [output.splitlines() for _, output, _ in ranks_of_job]
        assert ("tuned" in outputs[0]) == first
        assert choice_row(choice()) in outputs[0]
        assert "0 fast" in outputs[0]
        digests = [lines[-1].split("1 kernels, 1 choices, digest ")[1].split(",")[0] for lines in outputs]
        assert digests[0] == digests[1]
        assert len(outputs[1]) == 1
    assert len(list((tmp_path / "cache").glob("gem_kernels-tuning-NVIDIA-H200.json"))) == 1


def test_without_tuning_both_ranks_take_the_default(warm_ranks):
    ranks_of_job = warm_ranks("--no-tune")
    assert [code for code, *_ in ranks_of_job] == [0, 0], ranks_of_job
    assert "0 default" in ranks_of_job[0][1].splitlines()
    # The marker of that job does not stand for a tuned one.
    assert "tuned" in warm_ranks()[0][1].splitlines()


def assert_rank_1_is_named(ranks_of_job):
    """By every rank that has ended with an error."""
    errors = [error for code, _, error in ranks_of_job if code == 1]
    assert all("all ranks must have the hash of rank 0" in error and "got rank 1 " in error for error in errors)
    return len(errors)


def test_a_rank_that_chooses_otherwise_is_named_by_both(warm_ranks):
    assert assert_rank_1_is_named(warm_ranks(GEM_KERNELS_TUNING="off")) == 2


def test_digests_of_an_earlier_job_do_not_mislead_all_ranks(warm_ranks):
    warm_ranks()
    assert assert_rank_1_is_named(warm_ranks(GEM_KERNELS_TUNING="off")) >= 1


def test_a_damaged_file_ends_warm_with_its_name(warm_ranks, tmp_path):
    path = tmp_path / "cache" / "gem_kernels-tuning-NVIDIA-H200.json"
    path.parent.mkdir()
    path.write_text("{")
    for code, _, error in warm_ranks():
        assert code == 1
        assert f"tuning: `{path}` must be a tuning file" in error


# ---------------------------------------------------------------- CUDA


CUDA_CASES = [{"op": "gdpa", "lengths_q": [700, 300, 65, 1, 0], "causal": True, "head_dim": 64}]


def start_warm(shapes, cache, rank):
    """``python -m gem_kernels warm`` as a rank of two."""
    env = os.environ | {"TRITON_CACHE_DIR": str(cache), "RANK": str(rank), "WORLD_SIZE": "2"}
    for name in ("TRITON_INTERPRET", "GEM_KERNELS_TUNING"):
        env.pop(name, None)
    command = [sys.executable, "-m", "gem_kernels", "warm", "--shapes", str(shapes), "--timeout", "500"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(processes):
    outputs = [process.communicate(timeout=550) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.gpu
def test_cuda_rank_0_tunes_and_ranks_agree(tmp_path):
    shapes, cache = tmp_path / "shapes.json", tmp_path / "cache"
    shapes.write_text(json.dumps(CUDA_CASES))
    first = finish([start_warm(shapes, cache, rank) for rank in (1, 0)])
    assert [code for code, *_ in first] == [0, 0], first
    digests = [out.rstrip().splitlines()[-1].split("digest ")[1].split(",")[0] for _, out, _ in first]
    assert digests[0] == digests[1]
    (path,) = cache.glob("gem_kernels-tuning-*.json")
    content = path.read_text()
    tuned = {(entry["op"], entry["kernel"]) for entry in json.loads(content)["choices"]}
    assert tuned == {("gdpa", "forward"), ("gdpa", "dkdv"), ("gdpa", "dq")}
    assert "default ms" in first[1][1]
    # The second time there is nothing to tune, and nothing changes.
    second = finish([start_warm(shapes, cache, rank) for rank in (0, 1)])
    assert [code for code, *_ in second] == [0, 0], second
    assert path.read_text() == content
