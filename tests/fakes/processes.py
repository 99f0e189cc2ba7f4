"""What tests of processes share: waiting for an end, and programs that stand in for real ones."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

#: Generous: a busy machine must not fail a test, and a test that succeeds does not wait.
DEADLINE_S = 60.0


def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
    """Whether the condition came true before the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C for this thread, later."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C for this thread once the condition is true."""
    target = threading.get_ident()

    def watch() -> None:
        if until(condition):
            # To this very thread: only then does its system call end.
            signal.pthread_kill(target, signal.SIGALRM)

    watcher = threading.Thread(target=watch)
    with interrupted_after(10 * DEADLINE_S):
        watcher.start()
        try:
            yield
        finally:
            watcher.join()


def script(path: Path, text: str) -> Path:
    """An executable shell script, without the shebang in `text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python of this environment that runs `code`; its output is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
