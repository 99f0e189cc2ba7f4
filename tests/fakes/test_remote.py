"""A user's host: what its address says, how the image gets there, what is set and set back."""

from __future__ import annotations

import getpass
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.fakes.fake_lab import FakeMachine
from tests.fakes.processes import DEADLINE_S, script
from tests.fakes.ssh_server import Keys, RealServer, SshServer, find_sshd

from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.image.build import Image
from vringlab.lab import remote
from vringlab.settings import Settings
from vringlab.transport.local import Completed
from vringlab.transport.ssh import Machine

# --- its address ---------------------------------------------------------------------------


def test_options_of_an_address() -> None:
    assert remote.parse("ssh://a?tune").options == {remote.TUNE}
    with pytest.raises(UserError, match="unknown option 'tuned'") as caught:
        remote.parse("ssh://a?tuned")
    assert "swap-host-module, tune" in caught.value.remedy


def test_options_are_kept_in_the_address_so_that_resume_has_them() -> None:
    once = remote.with_options("ssh://a:1", tune=True)
    assert once == "ssh://a:1?tune"
    assert remote.with_options(once, tune=True, swap_host_module=True) == (
        "ssh://a:1?tune&swap-host-module"
    )
    assert remote.with_options("embedded") == "embedded"
    with pytest.raises(UserError, match="host of your own"):
        remote.with_options("embedded", tune=True)


@pytest.mark.parametrize(
    ("cpu", "kind"),
    [
        ({"model": "AMD EPYC 7302", "hypervisor": False}, "physical"),
        ({"model": "AMD EPYC 7302", "hypervisor": True}, "nested"),
        ({"model": "QEMU TCG CPU version 2.5+", "hypervisor": True}, "emulated"),
    ],
)
def test_kinds_of_hosts(cpu: dict[str, Any], kind: str) -> None:
    assert remote.host_kind(cpu) == kind


@pytest.mark.parametrize(
    ("routes", "taken"),
    [
        ("default via 10.0.2.2 dev eth0\n10.0.2.0/24 dev eth0\n", ""),
        ("192.168.77.0/24 dev vringlab0 scope link src 192.168.77.1\n", ""),
        ("192.168.177.0/24 dev br0\n192.168.7.0/24 dev br1\n", ""),
        ("192.168.78.0/24 dev br0 scope link\n", "192.168.78.0/24 dev br0 scope link\n"),
        ("10.0.0.0/8 via 192.168.77.254 dev eth1\n", "10.0.0.0/8 via 192.168.77.254 dev eth1\n"),
    ],
)
def test_networks_that_are_taken(tmp_path: Path, routes: str, taken: str) -> None:
    (tmp_path / "routes").write_text(routes)
    script(tmp_path / "ip", f"cat {tmp_path}/routes")
    done = subprocess.run(
        ["sh", "-c", remote.NETWORKS_SCRIPT],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == taken


# --- the image -----------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with SshServer(Keys.make(tmp_path)) as started:
        yield started


@pytest.fixture
def machine(server: SshServer) -> Iterator[Machine]:
    with Machine(server.address, timeout=DEADLINE_S) as connected:
        yield connected


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    folder = tmp_path / "image"
    folder.mkdir()
    made = Image(folder, "0" * 16, "trixie", "6.12.1", "6.12.1-1", {}, "ssh-ed25519 AAAA")
    made.root.write_bytes(os.urandom(3 * 2**20 + 17))
    own = Settings(host_cache=str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "settings", lambda: own)
    monkeypatch.setattr(remote, "_CHUNK", 2**20)
    remote._sha256.cache_clear()
    return made


def _uploads(server: SshServer) -> int:
    return sum("cat >> " in command for command in server.commands)


def test_the_image_is_copied_once(machine: Machine, server: SshServer, image: Image) -> None:
    said: list[str] = []
    path = Path(remote.stage_image(machine, "", image, on_step=said.append))
    assert path.read_bytes() == image.root.read_bytes()
    assert hashlib.sha256(image.root.read_bytes()).hexdigest()[:16] in str(path)
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, f"{path.name}.sha256"]
    assert "copying the image, 3 MB, 0 %" in said[0]
    assert _uploads(server) == 4
    assert remote.stage_image(machine, "", image) == str(path)
    assert _uploads(server) == 4


def test_a_copy_that_was_cut_off_goes_on_where_it_ended(
    machine: Machine, server: SshServer, image: Image
) -> None:
    path = Path(remote.image_path(image))
    path.parent.mkdir(parents=True)
    Path(f"{path}.part").write_bytes(image.root.read_bytes()[: 3 * 2**20])
    remote.stage_image(machine, "", image)
    assert path.read_bytes() == image.root.read_bytes()
    assert _uploads(server) == 1


def test_a_damaged_beginning_is_thrown_away(
    machine: Machine, server: SshServer, image: Image
) -> None:
    path = Path(remote.image_path(image))
    path.parent.mkdir(parents=True)
    Path(f"{path}.part").write_bytes(bytes(2**20))
    remote.stage_image(machine, "", image)
    assert path.read_bytes() == image.root.read_bytes()
    assert _uploads(server) == 3 + 4


def test_a_copy_cut_off_now_is_not_taken_for_whole(
    machine: Machine, server: SshServer, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Machine.run

    def cut_after_two(self: Machine, command: Any, **more: Any) -> Completed:
        if _uploads(server) == 2:
            server.cut()
        return run(self, command, **more)

    monkeypatch.setattr(Machine, "run", cut_after_two)
    with pytest.raises(TransientError, match="lost"):
        remote.stage_image(machine, "", image)
    monkeypatch.undo()
    path = Path(remote.image_path(image))
    assert not path.exists()


def test_a_disk_without_room_is_told_before_anything_is_sent(
    machine: Machine, server: SshServer, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SPARE_BYTES", 10**18)
    with pytest.raises(InfrastructureError, match="is full") as caught:
        remote.stage_image(machine, "", image)
    assert "VRINGLAB_HOST_CACHE" in caught.value.remedy
    assert _uploads(server) == 0


def test_a_disk_that_fills_up_meanwhile_is_told_and_cleared(
    machine: Machine, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Path(f"{remote.image_path(image)}.part")
    full = tmp_path / "bin"
    script(
        full / "cat",
        '[ $# = 0 ] || exec /bin/cat "$@"\n'
        'echo "cat: write error: No space left on device" >&2; exit 1',
    )
    monkeypatch.setenv("PATH", f"{full}:{os.environ['PATH']}")
    with pytest.raises(InfrastructureError, match="is full"):
        remote.stage_image(machine, "", image)
    assert not part.exists()


def test_a_disk_that_is_really_full_is_told_and_cleared(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = find_sshd()
    if program is None or os.geteuid() != 0:
        pytest.skip("a small file system takes a real sshd and root")
    small = tmp_path / "small"
    small.mkdir()
    (tmp_path / "sshd").mkdir()
    monkeypatch.setattr(remote, "settings", lambda: Settings(host_cache=str(small)))
    keys = Keys.make(tmp_path / "sshd")
    with (
        RealServer(keys, tmp_path / "sshd", program, small=small) as server,
        Machine(server.address, timeout=DEADLINE_S) as machine,
    ):
        with pytest.raises(InfrastructureError, match="is full: 2 MB free") as caught:
            remote.stage_image(machine, "", image)
        assert not isinstance(caught.value, TransientError)
        # Somebody else fills it while the image is on its way.
        monkeypatch.setattr(remote, "_SPARE_BYTES", -(2**30))
        with pytest.raises(InfrastructureError, match="is full"):
            remote.stage_image(machine, "", image)
        with pytest.raises(InfrastructureError, match="the command failed") as caught:
            machine.put(bytes(3 * 2**20), f"{small}/file")
        assert "No space left" in caught.value.stderr
        assert "has room" in caught.value.remedy
        assert machine.run(["find", str(small), "-type", "f"]).stdout == ""


# --- settings of the host ------------------------------------------------------------------


def test_governor_and_irqbalance_are_noted_before_they_are_set() -> None:
    governor = "/sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
    log: list[str] = []
    fake = FakeMachine(
        "kvm1",
        log,
        {
            "^grep": (
                f"{governor.format(0)}:powersave\n{governor.format(1)}:performance\n",
                "",
                0,
            ),
            "irqbalance": ("712\n", "", 0),
            "^echo performance": ("", "", 0),
            "^kill -STOP 712$": ("", "", 0),
        },
    )
    done = remote.tune(cast(Machine, fake), lambda undo: log.append(f"undo: {undo}"))
    assert done == ["governor of 1 processors set to performance", "irqbalance (712) held"]
    kept = [line for line in log if "undo" in line or "echo perf" in line or "STOP" in line]
    assert kept == [
        f"undo: echo powersave > {governor.format(0)}",
        f"kvm1: echo performance > {governor.format(0)}",
        "undo: ! grep -qsx irqbalance /proc/712/comm || kill -CONT 712",
        "kvm1: kill -STOP 712",
    ]


def test_what_is_tuned_already_is_left_alone() -> None:
    fake = FakeMachine("kvm1", [], {"^grep": ("", "", 0), "irqbalance": ("", "", 0)})
    assert remote.tune(cast(Machine, fake), pytest.fail) == []


@pytest.mark.parametrize(
    ("loaded", "own", "done"),
    [
        ("aa", "aa", ""),
        ("bb", "aa", "rmmod vhost_net\nmodprobe vhost_net\n"),
        ("", "aa", "modprobe vhost_net\n"),
        ("bb", "", "rmmod vhost_net\n"),
        ("", "", ""),
    ],
)
def test_a_module_is_given_back_only_when_another_one_is_loaded(
    tmp_path: Path, loaded: str, own: str, done: str
) -> None:
    for name in ("rmmod", "modprobe"):
        script(tmp_path / "bin" / name, f'echo {name} "$@" >> {tmp_path}/log')
    folder = tmp_path / "module" / "vhost_net"
    if loaded:
        (folder / "notes").mkdir(parents=True)
        (folder / "notes" / ".note.gnu.build-id").write_bytes(bytes(16) + bytes.fromhex(loaded))
    text = remote.undo_swap("vhost_net", own).replace("/sys/module", str(tmp_path / "module"))
    subprocess.run(
        ["sh", "-c", text],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        check=True,
    )
    log = tmp_path / "log"
    assert (log.read_text() if log.exists() else "") == done


def test_modules_are_replaced_only_by_leave_and_for_the_kernel_that_runs(image: Image) -> None:
    assert remote._swap_refusal("6.12.1", image) == ""
    assert "6.13" in remote._swap_refusal("6.13", image)
    for fine in ("embedded", "ssh://kvm1?swap-host-module"):
        remote.require_leave(fine)
    with pytest.raises(UserError, match="modules of the KVM host kvm1") as caught:
        remote.require_leave("ssh://kvm1?tune")
    assert "--swap-host-module" in caught.value.remedy


def test_another_architecture_is_refused() -> None:
    fake = FakeMachine("kvm1", [], {"uname": ("aarch64\n", "", 0)})
    with pytest.raises(UserError, match="no x86-64"):
        remote._check(cast(Machine, fake))


def test_an_address_as_a_run_names_it(server: SshServer) -> None:
    assert str(remote.parse(f"ssh://{getpass.getuser()}@127.0.0.1:{server.port}?tune")) == (
        f"{getpass.getuser()}@127.0.0.1:{server.port}"
    )
