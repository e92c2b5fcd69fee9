"""Pytest plugin of the GPU lane: a skipped test is a failure unless it is marked `sm100`.

A GPU runner exists to run these tests; a skip there hides that something did not run. Processes that share the tests
also share the GPUs named in GEM_GPU_LANE_DEVICES, in turn.
"""

from __future__ import annotations

import os

import pytest

_skipped: list[str] = []


def device_of(worker: str, devices: str) -> str | None:
    """The GPU of a process of pytest-xdist, of those in a list with commas; None for the process that has them all."""
    names = [name for name in devices.split(",") if name]
    number = worker.removeprefix("gw")
    return names[int(number) % len(names)] if names and number.isdecimal() else None


# When the plugin is imported, CUDA has not been asked for its devices.
_device = device_of(os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("GEM_GPU_LANE_DEVICES", ""))
if _device is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = _device


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and "sm100" not in report.keywords:
        _skipped.append(f"{report.nodeid}: {report.longreprtext}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(f"{report.nodeid}: skipped as a whole")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped:
        terminalreporter.section("skipped in the GPU lane: an error", red=True)
        for line in _skipped:
            terminalreporter.line(line)
