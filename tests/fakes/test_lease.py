"""One campaign per host, on a host played by a real sshd where there is one.

No image here: the lease's scripts run in this machine's own root, in a folder of the test's.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from tests.fakes.fake_lab import Answer, FakeMachine
from tests.fakes.processes import DEADLINE_S, alive, script, until
from tests.fakes.ssh_server import Keys, RealServer, Server, SshServer, find_sshd

from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.lab import lease as leases
from vringlab.lab.lease import Lease, Owner
from vringlab.transport.ssh import Machine

_SSHD = find_sshd()
#: Seconds; long enough for a busy machine to send a beat in time.
PATIENT = 120.0
_ROOT_PREFIX = leases.root_prefix


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    keys = Keys.make(tmp_path)
    if _SSHD:
        with RealServer(keys, tmp_path, _SSHD) as real:
            yield real
    else:
        with SshServer(keys) as fake:
            yield fake


@pytest.fixture
def machine(server: Server) -> Iterator[Machine]:
    with Machine(server.address, timeout=DEADLINE_S) as connected:
        yield connected


@pytest.fixture(autouse=True)
def nobody_needs_to_be_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "root_prefix", lambda _: "")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def take(machine: Machine, state: Path, run: str = "", patience_s: float = PATIENT) -> Lease:
    return Lease(machine, run=run, state=str(state), patience_s=patience_s)


def _free(state: Path) -> bool:
    return not (state / "owner").exists()


def _stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on we are another process."""
    monkeypatch.setattr(leases, "_ours", lambda: "another process")


# --- who has it ----------------------------------------------------------------------------


def test_a_host_that_is_taken_says_by_whom(
    machine: Machine, server: Server, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take(machine, state, "20260101-mine") as held:
        held.open()
        owner = Owner.parse((state / "owner").read_text())
        assert owner is not None
        assert owner.who == f"{getpass.getuser()}@{platform.node()}"
        assert (owner.pid, owner.run) == (os.getpid(), "20260101-mine")
        assert owner.since.endswith("Z")
        _stranger(monkeypatch)
        with Machine(server.address, timeout=DEADLINE_S) as other:
            with pytest.raises(TransientError, match="is busy") as caught:
                take(other, state).__enter__()
            assert str(owner) in caught.value.message
            assert "20260101-mine" in str(owner)
            # Nothing of the owner's was touched.
            assert held.inside.run("echo mine").stdout == "mine\n"
    assert _free(state)
    with take(machine, state):
        assert not _free(state)


@pytest.mark.parametrize("text", ["", "somebody", "{}", '{"who": 1}', "[1]"])
def test_a_record_that_cannot_be_read(text: str) -> None:
    assert Owner.parse(text) is None


def test_of_many_that_race_exactly_one_wins(
    server: Server, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(range(100))
    # Each is a process of its own, as far as the host can tell.
    monkeypatch.setattr(leases, "_ours", lambda: f"process {next(names)}")
    won: list[Lease] = []
    lost: list[TransientError] = []
    ready = threading.Barrier(5)
    with contextlib.ExitStack() as stack:
        machines = [
            stack.enter_context(Machine(server.address, timeout=DEADLINE_S)) for _ in range(5)
        ]

        def race(machine: Machine) -> None:
            mine = take(machine, state)
            ready.wait()
            try:
                won.append(mine.__enter__())
            except TransientError as error:
                lost.append(error)

        threads = [threading.Thread(target=race, args=(each,)) for each in machines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 4)
        assert all(f"process {os.getpid()}" in str(error) for error in lost)
        won[0].__exit__(None, None, None)
    assert _free(state)


@pytest.mark.parametrize(
    ("answer", "prefix"), [(("0\n", "", 1), ""), (("1000\n", "", 0), "sudo -n ")]
)
def test_rights_of_root_or_by_sudo(answer: Answer, prefix: str) -> None:
    fake = FakeMachine("kvm1", [], {"id -u": answer})
    assert _ROOT_PREFIX(cast(Machine, fake)) == prefix


def test_a_host_without_rights() -> None:
    fake = FakeMachine("kvm1", [], {"id -u": ("1000\nsudo: a password is required\n", "", 1)})
    with pytest.raises(UserError, match="no rights to make guests: sudo: a password") as caught:
        _ROOT_PREFIX(cast(Machine, fake))
    assert "sudo without a password" in caught.value.remedy


def test_all_is_done_by_sudo_where_the_user_is_not_root(
    machine: Machine, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "bin" / "sudo", f'echo "asked $*" > {tmp_path}/asked\nshift\nexec "$@"')
    monkeypatch.setattr(leases, "root_prefix", lambda _: "sudo -n ")
    user = machine.inside(f"env PATH={tmp_path}/bin:$PATH sh -c")
    with take(user, state, "it's a run") as held:
        held.open()
        owner = Owner.parse((state / "owner").read_text())
        assert owner is not None
        assert owner.run == "it's a run"
    assert (tmp_path / "asked").read_text().startswith("asked -n sh -c ")
    held._chrooted = True
    assert held.inside._prefix.startswith("sudo -n nsenter -t ")


def test_a_host_without_flock(machine: Machine, state: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("sh", "timeout", "mkdir"):
        (bare / name).symlink_to(f"/usr/bin/{name}")
    poor = machine.inside(f"env PATH={bare} sh -c")
    # The script adds the usual folders, where this machine has one.
    text = leases._text("host-session").replace("$PATH:/usr/local/sbin:/usr/sbin:/sbin", str(bare))
    arguments = [str(state), "{}", "x", "1", "", ""]
    done = poor.run(["sh", "-c", text, "host-session", *arguments], check=False)
    assert done.returncode == 1
    assert "flock is missing" in done.stderr


# --- what is undone ------------------------------------------------------------------------


def _change(held: Lease, folder: Path, name: str) -> Path:
    """A change of the host, and how it is undone: the order is kept in a file."""
    path = folder / name
    held.record(f"[ ! -e {path} ] || {{ rm {path}; echo {name} >> {folder}/order; }}")
    held.inside.run(["touch", str(path)])
    return path


def test_changes_are_undone_in_reverse_and_processes_ended_first(
    machine: Machine, state: Path, tmp_path: Path
) -> None:
    with take(machine, state) as held:
        held.open()
        paths = [_change(held, tmp_path, name) for name in ("one", "two", "it's")[:2]]
        held.inside.run(
            f"setsid sleep 1000 > /dev/null 2>&1 < /dev/null & echo $! > {tmp_path}/pid"
        )
        pid = int((tmp_path / "pid").read_text())
        assert alive(pid)
        assert all(path.exists() for path in paths)
    assert not alive(pid)
    assert not any(path.exists() for path in paths)
    assert (tmp_path / "order").read_text() == "two\none\n"
    assert sorted(path.name for path in state.iterdir()) == ["lock"]


def test_what_cannot_be_undone_is_told(machine: Machine, state: Path) -> None:
    with pytest.raises(InfrastructureError, match="as it was: exit 3") as caught:  # noqa: PT012, SIM117
        with take(machine, state) as held:
            held.open()
            held.record("exit 3")
    assert "as root" in caught.value.remedy
    with pytest.raises(UserError, match="mine") as other, take(machine, state) as held:  # noqa: PT012
        held.open()
        held.record("exit 3")
        raise UserError("mine", remedy="do this")
    assert other.value.remedy.startswith("do this; besides, ")


@pytest.fixture
def cramped(tmp_path: Path) -> Iterator[tuple[Machine, Path]]:
    """A host with a real sshd and a folder that can be filled."""
    if not _SSHD or os.geteuid() != 0:
        pytest.skip("a small file system takes a real sshd and root")
    small = tmp_path / "small"
    small.mkdir()
    server = RealServer(Keys.make(tmp_path), tmp_path, _SSHD, small=small)
    with server, Machine(server.address, timeout=DEADLINE_S) as connected:
        yield connected, small


def _fill(machine: Machine, folder: Path) -> None:
    done = machine.run(f"cat /dev/zero > {folder}/filler; df -Pk {folder}", check=False)
    assert "No space left" in done.stderr


def test_a_change_that_cannot_be_noted_is_not_made_and_the_others_are_undone(
    cramped: tuple[Machine, Path], tmp_path: Path
) -> None:
    machine, small = cramped
    with take(machine, small / "state") as held:
        held.open()
        path = _change(held, tmp_path, "one")
        _fill(machine, small)
        # The rest of a page that is in use still has room.
        long = f"touch {tmp_path}/half " + "x" * 5000
        begin = time.monotonic()
        with pytest.raises(InfrastructureError, match="cannot note how a change") as caught:
            held.record(long)
        assert time.monotonic() - begin < DEADLINE_S
        assert not isinstance(caught.value, TransientError)
        assert str(small) in caught.value.remedy
        machine.run(["rm", f"{small}/filler"])
        two = _change(held, tmp_path, "two")
    assert not path.exists()
    assert not two.exists()
    assert not (tmp_path / "half").exists()


def test_a_host_without_room_for_its_record_is_not_taken(
    cramped: tuple[Machine, Path],
) -> None:
    machine, small = cramped
    machine.run(["mkdir", f"{small}/state"])
    _fill(machine, small)
    with pytest.raises(InfrastructureError, match="ended before it printed") as caught:
        take(machine, small / "state").__enter__()
    assert "is it full?" in caught.value.stderr
    machine.run(["rm", f"{small}/filler"])
    with take(machine, small / "state") as held:
        held.open()


@pytest.mark.parametrize("year", ["1998", "2061"])
def test_a_clock_that_is_wrong_changes_only_what_is_told(
    machine: Machine, server: Server, state: Path, tmp_path: Path, year: str
) -> None:
    script(tmp_path / "bin" / "date", f'exec /bin/date -d "{year}-01-01 00:00:00 UTC" "$@"')
    wrong = machine.inside(f"env PATH={tmp_path}/bin:$PATH sh -c")
    with take(wrong, state, patience_s=4.0) as held:
        held.open()
        path = _change(held, tmp_path, "one")
        owner = Owner.parse((state / "owner").read_text())
        assert owner is not None
        assert owner.since == f"{year}-01-01T00:00:00Z"
        assert not until(lambda: _free(state), 5.0)
        with pytest.MonkeyPatch.context() as patch:
            _stranger(patch)
            with (
                Machine(server.address, timeout=DEADLINE_S) as other,
                pytest.raises(TransientError, match=f"since {year}"),
            ):
                take(other, state).__enter__()
    assert _free(state)
    assert not path.exists()


def test_a_connection_that_is_cut_is_undone_by_the_host_itself(
    machine: Machine, server: Server, state: Path, tmp_path: Path
) -> None:
    with take(machine, state) as held:
        held.open()
        path = _change(held, tmp_path, "one")
        process = held.inside.start(f"echo $$ > {tmp_path}/pid; exec sleep 1000")
        assert until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        pid = int((tmp_path / "pid").read_text())
        server.cut()
        assert until(lambda: _free(state))
        assert not path.exists()
        assert not alive(pid)
        process.close()
    with Machine(server.address, timeout=DEADLINE_S) as again, take(again, state):
        assert not _free(state)


def test_a_controller_that_falls_silent_is_given_up(
    machine: Machine, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The connection stands: the machine at its other end hangs, or its network is away.
    monkeypatch.setattr(leases, "_BEATS", 1e-6)
    with take(machine, state, patience_s=2.0) as held:
        held.open()
        path = _change(held, tmp_path, "one")
        assert until(lambda: _free(state))
        assert not path.exists()
        assert machine.alive


def test_beats_keep_it(machine: Machine, state: Path) -> None:
    with take(machine, state, patience_s=4.0) as held:
        held.open()
        assert not until(lambda: _free(state), 7.0)


def test_our_own_lost_session_is_waited_for(
    machine: Machine, server: Server, state: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    with take(machine, state) as held:
        held.open()
        held.record(f"sleep 2; touch {tmp_path}/undone")
        server.cut()
        with Machine(server.address, timeout=DEADLINE_S) as again:
            anew = Lease(again, state=str(state), on_step=said.append)
            with anew:
                assert (tmp_path / "undone").exists()


def _watch(held: Lease) -> tuple[int, int]:
    """Process ids of the watch and of the shell above it."""
    status = Path(f"/proc/{held._pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("PPid:")]
    return held._pid, int(line.split()[1])


def test_a_watch_that_is_killed_is_followed_by_another_that_undoes(
    machine: Machine, state: Path, tmp_path: Path
) -> None:
    with take(machine, state) as held:
        held.open()
        path = _change(held, tmp_path, "one")
        os.kill(_watch(held)[0], signal.SIGKILL)
        assert until(lambda: _free(state))
        assert not path.exists()


def test_what_a_dead_session_left_is_undone_by_the_next(
    machine: Machine, server: Server, state: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    held = take(machine, state).__enter__()
    held.open()
    path = _change(held, tmp_path, "one")
    held.inside.run(f"setsid sleep 1000 > /dev/null 2>&1 < /dev/null & echo $! > {tmp_path}/pid")
    # A stray guest, and nobody left who knows of it.
    pid = int((tmp_path / "pid").read_text())
    for each in reversed(_watch(held)):
        os.kill(each, signal.SIGKILL)
    held.__exit__(None, None, None)
    assert alive(pid)
    assert path.exists()
    with Machine(server.address, timeout=DEADLINE_S) as other:
        with Lease(other, state=str(state), on_step=said.append) as anew:
            anew.open()
            assert not alive(pid)
            assert not path.exists()
        assert "undid what a dead session left (1 processes)" in said[0]
    assert [path.name for path in state.iterdir()] == ["lock"]
