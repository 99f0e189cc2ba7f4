"""What a killed run left: its QEMU is ended, its folder removed, and nobody else's is touched."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.processes import alive, python, until

from vringlab.lab import owner


@pytest.fixture
def labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "labs"
    folder.mkdir()
    monkeypatch.setattr(owner, "_labs", lambda: folder)
    return folder


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes that stand in for QEMU or an owner."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "1000"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


Sleeper = Callable[[], subprocess.Popen[bytes]]


def record(labs: Path, name: str, of: tuple[int, str], qemu: tuple[int, str] | None) -> Path:
    folder = labs / f"lab-{name}"
    folder.mkdir()
    (folder / "console.log").write_text("booting")
    found = {"pid": of[0], "started": of[1]}
    found |= {"qemu_pid": qemu and qemu[0], "qemu_started": qemu and qemu[1]}
    (folder / "owner.json").write_text(json.dumps(found))
    return folder


def identity(pid: int) -> tuple[int, str]:
    started = owner.start_time(pid)
    assert started is not None
    return pid, started


def dead(sleeper: Sleeper) -> tuple[int, str]:
    process = sleeper()
    found = identity(process.pid)
    process.kill()
    process.wait()
    return found


def test_a_dead_owners_qemu_is_ended_and_its_folder_removed(labs: Path, sleeper: Sleeper) -> None:
    qemu = sleeper()
    folder = record(labs, "a", dead(sleeper), identity(qemu.pid))
    assert owner.reap() == [folder]
    assert not folder.exists()
    assert until(lambda: not alive(qemu.pid))


def test_another_process_with_qemus_number_is_left_alone(labs: Path, sleeper: Sleeper) -> None:
    stranger = sleeper()
    folder = record(labs, "a", dead(sleeper), (stranger.pid, "1"))
    assert owner.reap() == [folder]
    assert not folder.exists()
    assert alive(stranger.pid)


def test_an_owner_whose_number_was_given_away_is_dead(labs: Path, sleeper: Sleeper) -> None:
    qemu = sleeper()
    folder = record(labs, "a", (os.getpid(), "1"), identity(qemu.pid))
    assert owner.reap() == [folder]
    assert until(lambda: not alive(qemu.pid))


def test_a_qemu_that_is_gone_already(labs: Path, sleeper: Sleeper) -> None:
    folder = record(labs, "a", dead(sleeper), dead(sleeper))
    assert owner.reap() == [folder]


def test_an_owner_that_died_before_qemu_started(labs: Path, sleeper: Sleeper) -> None:
    folder = record(labs, "a", dead(sleeper), None)
    assert owner.reap() == [folder]


def test_of_two_labs_only_the_dead_ones_is_reaped(labs: Path, sleeper: Sleeper) -> None:
    mine, theirs = sleeper(), sleeper()
    living = record(labs, "living", identity(os.getpid()), identity(mine.pid))
    folder = record(labs, "dead", dead(sleeper), identity(theirs.pid))
    assert owner.reap() == [folder]
    assert living.exists()
    assert alive(mine.pid)
    assert until(lambda: not alive(theirs.pid))


def test_a_folder_without_an_owner_is_left_for_a_while(labs: Path) -> None:
    fresh, old = labs / "lab-fresh", labs / "lab-old"
    for folder in (fresh, old):
        folder.mkdir()
    long_ago = time.time() - 10 * owner._HALF_MADE_S
    os.utime(old, (long_ago, long_ago))
    assert owner.reap() == [old]
    assert fresh.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 1}', '"lab"', "null", "\0"])
def test_a_damaged_record_is_no_reason_to_fail(labs: Path, text: str) -> None:
    folder = labs / "lab-damaged"
    folder.mkdir()
    (folder / "owner.json").write_text(text)
    assert owner.reap() == []
    long_ago = time.time() - 10 * owner._HALF_MADE_S
    os.utime(folder, (long_ago, long_ago))
    assert owner.reap() == [folder]


@pytest.mark.parametrize("pid", ["1", None, -1, True, 1.5, [], 2**70])
def test_numbers_that_are_none_end_nobody(
    labs: Path, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch, pid: object
) -> None:
    folder = record(labs, "a", dead(sleeper), None)
    known = json.loads((folder / "owner.json").read_text())
    (folder / "owner.json").write_text(json.dumps({**known, "qemu_pid": pid}))
    killed: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda number, _signal: killed.append(number))
        assert owner.reap() == [folder]
    assert killed == []


def test_other_files_beside_labs_stay(labs: Path) -> None:
    (labs / "notes").mkdir()
    assert owner.reap() == []
    assert (labs / "notes").exists()


def test_no_folder_of_labs_yet(labs: Path) -> None:
    labs.rmdir()
    assert owner.reap() == []


def test_what_kill_9_leaves_of_a_real_owner(labs: Path) -> None:
    process = python(
        "import sys, time; from pathlib import Path\n"
        "from vringlab.lab import owner; from vringlab.transport import local\n"
        "owner._labs = lambda: Path(sys.argv[1])\n"
        "with owner.lab_folder() as folder:\n"
        "    with local.companion(['sleep', '1000'], log=folder / 'qemu.log') as process:\n"
        "        owner.record(folder, process.pid)\n"
        "        print(process.pid, flush=True); time.sleep(1000)",
        str(labs),
    )
    with process:
        assert process.stdout is not None
        qemu = int(process.stdout.readline())
        (folder,) = labs.iterdir()
        assert owner.reap() == []
        process.kill()
    assert owner.reap() == [folder]
    assert list(labs.iterdir()) == []
    assert until(lambda: not alive(qemu))
