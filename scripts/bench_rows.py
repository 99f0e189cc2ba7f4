"""What every row of `make bench` has in common: its options, its place on disk, and its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vringlab.errors import UserError
from vringlab.image.build import Image, ensure_image
from vringlab.lab import accel
from vringlab.settings import settings

#: Waits for the end of its input, which is the end of the benchmark whatever ended it; then ends a
#: lab that a row has up, as soon as it can be ended, and removes what the rows have on disk.
_GUARD = """
read -r _
tries=0
while [ -e "$1/lab-is-up" ] && [ "$tries" -lt 60 ]; do
    "$2" -m vringlab down > /dev/null 2>&1 && break
    tries=$((tries + 1)); sleep 1
done
rm -rf -- "$1"
"""


@dataclass(frozen=True)
class Bench:
    """One run of the benchmark.

    Attributes:
        pairs: Pairs of each line.
        seconds: Length of a fio run.
        cells: Cells of the large plan.
        scratch: Folder for whatever a row writes; removed in the end.
        say: Tells what is being done.
    """

    pairs: int
    seconds: float
    cells: int
    scratch: Path
    say: Callable[[str], None]

    @cached_property
    def image(self) -> Image:
        """The image, built where it is missing."""
        return ensure_image(on_step=self.say)

    @cached_property
    def accelerator(self) -> accel.Accelerator:
        """What virtual machines run on here."""
        return accel.choose(self.image, settings().accel)

    @property
    def lab_mark(self) -> Path:
        """There as long as a row may have a kept lab up."""
        return self.scratch / "lab-is-up"

    def environment(self, **more: str) -> dict[str, str]:
        """Variables for programs of ours: modules are compiled once, and not into the checkout."""
        caches = {
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self.scratch / "pycache"),
        }
        return {**caches, **more}


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in the cache that is gone in the end, also after kill -9; one benchmark at a time.

    Raises:
        UserError: another benchmark runs.
    """
    place = settings().cache / "bench"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "bench.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another benchmark runs here", remedy="wait for its end: they would disturb it"
            ) from None
        folder = place / "scratch"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "bench-guard", str(folder), sys.executable],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It keeps the lock until it is done, and outlives whatever kills our group.
            pass_fds=(lock.fileno(),),
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            yield folder
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait()
