"""The switch for live tests, and settings that every test shares.

`VRINGLAB_LIVE` has three states: unset or empty skips the tests in tests/live and says how to
run them; 0 skips them on purpose; 1 runs them, and then a test that skips itself is an error:
otherwise a machine without QEMU would pass a suite that tested nothing.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

LIVE_FOLDER = Path(__file__).resolve().parent / "live"
SWITCH = "VRINGLAB_LIVE"

# No window must open for a figure.
os.environ["MPLBACKEND"] = "Agg"

# Machines differ and other jobs run beside the tests, so the time of an example says nothing.
settings.register_profile("vringlab", deadline=None)
settings.load_profile("vringlab")


def _is_live(path: Path) -> bool:
    return path == LIVE_FOLDER or LIVE_FOLDER in path.parents


def _required() -> bool:
    return os.environ.get(SWITCH) == "1"


def pytest_configure() -> None:
    if os.environ.get(SWITCH, "") not in ("", "0", "1"):
        raise pytest.UsageError(f"{SWITCH} is {os.environ[SWITCH]!r}: unset it, or use 0 or 1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    off = pytest.mark.skip(
        reason=f"{SWITCH}=0"
        if os.environ.get(SWITCH)
        else f"starts virtual machines; {SWITCH}=1 runs it"
    )
    for item in items:
        if _is_live(item.path):
            item.add_marker(pytest.mark.live)
        if item.get_closest_marker("live") and not _required():
            item.add_marker(off)


def _reason(longrepr: object) -> str:
    return str(longrepr[-1]) if isinstance(longrepr, tuple) else str(longrepr)


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    # An expected failure is reported as a skip too, but it did run.
    if report.outcome == "skipped" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"a live test may not skip when {SWITCH}=1: {_reason(report.longrepr)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _required() and item.get_closest_marker("live"):
        _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _required() and _is_live(collector.path):
        _refuse_skip(report)
    return report
