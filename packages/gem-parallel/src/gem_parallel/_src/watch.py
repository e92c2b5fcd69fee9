"""Names the ranks that keep a step from ending: a collective that waits for one of them says nothing."""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from gem_parallel._src.checks import check_mesh, check_number
from gem_parallel._src.mesh import ParallelMesh

__all__ = ["HANG_EXIT_CODE", "HangReport", "MissingRank", "RankState", "RankWatch", "find_missing"]

HANG_EXIT_CODE = 124
"""Of a process that ``RankWatch`` ended."""
_LEAST_LOOK_S = 1.5
"""A rank of a busy machine may be that long without a sign of life."""
_generation = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """What one rank last told the others."""

    rank: int
    beat: int
    """Signs of life so far."""
    state: Literal["step", "between", "failed", "ended"]
    label: str
    """Of the step that it is in, or was in last."""
    seconds: float
    """Since it entered or left it."""
    collectives: dict[str, int]
    """Group, named by axis and ranks -> collectives that the rank has started in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingRank:
    """A rank that others wait for and that waits for nobody."""

    rank: int
    kind: Literal["silent", "ended", "failed", "late"]
    text: str
    """What it does, in words that follow its number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangReport:
    """A step that does not end, as one rank sees it."""

    rank: int
    label: str
    seconds: float
    missing: tuple[MissingRank, ...]
    """In order of rank; empty if none is found."""
    text: str
    """One line that says all of it."""


def find_missing(states: Sequence[RankState], silent: Sequence[int]) -> tuple[MissingRank, ...]:
    """Who keeps the others waiting, in order of rank.

    Ranks that are gone come first: silent ones, and those that ended or failed. Else a rank is late in a group if
    another rank of it has started more collectives there. Of the late ranks those count that are ahead of nobody in
    another group, for they wait for nobody; if all are, they wait for each other in a circle, and all count.
    """
    gone = {
        rank: MissingRank(rank=rank, kind="silent", text="gives no sign of life: dead, or its process is stopped")
        for rank in silent
    }
    for state in states:
        if state.rank not in gone and state.state == "ended":
            gone[state.rank] = MissingRank(rank=state.rank, kind="ended", text=f"has ended after {state.label!r}")
        elif state.rank not in gone and state.state == "failed":
            gone[state.rank] = MissingRank(rank=state.rank, kind="failed", text=f"failed in {state.label!r}")
    if gone:
        return tuple(gone[rank] for rank in sorted(gone))
    late: dict[int, MissingRank] = {}
    waiting: set[int] = set()
    for group in dict.fromkeys(group for state in states for group in state.collectives):
        members = [state for state in states if group in state.collectives]
        most = max(state.collectives[group] for state in members)
        ahead = [state.rank for state in members if state.collectives[group] == most]
        behind = [state for state in members if state.collectives[group] < most]
        for state in behind:
            text = (
                f"(in {state.label!r} for {state.seconds:.1f} s) has not come to collective "
                f"{state.collectives[group] + 1} of {group}, in which {ahead} wait"
            )
            late.setdefault(state.rank, MissingRank(rank=state.rank, kind="late", text=text))
        waiting.update(ahead if behind else ())
    first = [rank for rank in sorted(late) if rank not in waiting]
    return tuple(late[rank] for rank in first or sorted(late))


class RankWatch:
    """Says which ranks keep a step from ending, and ends the process, where otherwise it would wait without a word.

    ::

        with RankWatch(timeout_s=300, mesh=mesh) as watch:
            for number, batch in enumerate(batches):
                with watch.step(f"step {number}"):
                    ...

    A thread of each rank tells the others, through the process group's store, that it lives, in which step its main
    thread is, and how many collectives it has started in each group of the mesh. When a step takes too long, the thread
    compares all ranks: it names those that gave no sign of life, that have ended (out of data before the others), or
    that have not come to a collective in which others wait, and hands a ``HangReport`` to ``on_hang``. An error inside
    a step, as a backend raises when a connection breaks, is raised again with the names of ranks that are gone.

    The thread needs the interpreter now and then: a rank that holds it for longer than 3/4 of ``timeout_s``, or 15 s,
    counts as one that gives no sign of life. A kernel that hangs on a GPU is not seen as late, as the host has started
    what follows.

    Args:
        timeout_s: Seconds that a step may take; above the longest one, compilation and checkpoints included. The report
            comes at most min(timeout_s, 20 s) + 2 s later.
        mesh: Whose groups are compared; None compares the default group only.
        groups: More groups to compare, by names that are equal on their ranks, such as those of
            ``ShardedEmbeddings.process_groups``; a collective in a group that is not compared makes nobody late.
        on_hang: Called once, on the thread; default: print the report and the main thread's stack to stderr and end
            the process with ``HANG_EXIT_CODE``, as nothing can interrupt a collective that waits.

    All ranks make it, after ``torch.distributed.init_process_group``; in one process without it there is nobody to
    name, and the report has the time only. It watches from here on, also outside ``with``; what is not closed by then
    is closed when the process exits.

    Raises:
        TypeError: an argument of another kind.
        ValueError: ``timeout_s`` is not finite and above 0.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        mesh: ParallelMesh | None = None,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        on_hang: Callable[[HangReport], None] | None = None,
    ) -> None:
        _check_timeout("RankWatch", timeout_s)
        check_mesh("RankWatch", mesh)
        if groups is not None:
            _check_groups(groups)
        if on_hang is not None and not callable(on_hang):
            raise TypeError(
                f"RankWatch: `on_hang` must be a function or None, got {type(on_hang).__name__}; it takes a HangReport"
            )
        self.timeout_s = timeout_s
        self._interval_s = min(5.0, timeout_s / 4)
        self._on_hang = on_hang or _end_process
        self._main = threading.get_ident()
        self._size, self._rank = 1, 0
        self._store: Any = None
        self._groups: dict[str, dist.ProcessGroup] = {}
        if dist.is_available() and dist.is_initialized():
            self._size, self._rank = dist.get_world_size(), dist.get_rank()
            # A connection of its own: the main thread may hold the other one while it waits.
            store: Any = _get_default_store()
            self._store = PrefixStore(f"gem_parallel/watch/{next(_generation)}", store.clone())
            self._groups = _groups_of(mesh, groups or {})
        self._lock = threading.Lock()
        self._now = RankState(rank=self._rank, beat=0, state="between", label="", seconds=0.0, collectives={})
        self._since = time.monotonic()
        self._limit_s = math.inf
        self._reported = False
        self._stop = threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._run, name="RankWatch", daemon=True)
        # An interpreter that ends under a thread which is inside the store takes the process down with it.
        atexit.register(self.close)
        self._thread.start()

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Tell the others that this rank takes part in no more steps, and stop watching."""
        if self._stop.is_set():
            return
        self._stop.set()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._enter("failed" if failed or self._now.state == "failed" else "ended", self._now.label, math.inf)

    @contextmanager
    def step(self, label: str, *, timeout_s: float | None = None) -> Iterator[None]:
        """What the main thread does inside must end in time.

        Args:
            label: What others read of this rank.
            timeout_s: In place of the watch's own, for example of a first step that compiles.

        Raises:
            TypeError: ``label`` is no str, or ``timeout_s`` no number.
            ValueError: ``timeout_s`` is not finite and above 0.
            RuntimeError: the watch is closed, or in another step; or the body raised one while another rank was gone:
                names it, with the body's as its cause.
        """
        if not isinstance(label, str):
            raise TypeError(f"RankWatch.step: `label` must be a str, got {type(label).__name__}; pass f'step {{n}}'")
        if timeout_s is not None:
            _check_timeout("RankWatch.step", timeout_s)
        if self._stop.is_set():
            raise RuntimeError(f"RankWatch.step: the watch must not be closed, got {label!r} after close; make another")
        if self._now.state == "step":
            raise RuntimeError(
                f"RankWatch.step: steps must follow each other, got {label!r} inside {self._now.label!r}; "
                "end that first"
            )
        self._enter("step", label, self.timeout_s if timeout_s is None else timeout_s)
        try:
            yield
        except BaseException as error:
            self._enter("failed", label, math.inf)
            if isinstance(error, RuntimeError) and self._size > 1:
                # Others that failed did so for the same reason.
                gone = [each for each in self._missing() if each.kind in ("silent", "ended")]
                if gone:
                    raise RuntimeError(f"RankWatch: {label!r} failed on rank {self._rank}; {_said(gone)}") from error
            raise
        self._enter("between", label, math.inf)

    def _enter(self, state: Literal["step", "between", "failed", "ended"], label: str, limit_s: float) -> None:
        with self._lock:
            self._now = replace(self._now, state=state, label=label)
            self._since, self._limit_s, self._reported = time.monotonic(), limit_s, False
        if state in ("failed", "ended"):
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            counts = {name: _started(group) for name, group in self._groups.items()}
            seconds = time.monotonic() - self._since
            self._now = replace(self._now, beat=self._now.beat + 1, seconds=seconds, collectives=counts)
            text = json.dumps(asdict(self._now))
        if self._store is not None:
            try:
                self._store.set(str(self._rank), text)
            except RuntimeError:
                # The store went away with the rank or launcher that keeps it; a report says so.
                self._stop.wait(self._interval_s)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._tell()
            with self._lock:
                seconds = time.monotonic() - self._since
                due = seconds > self._limit_s and not self._reported
                self._reported |= due
                label = self._now.label
            if due:
                self._report(label, seconds)

    def _report(self, label: str, seconds: float) -> None:
        text = f"RankWatch: {label!r} takes longer than {self._limit_s:g} s on rank {self._rank}"
        missing: tuple[MissingRank, ...] = ()
        if self._size > 1:
            try:
                missing = self._missing()
            except RuntimeError as error:
                text += f"; the store, which rank 0 keeps unless torchrun does, cannot be reached: {error}"
            else:
                text += "; " + (_said(missing) or "no rank is late in a collective: compare the ranks' stacks")
        with self._lock:
            over = self._now.label != label or self._now.state != "step"
        if not over:
            self._on_hang(HangReport(rank=self._rank, label=label, seconds=seconds, missing=missing, text=text))

    def _missing(self) -> tuple[MissingRank, ...]:
        first = self._read(range(self._size))
        until = time.monotonic() + max(3 * self._interval_s, _LEAST_LOOK_S)
        last: dict[int, RankState] = {}
        untold = list(range(self._size))
        # Until every rank has given a sign of life, so that all counts are new: only a silent one takes the whole time.
        while untold and time.monotonic() < until:
            time.sleep(self._interval_s / 2)
            # Read by the main thread after an error, this rank's own thread still tells; by the thread, it tells here.
            self._tell()
            last.update(self._read(untold))
            untold = [rank for rank in untold if not _told_since(first.get(rank), last.get(rank))]
        return find_missing([last[rank] for rank in sorted(last)], untold)

    def _read(self, ranks: Iterable[int]) -> dict[int, RankState]:
        known = [rank for rank in ranks if self._store.check([str(rank)])]
        return {rank: RankState(**json.loads(self._store.get(str(rank)))) for rank in known}


def _check_timeout(owner: str, timeout_s: object) -> None:
    check_number(owner, "timeout_s", timeout_s)
    assert isinstance(timeout_s, (int, float))
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"{owner}: `timeout_s` must be finite and above 0, got {timeout_s}; pass seconds")


def _check_groups(groups: object) -> None:
    if not isinstance(groups, Mapping):
        raise TypeError(
            f"RankWatch: `groups` must map names to process groups, got {type(groups).__name__}; "
            'pass {"control": group}, for example'
        )
    for name, group in groups.items():
        if not isinstance(name, str) or not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"RankWatch: `groups` must map names to process groups, got {type(group).__name__} for {name!r}; "
                "pass a mesh's get_group()"
            )


def _told_since(first: RankState | None, last: RankState | None) -> bool:
    """A sign of life came between two looks, or none is to come."""
    if last is None or last.state in ("failed", "ended"):
        return last is not None
    return first is None or last.beat > first.beat


def _groups_of(mesh: ParallelMesh | None, more: Mapping[str, dist.ProcessGroup]) -> dict[str, dist.ProcessGroup]:
    """Groups of more than one rank, named by axis and ranks; one that two axes share by its first name."""
    assert dist.group.WORLD is not None
    groups = [("all ranks", dist.group.WORLD)]
    for axes in () if mesh is None else (mesh.dense, mesh.shared, mesh.sparse):
        groups += [(name, axes.get_group(name)) for name in axes.mesh_dim_names or ()]
    groups += list(more.items())
    found: dict[str, dist.ProcessGroup] = {}
    seen: set[int] = set()
    for name, group in groups:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1 and id(group) not in seen and _counts(group):
            seen.add(id(group))
            found[f"{name} {ranks}" if name != "all ranks" else name] = group
    return found


def _started(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


def _counts(group: Any) -> bool:
    """Not every backend counts its collectives; ranks that are gone are still named then."""
    try:
        _started(group)
    except RuntimeError:
        return False
    return True


def _said(missing: Sequence[MissingRank]) -> str:
    return "; ".join(f"rank {each.rank} {each.text}" for each in missing)


def _end_process(report: HangReport) -> None:
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(main)) if main is not None else ""
    sys.stderr.write(f"{report.text}\nstack of the main thread:\n{stack}")
    sys.stderr.flush()
    os._exit(HANG_EXIT_CODE)
