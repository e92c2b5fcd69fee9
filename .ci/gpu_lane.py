"""Pytest plugin of the GPU lane: a skipped test is a failure unless it is marked `sm100`.

A GPU runner exists to run these tests; a skip there hides that something did not run.
"""

from __future__ import annotations

import pytest

_skipped: list[str] = []


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
