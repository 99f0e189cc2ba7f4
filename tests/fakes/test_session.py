"""A campaign's session on machines that answer as told: whose module it swaps, what it leaves
behind, what it does about a host that is lost, and which guests it restores instead of booting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.fake_lab import Answer, FakeMachine, built_module

from vringlab.campaign import experiment as experiments
from vringlab.campaign import session as sessions
from vringlab.campaign.budget import Budget
from vringlab.campaign.session import HostLease, MachineSession, Prepared, SavedLabs, Side, Switch
from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.image.build import Image
from vringlab.kernels.base import BaseKernel
from vringlab.kernels.bundle import KernelBundle
from vringlab.lab import accel, facts, snapshot, vhost_nic
from vringlab.lab.accel import Accelerator
from vringlab.lab.embedded import HostMachine
from vringlab.lab.guest import Guest, GuestSpec
from vringlab.lab.pinning import Layout
from vringlab.lab.snapshot import Snapshot
from vringlab.settings import Settings

OK: Answer = ("", "", 0)
IMAGE = Image(Path("/image"), "0" * 16, "trixie", "6.12.1", "6.12.1-1", {"fio": "3"}, "key")
TCG = Accelerator("tcg", "asked for")
KVM = Accelerator("kvm", "asked for")
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
    def open_host(self, how: str = "open host") -> Iterator[HostMachine]:
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
        self.log.append(how)
        yield cast(
            HostMachine,
            SimpleNamespace(
                machine=host,
                kind=self.kind,
                on_change=self.changes.append,
                lost_is_undone=self.lost_is_undone,
                swap_refusal="",
                image=IMAGE,
                accelerator=TCG,
                qemu_argv=("qemu",),
                last_words=lambda: "Kernel panic - not syncing",
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
        yield self.guest(spec, f"cold {self.log.count('boot guest')}")
        self.log.append("end guest")

    def guest(self, spec: GuestSpec, boot_id: str) -> Guest:
        found = SimpleNamespace(
            machine=FakeMachine("guest", self.log),
            spec=spec,
            boot_id=boot_id,
            cid=3,
            qemu_argv=("qemu",),
            layout=Layout.plan(4, 2),
            threads={501: 2},
            vhost_threads=(510,),
        )
        return cast(Guest, found)

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


# --- saved labs ----------------------------------------------------------------------------


@dataclass
class Saved:
    """Saved labs of a world: what is wrong with them, and what was removed."""

    world: World
    fault: InfrastructureError | None = None
    dead: bool = False
    asked: list[tuple[GuestSpec, int]] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)

    def ensure(
        self, _image: Image, _on: Accelerator, spec: GuestSpec, *, edition: int, on_step: object
    ) -> Snapshot:
        assert on_step is not None
        self.asked.append((spec, edition))
        if self.fault is not None:
            raise self.fault
        return Snapshot(Path("/saved"), "d" * 16, edition, f"saved {edition}", "2026", {})

    @contextlib.contextmanager
    def restored(
        self,
        found: Snapshot,
        _image: Image,
        _on: Accelerator,
        spec: GuestSpec,
        *,
        on_step: object,
        count_instructions: bool,
    ) -> Iterator[object]:
        assert on_step is not None
        assert not count_instructions, "nobody asked for it"

        @contextlib.contextmanager
        def wake() -> Iterator[Guest]:
            self.world.log.append(f"wake {found.edition}")
            try:
                if self.dead:
                    raise TransientError("guest did not answer")
                yield self.world.guest(spec, found.boot_id)
            finally:
                self.world.log.append("end guest")

        with self.world.open_host(f"restore {found.edition}") as host:
            yield host, wake


@pytest.fixture
def saved(world: World, monkeypatch: pytest.MonkeyPatch) -> Saved:
    made = Saved(world)
    monkeypatch.setattr(snapshot, "ensure", made.ensure)
    monkeypatch.setattr(snapshot, "restored", made.restored)
    monkeypatch.setattr(snapshot, "discard", lambda found: made.removed.append(found.edition))
    monkeypatch.setattr(sessions, "_git_state", dict)
    return made


@contextlib.contextmanager
def restoring(
    world: World, first: tuple[GuestSpec, int] | None = (GuestSpec(), 1), **changed: Any
) -> Iterator[MachineSession]:
    """A session that may restore labs; `changed` are arguments of its class."""
    say = world.log.append
    arguments = {"side": "guest", "built": {}, "switch": "swap", **changed}
    with (
        HostLease(world.open_host, SavedLabs(IMAGE, TCG, say), first, say) as lease,
        MachineSession(lease=lease, budget=Budget(), on_step=say, **arguments) as session,
    ):
        yield session


def labs(world: World) -> list[str]:
    """What became of hosts and guests."""
    words = ("open host", "close host", "boot guest", "end guest", "restore ", "wake ")
    return [line for line in world.log if line.startswith(words)]


def how(session: MachineSession) -> object:
    return session.provenance()["boot"]


def record(edition: int) -> dict[str, object]:
    return {
        "how": "restored",
        "snapshot": {"digest": "d" * 16, "edition": edition, "made": "2026"},
        "boot_id": f"saved {edition}",
    }


def test_the_host_comes_with_its_first_guest(world: World, saved: Saved) -> None:
    with restoring(world) as session:
        assert labs(world) == ["restore 1"]
        session.boot("b01", {}, 1)
        assert how(session) == record(1)
        assert cast(object, session.lab.host.machine) is world.hosts[0]
    assert labs(world) == ["restore 1", "wake 1", "end guest", "close host"]
    assert saved.asked == [(GuestSpec(), 1)]


def test_another_edition_takes_the_hosts_place_and_a_cold_boot_stays_on_it(
    world: World, saved: Saved
) -> None:
    found = []
    with restoring(world) as session:
        for number, edition in enumerate((1, 2, 0, 0), 1):
            session.boot(f"b{number:02}", {}, edition)
            found.append(how(session))
    assert found == [
        record(1),
        record(2),
        {"how": "booted", "boot_id": "cold 1"},
        {"how": "booted", "boot_id": "cold 2"},
    ]
    assert labs(world) == [
        *("restore 1", "wake 1", "end guest", "close host"),
        *("restore 2", "wake 2", "end guest"),
        *("boot guest", "end guest") * 2,
        "close host",
    ]
    assert [edition for _, edition in saved.asked] == [1, 2]


def test_the_same_edition_again_is_restored_again(world: World, saved: Saved) -> None:
    # A guest cannot be woken twice: it is no longer what was saved.
    with restoring(world) as session:
        for boot in ("b01", "b01r1"):
            session.boot(boot, {}, 1)
            assert how(session) == record(1)
    assert labs(world) == ["restore 1", "wake 1", "end guest", "close host"] * 2
    assert len(saved.asked) == 2


@pytest.mark.parametrize("dead", [False, True])
def test_a_sleeping_guest_that_is_not_wanted_is_ended(
    world: World, saved: Saved, dead: bool
) -> None:
    saved.dead = dead
    with restoring(world) as session:
        session.boot("b01", {}, 0)
        assert how(session) == {"how": "booted", "boot_id": "cold 1"}
        session.boot("b02", {}, 0)
    assert labs(world) == [
        *("restore 1", "wake 1", "end guest"),
        *("boot guest", "end guest") * 2,
        "close host",
    ]


@pytest.mark.usefixtures("saved")
def test_a_sleeping_guest_of_another_kind_goes_with_its_host(world: World) -> None:
    with restoring(world) as session:
        session.boot("b01", {"vcpus": 1}, 1)
        assert session.lab.guest.spec == GuestSpec(vcpus=1)
    assert labs(world) == [
        "restore 1",
        "close host",
        "restore 1",
        "wake 1",
        "end guest",
        "close host",
    ]


@pytest.mark.usefixtures("saved")
def test_a_host_that_was_booted_is_replaced_by_a_saved_one(world: World) -> None:
    with restoring(world, first=None) as session:
        session.boot("b01", {}, 1)
        assert how(session) == record(1)
    assert labs(world) == [
        *("open host", "close host"),
        *("restore 1", "wake 1", "end guest", "close host"),
    ]


@pytest.mark.parametrize("error", [InfrastructureError, TransientError, snapshot.Unusable])
def test_a_lab_is_booted_where_none_can_be_restored_and_why_is_said_once(
    world: World, saved: Saved, error: type[InfrastructureError]
) -> None:
    saved.fault = error("not enough disk space")
    with restoring(world) as session:
        for number in (1, 2):
            session.boot(f"b{number:02}", {}, number)
            assert how(session) == {"how": "booted", "boot_id": f"cold {number}"}
    assert labs(world) == ["open host", *("boot guest", "end guest") * 2, "close host"]
    said = [line for line in world.log if "saved lab" in line]
    assert said == ["no saved lab is used, one is booted: not enough disk space"]
    # Each try may take as long as a boot.
    assert len(saved.asked) == 1


def test_a_lab_that_cannot_be_restored_later_is_booted_on_a_fresh_host(
    world: World, saved: Saved
) -> None:
    with restoring(world) as session:
        session.boot("b01", {}, 1)
        saved.fault = InfrastructureError("its memory is not what was written")
        session.boot("b02", {}, 2)
        assert how(session) == {"how": "booted", "boot_id": "cold 1"}
        assert cast(object, session.lab.host.machine) is world.hosts[1]
    assert labs(world) == [
        *("restore 1", "wake 1", "end guest", "close host"),
        *("open host", "boot guest", "end guest", "close host"),
    ]
    assert "no saved lab is used, one is booted: its memory is not what was written" in world.log
    # It was ended, not lost.
    assert not [line for line in world.log if "had been lost" in line]


def test_a_dead_guest_is_told_and_its_lab_is_removed_and_booted(world: World, saved: Saved) -> None:
    saved.dead = True
    with restoring(world) as session:
        session.boot("b01", {}, 1)
        assert how(session) == {"how": "booted", "boot_id": "cold 1"}
        assert cast(object, session.lab.host.machine) is world.hosts[1]
    assert labs(world) == [
        *("restore 1", "wake 1", "end guest", "close host"),
        *("open host", "boot guest", "end guest", "close host"),
    ]
    assert saved.removed == [1]
    assert "the saved lab's guest is dead, one is booted: guest did not answer" in world.log
    assert not [line for line in world.log if "had been lost" in line]


def test_facts_of_a_guest_are_read_once_when_they_are_asked_for(
    world: World, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def collect(_: HostMachine, guest: Guest) -> dict[str, object]:
        asked.append(guest.boot_id)
        return {"tools": {"fio": str(len(asked))}}

    monkeypatch.setattr(facts, "collect", collect)
    with restoring(world) as session:
        session.boot("b01", {}, 1)
        assert asked == []
        for _ in range(2):
            assert session.provenance()["tools"] == {"fio": "1"}
        session.boot("b02", {}, 0)
        assert session.provenance()["tools"] == {"fio": "2"}
    assert len(asked) == 2
    assert saved.removed == []


def test_a_restored_host_that_is_lost_is_opened_again(world: World, saved: Saved) -> None:
    with restoring(world) as session:
        session.boot("b01", {}, 1)
        world.hosts[0].alive = False
        session.boot("b01r1", {}, 0)
    assert labs(world)[4:] == ["open host", "boot guest", "end guest", "close host"]
    assert "the KVM host had been lost and was opened again" in world.log
    assert len(saved.asked) == 1


@pytest.mark.parametrize(
    "changed", [{"switch": "reboot"}, {"kernels": {"old": "6.1"}}, {"side": "host"}]
)
def test_what_no_saved_lab_has_is_booted(
    world: World, saved: Saved, tmp_path: Path, changed: dict[str, Any]
) -> None:
    module = tmp_path / "vhost_net.ko"
    module.write_bytes(b"module")
    changed = {**changed, "built": {"arm": built_module("vhost_net", module, ARM)}}
    if "kernels" in changed:
        changed["kernels"] = {"old": bundle("6.1")}
    with restoring(world, first=None, **changed) as session:
        session.boot("b01", {}, 0)
        if changed.get("side") == "host":
            # From here on the host has to get its own module back.
            session.switch("arm")
        session.boot("b02", {}, 1)
        if changed.get("switch") == "reboot":
            assert "boot" not in session.provenance()
        else:
            assert how(session)["how"] == "booted"  # type: ignore[index]  # a mapping
    assert saved.asked == []
    assert len(world.hosts) == 1


@pytest.mark.parametrize(
    ("changed", "restores"),
    [
        ({}, True),
        ({"switch": "reboot"}, False),
        ({"edition": 0}, False),
        ({"first": None}, False),
        ({"kernel": "another"}, False),
        ({"saved_labs": False}, False),
        ({"accelerator": KVM}, False),
        ({"host": "ssh://kvm1"}, False),
    ],
)
def test_a_session_opens_its_host_with_a_guest_where_that_can_be(
    world: World,
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    restores: bool,
) -> None:
    found = Settings(saved_labs=changed.get("saved_labs", True))
    monkeypatch.setattr(sessions, "settings", lambda: found)
    monkeypatch.setattr(sessions, "ensure_image", lambda **_: IMAGE)
    monkeypatch.setattr(sessions, "prepare_arms", lambda *_: Prepared({}, {}))
    monkeypatch.setattr(sessions, "is_held", lambda *_: changed.get("kernel") is None)
    monkeypatch.setattr(sessions, "prepare_host", lambda _: None)
    monkeypatch.setattr(accel, "choose", lambda *_: changed.get("accelerator", TCG))
    for name in ("embedded_host", "user_host"):
        monkeypatch.setattr(sessions, name, lambda *_, **__: world.open_host())
    first = changed.get("first", ({"vcpus": 1}, changed.get("edition", 1)))
    with sessions.open_session(
        experiments.load("vsock-direct-enqueue"),
        ("queued", "direct"),
        host=changed.get("host", "embedded"),
        switch=changed.get("switch", "swap"),
        on_step=world.log.append,
        first=first,
    ):
        pass
    assert labs(world) == ["restore 1" if restores else "open host", "close host"]
    assert saved.asked == ([(GuestSpec(vcpus=1), 1)] if restores else [])
