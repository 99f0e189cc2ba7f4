"""The benchmark's device, plugged in and out, and modules of the host swapped between."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.fakes.fake_lab import STILL_RUNNING, Answer, FakeMachine, built_module

from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab import vhost_nic
from vringlab.lab.embedded import HostMachine
from vringlab.lab.guest import WORK, Guest
from vringlab.lab.pinning import Layout
from vringlab.lab.swap import restore_host, swap_host

QEMU, VSOCK, NET = 500, 510, 511
BUILD_ID = "ab" * 20
OK: Answer = ("", "", 0)


class FakeMonitor:
    """QEMU's monitor; each command is in the machine's log."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.refuse = ""

    def execute(self, command: str, arguments: Mapping[str, object] | None = None) -> object:
        self.log.append(f"qmp: {command} {dict(arguments or {})}")
        if command == self.refuse:
            raise InfrastructureError(f"QEMU's monitor: {command} is refused")
        return {}

    def execute_until(
        self, command: str, arguments: Mapping[str, object], event: str, data: Mapping[str, object]
    ) -> None:
        self.execute(command, arguments)
        self.log.append(f"qmp: waits for {event} {dict(data)}")


class Host:
    """A host with a guest that has the device or not."""

    def __init__(self, tmp_path: Path) -> None:
        self.machine = FakeMachine("embedded", [])
        self.workers = [VSOCK, NET]
        self.machine.answers |= {
            "comm": lambda _: (" ".join(map(str, self.workers)), "", 0),
            "taskset -p": OK,
            "swap-module": (f"ok {BUILD_ID}\n", "", 0),
            "dmesg": ("tainted", "", 0),
            "^mkdir": OK,
            "^test -e": ("", "", 1),
        }
        self.monitor = FakeMonitor(self.machine.log)
        self.guest = cast(
            Guest,
            SimpleNamespace(
                monitor=self.monitor,
                qemu_pid=QEMU,
                layout=Layout.plan(4, 2),
                threads={501: 2, 502: 3, VSOCK: 1},
                vhost_threads=(VSOCK,),
                net_worker=None,
            ),
        )
        self.host = cast(HostMachine, SimpleNamespace(machine=self.machine))
        path = tmp_path / "vhost_net.ko"
        path.write_bytes(b"module")
        self.built = built_module("vhost_net", path, BUILD_ID)

    def plug(self) -> None:
        vhost_nic.plug(self.host, self.guest)

    def order(self, *words: str) -> list[str]:
        """Which of the words came, in order."""
        return [word for line in self.machine.log for word in words if word in line]


@pytest.fixture
def made(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_the_new_worker_is_the_nets_and_is_pinned(made: Host) -> None:
    made.plug()
    assert made.guest.net_worker == NET
    assert made.guest.vhost_threads == (VSOCK, NET)
    assert made.guest.threads == {501: 2, 502: 3, VSOCK: 1, NET: 1}
    (pinned,) = made.machine.asked("taskset -p")
    assert pinned == f"taskset -p -c 1 {NET} >/dev/null"
    netdev, device = made.machine.log[:2]
    assert "'vhost': True" in netdev
    assert f"'ifname': '{vhost_nic.TAP}'" in netdev
    assert f"'mac': '{vhost_nic.MAC}'" in device
    assert f"'bus': '{vhost_nic.PORT}'" in device


@pytest.mark.parametrize("workers", [[VSOCK], [], [VSOCK, NET, 512]], ids=["none", "all", "two"])
def test_no_worker_of_its_own_is_an_error(made: Host, workers: list[int]) -> None:
    # QEMU says nothing when it falls back to copying by itself.
    made.workers = workers
    with pytest.raises(InfrastructureError, match="vhost workers came with") as caught:
        made.plug()
    assert "vhost_net is loaded" in caught.value.remedy
    assert made.guest.net_worker is None


def test_unplugged_it_leaves_no_thread_to_watch(made: Host) -> None:
    made.plug()
    vhost_nic.unplug(made.guest)
    assert made.guest.net_worker is None
    assert made.guest.vhost_threads == (VSOCK,)
    assert made.guest.threads == {501: 2, 502: 3, VSOCK: 1}
    # The guest lets go first: a back end may not go from under its device.
    assert made.order("device_del", "waits for DEVICE_DELETED", "netdev_del") == [
        *("device_del", "waits for DEVICE_DELETED", "netdev_del")
    ]
    before = len(made.machine.log)
    vhost_nic.unplug(made.guest)
    assert len(made.machine.log) == before, "there is nothing to unplug any more"


def test_plugged_again_the_worker_is_another_thread(made: Host) -> None:
    made.plug()
    vhost_nic.unplug(made.guest)
    made.workers = [VSOCK, 533]
    made.plug()
    assert made.guest.net_worker == 533
    assert made.guest.threads == {501: 2, 502: 3, VSOCK: 1, 533: 1}


# --- modules of the host -------------------------------------------------------------------


def test_the_module_is_replaced_while_nobody_uses_it(made: Host) -> None:
    made.plug()
    made.machine.log.clear()
    swap_host(made.host, made.guest, made.built)
    remote = f"{WORK}/modules/{BUILD_ID}.ko"
    assert made.machine.files == {remote: b"module"}
    assert made.order("device_del", "swap-module", "device_add") == [
        *("device_del", "swap-module", "device_add")
    ]
    (asked,) = made.machine.asked("swap-module")
    assert f"vhost_net {remote}" in asked
    assert made.guest.net_worker == NET


def test_without_a_guest_there_is_nothing_to_unplug(made: Host) -> None:
    swap_host(made.host, None, made.built)
    assert made.order("qmp") == []


def test_a_module_that_the_host_has_is_not_copied_again(made: Host) -> None:
    made.machine.answers["^test -e"] = OK
    swap_host(made.host, None, made.built)
    assert made.machine.files == {}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("failed rmmod: ERROR: Module vhost_net is in use", "in use"),
        ("failed insmod: ERROR: Invalid module format", "Invalid module format"),
        (f"ok {'cd' * 20}", "did not take"),
        ("", "could not be loaded"),
    ],
)
def test_another_module_than_asked_for_is_never_measured(
    made: Host, result: str, words: str
) -> None:
    made.plug()
    made.machine.answers["swap-module"] = (f"{result}\n", "", 0)
    with pytest.raises(InfrastructureError, match=words):
        swap_host(made.host, made.guest, made.built)
    assert made.guest.net_worker is None, "a workload refuses a guest without its device"


def test_a_monitor_that_refuses(made: Host) -> None:
    made.plug()
    made.monitor.refuse = "device_del"
    with pytest.raises(InfrastructureError, match="device_del is refused"):
        swap_host(made.host, made.guest, made.built)
    assert made.machine.asked("swap-module") == []


def test_a_host_that_hangs_in_the_swap(made: Host) -> None:
    made.machine.answers["swap-module"] = ("", "", STILL_RUNNING)
    with pytest.raises(TransientError):
        swap_host(made.host, None, made.built)


def test_the_hosts_own_module_is_loaded_again_and_checked(made: Host) -> None:
    restore_host(made.host, "vhost_net", BUILD_ID)
    (asked,) = made.machine.asked("swap-module")
    assert 'vhost_net "$(modinfo -n vhost_net)"' in asked
    with pytest.raises(InfrastructureError, match="did not take"):
        restore_host(made.host, "vhost_net", "0" * 40)


def test_a_module_that_was_not_loaded_before_is_unloaded(made: Host) -> None:
    made.machine.answers["rmmod"] = OK
    restore_host(made.host, "vhost_net", "")
    assert made.machine.asked("swap-module") == []
    made.machine.answers["rmmod"] = ("", "rmmod: ERROR: in use", 1)
    with pytest.raises(InfrastructureError):
        restore_host(made.host, "vhost_net", "")
