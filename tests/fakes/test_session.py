"""A campaign's session on machines that answer as told: whose module it swaps, what it leaves
behind, and what it does about a host that is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.fake_lab import Answer, FakeMachine, built_module

from vringlab.campaign import session as sessions
from vringlab.campaign.budget import Budget
from vringlab.campaign.session import HostLease, MachineSession, Side, Switch
from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.kernels.base import BaseKernel
from vringlab.kernels.bundle import KernelBundle
from vringlab.lab import facts, vhost_nic
from vringlab.lab.embedded import HostMachine
from vringlab.lab.guest import GuestSpec

OK: Answer = ("", "", 0)
OWN, ARM = "aa" * 20, "bb" * 20


class HostLike(FakeMachine):
    """A host that can be lost: then no command is answered."""

    alive = True

    def outlives(self, seconds: float) -> bool:
        assert seconds > 0
        return self.alive

    def run(self, *arguments: Any, **options: Any) -> Any:
        if not self.alive:
            raise TransientError("the connection to embedded was lost")
        return super().run(*arguments, **options)


@dataclass
class World:
    """All that a session may touch; `log` has it in order."""

    kind: str = "emulated"
    log: list[str] = field(default_factory=list)
    hosts: list[HostLike] = field(default_factory=list)
    loaded: str = OWN
    changes: list[str] = field(default_factory=list)
    lost_is_undone: bool = False

    @contextlib.contextmanager
    def open_host(self) -> Iterator[HostMachine]:
        host = HostLike("embedded", self.log)
        host.answers |= {
            "build-id": lambda _: (self.loaded, "", 0),
            "swap-module": self._replace,
            "dmesg": OK,
            "^mkdir": OK,
            "^test -e": ("", "", 1),
            "^true": OK,
        }
        self.hosts.append(host)
        self.log.append("open host")
        yield cast(
            HostMachine,
            SimpleNamespace(
                machine=host,
                kind=self.kind,
                on_change=self.changes.append,
                lost_is_undone=self.lost_is_undone,
            ),
        )
        self.log.append("close host")

    def _replace(self, command: str) -> Answer:
        self.loaded = OWN if "modinfo -n" in command else ARM
        return f"ok {self.loaded}\n", "", 0

    @contextlib.contextmanager
    def boot_guest(
        self, host: HostMachine, spec: GuestSpec, kernel: KernelBundle | None = None
    ) -> Iterator[object]:
        self.log.append(f"boot guest {kernel.digest}" if kernel else "boot guest")
        if not cast(HostLike, host.machine).alive:
            raise TransientError("the connection to embedded was lost")
        yield SimpleNamespace(machine=FakeMachine("guest", self.log), spec=spec)
        self.log.append("end guest")

    def steps(self) -> list[str]:
        """What happened, in a word each."""
        words = {
            "swap-module": "restore",
            "open host": "open host",
            "close host": "close host",
            "boot guest": "boot",
            "end guest": "end",
            "unplug": "unplug",
            "plug": "plug",
        }
        found = []
        for line in self.log:
            if "swap-module" in line and "modinfo" not in line:
                found.append("swap")
            else:
                found += [word for text, word in words.items() if text in line][:1]
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(sessions, "boot_guest", made.boot_guest)
    monkeypatch.setattr(facts, "collect", lambda *_: {})
    monkeypatch.setattr(vhost_nic, "unplug", lambda *_: made.log.append("unplug"))
    monkeypatch.setattr(vhost_nic, "plug", lambda *_: made.log.append("plug"))
    return made


@pytest.fixture
def opened(world: World, tmp_path: Path) -> Callable[..., contextlib.ExitStack]:
    module = tmp_path / "vhost_net.ko"
    module.write_bytes(b"module")
    built = built_module("vhost_net", module, ARM)

    def open_session(side: Side = "host", switch: Switch = "swap") -> Any:
        @contextlib.contextmanager
        def made() -> Iterator[MachineSession]:
            with (
                HostLease(world.open_host) as lease,
                MachineSession(
                    lease, side, {"arm": built}, Budget(), switch, world.log.append
                ) as session,
            ):
                yield session

        return made()

    return open_session


Opened = Callable[..., contextlib.AbstractContextManager[MachineSession]]


# --- arms of the host ----------------------------------------------------------------------


def test_a_module_of_the_host_is_swapped_under_the_guest_and_restored(
    world: World, opened: Opened
) -> None:
    with opened() as session:
        session.boot("b01", {"vhost_nic": True})
        assert session.switch("arm") == ARM
        session.switch("arm")
    assert world.steps() == [
        *("open host", "boot", "unplug", "swap", "plug", "unplug", "swap", "plug"),
        *("end", "restore", "close host"),
    ]
    assert world.loaded == OWN
    (asked,) = world.hosts[0].asked("modinfo")
    assert 'vhost_net "$(modinfo -n vhost_net)"' in asked


def test_with_reboot_the_guest_is_ended_before_the_swap_and_booted_after_it(
    world: World, opened: Opened
) -> None:
    with opened(switch="reboot") as session:
        session.boot("b01", {})
        for _ in range(2):
            session.switch("arm")
    assert world.steps() == [
        *("open host", "swap", "boot", "end", "swap", "boot", "end", "restore", "close host")
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TransientError("lost"), ValueError])
def test_whatever_happens_the_host_gets_its_module_back(
    world: World, opened: Opened, error: Any
) -> None:
    with pytest.raises(BaseException) as caught, opened() as session:  # noqa: PT011, PT012
        session.boot("b01", {})
        session.switch("arm")
        raise error
    assert isinstance(caught.value, error if isinstance(error, type) else TransientError)
    assert world.loaded == OWN
    assert world.steps()[-3:] == ["end", "restore", "close host"]


def test_also_when_the_swap_itself_fails(world: World, opened: Opened) -> None:
    with pytest.raises(InfrastructureError, match="in use"), opened() as session:  # noqa: PT012
        session.boot("b01", {})
        answers = world.hosts[0].answers
        answers["swap-module"] = ("failed rmmod: Module vhost_net is in use\n", "", 0)
        try:
            session.switch("arm")
        finally:
            answers["swap-module"] = world._replace
    assert world.steps()[-3:] == ["end", "restore", "close host"]


def test_a_session_that_swapped_nothing_restores_nothing(world: World, opened: Opened) -> None:
    with opened() as session:
        session.boot("b01", {})
    assert "restore" not in world.steps()


def test_a_module_that_was_not_loaded_is_taken_out_again(world: World, opened: Opened) -> None:
    world.loaded = ""
    with opened() as session:
        session.boot("b01", {})
        session.switch("arm")
        world.hosts[0].answers["rmmod vhost_net$"] = OK
    assert world.hosts[0].asked("rmmod vhost_net$")
    assert "restore" not in world.steps()


def test_a_module_that_cannot_be_restored_is_told_with_what_to_do(
    world: World, opened: Opened
) -> None:
    with pytest.raises(InfrastructureError, match="own vhost_net could not") as caught:  # noqa: PT012, SIM117
        with opened() as session:
            session.boot("b01", {})
            session.switch("arm")
            world.hosts[0].answers["swap-module"] = ("failed rmmod: in use\n", "", 0)
    assert "rmmod vhost_net; modprobe vhost_net" in caught.value.remedy


def test_an_error_on_its_way_says_that_the_module_is_not_restored(
    world: World, opened: Opened
) -> None:
    def fail(session: MachineSession, error: BaseException) -> None:
        session.boot("b01", {})
        session.switch("arm")
        world.hosts[-1].answers["swap-module"] = ("failed rmmod: in use\n", "", 0)
        raise error

    with pytest.raises(UserError, match="mine") as caught, opened() as session:
        fail(session, UserError("mine", remedy="do this"))
    assert caught.value.remedy.startswith("do this; besides, the KVM host's own vhost_net")
    with pytest.raises(KeyboardInterrupt) as interrupted, opened() as session:
        fail(session, KeyboardInterrupt())
    assert "could not be restored" in interrupted.value.__notes__[0]


def test_a_dead_host_of_ours_has_nothing_to_restore(world: World, opened: Opened) -> None:
    with opened() as session:
        session.boot("b01", {})
        session.switch("arm")
        world.hosts[0].alive = False
    assert "restore" not in world.steps()


def test_a_users_own_host_that_is_lost_is_an_error(world: World, opened: Opened) -> None:
    world.kind = "physical"
    with pytest.raises(InfrastructureError, match="own vhost_net"), opened() as session:  # noqa: PT012
        session.boot("b01", {})
        session.switch("arm")
        world.hosts[0].alive = False


def test_a_users_own_host_that_restores_itself_is_none(world: World, opened: Opened) -> None:
    world.kind, world.lost_is_undone = "physical", True
    with opened() as session:
        session.boot("b01", {})
        session.switch("arm")
        world.hosts[0].alive = False
    assert "restore" not in world.steps()


def test_how_a_swap_is_undone_is_noted_once_and_before_it(world: World, opened: Opened) -> None:
    with opened() as session:
        session.boot("b01", {})
        session.switch("arm")
        session.switch("arm")
    (undo,) = world.changes
    assert OWN in undo
    assert "rmmod vhost_net; modprobe vhost_net" in undo


# --- a host that is lost -------------------------------------------------------------------


def test_a_host_that_is_lost_is_opened_again_at_the_next_boot(world: World, opened: Opened) -> None:
    with opened() as session:
        session.boot("b01", {})
        session.switch("arm")
        world.hosts[0].alive = False
        with pytest.raises(TransientError):
            session.switch("arm")
        session.boot("b01.1", {})
        world.loaded = OWN
        assert session.switch("arm") == ARM
    assert len(world.hosts) == 2
    assert world.loaded == OWN
    assert "the KVM host had been lost and was opened again" in world.log
    order = world.steps()
    assert order.index("close host") < order.index("open host", 1) < order.index("boot", 5)


def test_a_host_that_answers_is_kept(world: World, opened: Opened) -> None:
    with opened() as session:
        for boot in ("b01", "b02"):
            session.boot(boot, {})
    assert len(world.hosts) == 1


def test_any_failure_is_transient_when_the_host_was_lost(world: World) -> None:
    with HostLease(world.open_host) as lease:
        with pytest.raises(InfrastructureError) as kept, lease.watched():
            raise InfrastructureError("QEMU's monitor: it said nonsense")
        assert not isinstance(kept.value, TransientError)
        world.hosts[0].alive = False
        with pytest.raises(TransientError, match="host was lost: QEMU's monitor"), lease.watched():
            raise InfrastructureError("QEMU's monitor: the connection was reset")
        with pytest.raises(UserError), lease.watched():
            raise UserError("mine")


# --- kernels as arms -----------------------------------------------------------------------


def bundle(name: str) -> KernelBundle:
    kernel = BaseKernel(f"debian:{name}", f"{name}.1-fake", f"{name}.1-1", "fake")
    return KernelBundle(Path("/bundles") / name, name, kernel)


def test_an_arm_that_is_a_kernel_gets_a_guest_that_runs_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def running(_machine: object, release: str) -> str:
        asked.append(release)
        return f"id-of-{release}"

    monkeypatch.setattr(sessions, "running_kernel", running)
    with (
        HostLease(world.open_host) as lease,
        MachineSession(
            lease,
            "guest",
            {},
            Budget(),
            "reboot",
            world.log.append,
            kernels={"old": bundle("6.1"), "new": bundle("7.3")},
        ) as session,
    ):
        session.boot("b01", {})
        assert session.switch("old") == "id-of-6.1.1-fake"
        assert session.switch("new") == "id-of-7.3.1-fake"
    assert asked == ["6.1.1-fake", "7.3.1-fake"]
    assert [entry for entry in world.log if entry.startswith("boot guest")] == [
        "boot guest 6.1",
        "boot guest 7.3",
    ]


def test_arms_on_another_kernel_share_a_guest_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    swapped: list[str] = []
    monkeypatch.setattr(sessions, "swap", lambda _guest, built: swapped.append(built.build_id))
    module = built_module("virtio_net", tmp_path / "x.ko", ARM)
    with (
        HostLease(world.open_host) as lease,
        MachineSession(
            lease,
            "guest",
            {"stock": module},
            Budget(),
            "swap",
            world.log.append,
            kernels={"stock": bundle("6.1")},
        ) as session,
    ):
        session.boot("b01", {})
        assert session.switch("stock") == ARM
    assert swapped == [ARM]
    assert [entry for entry in world.log if entry.startswith("boot guest")] == ["boot guest 6.1"]
