"""The three states of VRINGLAB_LIVE, see tests/conftest.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LIVE = """
import pytest

def test_runs():
    pass

def test_skips_itself():
    pytest.skip("no machine here")

@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail():
    assert False
"""
SKIPPED_WHOLE = 'import pytest\npytest.skip("no tool here", allow_module_level=True)\n'


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A small suite with our conftest: one pure test, and live ones of every outcome."""
    (tmp_path / "tests" / "live").mkdir(parents=True)
    (tmp_path / "tests" / "pure").mkdir()
    shutil.copy(CONFTEST, tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = live\naddopts = --strict-markers\n")
    (tmp_path / "tests" / "live" / "test_machine.py").write_text(LIVE)
    (tmp_path / "tests" / "live" / "test_whole.py").write_text(SKIPPED_WHOLE)
    (tmp_path / "tests" / "pure" / "test_pure.py").write_text("def test_pure(): pass\n")
    return tmp_path


def run(suite: Path, switch: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "VRINGLAB_LIVE"}
    # Loading the plugins takes longer than the tests, and none is needed.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if switch is not None:
        environment["VRINGLAB_LIVE"] = switch
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"],
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("switch", "reason"),
    [(None, "VRINGLAB_LIVE=1 runs it"), ("", "VRINGLAB_LIVE=1 runs it"), ("0", "VRINGLAB_LIVE=0")],
)
def test_off_skips_live_tests_with_the_reason(suite: Path, switch: str | None, reason: str) -> None:
    done = run(suite, switch)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 4 skipped" in done.stdout
    assert reason in done.stdout


def test_on_refuses_a_file_that_skips_itself(suite: Path) -> None:
    done = run(suite, "1")
    # Nothing runs then: pytest stops at an error of collection.
    assert done.returncode == 2, done.stdout
    assert "a live test may not skip when VRINGLAB_LIVE=1: Skipped: no tool here" in done.stdout


def test_on_runs_live_tests_and_refuses_the_skip_of_one(suite: Path) -> None:
    (suite / "tests" / "live" / "test_whole.py").unlink()
    done = run(suite, "1")
    assert done.returncode == 1, done.stdout
    assert "1 failed, 2 passed, 1 xfailed" in done.stdout
    assert "may not skip when VRINGLAB_LIVE=1: Skipped: no machine here" in done.stdout


def test_other_values_are_refused(suite: Path) -> None:
    done = run(suite, "yes")
    assert done.returncode == 4
    assert "VRINGLAB_LIVE is 'yes'" in done.stderr
