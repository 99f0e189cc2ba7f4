"""The SSH transport against a server in this process, and against a real sshd where one is."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.processes import DEADLINE_S, alive, until
from tests.fakes.ssh_server import (
    Keys,
    RealServer,
    Server,
    SshServer,
    find_sshd,
    silent_port,
)

from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.transport import ssh
from vringlab.transport.ssh import Machine

_SSHD = find_sshd()
#: VRINGLAB_TEST_SSHD=PATH runs the same tests against that sshd, also where none is installed.
BOTH = ["in-process", *(["sshd"] if _SSHD else [])]
MIB = 2**20


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys.make(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module", params=BOTH)
def server(
    request: pytest.FixtureRequest, keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param == "sshd":
        with RealServer(keys, tmp_path_factory.mktemp("sshd"), str(_SSHD)) as real:
            yield real
    else:
        with SshServer(keys) as fake:
            yield fake


@pytest.fixture
def machine(server: Server) -> Iterator[Machine]:
    with Machine(server.address, timeout=DEADLINE_S) as connected:
        yield connected


@pytest.fixture
def fake(keys: Keys) -> Iterator[SshServer]:
    """A server of the test's own, to be tampered with."""
    with SshServer(keys) as started:
        yield started


# --- commands ------------------------------------------------------------------------------


def test_output_status_and_time(machine: Machine) -> None:
    done = machine.run("echo out; echo err >&2; exit 3", check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
    assert done.seconds > 0


@pytest.mark.parametrize(
    "word",
    [
        "plain",
        "two words",
        "it's",
        '"quoted"',
        "$HOME `id` \\n",
        "häßlich 💥",
        "",
        "*",
        "-n",
        "a\nb",
    ],
)
def test_arguments_arrive_as_they_are(machine: Machine, word: str) -> None:
    assert machine.run(["printf", "%s|", "x", word]).stdout == f"x|{word}|"


def test_shell_text_may_hold_quotes_and_lines(machine: Machine) -> None:
    text = "for word in 'it''s' \"a b\"; do\n  echo \"<$word>\"\ndone # a comment"
    assert machine.run(text).stdout == "<its>\n<a b>\n"


def test_ten_mib_on_each_stream_at_once(machine: Machine) -> None:
    # paramiko#1778: read one after the other, they block each other beyond 2 MiB.
    size = 10 * MIB
    done = machine.run(
        f"head -c {size} /dev/zero | tr '\\0' e >&2 & head -c {size} /dev/zero | tr '\\0' o; wait",
        timeout=100,
    )
    assert len(done.stdout) == len(done.stderr) == size
    assert set(done.stdout) == {"o"}
    assert set(done.stderr) == {"e"}


def test_an_answer_as_long_as_the_input(machine: Machine) -> None:
    # The far side stops reading when nobody takes what it writes.
    data = os.urandom(6 * MIB)
    process = machine.start("cat", input=data)
    assert process.wait(100).returncode == 0
    assert process.stdout_bytes == data


def test_input_that_is_not_read_is_no_lost_connection(machine: Machine) -> None:
    done = machine.run("echo no >&2; exit 4", input=bytes(8 * MIB), check=False)
    assert (done.returncode, done.stderr) == (4, "no\n")
    assert machine.run("echo alive").stdout == "alive\n"


def test_a_failure_says_where_and_what(machine: Machine) -> None:
    with pytest.raises(InfrastructureError) as caught:
        machine.run("echo no disk >&2; exit 3", remedy="buy one")
    error = caught.value
    assert not isinstance(error, TransientError)
    assert (error.returncode, error.stderr, error.remedy) == (3, "no disk\n", "buy one")
    assert error.host == machine.name
    assert "no disk" in str(error)


def test_a_command_that_is_not_there(machine: Machine) -> None:
    assert machine.run(["no-such-program"], check=False).returncode == 127


@pytest.mark.parametrize("cause", ["kill -PIPE $$", "kill -KILL $$"])
def test_a_signal_is_not_a_lost_connection(machine: Machine, cause: str) -> None:
    # fio ends so when its peer closes first: the cell is invalid then, and the run goes on.
    process = machine.start(f"echo some; {cause}")
    done = process.wait(DEADLINE_S)
    assert done.stdout == "some\n"
    assert done.returncode == -1
    bounded = machine.run(f"echo some; {cause}", check=False)
    assert bounded.stdout == "some\n"
    assert bounded.returncode not in (0, 1, 127)
    with pytest.raises(InfrastructureError, match="the command failed"):
        machine.run(cause)


def test_a_silent_command_ends_at_its_deadline_on_the_far_side_too(
    machine: Machine, tmp_path: Path
) -> None:
    # paramiko#448: recv_exit_status waits for ever.
    path = tmp_path / "pids"
    with pytest.raises(TransientError, match=r"did not end within 2 s") as caught:
        machine.run(
            f"sleep 1000 & echo $! > {path}; echo $$ >> {path}; echo begun; wait",
            timeout=2,
            remedy="wait longer",
        )
    assert caught.value.stdout == "begun\n"
    assert caught.value.remedy == "wait longer"
    assert until(lambda: not any(alive(int(pid)) for pid in path.read_text().split()))
    assert machine.run("echo alive").stdout == "alive\n"


def test_waiting_for_an_end_that_does_not_come(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    process = machine.start(f"echo $$ > {path}; exec sleep 1000")
    assert until(path.exists)
    with pytest.raises(TransientError, match=r"did not end within 0\.3 s"):
        process.wait(0.3)
    machine.run(f"kill $(cat {path})")


def test_waiting_does_not_spin_after_the_output_has_ended(machine: Machine) -> None:
    process = machine.start("exec >&- 2>&-; sleep 1.5; exit 5")
    begin, cpu = time.monotonic(), time.thread_time()
    done = process.wait(DEADLINE_S)
    spent, passed = time.thread_time() - cpu, time.monotonic() - begin
    assert done.returncode == 5
    assert passed > 1
    assert spent < passed / 3


def test_descriptors_beyond_select(machine: Machine) -> None:
    extra = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while extra[-1] < 1100:
            extra.append(os.dup(extra[-1]))
        assert machine.run("echo fine").stdout == "fine\n"
    except OSError:
        pytest.skip("not so many descriptors are allowed here")
    finally:
        for descriptor in extra:
            os.close(descriptor)


def test_many_commands_leave_no_descriptor_behind(machine: Machine) -> None:
    machine.run("true")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(8):
        machine.run("echo x; exit 1", check=False)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


# --- commands beside us --------------------------------------------------------------------


def test_a_background_command_is_waited_for_by_its_words(machine: Machine) -> None:
    process = machine.start("echo ready >&2; read line; echo got; exit 2", input=b"go\n")
    process.wait_for("ready", DEADLINE_S)
    done = process.wait(DEADLINE_S)
    assert (done.stdout, done.stderr, done.returncode) == ("got\n", "ready\n", 2)
    assert not process.running


def test_words_that_never_come(machine: Machine) -> None:
    process = machine.start("echo else; sleep 30")
    process.wait_for("else", DEADLINE_S)
    with pytest.raises(TransientError, match=r"did not print 'ready' within 0\.3 s") as caught:
        process.wait_for("ready", 0.3)
    assert caught.value.stdout == "else\n"
    assert process.running
    process.close()


def test_an_end_instead_of_the_words(machine: Machine) -> None:
    process = machine.start("echo cannot bind >&2; exit 9")
    with pytest.raises(InfrastructureError, match="ended before it printed 'ready'") as caught:
        process.wait_for("ready", DEADLINE_S)
    assert not isinstance(caught.value, TransientError)
    assert (caught.value.returncode, caught.value.stderr) == (9, "cannot bind\n")


def test_words_at_the_very_end_count(machine: Machine) -> None:
    process = machine.start("echo ready")
    time.sleep(0.2)
    process.wait_for("ready", DEADLINE_S)
    assert process.wait(DEADLINE_S).stdout == "ready\n"


# --- files ---------------------------------------------------------------------------------


def test_binary_files_go_there_and_back(machine: Machine, tmp_path: Path) -> None:
    data = os.urandom(7 * MIB) + bytes(range(256))
    target = tmp_path / "it's a file"
    machine.put(data, str(target), mode=0o640)
    assert target.read_bytes() == data
    assert target.stat().st_mode & 0o777 == 0o640
    assert machine.get(str(target)) == data
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_an_empty_file(machine: Machine, tmp_path: Path) -> None:
    machine.put(b"", str(tmp_path / "empty"))
    assert (tmp_path / "empty").read_bytes() == b""
    assert machine.get(str(tmp_path / "empty")) == b""


def test_a_file_as_the_source(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"\0\1")
    machine.put(tmp_path / "source", str(tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == b"\0\1"


def test_a_file_is_replaced_as_a_whole(machine: Machine, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old and longer")
    machine.put(b"new", str(target))
    assert target.read_bytes() == b"new"


def test_a_large_file_without_a_folder_for_it(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="the command failed") as caught:
        machine.put(bytes(8 * MIB), str(tmp_path / "none" / "target"))
    assert not isinstance(caught.value, TransientError)
    assert "target.part" in caught.value.stderr
    assert str(tmp_path) in caught.value.remedy


def test_a_file_that_is_not_there(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="cannot be read") as caught:
        machine.get(str(tmp_path / "none"))
    assert "No such file" in caught.value.stderr


# --- tunnels -------------------------------------------------------------------------------


@pytest.fixture
def echo_port() -> Iterator[int]:
    """Answers what it was sent, in capitals, once the sender has ended; then closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                heard = b""
                while data := connection.recv(65536):
                    heard += data
                connection.sendall(heard.upper())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield int(listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_a_tunnel_carries_both_ways_and_the_end_of_each(machine: Machine, echo_port: int) -> None:
    sent = b"abc" * MIB
    with machine.tunnel("127.0.0.1", echo_port, timeout=DEADLINE_S) as end:
        end.settimeout(DEADLINE_S)
        end.sendall(sent)
        end.shutdown(socket.SHUT_WR)
        heard = b""
        while data := end.recv(65536):
            heard += data
    assert heard == sent.upper()


def test_a_tunnel_closed_here_is_closed_there(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        port = int(listener.getsockname()[1])
        with machine.tunnel("127.0.0.1", port, timeout=DEADLINE_S) as end:
            connection, _ = listener.accept()
            end.sendall(b"x")
            assert connection.recv(1) == b"x"
        with connection:
            connection.settimeout(DEADLINE_S)
            assert connection.recv(1) == b""


def test_a_tunnel_waits_for_its_listener(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    timer = threading.Timer(0.3, listener.listen)
    timer.start()
    try:
        with machine.tunnel("127.0.0.1", port, timeout=DEADLINE_S) as end:
            assert end.fileno() >= 0
    finally:
        timer.join()
        listener.close()


def test_a_tunnel_to_nothing(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with (
        pytest.raises(TransientError, match=rf"nothing answered on 127\.0\.0\.1:{port}"),
        machine.tunnel("127.0.0.1", port, timeout=0.3),
    ):
        raise AssertionError("there was nobody to connect to")
    assert machine.run("echo alive").stdout == "alive\n"


def test_a_machine_behind_a_machine(machine: Machine, fake: SshServer) -> None:
    with Machine(fake.address, timeout=DEADLINE_S, via=machine) as behind:
        assert behind.run("echo deep").stdout == "deep\n"


def test_a_machine_behind_one_that_is_gone(fake: SshServer, keys: Keys) -> None:
    with SshServer(keys) as between, Machine(between.address, timeout=DEADLINE_S) as first:
        between.cut()
        assert until(lambda: not first.alive)
        begin = time.monotonic()
        with pytest.raises(TransientError, match="on the way to it, is gone"):
            Machine(fake.address, timeout=10 * DEADLINE_S, via=first)
        assert time.monotonic() - begin < DEADLINE_S


# --- a connection that does not come -------------------------------------------------------


def test_a_server_that_hangs_up_for_a_while_is_waited_for(fake: SshServer) -> None:
    # As a forwarded port before sshd is up, and sshd while it has too many clients.
    fake.drop = 3
    fake.drop_in_auth = 2
    with Machine(fake.address, timeout=DEADLINE_S) as machine:
        assert machine.run("echo up").stdout == "up\n"
    assert fake.connections == 6


def test_a_port_that_opens_late(keys: Keys) -> None:
    with SshServer(keys) as gone:
        address = gone.address
    servers: list[SshServer] = []

    def start() -> None:
        late = SshServer(keys, port=address.port)
        servers.append(late.__enter__())

    timer = threading.Timer(0.3, start)
    timer.start()
    try:
        with Machine(address, timeout=DEADLINE_S) as machine:
            assert machine.run("echo up").stdout == "up\n"
    finally:
        timer.join()
        for late in servers:
            late.__exit__(None, None, None)


def test_a_banner_that_never_comes(keys: Keys, fake: SshServer) -> None:
    begin = time.monotonic()
    with silent_port() as port, pytest.raises(TransientError, match=r"within 1 s") as caught:
        Machine(replace(fake.address, port=port), timeout=1.0)
    assert time.monotonic() - begin < DEADLINE_S
    assert "VRINGLAB_BOOT_TIMEOUT" in caught.value.remedy
    assert keys.client.public not in str(caught.value)


def test_a_silent_attempt_does_not_use_up_the_deadline(
    fake: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first connection reaches a machine that has only just begun to boot and forgets it.
    monkeypatch.setattr(ssh, "_ATTEMPT_S", 0.5)
    connect = socket.create_connection
    with silent_port() as silent:
        ports = [silent]

        def redirected(target: tuple[str, int], timeout: float) -> socket.socket:
            return connect((target[0], ports.pop() if ports else target[1]), timeout)

        monkeypatch.setattr(socket, "create_connection", redirected)
        with Machine(fake.address, timeout=DEADLINE_S) as machine:
            assert machine.run("echo up").stdout == "up\n"
    assert ports == []


def test_nobody_listens(fake: SshServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    with pytest.raises(TransientError, match="did not answer on SSH") as caught:
        Machine(replace(fake.address, port=port), timeout=0.3)
    assert "refused" in caught.value.message


def test_another_host_key_ends_it_before_anything_is_sent(fake: SshServer, keys: Keys) -> None:
    address = replace(fake.address, host_key=keys.stranger.public)
    begin = time.monotonic()
    with pytest.raises(InfrastructureError, match="another host key than expected") as caught:
        Machine(address, timeout=10 * DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S
    assert not isinstance(caught.value, TransientError)
    assert keys.host.public in str(caught.value)
    assert fake.attempts == []
    assert fake.commands == []
    assert fake.connections == 1


def test_a_refused_key_is_not_tried_again(server: Server, keys: Keys) -> None:
    begin = time.monotonic()
    with pytest.raises(InfrastructureError, match="refused the key") as caught:
        Machine(replace(server.address, key=keys.stranger.path), timeout=10 * DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S
    assert not isinstance(caught.value, TransientError)
    assert "authorized_keys" in caught.value.remedy


def test_a_refused_key_is_tried_once(fake: SshServer, keys: Keys) -> None:
    with pytest.raises(InfrastructureError, match="refused the key"):
        Machine(replace(fake.address, key=keys.stranger.path), timeout=DEADLINE_S)
    assert len(fake.attempts) == 1


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_text("no key"), "cannot be read"),
    ],
    ids=["missing", "damaged"],
)
def test_a_key_of_ours_that_cannot_be_read(
    fake: SshServer,
    keys: Keys,
    tmp_path: Path,
    break_it: Callable[[Path], object],
    message: str,
) -> None:
    path = tmp_path / "key"
    path.write_bytes(keys.client.path.read_bytes())
    break_it(path)
    with pytest.raises(UserError, match=message):
        Machine(replace(fake.address, key=path), timeout=DEADLINE_S)
    assert fake.connections == 0


@pytest.mark.parametrize(
    "line", ["", "ssh-ed25519", "ssh-ed25519 %%%", "none AAAA", "ssh-rsa AAAA"]
)
def test_a_host_key_that_is_none(fake: SshServer, line: str) -> None:
    with pytest.raises(UserError, match="host key expected"):
        Machine(replace(fake.address, host_key=line), timeout=DEADLINE_S)
    assert fake.connections == 0


# --- a connection that breaks --------------------------------------------------------------


def test_a_connection_cut_in_the_middle_of_a_command(server: Server) -> None:
    with Machine(server.address, timeout=DEADLINE_S) as machine:
        process = machine.start("echo begun; sleep 20")
        process.wait_for("begun", DEADLINE_S)
        server.cut()
        with pytest.raises(TransientError, match="the connection was lost") as caught:
            process.wait(DEADLINE_S)
        assert caught.value.stdout == "begun\n"
        assert "resume" in caught.value.remedy
        assert until(lambda: not machine.alive)
        with pytest.raises(TransientError, match="was lost"):
            machine.run("echo more")


def test_a_connection_cut_while_words_are_waited_for(server: Server) -> None:
    with Machine(server.address, timeout=DEADLINE_S) as machine:
        process = machine.start("echo begun; sleep 20")
        process.wait_for("begun", DEADLINE_S)
        timer = threading.Timer(0.2, server.cut)
        timer.start()
        with pytest.raises(TransientError, match="the connection was lost"):
            process.wait_for("ready", DEADLINE_S)
        timer.join()


def test_a_transfer_cut_in_the_middle_leaves_the_old_file(fake: SshServer, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with Machine(fake.address, timeout=DEADLINE_S) as machine:

        def cut_when_begun() -> None:
            part = tmp_path / "target.part"
            assert until(lambda: part.exists() and part.stat().st_size > 0)
            fake.cut()

        cutter = threading.Thread(target=cut_when_begun)
        cutter.start()
        with pytest.raises(TransientError, match="lost"):
            machine.put(bytes(64 * MIB), str(target))
        cutter.join()
    for process in fake.processes:
        process.wait(timeout=DEADLINE_S)
    assert target.read_bytes() == b"old"


def test_a_short_transfer_does_not_count(fake: SshServer, tmp_path: Path) -> None:
    # What arrives is counted on the far side: here a `wc` that finds less.
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "wc").write_text("#!/bin/sh\necho 1\n")
    (tools / "wc").chmod(0o755)
    with Machine(fake.address, timeout=DEADLINE_S) as machine:
        old = os.environ["PATH"]
        os.environ["PATH"] = f"{tools}:{old}"
        try:
            with pytest.raises(InfrastructureError, match="the command failed"):
                machine.put(b"content", str(tmp_path / "target"))
        finally:
            os.environ["PATH"] = old
    assert not (tmp_path / "target").exists()
