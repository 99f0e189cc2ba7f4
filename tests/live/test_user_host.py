"""A user's own KVM host, played by an embedded one: reached by name, used, and left as it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vringlab.analysis.frames import load_run
from vringlab.image.build import Image, ensure_image
from vringlab.lab import accel, remote
from vringlab.lab.embedded import embedded_host
from vringlab.lab.lease import STATE
from vringlab.settings import settings
from vringlab.transport.ssh import Address, Machine

pytestmark = [pytest.mark.timeout(500), pytest.mark.long]

VRINGLAB = [sys.executable, "-m", "vringlab"]
#: So much of the image is left to be copied; the rest comes from the host's own disk.
_LEFT_BYTES = 12 * 2**20


@dataclass
class UserHost:
    """The host as its owner has it, and a home from which it is reached as `ssh://mine`."""

    machine: Machine
    image: Image
    home: Path
    before: dict[str, list[str]]

    def state(self) -> dict[str, list[str]]:
        """What a run might leave."""
        questions = {
            "modules": "cut -d' ' -f1 /proc/modules | sort",
            "mounts": "cut -d' ' -f2 /proc/mounts | sort",
            "links": "ls /sys/class/net",
            "loops": "cat /sys/block/loop*/loop/backing_file 2>/dev/null; true",
            "processes": "grep -lzs ^VRINGLAB_LEASE= /proc/[0-9]*/environ; true",
            "guests": "pgrep -l qemu; true",
            "record": f"ls {STATE} 2>/dev/null | grep -v ^lock; true",
            "settings": "cat /proc/sys/net/ipv4/ip_forward",
        }
        return {name: self.machine.run(text).stdout.split() for name, text in questions.items()}

    def environment(self, runs: Path) -> dict[str, str]:
        more = {
            "HOME": str(self.home),
            "VRINGLAB_CACHE": str(settings().cache),
            "VRINGLAB_RUNS": str(runs),
            "COLUMNS": "120",
        }
        kept = {name: text for name, text in os.environ.items() if name != "SSH_AUTH_SOCK"}
        return {**kept, **more}

    def run(self, runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*VRINGLAB, *arguments],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            env=self.environment(runs),
        )


class Owner:
    """Boots the host, and again when it has died: an emulated one does now and then."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._host: UserHost | None = None

    def host(self) -> UserHost:
        if self._host is None or not self._host.machine.outlives(0.0):
            self._stack.close()
            self._host = self._boot()
        return self._host

    def _boot(self) -> UserHost:
        image = ensure_image()
        host = self._stack.enter_context(embedded_host(image, accel.choose(image)))
        address = host.machine.address
        assert isinstance(address, Address)
        ssh = self._folder / ".ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        (ssh / "config").write_text(
            f"Host mine\n  HostName 127.0.0.1\n  Port {address.port}\n  User root\n"
            f"  IdentityFile {address.key}\n  IdentitiesOnly yes\n"
        )
        (ssh / "known_hosts").write_text(f"[127.0.0.1]:{address.port} {address.host_key}\n")
        # Somebody else's machine: what is needed is not loaded, and most of the image came with
        # an earlier visit that was cut off.
        host.machine.run("rmmod vhost_vsock vhost_net tun")
        part = f"{remote.image_path(image)}.part"
        kept = image.root.stat().st_size - _LEFT_BYTES
        host.machine.run(
            f"mkdir -p {os.path.dirname(part)} && head -c {kept} /dev/vda > {part}",  # noqa: PTH120 - of another machine
            timeout=120,
        )
        made = UserHost(host.machine, image, self._folder, {})
        made.before = made.state()
        return made


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    with contextlib.ExitStack() as stack:
        yield Owner(tmp_path_factory.mktemp("home"), stack)


@pytest.fixture
def mine(owner: Owner) -> UserHost:
    return owner.host()


def test_doctor_says_what_the_host_is_good_for(mine: UserHost, tmp_path: Path) -> None:
    done = mine.run(tmp_path, "doctor", "ssh://mine", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["name"]: row for row in found["checks"]}
    assert found["usable"]
    assert found["kind"] in ("emulated", "nested")
    assert "a Linux guest booted" in rows["KVM"]["found"]
    assert rows["vhost_net"]["found"] == "loaded for a run"
    assert rows["lease"]["found"] == "free"
    assert {row["state"] for row in found["checks"] if row["weight"] == "must"} == {"ok"}
    assert mine.state() == mine.before


def test_a_killed_run_leaves_nothing_and_is_resumed_there(mine: UserHost, tmp_path: Path) -> None:
    with subprocess.Popen(
        [
            *VRINGLAB,
            *("run", "vsock-direct-enqueue", "--profile", "smoke", "--host", "ssh://mine"),
            *("-p", "payload=64", "--arms", "queued"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=mine.environment(tmp_path),
    ) as process:
        assert _until(lambda: mine.state()["guests"] != [], process)
        # The run has the host: nobody else gets it, and is told who has.
        other = mine.run(tmp_path, "doctor", "ssh://mine", "--no-boot")
        process.send_signal(signal.SIGKILL)
    assert other.returncode == 3
    assert f"(process {process.pid})" in " ".join(other.stdout.split())
    assert _until(lambda: mine.state() == mine.before), mine.state()

    done = mine.run(tmp_path, "resume", "last")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    run = load_run(folder)
    assert run.complete
    assert run.provenance["host"]["kind"] in ("emulated", "nested")
    assert run.provenance["host"]["qemu_argv"] == []
    assert set(run.samples["arm"]) == {"queued", "queued.aa"}
    ours = run.samples[run.samples["workload"] == "vsock-pingpong"]
    assert ours["valid"].all(), list(ours["reason"])
    assert mine.state() == mine.before


def _until(condition: object, process: subprocess.Popen[str] | None = None) -> bool:
    deadline = time.monotonic() + 200
    assert callable(condition)
    while time.monotonic() < deadline:
        if condition():
            return True
        if process is not None and process.poll() is not None:
            assert process.stderr is not None
            raise AssertionError(process.stderr.read())
        time.sleep(0.3)
    return False


def test_host_side_arms_need_leave(mine: UserHost, tmp_path: Path) -> None:
    done = mine.run(
        tmp_path, "run", "vhost-net-rx-poll", "--profile", "smoke", "--host", "ssh://mine"
    )
    assert done.returncode == 2, done.stderr
    assert "--swap-host-module" in done.stderr
    assert mine.state() == mine.before
    with contextlib.suppress(FileNotFoundError):
        assert not list(tmp_path.glob("*/cells/*/sample.json"))
