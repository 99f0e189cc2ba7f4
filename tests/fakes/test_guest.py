"""Making a guest, and swapping its modules, on machines that answer what they are told to."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from tests.fakes.fake_lab import STILL_RUNNING, Answer, FakeMachine, built_module

from vringlab.errors import InfrastructureError, TransientError, VringlabError
from vringlab.image.build import Image, ensure_image
from vringlab.kernels.module import BuiltModule
from vringlab.lab import guest, testpmd
from vringlab.lab.embedded import HostMachine
from vringlab.lab.guest import WORK, Guest, GuestSpec, VhostUserNic
from vringlab.lab.pinning import Layout
from vringlab.lab.swap import loaded_build_id, running_kernel, swap
from vringlab.transport.ssh import Machine

OK: Answer = ("", "", 0)
CID_TAKEN = (
    "qemu-system-x86_64: -device vhost-vsock-pci,guest-cid=3: vhost-vsock: unable to set guest "
    "cid: Address already in use"
)
PORT_TAKEN = (
    "qemu-system-x86_64: -qmp tcp:127.0.0.1:4444,server=on,wait=off: Failed to find an available "
    "port: Address already in use"
)


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine("embedded", [])


@pytest.fixture
def host(machine: FakeMachine, tmp_path: Path) -> HostMachine:
    image = Image(tmp_path, "0" * 16, "trixie", "6.12.1", "6.12.1-1", {}, "ssh-ed25519 AAAA")
    image.initrd.write_bytes(b"initrd")
    changes: list[str] = []
    return cast(
        HostMachine,
        SimpleNamespace(
            machine=machine,
            image=image,
            kind="emulated",
            root_disk="/dev/vda",
            on_change=changes.append,
            changes=changes,
        ),
    )


# --- preparing the host --------------------------------------------------------------------


def test_a_host_is_prepared(host: HostMachine, machine: FakeMachine) -> None:
    machine.answers["."] = OK
    guest.prepare_host(host)
    (made,) = machine.asked("for device")
    assert all(f"ip tuntap add {tap}" in made for tap in ("vringlab0", "vringlab-b0"))
    # A host of the user's learns how to take the devices away before they are made.
    assert [undo.split()[-1] for undo in host.changes] == ["vringlab0", "vringlab-b0"]  # type: ignore[attr-defined]  # the fake's


@pytest.mark.parametrize("missing", ["kvm", "vhost-vsock", "vhost-net", "net/tun"])
def test_a_host_without_a_device(host: HostMachine, machine: FakeMachine, missing: str) -> None:
    def check(command: str) -> Answer:
        assert missing in command
        return "", f"/dev/{missing} is missing\n", 1

    machine.answers["for device"] = check
    with pytest.raises(InfrastructureError, match=f"/dev/{missing} is missing") as caught:
        guest.prepare_host(host)
    assert "vhost_vsock" in caught.value.remedy
    assert machine.files == {}


# --- QEMU ----------------------------------------------------------------------------------


def launching(*answers: Answer) -> Callable[[str], Answer]:
    left = list(answers)
    return lambda _command: left.pop(0)


def launch(host: HostMachine) -> tuple[int, tuple[str, ...], int, int]:
    return guest._launch(host, GuestSpec())


def test_the_first_cid_and_port_are_taken_when_free(
    host: HostMachine, machine: FakeMachine
) -> None:
    machine.answers["qemu"] = ("4711\n", "", 0)
    pid, argv, cid, port = launch(host)
    assert (pid, cid, port) == (4711, 3, 4444)
    assert "vhost-vsock-pci,guest-cid=3" in argv


@pytest.mark.parametrize(
    ("faults", "cid", "port"),
    [
        ([CID_TAKEN], 4, 4444),
        ([CID_TAKEN] * 5, 8, 4444),
        ([PORT_TAKEN], 3, 4445),
        ([PORT_TAKEN, CID_TAKEN, PORT_TAKEN], 4, 4446),
    ],
)
def test_what_others_hold_is_passed_over(
    host: HostMachine, machine: FakeMachine, faults: list[str], cid: int, port: int
) -> None:
    machine.answers["qemu"] = launching(*(("", fault, 1) for fault in faults), ("9\n", "", 0))
    assert launch(host)[2:] == (cid, port)
    assert f"guest-cid={cid}" in machine.commands[-1]
    assert f"127.0.0.1:{port}" in machine.commands[-1]
    assert len(machine.commands) == len(faults) + 1


@pytest.mark.parametrize("fault", [CID_TAKEN, PORT_TAKEN])
def test_a_host_where_all_is_taken(host: HostMachine, machine: FakeMachine, fault: str) -> None:
    machine.answers["qemu"] = ("", fault, 1)
    with pytest.raises(InfrastructureError, match="no free vsock CID or monitor port"):
        launch(host)
    assert 10 < len(machine.commands) < 1000


@pytest.mark.parametrize(
    "words",
    [
        "Could not access KVM kernel module: No such file or directory",
        "cannot set up guest memory 'mem': Cannot allocate memory",
        "could not configure /dev/net/tun (vringlab0): Device or resource busy",
        "",
    ],
)
def test_any_other_refusal_has_qemus_words(
    host: HostMachine, machine: FakeMachine, words: str
) -> None:
    machine.answers["qemu"] = ("", words, 1)
    with pytest.raises(InfrastructureError, match="QEMU did not start") as caught:
        launch(host)
    assert words in str(caught.value)
    assert len(machine.commands) == 1


@pytest.mark.timeout(900)  # The image may have to be built.
def test_the_images_qemu_says_it_as_expected(host: HostMachine, machine: FakeMachine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = int(holder.getsockname()[1])
        done = subprocess.run(
            [
                *(ensure_image().qemu, "-M", "none", "-display", "none", "-nodefaults"),
                *("-qmp", f"tcp:127.0.0.1:{port},server=on,wait=off"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode != 0
    machine.answers["qemu"] = launching(("", done.stderr, 1), ("9\n", "", 0))
    assert launch(host)[2:] == (3, 4445)


# --- up or not -----------------------------------------------------------------------------

CONSOLE = "".join(f"[{n}.0] line {n}\n" for n in range(30)) + "Kernel panic - not syncing: init\n"


def test_a_guest_that_never_comes_up_shows_its_consoles_last_lines(
    host: HostMachine, machine: FakeMachine
) -> None:
    machine.answers |= {"guest is set up": ("", "", STILL_RUNNING), "tail": (CONSOLE, "", 0)}
    with pytest.raises(TransientError, match="never came up") as caught:
        guest._await_guest(host, 1, 0.0)
    assert "Kernel panic" in str(caught.value)
    assert "VRINGLAB_BOOT_TIMEOUT" in caught.value.remedy
    assert caught.value.host == "guest"


def test_a_guest_that_ends_while_it_boots(host: HostMachine, machine: FakeMachine) -> None:
    machine.answers |= {"guest is set up": ("", "", 9), "tail": (CONSOLE, "", 0)}
    with pytest.raises(TransientError, match="QEMU ended while it booted") as caught:
        guest._await_guest(host, 1, 0.0)
    assert "Kernel panic" in str(caught.value)


def test_a_guest_that_comes_up(host: HostMachine, machine: FakeMachine) -> None:
    machine.answers["guest is set up"] = OK
    guest._await_guest(host, 1, 0.0)
    assert len(machine.commands) == 1


# --- threads -------------------------------------------------------------------------------

QEMU = 500


class Proc:
    """A /proc of our making, in which the shell text of a command is really run."""

    def __init__(self, folder: Path, machine: FakeMachine) -> None:
        self._folder = folder
        machine.answers["comm"] = self._run
        self.thread(QEMU, "qemu-system-x86", QEMU)
        self.thread(501, "CPU 0/KVM", QEMU)
        self.thread(600, "kworker/0:1")
        self.thread(700, "vhost-999")  # another guest's

    def thread(self, tid: int, name: str, process: int | None = None) -> None:
        """A task of a process, or a process (or kernel thread) of its own."""
        place = self._folder / (f"{process}/task/{tid}" if process else str(tid))
        place.mkdir(parents=True, exist_ok=True)
        (place / "comm").write_text(f"{name}\n")
        if process is not None:
            (self._folder / str(process) / "comm").write_text("qemu-system-x86\n")

    def _run(self, command: str) -> Answer:
        text = command.replace("/proc/", f"{self._folder}/")
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True)
        return done.stdout, done.stderr, done.returncode


@pytest.fixture
def proc(tmp_path: Path, machine: FakeMachine) -> Proc:
    return Proc(tmp_path / "proc", machine)


@pytest.mark.parametrize(
    ("tasks", "kernel_threads"),
    [((510, 511), ()), ((), (520,)), ((510,), (520, 521))],
    ids=["tasks of QEMU since 6.4", "kernel threads before", "both"],
)
def test_vhost_workers_are_found_wherever_the_kernel_keeps_them(
    host: HostMachine, proc: Proc, tasks: tuple[int, ...], kernel_threads: tuple[int, ...]
) -> None:
    # spdk#3482.
    for tid in tasks:
        proc.thread(tid, f"vhost-{QEMU}", QEMU)
    for tid in kernel_threads:
        proc.thread(tid, f"vhost-{QEMU}")
    threads, workers = guest._find_threads(host, QEMU, Layout.plan(4, 2), [501, 502])
    assert workers == (*tasks, *kernel_threads)
    assert threads == {501: 2, 502: 3, **dict.fromkeys(workers, 1)}


@pytest.mark.usefixtures("proc")
def test_no_vhost_worker_is_an_error(host: HostMachine) -> None:
    with pytest.raises(InfrastructureError, match="no vhost worker") as caught:
        guest._find_threads(host, QEMU, Layout.plan(4, 2), [501, 502])
    assert "vhost_vsock" in caught.value.remedy


# --- testpmd -------------------------------------------------------------------------------

SPLIT = VhostUserNic(packed=False, ring_size=256)
BOOT = "0b1c5a3e-9d2f-4c0a-8f00-6a1b2c3d4e5f"
EAL = "EAL: Cannot allocate memory\n"


def with_testpmd(machine: FakeMachine) -> Any:
    sockets = [f"{WORK}/vhost0.sock"]
    return testpmd.start(cast(Machine, machine), WORK, sockets, Layout.plan(4, 2))


def test_testpmd_runs_until_it_is_ended(machine: FakeMachine) -> None:
    machine.answers["."] = OK
    running = with_testpmd(machine)
    (start,) = machine.asked("dpdk-testpmd")
    assert f"{WORK}/vhost0.sock" in start
    assert machine.asked("kill") == []
    assert not running.closed
    testpmd.end(cast(Machine, machine), WORK)
    assert machine.asked("kill -KILL")


@pytest.mark.parametrize("status", [9, STILL_RUNNING], ids=["ended", "never ready"])
def test_a_testpmd_that_does_not_come_up(machine: FakeMachine, status: int) -> None:
    machine.answers |= {"until": ("", "", status), "tail": (EAL, "", 0), ".": OK}
    with pytest.raises(InfrastructureError, match="testpmd did not come up") as caught:
        with_testpmd(machine)
    assert "EAL: Cannot allocate" in str(caught.value)
    assert machine.asked("kill -KILL")
    assert machine.processes[0].closed


# --- all of a boot -------------------------------------------------------------------------


class FakeMonitor:
    told: ClassVar[list[str]] = []

    def __init__(self, connection: object, *, name: str) -> None:
        assert connection == "127.0.0.1:4444"
        assert name == "guest"

    def execute(self, command: str) -> None:
        self.told.append(command)

    def __enter__(self) -> FakeMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def vcpu_threads(self) -> list[int]:
        return [501, 502]


@pytest.fixture
def booting(
    machine: FakeMachine, proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], Any]], None]:
    """A host on which a guest boots; takes what stands in for SSH to the guest."""
    proc.thread(510, f"vhost-{QEMU}", QEMU)
    machine.answers |= {
        "nproc": ("4\n", "", 0),
        "^rm -f .*qemu-system": (f"{QEMU}\n", "", 0),
        f"^tail --pid={QEMU}": ("", "", STILL_RUNNING),
        ".": OK,
    }
    monkeypatch.setattr(guest, "Monitor", FakeMonitor)
    monkeypatch.setattr(FakeMonitor, "told", [])

    def connecting(connect: Callable[[], Any]) -> None:
        monkeypatch.setattr(guest, "Machine", lambda *_, **__: connect())

    return connecting


def test_a_guest_is_booted_pinned_and_ended(
    host: HostMachine, machine: FakeMachine, booting: Callable[[Callable[[], Any]], None]
) -> None:
    inside = FakeMachine("guest", machine.log, {"boot_id": (f"{BOOT}\n", "", 0)})
    booting(lambda: contextlib.nullcontext(inside))
    steps: list[str] = []
    with guest.boot_guest(host, GuestSpec(nics=(SPLIT,)), on_step=steps.append) as running:
        assert (running.cid, running.qemu_pid) == (3, QEMU)
        assert running.threads == {501: 2, 502: 3, 510: 1}
        assert running.vhost_threads == (510,)
        assert running.testpmd_ports == {SPLIT: 0}
        assert running.boot_id == BOOT
        assert cast(object, running.machine) is inside
        (pinned,) = machine.asked("taskset -p")
        assert [f"-c {cpu} {tid}" in pinned for tid, cpu in running.threads.items()] == [True] * 3
        assert machine.asked(f"kill -KILL {QEMU}") == []
    assert steps == ["booting the guest"]
    # QEMU first, then testpmd, on which its devices hang.
    order = [line for line in machine.log if "kill -KILL" in line]
    assert [bool(re.search(rf"KILL {QEMU}\b", line)) for line in order] == [True, False]


def test_a_guest_that_hangs_while_it_boots_is_started_once_more(
    host: HostMachine, machine: FakeMachine, booting: Callable[[Callable[[], Any]], None]
) -> None:
    inside = FakeMachine("guest", machine.log, {"boot_id": (f"{BOOT}\n", "", 0)})
    booting(lambda: contextlib.nullcontext(inside))
    hung = launching(("", "", STILL_RUNNING), OK)
    machine.answers = {"guest is set up": hung, **machine.answers}
    steps: list[str] = []
    with guest.boot_guest(host, GuestSpec(), on_step=steps.append) as running:
        assert running.boot_id == BOOT
        # The one that hung is gone.
        assert len(machine.asked(f"kill -KILL {QEMU}")) == 1
    assert len(machine.asked("^rm -f .*qemu-system")) == 2
    assert "is started once more" in steps[-1]


def test_connection_to_a_guest_whose_qemu_ends_is_closed_at_once(
    host: HostMachine, machine: FakeMachine, booting: Callable[[Callable[[], Any]], None]
) -> None:
    inside = FakeMachine("guest", machine.log, {"boot_id": (f"{BOOT}\n", "", 0)})
    booting(lambda: contextlib.nullcontext(inside))
    with guest.boot_guest(host, GuestSpec()):
        (watch,) = [p for p in machine.processes if p.command.startswith("tail")]
        assert not inside.closed.wait(0.05)
        watch.answer = OK
        assert inside.closed.wait(30)
    assert watch.closed


def test_a_guest_without_ssh_is_ended_all_the_same(
    host: HostMachine, machine: FakeMachine, booting: Callable[[Callable[[], Any]], None]
) -> None:
    def never() -> Any:
        raise TransientError("guest did not answer on SSH")

    booting(never)
    with (
        pytest.raises(TransientError, match="did not answer on SSH"),
        guest.boot_guest(host, GuestSpec(nics=(SPLIT,))),
    ):
        raise AssertionError("it is not up")
    assert machine.asked(f"kill -KILL {QEMU}")
    assert machine.asked("kill -KILL .*testpmd")


def test_a_host_that_is_too_small(host: HostMachine, machine: FakeMachine) -> None:
    machine.answers["nproc"] = ("3\n", "", 0)
    with (
        pytest.raises(InfrastructureError, match="has 3 processors"),
        guest.boot_guest(host, GuestSpec()),
    ):
        raise AssertionError("there is no room for it")
    assert machine.asked("qemu") == []


# --- left by one, taken over by another ----------------------------------------------------

Booting = Callable[[Callable[[], Any]], None]


def left_behind(host: HostMachine, machine: FakeMachine, booting: Booting) -> dict[str, Any]:
    """What a guest with testpmd left, through a JSON file as ever."""
    inside = FakeMachine("guest", machine.log, {"boot_id": (f"{BOOT}\n", "", 0)})
    booting(lambda: contextlib.nullcontext(inside))
    with guest.boot_guest(host, GuestSpec(nics=(SPLIT,))) as running:
        known: dict[str, Any] = json.loads(json.dumps(guest.leave(running)))
    return known


def test_a_guest_that_is_left_is_paused_and_outlives_its_block(
    host: HostMachine, machine: FakeMachine, booting: Booting
) -> None:
    known = left_behind(host, machine, booting)
    assert known.keys() == guest.LEFT
    assert known["boot_id"] == BOOT
    assert FakeMonitor.told == ["stop"]
    assert machine.asked("kill -KILL") == []


def test_a_guest_that_was_left_goes_on_and_ends_with_who_took_it_over(
    host: HostMachine, machine: FakeMachine, booting: Booting
) -> None:
    known = left_behind(host, machine, booting)
    spec = GuestSpec(nics=(SPLIT,))
    inside = FakeMachine("guest", machine.log)
    booting(lambda: contextlib.nullcontext(inside))
    woken: list[object] = []
    with guest.taken_over(host, spec, known, woken.append) as running:
        assert FakeMonitor.told == ["stop", "cont"]
        assert woken == [inside]
        assert (running.cid, running.qemu_pid, running.boot_id) == (3, QEMU, BOOT)
        assert running.threads == {501: 2, 502: 3, 510: 1}
        assert running.vhost_threads == (510,)
        assert running.qemu_argv == tuple(known["qemu_argv"])
        assert running.testpmd_ports == {SPLIT: 0}
        assert running.nics == {SPLIT: guest.nic_mac(0)}
        assert running.layout == Layout.plan(4, 2)
        # Nothing was swapped in it yet, as in one that was booted.
        assert (running.loaded, running.delivered) == ({}, set())
        assert machine.asked("kill -KILL") == []
    order = [line for line in machine.log if "kill -KILL" in line]
    assert [bool(re.search(rf"KILL {QEMU}\b", line)) for line in order] == [True, False]


@pytest.mark.parametrize("at", ["connecting", "waking"])
def test_a_guest_that_does_not_go_on_is_ended(
    host: HostMachine, machine: FakeMachine, booting: Booting, at: str
) -> None:
    known = left_behind(host, machine, booting)

    def fail(*_: object) -> Any:
        raise TransientError("guest did not answer")

    inside = FakeMachine("guest", machine.log)
    booting(fail if at == "connecting" else lambda: contextlib.nullcontext(inside))
    with (
        pytest.raises(TransientError, match="did not answer"),
        guest.taken_over(host, GuestSpec(nics=(SPLIT,)), known, fail),
    ):
        raise AssertionError("it is dead")
    assert machine.asked(f"kill -KILL {QEMU}")
    assert machine.asked("kill -KILL .*testpmd")


# --- swapping a module ---------------------------------------------------------------------

BUILD_ID = "ab" * 20


@pytest.fixture
def inside() -> FakeMachine:
    return FakeMachine("guest", [])


@pytest.fixture
def running(inside: FakeMachine) -> Guest:
    return cast(
        Guest,
        SimpleNamespace(
            machine=inside,
            loaded={},
            delivered=set(),
            management=("52:54:00:76:6c:01", "192.168.77.2/24", "192.168.77.1"),
        ),
    )


def built(folder: Path, module: str) -> BuiltModule:
    path = folder / f"{module}.ko"
    path.write_bytes(b"module")
    return built_module(module, path, BUILD_ID)


def swapping(inside: FakeMachine, result: str, *, log: str = "") -> None:
    inside.answers |= {
        "^mkdir": OK,
        "swap-module": (f"{result}\n", "", 0),
        "dmesg": (log, "", 0),
    }


def test_an_arm_is_copied_loaded_and_remembered(
    running: Guest, inside: FakeMachine, tmp_path: Path
) -> None:
    swapping(inside, f"ok {BUILD_ID}")
    swap(running, built(tmp_path, "vmw_vsock_virtio_transport"))
    remote = f"{WORK}/modules/{BUILD_ID}.ko"
    assert inside.files == {remote: b"module"}
    assert running.loaded == {"vmw_vsock_virtio_transport": BUILD_ID}
    (command,) = inside.asked("swap-module")
    assert f"vmw_vsock_virtio_transport {remote}" in command
    assert "192.168.77.2" not in command


def test_an_arm_that_is_there_is_not_copied_again(
    running: Guest, inside: FakeMachine, tmp_path: Path
) -> None:
    swapping(inside, f"ok {BUILD_ID}")
    swap(running, built(tmp_path, "vsock"))
    inside.files.clear()
    swap(running, built(tmp_path, "vsock"))
    assert inside.files == {}


def test_with_virtio_net_the_management_interface_is_brought_back(
    running: Guest, inside: FakeMachine, tmp_path: Path
) -> None:
    swapping(inside, f"ok {BUILD_ID}")
    swap(running, built(tmp_path, "virtio_net"))
    (command,) = inside.asked("swap-module")
    assert "52:54:00:76:6c:01 192.168.77.2/24 192.168.77.1" in command


def test_modules_of_one_arm_are_replaced_together_in_the_order_of_loading(
    running: Guest, inside: FakeMachine, tmp_path: Path
) -> None:
    common = replace(built(tmp_path, "vmw_vsock_virtio_transport_common"), build_id="cd" * 20)
    arm = replace(built(tmp_path, "vmw_vsock_virtio_transport"), before=(common,))
    swapping(inside, f"ok {'cd' * 20} {BUILD_ID}")
    inside.answers = {"test -e .*swap-modules": ("", "", 1), **inside.answers}
    swap(running, arm)
    assert inside.files.keys() >= {
        f"{WORK}/modules/{BUILD_ID}.ko",
        f"{WORK}/modules/{'cd' * 20}.ko",
    }
    assert b"holders" in inside.files[f"{WORK}/swap-modules"]
    (command,) = inside.asked("swap-modules .*swap.result")
    first, second = (command.index(name) for name in ("transport_common ", "virtio_transport "))
    assert first < second
    assert running.loaded == {
        "vmw_vsock_virtio_transport_common": "cd" * 20,
        "vmw_vsock_virtio_transport": BUILD_ID,
    }
    # One of them being another build than asked for is enough.
    swapping(inside, f"ok {'cd' * 20} {'ee' * 20}")
    with pytest.raises(InfrastructureError, match="did not take"):
        swap(running, arm)
    assert running.loaded == {}


def test_a_guest_with_another_kernel_than_asked_for_is_never_measured(inside: FakeMachine) -> None:
    note = "040000001400000003000000474e5500" + "ab" * 20
    inside.answers |= {"uname -r": (f"6.1.0-57-amd64\n0400{note}07\n", "", 0)}
    assert running_kernel(cast(Machine, inside), "6.1.0-57-amd64") == "ab" * 20
    with pytest.raises(InfrastructureError, match=r"runs kernel 6\.1\.0-57-amd64, 6\.12 was asked"):
        running_kernel(cast(Machine, inside), "6.12")


@pytest.mark.parametrize("seen", ["cd" * 20, "", BUILD_ID[:-2], BUILD_ID.upper()])
def test_another_build_than_asked_for_is_never_measured(
    running: Guest, inside: FakeMachine, tmp_path: Path, seen: str
) -> None:
    # kworkflow#1198: the machine ran something else than was asked for.
    swapping(inside, f"ok {seen}".strip())
    with pytest.raises(InfrastructureError, match="did not take") as caught:
        swap(running, built(tmp_path, "virtio_net"))
    assert BUILD_ID in caught.value.message
    assert (seen or "unknown") in caught.value.message
    assert "nothing was measured" in caught.value.remedy
    assert running.loaded == {}


@pytest.mark.parametrize(
    "why",
    [
        "insmod: ERROR: could not insert module x.ko: Invalid module format",
        "rmmod: ERROR: Module virtio_net is in use",
        "the management interface 52:54:00:76:6c:01 did not come back",
    ],
)
def test_a_module_that_is_refused(
    running: Guest, inside: FakeMachine, tmp_path: Path, why: str
) -> None:
    log = "virtio_net: disagrees about version of symbol module_layout\n"
    swapping(inside, f"failed {why}", log=log)
    with pytest.raises(InfrastructureError, match="could not be loaded") as caught:
        swap(running, built(tmp_path, "virtio_net"))
    assert why in str(caught.value)
    assert "disagrees about version" in str(caught.value)
    assert not isinstance(caught.value, TransientError)
    assert running.loaded == {}


@pytest.mark.parametrize("result", ["", "nonsense"])
def test_a_swap_without_a_result(
    running: Guest, inside: FakeMachine, tmp_path: Path, result: str
) -> None:
    swapping(inside, result)
    with pytest.raises(InfrastructureError):
        swap(running, built(tmp_path, "virtio_net"))
    assert running.loaded == {}


def test_a_guest_that_does_not_come_back(
    running: Guest, inside: FakeMachine, tmp_path: Path
) -> None:
    inside.answers |= {"^mkdir": OK, "swap-module": ("", "", STILL_RUNNING)}
    with pytest.raises(TransientError) as caught:
        swap(running, built(tmp_path, "virtio_net"))
    assert "network did not come back" in caught.value.remedy
    assert running.loaded == {}


def test_a_failed_swap_forgets_what_was_loaded_before(
    running: Guest, inside: FakeMachine, tmp_path: Path
) -> None:
    running.loaded["virtio_net"] = "ef" * 20
    swapping(inside, "failed insmod: no")
    with pytest.raises(VringlabError):
        swap(running, built(tmp_path, "virtio_net"))
    # The script falls back to the distribution's module: the old arm is no longer there.
    assert "virtio_net" not in running.loaded


def test_the_build_id_of_a_loaded_module(inside: FakeMachine) -> None:
    inside.answers["build-id"] = (f"{BUILD_ID}\n", "", 0)
    assert loaded_build_id(cast(Any, inside), "virtio_net") == BUILD_ID
    inside.answers["build-id"] = ("", "No such file", 1)
    assert loaded_build_id(cast(Any, inside), "virtio_net") == ""
