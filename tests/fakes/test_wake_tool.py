"""The C tool vringlab-wake, built here, as far as it can be run without setting a clock."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import vringlab.image

SOURCE = Path(vringlab.image.__file__).parent / "src"
SEED_BYTES = 64
#: Root without any right of root's.
POWERLESS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--")


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None or shutil.which("make") is None:
        pytest.skip("needs a C compiler and make")
    out = tmp_path_factory.mktemp("wake")
    made = out / "vringlab-wake"
    subprocess.run(["make", "-C", SOURCE, f"OUT={out}", made], check=True, capture_output=True)
    return made


def run(tool: Path, *arguments: str, seed: bytes = b"") -> tuple[int, str, str]:
    # Nothing here may have all of a seed together with a right to set the clock.
    assert len(seed) < SEED_BYTES
    done = subprocess.run([tool, *arguments], input=seed, capture_output=True, timeout=30)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_it_says_how_it_is_used(tool: Path) -> None:
    status, out, error = run(tool, "--help")
    assert (status, error) == (0, "")
    assert out.startswith("usage: vringlab-wake SECONDS < SEED\n")
    assert f"{SEED_BYTES} bytes" in out


@pytest.mark.parametrize(
    "arguments",
    [
        *((), ("",), ("now",), ("12x",), ("12", "13"), ("--version",)),
        *(("0",), ("-5",), ("nan",), ("inf",), ("1e12",)),
    ],
    ids=" ".join,
)
def test_a_clock_that_is_none_is_refused(tool: Path, arguments: tuple[str, ...]) -> None:
    status, out, error = run(tool, *arguments)
    assert (status, out) == (1, "")
    assert error.startswith("usage: ")


@pytest.mark.parametrize("length", [0, 1, SEED_BYTES - 1])
def test_a_short_seed_is_refused(tool: Path, length: int) -> None:
    status, out, error = run(tool, "1796090000.5", seed=os.urandom(length))
    assert (status, out) == (2, "")
    assert error == "vringlab-wake: the seed is shorter than 64 bytes\n"


def test_without_rights_nothing_is_set_and_it_says_so(tool: Path) -> None:
    prefix = POWERLESS if os.geteuid() == 0 else ()
    if prefix and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    rights = subprocess.run(
        [*prefix, "grep", "CapEff", "/proc/self/status"], capture_output=True, text=True
    )
    if rights.returncode != 0 or int(rights.stdout.split()[1], 16) != 0:
        pytest.skip("rights cannot be given up here")
    done = subprocess.run(
        # The time that it is: even a tool that set it would do no harm.
        [*prefix, tool, f"{time.time():.6f}"],
        input=os.urandom(SEED_BYTES),
        capture_output=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == (
        b"vringlab-wake: the random numbers cannot be reseeded: Operation not permitted\n"
    )
