"""Time the configurations of the kernels that some cases launch; the fastest one whose results are right is chosen."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_kernels._src.conformance.cases import ConformanceCase
from gem_kernels._src.conformance.run import make_calls
from gem_kernels._src.tuning.choices import Choice, Key, add
from gem_kernels._src.tuning.state import Question, as_numbers, asking, made_for, table, trying
from gem_kernels.testing.bench import measure

MIN_GAIN = 0.02
"""A configuration must be faster than the default by this share of its time: less is noise."""
_REPEATS = 15
_RMS_UNITS = 2.0
_MAX_UNITS = 16.0
"""Roundings of the output's dtype by which results of two configurations may differ: they sum in other orders."""
Call = Callable[[], tuple[Tensor, ...]]


class TuningError(RuntimeError):
    """The process that tunes has failed."""


def agree(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether two configurations compute the same up to rounding, by the root mean square and by the worst entry."""
    for a, b in zip(actual, expected, strict=True):
        if b.numel() == 0:
            continue
        unit = torch.finfo(b.dtype).eps
        a, b = a.float(), b.float()
        difference = a - b
        # NaN fails both.
        rms_is_small = difference.norm() <= _RMS_UNITS * unit * b.norm()
        if not bool(rms_is_small & (difference.abs().amax() <= _MAX_UNITS * unit * b.abs().amax())):
            return False
    return True


def _run(key: Key, config: Any, calls: Sequence[Call]) -> list[Tensor]:
    with trying(key, config):
        return [x for call in calls for x in call()]


def choose_fastest(
    key: Key, question: Question, calls: Sequence[Call], device: torch.device, *, log: Callable[[str], None]
) -> Choice:
    """Time the default and its alternatives in turn, medians of calls on a cold cache."""
    expected = _run(key, question.default, calls)
    right = [question.default]
    failures: tuple[type[Exception], ...] = (ValueError, RuntimeError, *_compiler_errors())
    for config in question.others:
        try:
            is_right = agree(_run(key, config, calls), expected)
        except failures as error:
            log(f"{' '.join(key)}: {as_numbers(config)} left out, {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        if is_right:
            right.append(config)
        else:
            log(f"{' '.join(key)}: {as_numbers(config)} left out, its results differ from the default's")
    providers = {str(i): functools.partial(_run, key, config, calls) for i, config in enumerate(right)}
    times = [timing.median for timing in measure(providers, device=device, warmup=2, repeats=_REPEATS).values()]
    best = min(range(len(right)), key=times.__getitem__)
    if times[best] > (1 - MIN_GAIN) * times[0]:
        best = 0
    return Choice(key, as_numbers(right[best]), times[best], as_numbers(question.default), times[0])


def _compiler_errors() -> tuple[type[Exception], ...]:
    """What Triton raises for a configuration that it cannot build or launch."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def tune(
    cases: Sequence[ConformanceCase], device: torch.device, known: Mapping[Key, Choice], *, log: Callable[[str], None]
) -> list[Choice]:
    """Choices for every kernel that the cases launch and that there is something to choose for, but known ones."""
    questions: dict[Key, Question] = {}
    calls: dict[Key, list[Call]] = {}
    for case in cases:
        for call in make_calls(case, device):
            with asking() as asked:
                call()
            for key, question in asked.items():
                if question.others and key not in known:
                    questions[key] = question
                    calls.setdefault(key, []).append(call)
    return [choose_fastest(key, questions[key], calls[key], device, log=log) for key in sorted(questions)]


def _tune_into(path: Path, cases: Sequence[ConformanceCase], device: torch.device) -> None:
    torch.cuda.set_device(device)

    def log(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    # The file must be there before the first launch asks for it, if the user has named it.
    add(path, made_for(device), [])
    add(path, made_for(device), tune(cases, device, table(), log=log))


def tune_in_a_process(path: Path, cases: Sequence[ConformanceCase], device: torch.device) -> None:
    """Add the choices for some cases to a file; no kernel of the losers, nor a broken context, stays behind here.

    Raises:
        TuningError: if the process fails; what it printed says why.
    """
    process = multiprocessing.get_context("spawn").Process(target=_tune_into, args=(path, list(cases), device))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise TuningError(
            f"warm: the process that tunes must end with 0, got {process.exitcode}; its message is above, and "
            "`--no-tune` keeps the default configurations."
        )
