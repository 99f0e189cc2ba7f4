"""Whose lab it is: the folder of a lab of ours, and what is removed when its owner has died."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from vringlab.settings import settings

#: A lab's folder names its owner this long after it was made at the latest.
_HALF_MADE_S = 60.0


def start_time(pid: int) -> str | None:
    """The kernel's start time of a process: with the pid it names one process for ever.

    None when it has ended, whether or not its parent has heard of that.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[19] if fields[0] not in "ZX" else None
    except (OSError, IndexError):
        return None


def _labs() -> Path:
    return settings().cache / "labs"


def _runs(pid: object, started: object) -> bool:
    """Whether that very process still runs, and not another one that got its number."""
    return isinstance(pid, int) and started is not None and start_time(pid) == started


def reap() -> list[Path]:
    """Remove labs whose owner is dead, with their QEMU if it still runs.

    Returns the folders removed.
    """
    removed = []
    for folder in sorted(_labs().glob("lab-*")):
        try:
            owner = json.loads((folder / "owner.json").read_text())
            pid, started = owner["pid"], owner["started"]
            qemu_pid, qemu_started = owner["qemu_pid"], owner["qemu_started"]
        except (OSError, ValueError, TypeError, KeyError):
            # Either half made by a killed process, or being made right now by a live one.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime > _HALF_MADE_S:
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder)
            continue
        if _runs(pid, started):
            continue
        if _runs(qemu_pid, qemu_started):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(qemu_pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder)
    return removed


@contextlib.contextmanager
def lab_folder() -> Iterator[Path]:
    """A folder for a lab of ours; it goes with the block."""
    reap()
    folder = _labs() / f"lab-{uuid.uuid4().hex[:12]}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def record(folder: Path, qemu_pid: int) -> None:
    """Write down that this process owns a lab, and which QEMU is its."""
    pid = os.getpid()
    owner = {
        "pid": pid,
        "started": start_time(pid),
        "qemu_pid": qemu_pid,
        "qemu_started": start_time(qemu_pid),
    }
    temporary = folder / "owner.json.part"
    temporary.write_text(json.dumps(owner))
    temporary.rename(folder / "owner.json")
