"""Saved labs with a program in place of QEMU: saved whole or not at all, damage recognised, and
none removed that a lab runs from. A real lab's life is in tests/live/test_saved_lab.py."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.fake_qemu import STATE
from tests.fakes.processes import alive, until
from tests.fakes.qemu_bench import Bench

from vringlab.errors import InfrastructureError, TransientError
from vringlab.lab import embedded, guest, snapshot
from vringlab.lab.accel import Accelerator
from vringlab.lab.embedded import HostMachine
from vringlab.lab.guest import GuestSpec, VhostUserNic
from vringlab.lab.pinning import Layout
from vringlab.lab.snapshot import Snapshot, Unusable

TCG = Accelerator("tcg", "asked for")
KVM = Accelerator("kvm", "asked for")
SPEC = GuestSpec()
DIGEST = "d" * 16
#: What must not happen to a block that is not entered.
NEVER = AssertionError("it must not be used")
#: Later versions of Python warn where other tests left a thread.
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path, monkeypatch)
    monkeypatch.setattr(guest, "prepare_host", lambda _host: None)
    monkeypatch.setattr(guest, "boot_guest", boot_guest)
    # The disk of the tests may be small.
    monkeypatch.setattr(snapshot, "_SPACE_GB", 0.0)
    monkeypatch.setattr(snapshot, "_FULL_GB", 0.0)
    return made


@contextlib.contextmanager
def boot_guest(
    _host: HostMachine, _spec: GuestSpec, *, on_step: Callable[[str], None]
) -> Iterator[object]:
    """A guest that can be left, and says another boot id each time."""
    on_step("booting the guest")
    yield SimpleNamespace(
        monitor=SimpleNamespace(execute=lambda command: on_step(f"guest: {command}")),
        processes=SimpleNamespace(qemu=500, qmp_port=4444, testpmd=False, left=False),
        boot_id=str(uuid.uuid4()),
        cid=3,
        qemu_argv=("qemu-system-x86_64",),
        threads={501: 2},
        vhost_threads=(510,),
        net_worker=None,
        layout=Layout.plan(4, 2),
    )


def ensure(bench: Bench, said: list[str] | None = None, spec: GuestSpec = SPEC) -> Snapshot:
    on_step = said.append if said is not None else lambda _: None
    return snapshot.ensure(bench.image, TCG, spec, on_step=on_step)


def restored(bench: Bench, saved: Snapshot) -> Any:
    return snapshot.restored(saved, bench.image, TCG, SPEC)


def put(bench: Bench, digest: str = DIGEST, edition: int = 1, used: float = 0.0) -> Snapshot:
    """A whole snapshot that no QEMU made."""
    folder = bench.snapshots / f"{digest}-{edition}"
    folder.mkdir(parents=True)
    (folder / "memory").write_bytes(bytes(200_000) + b"memory" + bytes(200_000))
    (folder / "state").write_bytes(STATE)
    left = dict.fromkeys(guest.LEFT, 0) | {"boot_id": "b"}
    kept = {"made": "2026-12-01T00:00:00Z", "left": left}
    kept |= {name: snapshot._checksum(folder / name) for name in ("memory", "state")}
    (folder / "lab.json").write_text(json.dumps(kept))
    if used:
        os.utime(folder / "lab.json", (used, used))
    found = snapshot.find(digest, edition)
    assert found is not None
    return found


def entries(bench: Bench) -> list[str]:
    """All that the folder of the snapshots holds, but for locks."""
    return sorted(path.name for path in bench.snapshots.iterdir() if path.suffix != ".lock")


# --- saved once, restored any number of times ----------------------------------------------


def test_a_lab_is_saved_once_and_several_go_on_from_it(bench: Bench) -> None:
    said: list[str] = []
    saved = ensure(bench, said)
    assert said == [
        "saving a lab, to be restored from now on: booting it",
        "booting the embedded host (tcg: asked for)",
        "booting the guest",
        "guest: stop",
    ]
    # The host stands still before its state is written, and ends by itself.
    (commands,) = bench.monitor
    assert [text for text in commands if text != "query-migrate"][-4:] == [
        "stop",
        "migrate-set-capabilities",
        "migrate",
        "quit",
    ]
    assert bench.nothing_left()
    assert sorted(path.name for path in saved.folder.iterdir()) == ["lab.json", "memory", "state"]
    assert all(path.stat().st_mode & 0o222 == 0 for path in (saved.memory, saved.state))
    assert entries(bench) == [saved.folder.name]

    assert ensure(bench) == saved
    assert len(bench.calls) == 1
    before = saved.memory.read_bytes()
    with ExitStack() as stack:
        hosts = [stack.enter_context(restored(bench, saved))[0] for _ in range(2)]
        assert [host.machine.run("echo up").stdout for host in hosts] == ["up\n"] * 2
        for host in hosts:
            assert "share=off" in " ".join(host.qemu_argv)
            assert host.qemu_argv[-2:] == ("-incoming", "defer")
    assert [commands[-1] for commands in bench.monitor[1:]] == ["query-cpus-fast"] * 2
    assert all("cont" in commands for commands in bench.monitor[1:])
    assert bench.nothing_left()
    assert saved.memory.read_bytes() == before
    assert snapshot.find(saved.digest) == saved


def test_two_that_save_at_once_make_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    said: list[str] = []

    def say(step: str) -> None:
        said.append(step)
        if "waiting for it" in step:
            waiting.set()

    @contextlib.contextmanager
    def boot_late(*arguments: Any, **named: Any) -> Iterator[object]:
        # Not before the other one waits.
        assert waiting.wait(60)
        with boot_guest(*arguments, **named) as running:
            yield running

    monkeypatch.setattr(guest, "boot_guest", boot_late)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(snapshot.ensure, bench.image, TCG, SPEC, on_step=say) for _ in range(2)]
    first, second = (each.result() for each in both)
    assert first == second
    assert len(bench.calls) == 1
    assert said.count("another process builds the same; waiting for it") == 1
    assert entries(bench) == [first.folder.name]


def test_what_one_left_that_was_killed_while_saving_is_removed(bench: Bench) -> None:
    digest = snapshot.digest_of(bench.image, TCG, SPEC)
    for key in (f"{digest}-1", f"{'e' * 16}-2"):
        half = bench.snapshots / f".building-{key}"
        half.mkdir(parents=True)
        (half / "memory").write_bytes(b"half")
    assert snapshot.find(digest) is None
    saved = ensure(bench)
    assert entries(bench) == [saved.folder.name]
    assert b"memory of" in saved.memory.read_bytes()


def killed(bench: Bench, monkeypatch: pytest.MonkeyPatch, saved: Snapshot | None) -> None:
    """Have a process killed that saves a lab, or that has restored one."""

    @contextlib.contextmanager
    def boot_and_die(*_: Any, **__: Any) -> Iterator[object]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield None

    pid = os.fork()
    if pid == 0:
        try:
            monkeypatch.setattr(guest, "boot_guest", boot_and_die)
            with restored(bench, saved) if saved is not None else contextlib.nullcontext():
                if saved is None:
                    ensure(bench)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@FORKS
def test_killed_while_a_lab_is_saved_leaves_nothing_in_the_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(bench, monkeypatch, None)
    digest = snapshot.digest_of(bench.image, TCG, SPEC)
    assert snapshot.find(digest) is None
    assert entries(bench) == [f".building-{digest}-1"]
    assert until(lambda: not alive(bench.calls[0][0]))
    saved = ensure(bench)
    assert entries(bench) == [saved.folder.name]
    assert bench.nothing_left()


@FORKS
def test_killed_while_a_lab_is_restored_harms_no_snapshot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = put(bench)
    killed(bench, monkeypatch, saved)
    assert until(lambda: not alive(bench.calls[0][0]))
    with restored(bench, saved) as (host, _):
        assert host.machine.run("echo up").stdout == "up\n"
    assert bench.nothing_left()
    # It is in nobody's use.
    monkeypatch.setattr(snapshot, "_KEPT", 1)
    snapshot._prune(snapshot._store())
    assert entries(bench) == []


# --- faults while saving -------------------------------------------------------------------


def full_disk(*_: object) -> Any:
    return SimpleNamespace(total=10**12, used=10**12, free=10**6)


def cannot_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_FULL_GB", 0.05)
    monkeypatch.setattr(shutil, "disk_usage", full_disk)


def no_room_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_checksum", cannot_write)


def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_STATE_S", 0.2)


#: How QEMU behaves, what else is wrong, and what is said.
FAULTS: Mapping[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "no space for the state": ("full", lambda _: None, "restore the host: .*No space left"),
    "no space for the memory": ("dies", disk_is_full, "not enough disk space .* 0.0 GB free"),
    "no space for the rest": ("works", no_room_at_the_end, "cannot be used: .*No space left"),
    "a state that is never written": ("stuck", little_patience, "not read or written within"),
    "a host that does not boot": ("dies", lambda _: None, "QEMU ended while it booted"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lab_that_cannot_be_saved_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    how, prepare, says = FAULTS[fault]
    bench.behaves(how)
    with monkeypatch.context() as patched:
        prepare(patched)
        with pytest.raises(InfrastructureError, match=says) as caught:
            ensure(bench)
    assert caught.value.remedy
    assert entries(bench) == []
    assert bench.nothing_left()
    # Nothing of it is in the way of the next one.
    bench.behaves("works")
    assert snapshot.find(snapshot.digest_of(bench.image, TCG, SPEC)) is None


def test_without_room_no_lab_is_booted_to_be_saved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_SPACE_GB", 1.5)
    monkeypatch.setattr(shutil, "disk_usage", full_disk)
    with pytest.raises(InfrastructureError, match=r"0\.0 GB free, 1\.5 GB needed"):
        ensure(bench)
    assert bench.calls == []


def test_a_host_whose_connections_stay_open_is_not_saved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_QUIET_S", 0.3)
    (bench.folder / "hangs-on").touch()
    with pytest.raises(TransientError, match="connections were not closed"):
        ensure(bench)
    (bench.folder / "hangs-on").unlink()
    assert entries(bench) == []
    assert bench.nothing_left()


# --- what names a snapshot -----------------------------------------------------------------


def test_whatever_a_lab_is_made_of_names_its_snapshots(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(**changed: Any) -> str:
        image = replace(bench.image, **changed.pop("image", {}))
        spec = replace(SPEC, **changed.pop("spec", {}))
        bench.behaves("works", **changed.pop("settings", {}))
        return snapshot.digest_of(image, changed.pop("accelerator", TCG), spec)

    usual = named()
    assert len(usual) == 16
    others = [
        # A QEMU or kernel of another version is another image; built anew it has other keys.
        named(image={"digest": "1" * 16}),
        named(image={"release": "6.12.2"}),
        named(image={"host_key": "ssh-ed25519 BBBB"}),
        named(spec={"vcpus": 1}),
        named(spec={"memory_mib": 2048}),
        named(spec={"nics": (VhostUserNic(packed=False, ring_size=256),)}),
        named(spec={"nics": (VhostUserNic(packed=True, ring_size=256),)}),
        named(spec={"vhost_nic": True}),
        named(spec={"kernel_args": "nokaslr"}),
        named(settings={"cpus": 6}),
        named(settings={"memory_mib": 8192}),
        named(accelerator=KVM),
    ]
    assert len({usual, *others}) == 1 + len(others)
    # Ports, and how long a boot may take, say nothing of the lab.
    monkeypatch.setattr(embedded, "_free_port", lambda: 4711)
    assert named() == named(settings={"boot_timeout": 9.0}) == usual
    assert named(accelerator=replace(TCG, reason="no /dev/kvm")) == usual


def test_another_processor_is_another_lab_where_the_guest_sees_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(accelerator: Accelerator) -> str:
        return snapshot.digest_of(bench.image, accelerator, SPEC)

    before = named(TCG), named(KVM)
    monkeypatch.setattr(snapshot, "_processor", lambda: "model name : another")
    assert named(TCG) == before[0]
    assert named(KVM) != before[1]


def test_a_qemu_upgraded_between_save_and_restore_gets_a_lab_of_its_own(bench: Bench) -> None:
    saved = ensure(bench)
    bench.image = replace(bench.image, digest="1" * 16)
    again = ensure(bench)
    assert again.digest != saved.digest
    assert again.boot_id != saved.boot_id
    assert len(bench.calls) == 2
    # The old one is found by those who still have the old image.
    assert snapshot.find(saved.digest) == saved


def test_editions_are_boots_of_their_own(bench: Bench) -> None:
    saved = [snapshot.ensure(bench.image, TCG, SPEC, edition=number) for number in (1, 2)]
    assert [each.edition for each in saved] == [1, 2]
    assert saved[0].digest == saved[1].digest
    assert saved[0].boot_id != saved[1].boot_id
    record = saved[1].as_record()
    assert (record["digest"], record["edition"]) == (saved[1].digest, 2)
    assert entries(bench) == [f"{saved[0].digest}-1", f"{saved[0].digest}-2"]


# --- damage --------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    kept = json.loads(path.read_text())
    change(kept)
    path.write_text(json.dumps(kept))


def says(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "lab.json").write_text(text)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit(folder / "lab.json", change)


#: What makes it no snapshot at all.
NOT_WHOLE: Mapping[str, Callable[[Path], object]] = {
    "no folder": shutil.rmtree,
    "no memory": lambda folder: (folder / "memory").unlink(),
    "no state": lambda folder: (folder / "state").unlink(),
    "nothing said of it": lambda folder: (folder / "lab.json").unlink(),
    "nothing in its file": says(""),
    "half a file": says('{"made": "2026'),
    "bytes": lambda folder: (folder / "lab.json").write_bytes(b"\xff\xfe\x00"),
    "a list": says("[]"),
    "of something else": says('{"name": "lab"}'),
    "a guest that is text": edited(lambda kept: kept.update(left="x")),
    "a guest that is a list": edited(lambda kept: kept.update(left=[])),
    "a guest without a process": edited(lambda kept: kept["left"].pop("qemu")),
    "no checksum": edited(lambda kept: kept.pop("memory")),
}


@pytest.mark.parametrize("damage", NOT_WHOLE)
def test_what_is_no_whole_snapshot_is_not_found(bench: Bench, damage: str) -> None:
    saved = put(bench)
    NOT_WHOLE[damage](saved.folder)
    assert snapshot.find(DIGEST) is None


def test_what_is_no_whole_snapshot_is_made_anew(bench: Bench) -> None:
    digest = snapshot.digest_of(bench.image, TCG, SPEC)
    saved = put(bench, digest)
    saved.state.unlink()
    again = ensure(bench)
    assert again.folder == saved.folder
    assert b"memory of" in again.memory.read_bytes()
    assert again.boot_id != saved.boot_id


def overwrite(path: Path, place: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


def is_whole_and_foreign(_: Bench, saved: Snapshot) -> None:
    saved.state.write_bytes(b"of another program")
    edit(saved.folder / "lab.json", lambda kept: kept.update(state=snapshot._checksum(saved.state)))


DAMAGE: Mapping[str, tuple[Callable[[Bench, Snapshot], object], str]] = {
    "a page": (lambda _, saved: overwrite(saved.memory, 200_001, b"x"), "its memory is not what"),
    "a hole": (lambda _, saved: overwrite(saved.memory, 9, b"x"), "its memory is not what"),
    "its length": (lambda _, saved: os.truncate(saved.memory, 300_000), "its memory is not what"),
    "half a state": (lambda _, saved: os.truncate(saved.state, 4), "its state is not what"),
    "another state": (is_whole_and_foreign, "Not a migration stream"),
    "no host": (lambda bench, _: bench.behaves("dies"), "QEMU ended"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_snapshot_is_told_and_removed(bench: Bench, damage: str) -> None:
    saved = put(bench)
    harm, says = DAMAGE[damage]
    harm(bench, saved)
    with (
        pytest.raises(Unusable, match=f"cannot be restored: .*{says}") as caught,
        restored(bench, saved),
    ):
        raise NEVER
    assert "a lab is booted" in caught.value.remedy
    assert not saved.folder.exists()
    assert snapshot.find(DIGEST) is None
    assert bench.nothing_left()


def test_a_snapshot_that_vanished_meanwhile_is_told(bench: Bench) -> None:
    saved = put(bench)
    snapshot.discard(saved)
    with pytest.raises(Unusable, match="was removed"), restored(bench, saved):
        raise NEVER
    assert bench.calls == []


@pytest.mark.parametrize("error", [FileNotFoundError("mine"), InfrastructureError("mine")])
def test_a_failure_of_the_block_is_its_own_and_the_snapshot_stays(
    bench: Bench, error: Exception
) -> None:
    saved = put(bench)
    with pytest.raises(type(error), match="mine") as caught, restored(bench, saved):
        raise error
    assert caught.value is error
    assert snapshot.find(DIGEST) == saved
    assert bench.nothing_left()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What each guest is taken over with; it is awake at once."""
    asked: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def taken_over(*arguments: Any) -> Iterator[str]:
        asked.append(arguments)
        # There is one machine here, which stands for host and guest.
        arguments[-1](arguments[0].machine)
        yield "guest"

    monkeypatch.setattr(guest, "taken_over", taken_over)
    return asked


def test_the_guest_of_a_restored_host_is_woken_by_a_block(
    bench: Bench, taken: list[tuple[Any, ...]]
) -> None:
    saved = put(bench)
    with restored(bench, saved) as (host, waking):
        assert taken == []
        with waking() as running:
            assert running == "guest"
            # Host and guest.
            clocks, seeds = zip(*bench.wakes, strict=True)
            assert all(abs(clock - time.time()) < 60 for clock in clocks)
            assert [len(seed) for seed in seeds] == [64, 64]
            assert seeds[0] != seeds[1]
    ((*others, _),) = taken
    assert others == [host, SPEC, saved.left]


def test_a_machine_that_keeps_its_old_clock_is_not_handed_out(
    bench: Bench, taken: list[tuple[Any, ...]]
) -> None:
    (bench.folder / "refuses").touch()
    with (
        restored(bench, put(bench)) as (_, waking),
        pytest.raises(InfrastructureError, match="clock") as caught,
        waking(),
    ):
        raise NEVER
    assert "cannot be set" in caught.value.stderr
    assert len(taken) == 1


# --- checksums -----------------------------------------------------------------------------


def test_zeroes_are_as_good_as_a_hole(tmp_path: Path) -> None:
    content = b"".join([bytes(70_000), b"x" * 5_000, bytes(900_000), b"y", bytes(65_536 - 1)])
    written, sparse = tmp_path / "written", tmp_path / "sparse"
    written.write_bytes(content)
    with sparse.open("wb") as file:
        for place in range(0, len(content), 4096):
            page = content[place : place + 4096]
            if page.strip(b"\0"):
                file.seek(place)
                file.write(page)
        file.truncate(len(content))
    assert sparse.stat().st_blocks < written.stat().st_blocks
    assert snapshot._checksum(sparse) == snapshot._checksum(written)


def test_whatever_differs_has_another_checksum(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [b"", bytes(10), bytes(11), b"a" + bytes(10), bytes(10) + b"a"]
    contents += [
        bytes(1 << 20) + b"a",
        b"a" + bytes(1 << 20),
        bytes(1 << 17) + b"a" + bytes(917505),
    ]
    found = set()
    for content in contents:
        path.write_bytes(content)
        found.add(snapshot._checksum(path))
    assert len(found) == len(contents)


def test_a_comparison_can_be_ended(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 100)
    stop = threading.Event()
    stop.set()
    assert snapshot._checksum(path, stop) == ""


# --- how many are kept ---------------------------------------------------------------------


def test_the_newest_are_kept_and_none_is_removed_that_a_lab_runs_from(bench: Bench) -> None:
    long_ago = time.time() - 1e6
    kept = [put(bench, f"{n:016}", used=long_ago + n) for n in range(1, 12)]
    # One that somebody was killed while removing, and one that is no snapshot's.
    shutil.copytree(kept[0].folder, bench.snapshots / f"{'f' * 16}-1")
    for name in ("lab.json", "state"):
        (bench.snapshots / f"{'f' * 16}-1" / name).unlink()
    with snapshot._in_use(kept[1]), snapshot._in_use(kept[1]):
        os.utime(kept[1].folder / "lab.json", (long_ago, long_ago))
        saved = ensure(bench)
        assert entries(bench) == sorted(each.folder.name for each in (kept[1], *kept[-7:], saved))
    # Its last use ended: it goes like any other.
    snapshot._prune(snapshot._store())
    assert kept[1].folder.name not in entries(bench)


def test_restoring_is_a_use(bench: Bench) -> None:
    saved = put(bench, used=1.0)
    with restored(bench, saved):
        assert (saved.folder / "lab.json").stat().st_mtime > time.time() - 60
        os.utime(saved.folder / "lab.json", (1.0, 1.0))
        for number in range(8):
            put(bench, f"{number:016}")
        snapshot._prune(snapshot._store())
        assert snapshot.find(DIGEST) == saved


def test_one_that_is_being_removed_is_told_when_it_is_wanted(bench: Bench) -> None:
    saved = put(bench)
    (saved.folder / "lab.json").unlink()
    with pytest.raises(Unusable, match="was removed"), restored(bench, saved):
        raise NEVER
