"""A keeper of a lab without machines: a real process with real locks, sockets and signals.

As a program it is a keeper (`campaign.keeper`). What its lab does is told by words in the file
`act` of the cache: `refuse`, `die` and `stall` while it boots, `lose` to be lost a moment later.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vringlab.campaign import keeper
from vringlab.campaign.experiment import Experiment, Probes
from vringlab.campaign.fake import FakeSession
from vringlab.campaign.seat import Facts
from vringlab.errors import TransientError, UserError
from vringlab.settings import settings
from vringlab.transport import local
from vringlab.transport.local import Completed
from vringlab.transport.ssh import Address

HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFBhc3N3b3JkIGlzIG5vdCB0YWtlbiBoZXJlIGF0IGFs"


class FakeLab(FakeSession):
    """Answers like `keeper.KeptLab`, without machines."""

    alive = True

    def adopt(
        self, experiment: Experiment, arms: Sequence[str], switch: str, probes: Probes | None
    ) -> Facts:
        """Pretend to build arms."""
        assert set(arms) <= set(experiment.arm_names)
        assert switch in ("swap", "reboot")
        self.sees_paths, self._probes = probes is not None, probes
        return Facts(self.host, self.host_kind, self.sees_paths)

    def run(self, machine: str, command: str, timeout: float) -> Completed:
        """Say what was asked, or do as told."""
        if command == "lost":
            raise TransientError("the connection was lost", remedy="look at it")
        if command.startswith("sleep"):
            time.sleep(float(command.split()[1]))
        return Completed(f"{machine}: {command} within {timeout:g} s\n", "", 3, 0.25)

    def ssh_hosts(self) -> dict[str, Address | str]:
        """Two addresses of ours."""
        key = settings().cache / "a key"
        return {
            "host": Address("embedded", "127.0.0.1", 2022, "root", key, HOST_KEY),
            "guest": Address("guest", "192.168.77.2", 22, "root", key, HOST_KEY),
        }


@contextmanager
def opening(
    experiment: Experiment, host: str, *, on_step: Callable[[str], None]
) -> Iterator[FakeLab]:
    """Stand in for `keeper.open_lab`, with a companion for QEMU."""
    act = settings().cache / "act"
    words = act.read_text().split() if act.exists() else []
    on_step(f"booting {host} for {experiment.name}")
    log = settings().cache / "sleep.out"
    with local.companion(["sleep", "300"], log=log) as process:
        (settings().cache / "pids").write_text(f"{os.getpid()} {process.pid}")
        if "refuse" in words:
            raise UserError("no such host", remedy="name another")
        if "die" in words:
            print("a fault in the keeper", file=sys.stderr, flush=True)
            os._exit(3)
        deadline = time.monotonic() + 60
        while "stall" in words and time.monotonic() < deadline:
            time.sleep(0.05)
        lab = FakeLab(seed=1)
        lab.alive = "lose" not in words
        try:
            yield lab
        finally:
            (settings().cache / "given-back").touch()


def command() -> list[str]:
    """How `kept.up` starts this keeper."""
    return [sys.executable, str(Path(__file__))]


def environment() -> Mapping[str, str]:
    """What it needs to find the tests."""
    root = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": f"{root}{os.pathsep}{root / 'lib'}"}


if __name__ == "__main__":
    keeper._LOOK_S = 0.05
    keeper.main(opening)
