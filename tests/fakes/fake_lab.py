"""A lab whose machines answer with recorded output instead of running anything."""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from vringlab.errors import InfrastructureError, TransientError
from vringlab.kernels.module import BuiltModule
from vringlab.lab.guest import GuestSpec, VhostUserNic, nic_mac
from vringlab.lab.lab import Lab
from vringlab.lab.pinning import Layout
from vringlab.transport.local import Completed

#: Standard output, standard error and exit status of a command.
Answer = tuple[str, str, int]


@dataclass
class FakeProcess:
    """A command that has already printed all that it will."""

    machine: FakeMachine
    command: str
    answer: Answer
    closed: bool = False

    @property
    def stdout(self) -> str:
        return self.answer[0]

    @property
    def running(self) -> bool:
        return self.answer[2] == STILL_RUNNING and not self.closed

    def wait_for(self, text: str, timeout: float) -> None:
        stdout, stderr, status = self.answer
        self.machine.log.append(f"wait_for {text}")
        if text in stdout + stderr:
            return
        kind = TransientError if status == STILL_RUNNING else InfrastructureError
        message = f"no {text!r} within {timeout:g} s"
        raise kind(message, host=self.machine.name, stdout=stdout, stderr=stderr)

    def wait(self, timeout: float) -> Completed:
        self.machine.log.append(f"wait {self.command}")
        if self.answer[2] == STILL_RUNNING:
            raise TransientError(f"the command did not end within {timeout:g} s")
        return Completed(*self.answer, 0.0)

    def close(self) -> None:
        self.closed = True


#: Exit status of a command that never ends.
STILL_RUNNING = -1000


@dataclass
class FakeMachine:
    """A machine; `answers` maps patterns of commands to what they print, the first that fits.

    An answer may be a function of the command. All that was asked is in `log`, which both
    machines of a lab share, so that its order tells which came first.
    """

    name: str
    log: list[str]
    answers: dict[str, Answer | Callable[[str], Answer]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    processes: list[FakeProcess] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        self.closed.set()

    def _answer(self, command: Sequence[str] | str) -> tuple[str, Answer]:
        text = command if isinstance(command, str) else shlex.join(command)
        self.commands.append(text)
        self.log.append(f"{self.name}: {text}")
        for pattern, answer in self.answers.items():
            if re.search(pattern, text, re.DOTALL):
                return text, answer if isinstance(answer, tuple) else answer(text)
        raise AssertionError(f"{self.name} was asked something unexpected: {text}")

    def start(self, command: Sequence[str] | str, *, input: bytes = b"") -> FakeProcess:
        assert input == b""
        text, answer = self._answer(command)
        self.processes.append(FakeProcess(self, text, answer))
        return self.processes[-1]

    def run(
        self,
        command: Sequence[str] | str,
        *,
        timeout: float = 60.0,
        input: bytes = b"",
        check: bool = True,
        remedy: str = "",
    ) -> Completed:
        text, (stdout, stderr, status) = self._answer(command)
        assert input == b""
        assert timeout > 0
        if status == STILL_RUNNING:
            raise TransientError(
                f"the command did not end within {timeout:g} s", remedy=remedy, command=text
            )
        if check and status != 0:
            raise InfrastructureError(
                "the command failed",
                remedy=remedy,
                command=text,
                host=self.name,
                stdout=stdout,
                stderr=stderr,
                returncode=status,
            )
        return Completed(stdout, stderr, status, 0.0)

    def put(self, content: bytes | Path, path: str, *, mode: int = 0o644) -> None:
        self.log.append(f"{self.name}: put {path} {mode:o}")
        self.files[path] = content.read_bytes() if isinstance(content, Path) else content

    @contextlib.contextmanager
    def tunnel(self, host: str, port: int, *, timeout: float) -> Iterator[str]:
        assert timeout > 0
        self.log.append(f"{self.name}: tunnel {host}:{port}")
        yield f"{host}:{port}"

    def asked(self, pattern: str) -> list[str]:
        """The commands that fit a pattern."""
        return [text for text in self.commands if re.search(pattern, text, re.DOTALL)]


@dataclass
class FakeLab:
    """Host and guest of a lab; `lab` is what a workload sees."""

    host: FakeMachine
    guest: FakeMachine
    lab: Lab


def fake_lab(
    *,
    nics: Sequence[VhostUserNic] = (),
    threads: Mapping[int, int] | None = None,
    seen: str = "",
    cid: int = 7,
) -> FakeLab:
    """A lab with a guest of two vCPUs on a host of four processors.

    Args:
        nics: vhost-user devices of the guest.
        threads: Pinned threads of the host.
        seen: Where they are now, as the host prints it; where they shall be when empty.
        cid: The guest's context id.
    """
    log: list[str] = []
    wanted = dict(threads or {100: 2, 101: 3, 102: 1})
    host, guest = FakeMachine("embedded", log), FakeMachine("guest", log)
    lines = seen or "".join(f"{tid} {cpu}\n" for tid, cpu in wanted.items())
    host.answers["Cpus_allowed_list"] = (lines, "", 0)
    nics = tuple(nics)
    running = SimpleNamespace(
        machine=guest,
        spec=GuestSpec(vcpus=2, nics=nics),
        cid=cid,
        layout=Layout.plan(4, 2),
        threads=wanted,
        nics={nic: nic_mac(index) for index, nic in enumerate(nics)},
        testpmd_ports={nic: index for index, nic in enumerate(nics)},
        management=("52:54:00:76:6c:01", "192.168.77.2/24", "192.168.77.1"),
        loaded={},
    )
    lab = Lab(host=cast("object", SimpleNamespace(machine=host)), guest=cast("object", running))  # type: ignore[arg-type]
    return FakeLab(host, guest, lab)


def built_module(module: str, path: Path, build_id: str) -> BuiltModule:
    """A module as its build leaves it, of which only what a swap looks at is true."""
    return BuiltModule(
        path=path,
        module=module,
        experiment="fake",
        arm="arm",
        side="guest",
        release="6.12.118+fake",
        build_id=build_id,
        srcversion="",
        vermagic="6.12.118+fake SMP",
        sha256="0" * 64,
        text_sha256="1" * 64,
        log_path=path,
        patched_files=(),
        warnings=(),
        compiler="fake",
        built_s=0.0,
        cached=True,
    )
