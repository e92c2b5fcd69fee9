"""A step that does not end names who keeps it from ending: late, dead, ended and failed ranks; nothing hangs."""

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gem_parallel import ParallelDims, ParallelPlan, parallelize
from gem_parallel.watch import HANG_EXIT_CODE, RankState, RankWatch, find_missing


def state(rank, kind="step", **collectives):
    return RankState(rank=rank, beat=3, state=kind, label="step 7", seconds=9.0, collectives=collectives)


@dataclass(frozen=True)
class Case:
    id: str
    states: list
    missing: dict
    silent: tuple = ()


CASES = [
    Case("one is late", [state(0, all=5), state(1, all=4), state(2, all=5)], {1: "late"}),
    Case(
        "who waits for the late one is not late",
        [state(0, rep02=4, shard01=9), state(1, shard01=9, rep13=4), state(2, rep02=3, shard23=6), state(3, shard23=5)],
        {3: "late"},
    ),
    Case("a circle", [state(0, a=2, b=1), state(1, a=1, b=2)], {0: "late", 1: "late"}),
    Case("a dead one explains all", [state(0, all=5), state(1, all=4), state(2, all=3)], {2: "silent"}, (2,)),
    Case("out of data", [state(0, all=5), state(1, "ended", all=4)], {1: "ended"}),
    Case("failed", [state(0, all=5), state(1, "failed", all=5)], {1: "failed"}),
    Case("nobody", [state(0, all=5), state(1, all=5)], {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_find_missing(case):
    found = find_missing(case.states, case.silent)
    assert {each.rank: each.kind for each in found} == case.missing
    if case.id == "one is late":
        (late,) = found
        assert late.text == "(in 'step 7' for 9.0 s) has not come to collective 5 of all, in which [0, 2] wait"


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf")])
def test_timeout_is_checked(timeout_s):
    with pytest.raises(ValueError, match="RankWatch: `timeout_s` must be finite and above 0, got"):
        RankWatch(timeout_s)


REFUSED = {
    "str": (lambda: RankWatch("3"), TypeError, "RankWatch: `timeout_s` must be a number, got str '3'"),
    "None": (lambda: RankWatch(None), TypeError, "`timeout_s` must be a number, got NoneType"),
    "bool": (lambda: RankWatch(True), TypeError, "`timeout_s` must be a number, got bool"),
    "mesh": (lambda: RankWatch(3, mesh=4), TypeError, "RankWatch: `mesh` must be a ParallelMesh or None, got int"),
    "on_hang": (lambda: RankWatch(3, on_hang=5), TypeError, "`on_hang` must be a function or None, got int"),
    "groups": (lambda: RankWatch(3, groups=[1]), TypeError, "`groups` must map names to process groups, got list"),
    "a group": (lambda: RankWatch(3, groups={"a": 1}), TypeError, "process groups, got int for 'a'"),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_other_kinds(call, error, text):
    before = threading.active_count()
    with pytest.raises(error, match=text):
        call()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("label", "timeout_s", "error", "text"),
    [
        (5, None, TypeError, "RankWatch.step: `label` must be a str, got int; pass f'step {n}'"),
        ("x", "x", TypeError, "RankWatch.step: `timeout_s` must be a number, got str 'x'"),
        ("x", -1, ValueError, "RankWatch.step: `timeout_s` must be finite and above 0, got -1"),
        ("x", float("nan"), ValueError, "must be finite and above 0, got nan"),
    ],
)
def test_step_refuses(label, timeout_s, error, text):
    with RankWatch(5.0) as watch:
        with pytest.raises(error, match=re.escape(text)), watch.step(label, timeout_s=timeout_s):
            pass
        with watch.step("the next"):
            pass


def test_steps_do_not_nest_and_end_with_the_watch():
    with RankWatch(5.0) as watch:
        with watch.step("a"), pytest.raises(RuntimeError, match="got 'b' inside 'a'; end that first"), watch.step("b"):
            pass
        with watch.step("c"):
            pass
    with pytest.raises(RuntimeError, match="must not be closed, got 'd' after close; make another"), watch.step("d"):
        pass


UNCLOSED = """
import sys, threading
import torch.distributed as dist
from gem_parallel.watch import RankWatch
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
watch = RankWatch(0.02)
with watch.step("step 1"):
    pass
# before the interpreter ends, after every handler that was registered later
import atexit
atexit._run_exitfuncs()
print([thread.name for thread in threading.enumerate()])
"""


def test_no_thread_outlives_the_interpreter(tmp_path):
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "['MainThread']\n"), done.stderr


def test_on_hang_may_close_the_watch():
    reports = []
    watch = RankWatch(0.1, on_hang=lambda report: (watch.close(), reports.append(report)))
    with watch.step("slow"):
        time.sleep(0.5)
    assert [report.label for report in reports] == ["slow"]


def test_one_process_reports_once_and_only_late_steps():
    reports = []
    with RankWatch(0.2, on_hang=reports.append) as watch:
        with watch.step("quick"):
            pass
        time.sleep(0.5)
        with watch.step("a longer bound", timeout_s=5.0):
            time.sleep(0.5)
        assert reports == []
        with watch.step("slow"):
            time.sleep(0.7)
    (report,) = reports
    assert (report.rank, report.label, report.missing) == (0, "slow", ())
    assert report.text == "RankWatch: 'slow' takes longer than 0.2 s on rank 0"
    with pytest.raises(KeyError), RankWatch(5.0) as watch, watch.step("an error passes"):
        raise KeyError("x")


HANGS = """
import time
from gem_parallel.watch import RankWatch
def waits_here():
    time.sleep(60)
with RankWatch(0.3).step("step 1"):
    waits_here()
"""


def test_by_default_the_process_ends_with_its_stack():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=50)
    assert done.returncode == HANG_EXIT_CODE
    assert "'step 1' takes longer than 0.3 s on rank 0\nstack of the main thread:\n" in done.stderr
    assert "in waits_here" in done.stderr


class Slow(nn.Module):
    """One rank takes long in the middle of a forward, while the others wait in a gather."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sleep_s = 0.0

    def forward(self, x):
        x = self.first(x)
        time.sleep(self.sleep_s)
        return self.second(x)


TIMEOUT_S, LATE = 1.0, 3


def rank_lags(rank, world_size, folder):
    """dp_replicate 2 x dp_shard 2: rank 3 lags twice, then ends before the others, then dies."""
    mesh = ParallelDims.for_world(world_size, dp_replicate=2).build_mesh("cpu")
    net = parallelize(Slow(), ParallelPlan(shard_units=("first", "second")), mesh)
    reports = []

    def step():
        net(torch.ones(2, 4)).sum().backward()

    with RankWatch(TIMEOUT_S, mesh=mesh, on_hang=lambda report: reports.append((report, time.monotonic()))) as watch:
        with watch.step("whole"):
            step()
        net.sleep_s = 4.5 if rank == LATE else 0.0
        started = time.monotonic()
        with watch.step("lags"):
            step()
        lag = [(report.missing, report.text, at - started) for report, at in reports]
    reports.clear()
    control = dist.new_group(backend="gloo")
    counted = torch.ones(1)
    watch = RankWatch(TIMEOUT_S, mesh=mesh, groups={"control": control}, on_hang=reports.append)
    with watch, watch.step("lags elsewhere"):
        time.sleep(3.0 if rank == LATE else 0.0)
        dist.all_reduce(counted, group=control)
    elsewhere = [report.missing for report in reports]
    reports.clear()
    net.sleep_s = 0.0
    with RankWatch(TIMEOUT_S, mesh=mesh, on_hang=lambda report: reports.append((report, 0.0))) as watch:
        if rank == LATE:
            watch.close()
            time.sleep(3.5)
            step()
        else:
            with watch.step("another batch"):
                step()
    ended = [report.missing for report, _ in reports]
    watch, error = RankWatch(TIMEOUT_S, mesh=mesh), None
    run = max(folder.glob("rank_lags-*"))
    if rank == LATE:
        torch.save(None, run / f"{rank}.pt")
        os._exit(0)
    try:
        with watch.step("after a death"):
            for _ in range(2):
                step()
    except RuntimeError as raised:
        error = str(raised)
    torch.save((lag, elsewhere, ended, error), run / f"{rank}.pt")
    # The store is a file, so no rank needs to wait for another.
    os._exit(0)


@pytest.fixture(scope="module")
def lagged(ranks):
    return ranks("rank_lags", 4)


@pytest.mark.dist
def test_a_late_rank_is_named_by_all_within_the_bound(lagged):
    for lag, *_ in lagged[:LATE]:
        ((missing, text, seconds),) = lag
        assert [(each.rank, each.kind) for each in missing] == [(LATE, "late")]
        assert f"rank {LATE} (in 'lags' for " in text
        assert "has not come to collective" in text
        # as documented, and room for a busy machine
        assert TIMEOUT_S < seconds < 2 * TIMEOUT_S + 2 + 1


@pytest.mark.dist
def test_a_rank_is_late_in_a_group_that_only_the_caller_knows(lagged):
    for _, elsewhere, *_ in lagged[:LATE]:
        ((late,),) = elsewhere
        assert (late.rank, late.kind) == (LATE, "late")
        assert (
            f"has not come to collective 1 of control {list(range(4))}, in which {list(range(LATE))} wait" in late.text
        )


@pytest.mark.dist
def test_a_rank_that_ends_before_the_others_is_named(lagged):
    for *_, ended, _ in lagged[:LATE]:
        (missing,) = ended
        assert [(each.rank, each.kind) for each in missing] == [(LATE, "ended")]


@pytest.mark.dist
def test_an_error_after_a_death_names_the_dead(lagged):
    errors = [error for *_, error in lagged[:LATE]]
    assert all(errors)
    assert any(
        f"'after a death' failed on rank {rank}; rank {LATE} gives no sign of life" in error
        for rank, error in enumerate(errors)
    ), errors
