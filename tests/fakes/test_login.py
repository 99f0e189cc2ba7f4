"""Logging in as the user's own `ssh` would: a temporary home, a real sshd where there is one."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
import pytest
from tests.fakes.processes import DEADLINE_S, until
from tests.fakes.ssh_server import Key, Keys, RealServer, SshServer, find_sshd, silent_port

from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.transport import login
from vringlab.transport.login import Target, connect, known_keys, resolve, route

_SSHD = find_sshd()


@dataclass
class Home:
    """A home folder with the client's key in it."""

    path: Path
    keys: Keys

    @property
    def ssh(self) -> Path:
        return self.path / ".ssh"

    def config(self, text: str) -> None:
        (self.ssh / "config").write_text(text)

    def know(self, line: str) -> None:
        with (self.ssh / "known_hosts").open("a") as file:
            file.write(line + "\n")

    def knows(self, port: int, key: Key | None = None, host: str = "127.0.0.1") -> None:
        self.know(f"[{host}]:{port} {(key or self.keys.host).public}")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys.make(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def home(keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    made = Home(tmp_path / "home", keys)
    made.ssh.mkdir(parents=True)
    shutil.copy(keys.client.path, made.ssh / "id_ed25519")
    shutil.copy(keys.client.path.with_suffix(".pub"), made.ssh / "id_ed25519.pub")
    monkeypatch.setenv("HOME", str(made.path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(login, "_SYSTEM_CONFIG", tmp_path / "no-system-config")
    return made


@pytest.fixture(scope="module")
def port(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real sshd where there is one, else the one in this process."""
    if _SSHD:
        with RealServer(keys, tmp_path_factory.mktemp("sshd"), _SSHD) as real:
            yield real.port
    else:
        with SshServer(keys) as fake:
            yield fake.port


def at(port: int, host: str = "127.0.0.1") -> Target:
    return Target.parse(f"ssh://{getpass.getuser()}@{host}:{port}")


# --- addresses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("ssh://kvm1", Target("kvm1")),
        ("ssh://root@KVM1.example.org:2222/", Target("KVM1.example.org", "root", 2222)),
        ("root@kvm1", Target("kvm1", "root")),
        ("ssh://[::1]:22", Target("::1", None, 22)),
        (
            "ssh://a?tune&swap-host-module",
            Target("a", options=frozenset({"tune", "swap-host-module"})),
        ),
    ],
)
def test_addresses(text: str, target: Target) -> None:
    assert Target.parse(text) == target


@pytest.mark.parametrize(
    "text",
    [
        "ssh://",
        "ssh://@x:y",
        "ssh://a:99999",
        "http://a",
        "ssh://u:secret@a",
        "ssh://a/path",
        "ssh://-oX",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError) as caught:
        Target.parse(text)
    assert "ssh://[user@]host[:port]" in caught.value.remedy


# --- the configuration ---------------------------------------------------------------------


def test_configuration_is_honoured(home: Home) -> None:
    (home.ssh / "extra").write_text("Host lab\n  Port 2200\n  HostKeyAlias the-lab\n")
    home.config(
        "Include extra\n"
        "Host lab\n  HostName 10.1.2.3\n  User bob\n  Port 99\n  IdentityFile ~/.ssh/lab_key\n"
        "  IdentitiesOnly yes\n  UserKnownHostsFile ~/.ssh/lab_hosts\n  ConnectTimeout 7\n"
    )
    found = resolve(Target("lab"))
    assert (found.host, found.port, found.user) == ("10.1.2.3", 2200, "bob")
    assert found.identities == (home.ssh / "lab_key",)
    assert found.identities_only
    assert found.known_hosts[0] == home.ssh / "lab_hosts"
    assert found.attempt_s == 7
    assert found.known_as == "the-lab"
    # What the address says goes before the configuration.
    assert resolve(Target("lab", "eve", 1)).user == "eve"
    assert resolve(Target("lab", "eve", 1)).port == 1


def test_without_configuration_the_usual_values(home: Home) -> None:
    found = resolve(Target("kvm1"))
    assert (found.host, found.port, found.user) == ("kvm1", 22, getpass.getuser())
    assert home.ssh / "id_ed25519" in found.identities
    assert found.known_as == "kvm1"


@pytest.mark.parametrize("text", ["Host a\n  Port many\n", "Host a\n  ConnectTimeout soon\n"])
def test_a_configuration_of_nonsense(home: Home, text: str) -> None:
    home.config(text)
    with pytest.raises(UserError, match="no number for a"):
        resolve(Target("a"))


def test_chains_of_jumps(home: Home) -> None:
    home.config(
        "Host deep\n  ProxyJump outer,bob@inner:2200\nHost outer\n  ProxyJump gate\n"
        "Host free\n  ProxyJump none\n"
        "Host circle\n  ProxyJump back\nHost back\n  ProxyJump circle\n"
    )
    logins = route(Target("deep"))
    assert [each.host for each in logins] == ["gate", "outer", "inner", "deep"]
    assert [each.tunnelled for each in logins] == [False, True, True, True]
    assert (logins[2].user, logins[2].port) == ("bob", 2200)
    assert len(route(Target("free"))) == 1
    with pytest.raises(UserError, match="circle > back > circle"):
        route(Target("circle"))


# --- known hosts ---------------------------------------------------------------------------


def _hashed(name: str) -> str:
    return paramiko.HostKeys.hash_host(name)


@pytest.mark.parametrize(
    ("field", "name", "known"),
    [
        ("kvm1", "kvm1", True),
        ("kvm1,10.0.0.1", "10.0.0.1", True),
        ("KVM1", "kvm1", True),
        ("kvm1", "kvm10", False),
        ("[kvm1]:22", "kvm1", False),
        ("[kvm1]:2222", "[kvm1]:2222", True),
        ("*.example.org", "a.example.org", True),
        ("*.example.org,!b.example.org", "b.example.org", False),
        ("kvm?", "kvm1", True),
        pytest.param(_hashed("kvm1"), "kvm1", True, id="hashed"),
        pytest.param(_hashed("kvm1"), "kvm2", False, id="hashed, another"),
        pytest.param(_hashed("[kvm1]:2222"), "[kvm1]:2222", True, id="hashed, with port"),
        ("|1|broken", "kvm1", False),
    ],
)
def test_names_of_known_hosts(tmp_path: Path, field: str, name: str, known: bool) -> None:
    file = tmp_path / "known"
    file.write_text(f"# {name} ssh-ed25519 AAAA\n\n{field} ssh-ed25519 BBBB a comment\nshort\n")
    found = known_keys([tmp_path / "none", file], name)
    assert [(entry.encoded, entry.line) for entry in found] == ([("BBBB", 3)] if known else [])


def test_authorities_are_no_host_keys_and_revoked_ones_are_marked(tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text("@cert-authority * ssh-ed25519 AAAA\n@revoked * ssh-ed25519 BBBB\n")
    (found,) = known_keys([file], "kvm1")
    assert (found.marker, found.encoded) == ("@revoked", "BBBB")


# --- logging in ----------------------------------------------------------------------------


@pytest.mark.parametrize("hashed", [False, True])
def test_a_known_host_and_a_default_key(home: Home, port: int, hashed: bool) -> None:
    name = f"[127.0.0.1]:{port}"
    home.know(f"{_hashed(name) if hashed else name} {home.keys.host.public}")
    with connect(at(port)) as machine:
        assert machine.run("echo in").stdout == "in\n"


def test_a_key_known_for_the_usual_port_counts(home: Home, port: int) -> None:
    home.know(f"127.0.0.1 {home.keys.host.public}")
    with connect(at(port)) as machine:
        assert machine.alive


def test_a_name_of_the_configuration(home: Home, port: int) -> None:
    (home.ssh / "id_ed25519").rename(home.ssh / "other_key")
    (home.ssh / "id_ed25519.pub").unlink()
    home.config(
        f"Host mine\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        "  IdentityFile ~/.ssh/other_key\n  UserKnownHostsFile ~/.ssh/lab_hosts\n"
    )
    (home.ssh / "lab_hosts").write_text(f"[127.0.0.1]:{port} {home.keys.host.public}\n")
    with connect(Target.parse("ssh://mine")) as machine:
        assert machine.name == "mine"
        assert machine.run("echo in").stdout == "in\n"


def test_a_host_that_is_not_known_is_refused_with_what_accepts_it(home: Home, port: int) -> None:
    with (
        pytest.raises(UserError, match="a host key that is not known") as caught,
        connect(at(port)),
    ):
        raise AssertionError("nobody may trust it")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", home.keys.host.path.with_suffix(".pub")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[1]
    assert shown.startswith("SHA256:")
    assert shown in caught.value.message
    command = f"ssh-keyscan -t ed25519 -p {port} 127.0.0.1 >> ~/.ssh/known_hosts"
    assert command in caught.value.remedy
    if not _SSHD:
        return
    # It is what it says: run, it makes the host known. (~ is the shell's, and this home's.)
    subprocess.run(["sh", "-c", command], capture_output=True, timeout=DEADLINE_S, check=True)
    with connect(at(port)) as machine:
        assert machine.alive


def test_a_host_whose_key_has_changed_is_refused(home: Home, port: int) -> None:
    home.know("# a line before it")
    home.knows(port, home.keys.stranger)
    with pytest.raises(InfrastructureError, match="another host key than it had") as caught:
        connect(at(port)).__enter__()
    assert not isinstance(caught.value, TransientError)
    assert "SHA256:" in caught.value.message
    assert f"{home.ssh / 'known_hosts'}:2" in caught.value.message
    forget = f"ssh-keygen -R '[127.0.0.1]:{port}' -f ~/.ssh/known_hosts"
    assert forget in caught.value.remedy
    done = subprocess.run(["sh", "-c", forget], capture_output=True, timeout=DEADLINE_S, check=True)
    assert b"updated" in done.stdout + done.stderr
    with pytest.raises(UserError, match="not known"):
        connect(at(port)).__enter__()


def test_a_revoked_key_is_refused_although_it_is_known(home: Home, port: int) -> None:
    home.knows(port)
    home.know(f"@revoked * {home.keys.host.public}")
    with pytest.raises(InfrastructureError, match="a revoked host key"):
        connect(at(port)).__enter__()


def test_refused_logins_say_what_was_tried_and_are_not_repeated(home: Home, port: int) -> None:
    home.knows(port)
    shutil.copy(home.keys.stranger.path, home.ssh / "id_ed25519")
    (home.ssh / "id_ed25519.pub").unlink()
    begin = time.monotonic()
    with pytest.raises(InfrastructureError, match="does not let") as caught:
        connect(at(port), timeout=10 * DEADLINE_S).__enter__()
    assert time.monotonic() - begin < DEADLINE_S
    assert not isinstance(caught.value, TransientError)
    assert "id_ed25519" in caught.value.message
    assert "ssh-copy-id" in caught.value.remedy


def test_a_key_with_a_passphrase_is_told(home: Home, port: int) -> None:
    home.knows(port)
    path = home.ssh / "id_ed25519"
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", path], check=True, capture_output=True
    )
    with pytest.raises(InfrastructureError, match="there is no usable one") as caught:
        connect(at(port)).__enter__()
    assert "ssh-add" in caught.value.remedy


@contextlib.contextmanager
def agent(folder: Path, *paths: Path) -> Iterator[str]:
    name = str(folder / "agent")
    with subprocess.Popen(["ssh-agent", "-D", "-a", name], stdout=subprocess.DEVNULL) as process:
        try:
            assert until(lambda: Path(name).exists())
            for path in paths:
                subprocess.run(
                    ["ssh-add", "-q", path],
                    env={**os.environ, "SSH_AUTH_SOCK": name},
                    check=True,
                    capture_output=True,
                )
            yield name
        finally:
            process.terminate()


def test_keys_of_the_agent(
    home: Home, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.knows(port)
    with agent(tmp_path, home.keys.stranger.path, home.keys.client.path) as name:
        monkeypatch.setenv("SSH_AUTH_SOCK", name)
        (home.ssh / "id_ed25519").unlink()
        with connect(at(port)) as machine:
            assert machine.run("echo in").stdout == "in\n"
        home.config("Host *\n  IdentitiesOnly yes\n")
        with pytest.raises(InfrastructureError, match="there is no usable one"):
            connect(at(port)).__enter__()


def test_too_many_wrong_keys_are_a_refusal(
    home: Home, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _SSHD:
        pytest.skip("there is no sshd here")
    strangers = [Key.make(tmp_path / f"stranger{number}").path for number in range(4)]
    with (
        RealServer(keys, tmp_path, _SSHD, "MaxAuthTries 3\n") as server,
        agent(tmp_path, *strangers) as name,
    ):
        home.knows(server.port)
        monkeypatch.setenv("SSH_AUTH_SOCK", name)
        begin = time.monotonic()
        with pytest.raises(InfrastructureError, match="does not let") as caught:
            connect(at(server.port), timeout=10 * DEADLINE_S).__enter__()
    assert time.monotonic() - begin < DEADLINE_S
    assert "IdentitiesOnly" in caught.value.remedy


# --- on the way ----------------------------------------------------------------------------


def test_through_two_jumps(home: Home, port: int, keys: Keys) -> None:
    user = getpass.getuser()
    with SshServer(keys) as first, SshServer(keys) as second:
        home.config(
            f"Host first\n  HostName 127.0.0.1\n  Port {first.port}\n"
            f"Host second\n  HostName 127.0.0.1\n  Port {second.port}\n"
            f"Host target\n  HostName 127.0.0.1\n  Port {port}\n  User {user}\n"
            f"  ProxyJump {user}@first,{user}@second\n"
        )
        for number in (first.port, second.port, port):
            home.knows(number)
        with connect(Target("target")) as machine:
            assert machine.run("echo deep").stdout == "deep\n"
        assert (first.connections, second.connections) == (1, 1)


def test_a_host_behind_a_jump_is_accepted_by_the_very_key_seen(
    home: Home, port: int, keys: Keys
) -> None:
    with SshServer(keys) as gate:
        home.config(
            f"Host gate\n  HostName 127.0.0.1\n  Port {gate.port}\n"
            f"Host target\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
            "  ProxyJump gate\n"
        )
        home.knows(gate.port)
        with pytest.raises(UserError, match="not known") as caught:
            connect(Target("target")).__enter__()
        line = f"'[127.0.0.1]:{port} {keys.host.public}'"
        assert f"echo {line} >> ~/.ssh/known_hosts" in caught.value.remedy


def test_through_a_command(home: Home, port: int) -> None:
    relay = (
        "import os,socket,sys,threading;s=socket.create_connection(('127.0.0.1',int(sys.argv[1])));"
        "threading.Thread(target=lambda:[s.sendall(d) for d in iter(lambda:os.read(0,65536),b'')],"
        "daemon=True).start();[os.write(1,d) for d in iter(lambda:s.recv(65536),b'')]"
    )
    script = home.path / "relay.py"
    script.write_text(relay)
    home.config(f"Host *\n  ProxyCommand {sys.executable} {script} %p\n")
    home.knows(port)
    with connect(at(port)) as machine:
        assert machine.run("echo by").stdout == "by\n"


# --- hosts that do not answer --------------------------------------------------------------


def test_sshd_that_accepts_and_closes_for_twenty_seconds_is_waited_for(
    home: Home, port: int
) -> None:
    """A load balancer, or sshd under MaxStartups: closed connections, and then a real sshd."""
    seconds = 20.0
    begin = time.monotonic()
    closed: list[float] = []
    ends: list[socket.socket] = []
    pumps: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = int(listener.getsockname()[1])

        def carry(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    if time.monotonic() - begin < seconds:
                        closed.append(time.monotonic())
                        client.close()
                        continue
                    server = socket.create_connection(("127.0.0.1", port))
                    ends.extend([client, server])
                    for pair in ((client, server), (server, client)):
                        pumps.append(threading.Thread(target=carry, args=pair, daemon=True))
                        pumps[-1].start()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        home.knows(mine)
        with connect(at(mine)) as machine:
            assert machine.run("echo at last").stdout == "at last\n"
        waited = time.monotonic() - begin
        for end in (listener, *ends):
            # Each of them may have been ended by its peer, and a reset ends one direction only.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in (serving, *pumps):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        for end in ends:
            end.close()
    assert len(closed) > 5
    assert seconds < waited < login.ANSWER_S


def test_a_banner_that_never_comes(home: Home) -> None:
    home.config("Host *\n  ConnectTimeout 1\n")
    begin = time.monotonic()
    with silent_port() as silent, pytest.raises(TransientError, match="did not answer") as caught:
        connect(at(silent), timeout=2.5).__enter__()
    assert 2 < time.monotonic() - begin < DEADLINE_S
    assert f"ssh -p {silent}" in caught.value.remedy


def test_a_host_that_is_none(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve_nothing(*_: object) -> socket.socket:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    home.config("Host *\n  ProxyJump none\n")
    monkeypatch.setattr(socket, "create_connection", resolve_nothing)
    begin = time.monotonic()
    with pytest.raises(UserError, match="there is no host 'no-such-host'"):
        connect(Target("no-such-host")).__enter__()
    assert time.monotonic() - begin < DEADLINE_S / 2


def test_a_connection_cut_in_the_middle_of_a_command(
    home: Home, keys: Keys, tmp_path: Path
) -> None:
    if not _SSHD:
        pytest.skip("there is no sshd here; the same is tested with the one in this process")
    with RealServer(keys, tmp_path, _SSHD) as server:
        home.knows(server.port)
        with connect(at(server.port)) as machine:
            process = machine.start("echo begun; sleep 20")
            process.wait_for("begun", DEADLINE_S)
            server.cut()
            with pytest.raises(TransientError, match="the connection was lost"):
                process.wait(DEADLINE_S)
