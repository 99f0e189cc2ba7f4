"""A lab that is kept between commands: whether there is one, what it is asked, how to get in.

A process of ours, the keeper, holds the KVM host and the guest on it (`campaign.keeper`). Its
folder in the cache has the state that it wrote, a socket on which it is asked, and what `ssh`
needs to reach both machines. The keeper holds a lock on the folder for its life: the kernel frees
that whatever happens, so a folder without it is what a keeper that was killed has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from vringlab.campaign.budget import Budget
from vringlab.campaign.files import replace_json
from vringlab.campaign.seat import Answer, AskedSession, Facts
from vringlab.errors import (
    HostLost,
    InfrastructureError,
    TransientError,
    UserError,
    VringlabError,
)
from vringlab.lab.owner import reap, start_time
from vringlab.settings import settings
from vringlab.transport.local import Completed, find_tool

if TYPE_CHECKING:
    from vringlab.campaign.experiment import Experiment, Probes

#: Name of a kept lab where a host is named.
HOST = "kept"
#: Version of kept.json.
FORMAT = 1

STATE = "kept.json"
SOCKET = "socket"
SECRET = "secret"
LOG = "keeper.log"
SSH_CONFIG = "ssh_config"
KNOWN_HOSTS = "known_hosts"
_LOCK = "kept.lock"

MachineName = Literal["host", "guest"]
OnStep = Callable[[str], None]
Switch = Literal["swap", "reboot"]

#: A process that was killed holds its locks a moment longer.
_ENDING_S = 5.0
_POLL_S = 0.02
#: A keeper may take this long to give its machines back before it is killed.
_DOWN_S = 60.0
#: A command that takes longer is one for `shell`.
_COMMAND_S = 3600.0

_KINDS: Mapping[str, type[VringlabError]] = {
    kind.__name__: kind for kind in (UserError, TransientError, HostLost, InfrastructureError)
}


@dataclass(frozen=True)
class Kept:
    """A lab that is up.

    Attributes:
        pid: Process of its keeper.
        started: The kernel's start time of that process.
        host: The KVM host as it was named.
        host_kind: Its kind.
        experiment: The experiment for whose workloads the guest was made.
        since: When it was up, ISO 8601 in UTC.
        idle_s: It ends when nobody used it for so long.
        ssh: Arguments of `ssh` by machine.
    """

    pid: int
    started: str
    host: str
    host_kind: str
    experiment: str
    since: str
    idle_s: float
    ssh: Mapping[str, Sequence[str]]

    def write(self) -> None:
        """Say that the lab is up."""
        replace_json(folder() / STATE, {"format": FORMAT, **asdict(self)})


def folder() -> Path:
    """Everything of the kept lab."""
    return settings().cache / "labs" / "kept"


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def holding(on_taken: Callable[[], BaseException]) -> Iterator[int]:
    """Hold the lock of the kept lab; its descriptor may be handed to the keeper.

    One that has just ended, and is no longer there, is waited for.

    Raises:
        BaseException: what `on_taken` gives, when another process holds it.
    """
    path = folder().parent / _LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _ENDING_S
        while not _flock(descriptor):
            if current() is not None or time.monotonic() > deadline:
                raise on_taken()
            time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def current() -> Kept | None:
    """The lab that is up; None when none is, or is not yet.

    Raises:
        UserError: its state is of a format that this version does not know.
    """
    try:
        document = json.loads((folder() / STATE).read_bytes())
    except (OSError, ValueError):
        return None
    if document.pop("format", None) != FORMAT:
        raise UserError(
            f"{folder() / STATE} is of another version of vringlab",
            remedy="end that lab with the version that made it: vringlab down",
        )
    kept = Kept(**document)
    return kept if start_time(kept.pid) == kept.started else None


def get() -> Kept:
    """The lab that is up.

    Raises:
        UserError: none is.
    """
    kept = current()
    if kept is None:
        raise UserError("no lab is up", remedy="`vringlab up` boots one and keeps it")
    return kept


def clean() -> bool:
    """Remove what a keeper that was killed has left; hold the lock. True when there was any."""
    left = folder().exists()
    shutil.rmtree(folder(), ignore_errors=True)
    reap()
    return left


def up(
    experiment: str, host: str, idle_s: float, on_step: OnStep, keeper: Sequence[str] = ()
) -> tuple[Kept, bool]:
    """Boot a lab and keep it; the one that is up when it is such a lab.

    Args:
        experiment: The experiment for whose workloads the guest is made.
        host: The KVM host.
        idle_s: End it when nobody used it for so long.
        on_step: Told what is being done.
        keeper: Command of the keeper, for tests.

    Returns:
        The lab, and whether it was made now.

    Raises:
        UserError: another lab is up, or one is coming up; or as the keeper says.
        TransientError, InfrastructureError: a machine or tool failed.
    """

    def taken() -> BaseException:
        kept = current()
        if kept is None:
            return TransientError(
                "another process boots or ends a kept lab just now",
                remedy="wait a moment, then see `vringlab up` again",
            )
        return _Taken(kept)

    try:
        with holding(taken) as lock:
            if clean():
                on_step("the last kept lab had ended without `vringlab down`; it is cleaned up")
            return _boot(experiment, host, idle_s, on_step, keeper, lock), True
    except _Taken as found:
        kept = found.kept
        if (kept.experiment, kept.host) != (experiment, host):
            raise UserError(
                f"a lab for {kept.experiment} on {kept.host} is up since {kept.since}",
                remedy="end it first: vringlab down",
            ) from None
        return kept, False


class _Taken(Exception):  # noqa: N818 - it is no error
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept


def _boot(
    experiment: str, host: str, idle_s: float, on_step: OnStep, keeper: Sequence[str], lock: int
) -> Kept:
    place = folder()
    place.mkdir(mode=0o700, parents=True)
    with ExitStack() as failing:
        failing.callback(_give_up, place)
        (place / SECRET).write_text(secrets.token_hex(16))
        ours, theirs = os.pipe()
        command = [*keeper] or [sys.executable, "-m", "vringlab.campaign.keeper"]
        with os.fdopen(ours, encoding="utf-8") as reading, (place / LOG).open("wb") as log:
            try:
                process = subprocess.Popen(
                    [*command, str(theirs), str(lock), experiment, host, f"{idle_s:g}"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs, lock],
                    start_new_session=True,
                )
            finally:
                os.close(theirs)
            try:
                kept = _await(reading, process, on_step)
            except BaseException:
                _end(process)
                raise
        # It lives on, and is not ours to wait for.
        process.returncode = 0
        failing.pop_all()
        return kept


def _await(reading: IO[str], process: subprocess.Popen[bytes], on_step: OnStep) -> Kept:
    """Listen to a keeper until it says no more: then the lab is up, or will not be."""
    for line in reading:
        told = json.loads(line)
        if "error" in told:
            raise _error(told["error"])
        on_step(told["step"])
    kept = current()
    if kept is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_DOWN_S)
        raise InfrastructureError(
            "the lab's keeper ended while it booted it",
            remedy="see its last words",
            host="local",
            stderr=(folder() / LOG).read_text(errors="replace"),
            returncode=process.returncode,
        )
    return kept


def _give_up(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    reap()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_DOWN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _error(fields: Mapping[str, Any]) -> VringlabError:
    values = dict(fields)
    kind = _KINDS.get(values.pop("kind"), InfrastructureError)
    return kind(**values)


def as_record(error: BaseException) -> dict[str, Any]:
    """An error as the keeper tells it to the process that waits for the lab."""
    if not isinstance(error, VringlabError):
        return {
            "kind": "InfrastructureError",
            "message": f"the lab's keeper failed: {type(error).__name__}: {error}",
            "remedy": f"see {folder() / LOG}",
        }
    fields = {name: getattr(error, name) for name in error.__dataclass_fields__}
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS]
    return {"kind": kinds[0] if kinds else "InfrastructureError", **fields}


def down() -> bool:
    """End the lab that is up, with everything of it; False when none was.

    Raises:
        TransientError: one is coming up just now.
    """
    kept = current()
    if kept is not None:
        _end_keeper(kept)

    def taken() -> BaseException:
        return TransientError(
            "another process boots or ends a kept lab just now",
            remedy="wait a moment, then say `vringlab down` again",
        )

    with holding(taken):
        left = clean()
    return kept is not None or left


def _end_keeper(kept: Kept) -> None:
    try:
        handle = os.pidfd_open(kept.pid)
    except ProcessLookupError:
        return
    try:
        # The number is that of the keeper still: the handle would not follow another one.
        if start_time(kept.pid) != kept.started:
            return
        for number, seconds in ((signal.SIGTERM, _DOWN_S), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], seconds)[0]:
                return
    finally:
        os.close(handle)


# --- asking the keeper ---------------------------------------------------------------------


@contextmanager
def short_path(place: Path) -> Iterator[str]:
    """A name of the socket in a folder that is short enough for the kernel, wherever it lies."""
    descriptor = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


class Line:
    """A connection to the keeper; the lab is in use as long as it is open. A context manager."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    @classmethod
    def open(cls) -> Self:
        """Connect to the keeper of the lab that is up.

        Raises:
            UserError: no lab is up.
            TransientError: its keeper does not answer.
        """
        get()
        try:
            with short_path(folder()) as path:
                secret = (folder() / SECRET).read_bytes()
                return cls(Client(path, "AF_UNIX", authkey=secret))
        except (OSError, EOFError, AuthenticationError) as error:
            raise TransientError(
                f"the kept lab does not answer: {error}",
                remedy="it may be ending; see `vringlab up`",
            ) from error

    def ask(self, method: str, *arguments: Any) -> Answer:
        """Have the keeper call a method of `keeper.KeptLab`.

        Raises:
            HostLost: the lab ended.
            Exception: what the method raised.
        """
        try:
            self._connection.send((method, arguments))
            good, value = self._connection.recv()
        except (OSError, EOFError) as error:
            raise HostLost(
                "the kept lab ended",
                remedy=f"see {folder() / LOG}; `vringlab up` boots another",
                host=HOST,
            ) from error
        if not good:
            raise value
        answer: Answer = value
        return answer

    def run(self, machine: MachineName, command: str, timeout: float) -> Completed:
        """Run a command on one of the machines.

        Raises:
            HostLost: the lab ended.
            TransientError: the connection was lost, or the deadline passed.
        """
        done: Completed = self.ask("run", machine, command, timeout).value
        return done

    def adopt(
        self,
        experiment: Experiment,
        arms: Sequence[str],
        switch: Switch = "swap",
        probes: Probes | None = None,
    ) -> Facts:
        """Have arms built where they are not, to be loaded over this line alone until it closes.

        Raises:
            UserError: another process loads arms, or an arm cannot be built.
            HostLost: the lab ended.
            InfrastructureError: a tool failed.
        """
        facts: Facts = self.ask("adopt", experiment, tuple(arms), switch, probes).value
        return facts

    def close(self) -> None:
        """Let the lab go."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KeptSession(AskedSession):
    """A session on the kept lab. Made by `session`.

    Args:
        line: The way to the keeper.
        facts: What the session says of itself.
    """

    def __init__(self, line: Line, facts: Facts) -> None:
        super().__init__(HOST, facts, Budget())
        self._line = line

    def _answer(self, method: str, arguments: Sequence[Any]) -> Answer:
        return self._line.ask(method, *arguments)

    def provenance(self) -> Mapping[str, object]:
        """What is known by now, and that the lab is a kept one."""
        return {**super().provenance(), "command": sys.argv, "kept_lab": True}


@contextmanager
def session(
    experiment: Experiment,
    arms: tuple[str, ...],
    *,
    switch: Switch = "swap",
    on_step: OnStep = lambda _: None,
    probes: Probes | None = None,
) -> Iterator[KeptSession]:
    """A session on the kept lab with everything built that the arms need; the lab stays.

    Args:
        experiment: The experiment.
        arms: Names of the arms that will be loaded.
        switch: How an arm is loaded.
        on_step: Told what is being done.
        probes: What is counted to see which path packets take; nothing when None.

    Raises:
        UserError: no lab is up, another process measures on it, or an arm cannot be built.
        InfrastructureError: a tool or a machine failed.
    """
    with Line.open() as line:
        on_step("the kept lab builds the arms that it lacks")
        yield KeptSession(line, line.adopt(experiment, arms, switch, probes))


# --- getting in ----------------------------------------------------------------------------


def run(machine: MachineName, command: Sequence[str]) -> Completed:
    """Run one command by the keeper's own connection: no second one needs to be opened.

    Args:
        machine: `host` or `guest`.
        command: Program and arguments, or one piece of shell text.

    Raises:
        UserError: no lab is up.
        HostLost: the lab ended.
        TransientError: the connection was lost, or it did not end within an hour.
    """
    with Line.open() as line:
        return line.run(machine, _text(command), _COMMAND_S)


def _text(command: Sequence[str]) -> str:
    # Shell text is handed over as it is: `vringlab shell guest -- 'dmesg | tail'`.
    return command[0] if len(command) == 1 else shlex.join(command)


def ssh_argv(
    machine: MachineName, command: Sequence[str] = (), terminal: bool = False
) -> list[str]:
    """What runs a command, or a shell, on a machine of the kept lab by OpenSSH's client.

    Args:
        machine: `host` or `guest`.
        command: Program and arguments, or one piece of shell text; a shell when empty.
        terminal: Whether the command gets a terminal. A shell always does.

    Raises:
        UserError: no lab is up.
        InfrastructureError: there is no `ssh` here.
    """
    kept = get()
    ssh = find_tool("ssh", "install the OpenSSH client (openssh-client)")
    return [
        ssh,
        *(["-t"] if terminal or not command else []),
        *kept.ssh[machine],
        *(["--", _text(command)] if command else []),
    ]


def shell(machine: MachineName, command: Sequence[str] = ()) -> int:
    """A shell on a machine, or one command; its exit status, 255 when the machine is not reached.

    The lab is in use meanwhile, and does not end for idleness.

    Raises:
        UserError: no lab is up.
        TransientError: its keeper does not answer.
        InfrastructureError: there is no `ssh` here.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    argv = ssh_argv(machine, command, terminal)
    with Line.open():
        return subprocess.run(argv, check=False).returncode
