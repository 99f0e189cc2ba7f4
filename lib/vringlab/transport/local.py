"""Processes on this machine: run to the end, or kept beside us and never left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vringlab.errors import InfrastructureError

T = TypeVar("T")

#: A killed command's pipes are read this long for its last words.
_LAST_WORDS_S = 5.0
#: A tethered command may clean up this long before it is killed.
_CLEAN_UP_S = 5.0

#: Runs a command with standard input from $1 while the shell's own, a pipe that only we can
#: write to, is open. When that ends, because we want it or were killed, SIGTERM goes to all of
#: the group, and SIGKILL once the command has ended or has had $2 seconds to clean up.
_TETHER = """
exec 3<&0 < "$1"; seconds=$2; shift 2
cut=; trap cut=1 TERM
(trap : TERM; read -r _ <&3; kill -TERM 0; sleep "$seconds"; kill -KILL 0) &
"$@" 3<&-; status=$?
[ -z "$cut" ] || kill -KILL 0
kill -KILL $!
exit $status
"""


@dataclass(frozen=True)
class Completed:
    """A command that ended by itself; `seconds` is its wall time."""

    stdout: str
    stderr: str
    returncode: int
    seconds: float


class Stop:
    """Ends the commands of another thread: what that runs now, and whatever it would run next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[Any] | None = None
        self._stopped = False

    def around(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work whose commands this ends; give it to a thread."""
        token = _STOP.set(self)
        try:
            return work(*arguments)
        finally:
            _STOP.reset(token)

    def __call__(self) -> None:
        """End them; the work gets an InfrastructureError."""
        with self._lock:
            self._stopped = True
            self._end()

    def watch(self, process: subprocess.Popen[Any] | None) -> None:
        """Name the command that runs now."""
        with self._lock:
            self._running = process
            if self._stopped:
                self._end()

    def check(self, argv: Sequence[str]) -> None:
        """Refuse a command when it is too late for it.

        Raises:
            InfrastructureError: it is.
        """
        if self._stopped:
            raise InfrastructureError(
                f"{argv[0]} was stopped", remedy="what was done is kept", host="local"
            )

    def _end(self) -> None:
        if self._running is not None:
            # Tethered commands clean up, and a shell of ours sees to it that they hurry.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._running.pid, signal.SIGTERM)


_STOP: ContextVar[Stop | None] = ContextVar("stop", default=None)


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


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it started (it must have been made a group leader)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def _last_words(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a killed command had printed.

    Something that it started may have left its group and hold the pipes open for ever, and a
    process that waits in the kernel cannot be killed at all.
    """

    def text(printed: Any) -> str:
        return printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""

    try:
        found: tuple[Any, Any] = process.communicate(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired as error:
        found = error.output, error.stderr
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
    return text(found[0]), text(found[1])


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | Path | None = None,
    output: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    tethered: bool = False,
    remedy: str = "",
    remedy_missing: str = "",
) -> Completed:
    """Run a command to its end; its whole process group is ended at the deadline.

    Args:
        argv: Program and arguments; no shell.
        timeout: Seconds allowed.
        input: Text for its standard input, or a file to read it from (empty when None).
        output: File that takes its standard output; it is returned as text when None.
        env: Variables on top of ours.
        cwd: Folder to run in.
        check: Raise when the exit status is not 0.
        tethered: End it and all that it started when we are killed too; it gets SIGTERM and a
            moment to clean up first. Its input cannot be text.
        remedy: What to say when it fails.
        remedy_missing: What to say when the program is not installed.

    Raises:
        InfrastructureError: not installed, cannot be started, failed (with `check`), or over the
            deadline, or stopped (see `Stop`).
    """
    program = find_tool(argv[0], remedy_missing)
    stop = _STOP.get()
    if stop is not None:
        stop.check(argv)
    command = [program, *argv[1:]]
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        source: Any = subprocess.PIPE
        tether = contextlib.ExitStack()
        if tethered:
            assert not isinstance(input, str), "a tether takes the place of the input"
            setting = [str(input or os.devnull), f"{_CLEAN_UP_S:g}"]
            command = ["/bin/sh", "-c", _TETHER, "tether", *setting, *command]
            source, line = os.pipe()
            tether.callback(os.close, line)
            stack.enter_context(tether)
            stack.callback(os.close, source)
        elif isinstance(input, Path):
            source = stack.enter_context(input.open("rb"))
        sink: Any = subprocess.PIPE if output is None else stack.enter_context(output.open("wb"))
        try:
            process = subprocess.Popen(
                command,
                stdin=source,
                stdout=sink,
                stderr=subprocess.PIPE,
                cwd=cwd,
                env=None if env is None else {**os.environ, **env},
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise InfrastructureError(
                f"{argv[0]} cannot be started: {error}",
                remedy=remedy or "check the program, the folder it runs in and its arguments",
                command=argv,
                host="local",
            ) from error
        text = input if isinstance(input, str) else ""
        if stop is not None:
            stop.watch(process)
            stack.callback(stop.watch, None)
        try:
            stdout, stderr = process.communicate(text if process.stdin else None, timeout=timeout)
        except BaseException as error:
            tether.close()
            if tethered:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_CLEAN_UP_S)
            kill_group(process)
            stdout, stderr = _last_words(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise InfrastructureError(
                f"{argv[0]} did not end within {timeout:g} s",
                remedy=remedy or "see the output above; a slower machine may need a longer time",
                command=argv,
                host="local",
                stdout=stdout,
                stderr=stderr,
            ) from None
    if stop is not None:
        stop.check(argv)
    done = Completed(stdout or "", stderr or "", process.returncode, time.monotonic() - begin)
    if check and done.returncode != 0:
        raise InfrastructureError(
            f"{argv[0]} failed",
            remedy=remedy,
            command=argv,
            host="local",
            stdout=done.stdout,
            stderr=done.stderr,
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
        # Once it was seen to have ended, its number may belong to somebody else.
        if process.returncode is None:
            kill_group(process)
