"""Processes on this machine: run to the end, or kept beside us and never left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vringlab.errors import InfrastructureError


@dataclass(frozen=True)
class Completed:
    """A command that ended by itself; `seconds` is its wall time."""

    stdout: str
    stderr: str
    returncode: int
    seconds: float


def find_tool(name: str, remedy: str = "") -> str:
    """The full path of a program.

    Raises:
        InfrastructureError: it is not installed; `remedy` says how to get it.
    """
    path = shutil.which(name)
    if path is None:
        raise InfrastructureError(
            f"the program {name!r} is not installed here",
            remedy=remedy or "run `make setup`; it installs what is missing",
            host="local",
        )
    return path


def kill_group(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End a process and all that it started (it must have been made a group leader)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    remedy: str = "",
    remedy_missing: str = "",
) -> Completed:
    """Run a command to its end; its whole process group is ended at the deadline.

    Args:
        argv: Program and arguments; no shell.
        timeout: Seconds allowed.
        input: Text for its standard input (empty when None).
        env: Variables on top of ours.
        cwd: Folder to run in.
        check: Raise when the exit status is not 0.
        remedy: What to say when it fails.
        remedy_missing: What to say when the program is not installed.

    Raises:
        InfrastructureError: not installed, failed (with `check`), or over the deadline.
    """
    program = find_tool(argv[0], remedy_missing)
    begin = time.monotonic()
    process = subprocess.Popen(
        [program, *argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env=None if env is None else {**os.environ, **env},
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(input or "", timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_group(process)
        stdout, stderr = process.communicate()
        raise InfrastructureError(
            f"{argv[0]} did not end within {timeout:g} s",
            remedy=remedy or "see the output above; a slower machine may need a longer deadline",
            command=argv,
            host="local",
            stdout=stdout,
            stderr=stderr,
        ) from None
    except BaseException:
        kill_group(process)
        raise
    done = Completed(stdout, stderr, process.returncode, time.monotonic() - begin)
    if check and done.returncode != 0:
        raise InfrastructureError(
            f"{argv[0]} failed",
            remedy=remedy,
            command=argv,
            host="local",
            stdout=stdout,
            stderr=stderr,
            returncode=done.returncode,
        )
    return done


@contextlib.contextmanager
def companion(
    argv: Sequence[str],
    *,
    log: Path,
    remedy_missing: str = "",
    pass_fds: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A long-lived process that ends with this block, and with us even after kill -9.

    The kernel's parent-death signal does the latter. It is bound to the *thread* that started
    the process, so enter this block in a thread that lives as long as the process shall.

    Args:
        argv: Program and arguments.
        log: File that takes its standard output and error.
        remedy_missing: What to say when the program is not installed.
        pass_fds: Descriptors it inherits.

    Raises:
        InfrastructureError: the program is not installed.
    """
    program = find_tool(argv[0], remedy_missing)
    setpriv = find_tool("setpriv", "install util-linux 2.33 or newer")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [setpriv, "--pdeathsig", "KILL", "--", program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_group(process)
