"""One campaign per host: taken on the host itself, and everything undone there when it ends.

A shell on the host holds the lock and the other end of our line. It undoes what the session
changed when we say so, and also when the line is cut or falls silent: then nobody here could.
What a killed session left is undone by the next one.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import shlex
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from vringlab.errors import InfrastructureError, TransientError, UserError, VringlabError
from vringlab.transport.ssh import Machine, Process

#: Folder on the host; on a file system that does not outlive a reboot, as the changes do not.
STATE = "/run/vringlab-host"
#: The guest's root disk as seen from inside the image.
ROOT_DISK = "/vringlab.squashfs"
#: So long the host waits for a word of ours.
PATIENCE_S = 120.0
_BEATS = 4
_TAKE_S = 60.0
_ANSWER_S = 5.0
_OPEN_S = 120.0
_NOTE_S = 60.0
_END_S = 180.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _text(name: str) -> str:
    return (Path(__file__).parent / "files" / name).read_text()


@cache
def _ours() -> str:
    """Names this process: a lease that we lost ourselves is waited for."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Owner:
    """Who has a host.

    Attributes:
        who: `user@machine`.
        pid: Process there.
        run: The run; empty when it is none.
        since: When it was taken, by the host's clock, ISO 8601 in UTC.
        process: Names the process for ever.
    """

    who: str
    pid: int
    run: str
    since: str
    process: str

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Read the host's record; None when it is none."""
        try:
            values = json.loads(text)
            return cls(**{name: values[name] for name in cls.__dataclass_fields__})
        except (ValueError, TypeError, KeyError):
            return None

    def __str__(self) -> str:
        """For a reader."""
        run = f" for run {self.run}" if self.run else ""
        return f"{self.who} (process {self.pid}){run} since {self.since}"


def root_prefix(machine: Machine) -> str:
    """What makes a command run as root on a host: nothing, or sudo.

    Raises:
        UserError: the user has no such right there.
        TransientError: the connection was lost.
    """
    done = machine.run("id -u; sudo -n true 2>&1", check=False)
    uid, _, words = done.stdout.partition("\n")
    if uid.strip() == "0":
        return ""
    if done.returncode == 0:
        return "sudo -n "
    raise UserError(
        f"{machine.name} gives no rights to make guests: {words.strip() or 'no sudo'}",
        remedy="log in as root (ssh://root@HOST), or allow this user sudo without a password",
        host=machine.name,
    )


class Lease:
    """A host, taken; a context manager.

    Args:
        machine: The connection to the host.
        run: The run that it is taken for, for others to read.
        state: Folder of the host's record.
        patience_s: Seconds that the host waits for a word of ours.
        on_step: Told what was found.

    Raises (when entered):
        TransientError: somebody else has the host; the message says who.
        UserError: no rights there.
        InfrastructureError: the host lacks a tool.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        run: str = "",
        state: str = STATE,
        patience_s: float = PATIENCE_S,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.machine = machine
        self._run = run
        self._state = state
        self._patience_s = patience_s
        self._on_step = on_step
        self._id = uuid.uuid4().hex
        self._process: Process | None = None
        self._pid = 0
        self._chrooted = False
        self._notes = 0
        self._stop = threading.Event()
        self._beats: threading.Thread | None = None
        self._sending = threading.Lock()

    def __enter__(self) -> Self:
        """Take the host."""
        self.root = root_prefix(self.machine)
        deadline = time.monotonic() + self._patience_s + _END_S
        while (owner := self._try()) is not None:
            ours = owner.process == _ours() if isinstance(owner, Owner) else False
            if not ours or time.monotonic() > deadline:
                raise TransientError(
                    f"{self.machine.name} is busy: {owner or 'somebody'} has it",
                    remedy="one campaign runs on a host at a time; try again when that one has "
                    f"ended. What a killed one held comes free within {self._patience_s:g} s",
                    host=self.machine.name,
                )
            self._on_step(f"{self.machine.name} is still undoing our own lost session")
            time.sleep(1.0)
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()
        return self

    def _try(self) -> Owner | str | None:
        """Take the host; whoever else has it, or None when it is ours now."""
        owner = json.dumps(
            {
                "who": f"{getpass.getuser()}@{platform.node()}",
                "pid": os.getpid(),
                "run": self._run,
                "process": _ours(),
            }
        )
        arguments = [
            *(self._state, owner, self._id, f"{self._patience_s:g}"),
            *(_text("host-mounts"), _text("host-watch")),
        ]
        command = ["sh", "-c", _text("host-session"), "host-session", *arguments]
        process = self.machine.start(f"{self.root}{shlex.join(command)}", keep_input=True)
        try:
            process.wait_for("leased\n", _TAKE_S)
        except InfrastructureError as error:
            process.close()
            answer = process.stdout.strip()
            if isinstance(error, TransientError) or not answer.startswith("busy"):
                error.remedy = error.remedy or "see its words; `vringlab doctor HOST` tells more"
                # What is shown of a command should be readable.
                error.command = "host-session"
                raise
            words = answer.removeprefix("busy").strip()
            return Owner.parse(words) or words or "somebody"
        self._process = process
        return None

    def _beat(self) -> None:
        while not self._stop.wait(self._patience_s / _BEATS):
            try:
                self._say("")
            except TransientError:
                return

    def _say(self, line: str) -> None:
        assert self._process is not None, "said after it was taken"
        with self._sending:
            self._process.send(f"{line}\n".encode())

    def open(self, image: str | None = None) -> None:
        """Load modules, mount an image of ours, and undo what a killed session left.

        Args:
            image: Its file on the host; None to go on in the host's own root, without rights.

        Raises:
            InfrastructureError: it cannot be mounted.
            TransientError: the connection was lost.
        """
        assert self._process is not None, "opened after it was taken"
        try:
            self._say(f"open {image or '-'}")
            self._process.wait_for("ready ", _OPEN_S)
        except InfrastructureError as error:
            error.command = "host-session"
            error.remedy = (
                "its kernel needs squashfs, overlay and loop devices, and util-linux its unshare "
                "and nsenter; `vringlab doctor HOST` says what is missing"
            )
            raise
        self._chrooted = image is not None
        for line in self._process.stdout.splitlines():
            word, _, rest = line.partition(" ")
            if word == "ready":
                self._pid = int(rest)
            elif word == "reaped":
                self._on_step(
                    f"{self.machine.name}: undid what a dead session left ({rest} processes)"
                )
            elif word == "left":
                self._on_step(f"{self.machine.name}: could not undo: {rest}")

    @property
    def inside(self) -> Machine:
        """The host, with every command run in the image, as root, and known to be ours."""
        assert self._pid, "opened first"
        enter = f"nsenter -t {self._pid} -m -r -w -- " if self._chrooted else ""
        path = f"PATH={_PATH} HOME=/root " if self._chrooted else ""
        root = self.root if self._chrooted else ""
        return self.machine.inside(f"{root}{enter}env {path}VRINGLAB_LEASE={self._id} sh -c")

    def record(self, command: str) -> None:
        """Note how a change is undone; to be called before it is made.

        Args:
            command: One line of shell text; it must do nothing when there is nothing to undo.

        Raises:
            InfrastructureError: there is no room for it; do not make the change.
            TransientError: the connection was lost; do not make the change.
        """
        assert self._process is not None, "recorded after it was taken"
        assert "\n" not in command, "one line"
        self._say(f"undo {command}")
        self._notes += 1
        self._process.wait_for(f"noted {self._notes}\n", _NOTE_S)
        if f"full {self._notes}\n" in self._process.stdout:
            raise InfrastructureError(
                f"{self.machine.name} cannot note how a change of it is undone, so it was not made",
                remedy=f"free some space in {self._state} there",
                host=self.machine.name,
                stderr=self._process.stderr,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Have all undone and give the host back; without a connection it does that by itself.

        Raises:
            InfrastructureError: something could not be undone. An error that is on its way says
                so instead.
        """
        self._stop.set()
        if self._beats is not None:
            # One that hangs in a dead connection is not waited for.
            self._beats.join(_ANSWER_S)
        process = self._process
        if process is None:
            return
        try:
            if self.machine.alive:
                self._end(process)
        except InfrastructureError as error:
            if value is None:
                raise
            words = f"besides, {error.message}; {error.remedy}"
            if isinstance(value, VringlabError):
                value.remedy = f"{value.remedy}; {words}" if value.remedy else words
            else:
                value.add_note(words)
        finally:
            process.close()

    def _end(self, process: Process) -> None:
        with suppress(TransientError):
            self._say("end")
        try:
            process.wait(_END_S)
        except TransientError:
            if not self.machine.alive:
                return
            raise
        begun = process.stdout.rfind("ready ")
        lines = process.stdout[max(0, begun) :].splitlines()
        left = [line.removeprefix("left ") for line in lines if line.startswith("left ")]
        if left:
            raise InfrastructureError(
                f"{self.machine.name} could not be given back as it was: {'; '.join(left)}",
                remedy="run that there as root",
                host=self.machine.name,
            )
