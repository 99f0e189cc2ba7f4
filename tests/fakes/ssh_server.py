"""SSH servers for tests: one in this process, and a real sshd where there is one.

The one in this process does what OpenSSH does where it matters to a client: commands run by a
shell and go on when their channel closes, a signal is told as `exit-signal` and not as a status,
`direct-tcpip` connects from here. Beyond that it can be cut off like a machine that dies.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import paramiko
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_FAILED_CONNECT_FAILED,
    OPEN_SUCCEEDED,
    cMSG_CHANNEL_REQUEST,
)

from vringlab.settings import settings
from vringlab.transport.local import kill_group
from vringlab.transport.ssh import Address

_CHUNK = 65536


@dataclass(frozen=True)
class Key:
    """An Ed25519 key pair; `public` is the two words of a known_hosts or authorized_keys line."""

    path: Path
    public: str

    @classmethod
    def make(cls, path: Path) -> Key:
        private = Ed25519PrivateKey.generate()
        path.write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.OpenSSH,
                serialization.NoEncryption(),
            )
        )
        path.chmod(0o600)
        public = private.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        path.with_suffix(".pub").write_bytes(public)
        return cls(path, public.decode())


@dataclass(frozen=True)
class Keys:
    """A host's key, the key of the client it knows, and a stranger's."""

    host: Key
    client: Key
    stranger: Key

    @classmethod
    def make(cls, folder: Path) -> Keys:
        return cls(*(Key.make(folder / name) for name in ("host", "client", "stranger")))


class Server(Protocol):
    """What both servers can do."""

    @property
    def address(self) -> Address: ...

    def cut(self) -> None:
        """End all connections at once, without a word, as a machine does that dies."""


def _join(source: socket.socket | paramiko.Channel, sink: socket.socket | paramiko.Channel) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def _forward(channel: paramiko.Channel, target: socket.socket) -> None:
    """Both directions of a `direct-tcpip` channel, until both have ended."""
    back = threading.Thread(target=_join, args=(target, channel), daemon=True)
    back.start()
    _join(channel, target)
    back.join()
    channel.close()
    target.close()


def _execute(
    channel: paramiko.Channel, command: str, processes: list[subprocess.Popen[bytes]]
) -> None:
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    processes.append(process)
    assert process.stdin
    assert process.stdout
    assert process.stderr

    def hand_over(stream: Any, send: Any) -> None:
        # Closed early, the command's next write gives it SIGPIPE.
        with stream, contextlib.suppress(OSError, EOFError):
            while data := stream.read(_CHUNK):
                send(data)

    def feed(stream: Any) -> None:
        with contextlib.suppress(OSError, EOFError), stream:
            while data := channel.recv(_CHUNK):
                stream.write(data)

    feeder = threading.Thread(target=feed, args=(process.stdin,), daemon=True)
    pumps = [
        threading.Thread(target=hand_over, args=pair, daemon=True)
        for pair in (
            (process.stdout, channel.sendall),
            (process.stderr, channel.sendall_stderr),
        )
    ]
    for thread in (feeder, *pumps):
        thread.start()
    status = process.wait()
    for thread in pumps:
        thread.join()
    with contextlib.suppress(OSError, EOFError):
        if status >= 0:
            channel.send_exit_status(status)
        else:
            _send_signal(channel, -status)
        channel.shutdown_write()
    channel.close()
    feeder.join()


def _send_signal(channel: paramiko.Channel, number: int) -> None:
    """RFC 4254, section 6.10."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("exit-signal")
    message.add_boolean(False)
    message.add_string(signal.Signals(number).name.removeprefix("SIG"))
    message.add_boolean(False)
    message.add_string("")
    message.add_string("")
    transport: Any = channel.transport
    transport._send_user_message(message)


class _Policy(paramiko.ServerInterface):
    """Lets one key in and serves commands and tunnels."""

    def __init__(self, server: SshServer, connection: socket.socket) -> None:
        self._server = server
        self._connection = connection
        self._targets: dict[int, socket.socket] = {}

    def get_allowed_auths(self, username: str) -> str:  # noqa: ARG002
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self._server.attempts.append(username)
        if self._server.drop_in_auth > 0:
            self._server.drop_in_auth -= 1
            self._connection.shutdown(socket.SHUT_RDWR)
        known = f"{key.get_name()} {key.get_base64()}" == self._server.keys.client.public
        return AUTH_SUCCESSFUL if known else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:  # noqa: ARG002
        if kind == "session":
            return OPEN_SUCCEEDED
        return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        text = command.decode()
        self._server.commands.append(text)
        threading.Thread(
            target=_execute, args=(channel, text, self._server.processes), daemon=True
        ).start()
        return True

    def check_channel_direct_tcpip_request(
        self,
        chanid: int,
        origin: tuple[str, int],  # noqa: ARG002
        destination: tuple[str, int],
    ) -> int:
        try:
            self._targets[chanid] = socket.create_connection(destination, 10)
        except OSError:
            return OPEN_FAILED_CONNECT_FAILED
        self._targets[chanid].settimeout(None)
        return OPEN_SUCCEEDED

    def serve_tunnels(self, transport: paramiko.Transport) -> None:
        """Accepted channels come by here; those of sessions are served by their request."""
        while transport.is_active():
            channel = transport.accept(0.1)
            target = self._targets.pop(channel.get_id(), None) if channel else None
            if channel is not None and target is not None:
                threading.Thread(target=_forward, args=(channel, target), daemon=True).start()


@dataclass
class SshServer:
    """A server in this process.

    Attributes:
        keys: Who it is, and whom it lets in.
        port: Where it listens; a free one when 0.
        drop: How many connections it accepts and closes at once before it works.
        drop_in_auth: How many it closes when the client is about to log in.
        commands: What it was asked to run.
        attempts: User names that tried to log in.
        connections: How many connections it has accepted.
        processes: What it started; ended with the server.
    """

    keys: Keys
    port: int = 0
    drop: int = 0
    drop_in_auth: int = 0
    commands: list[str] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    connections: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = int(self._listener.getsockname()[1])
        self._host_key = paramiko.Ed25519Key.from_private_key_file(str(self.keys.host.path))
        self._transports: list[paramiko.Transport] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A blocked accept does not notice that its socket is closed.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for transport in self._transports:
            transport.close()
        for process in self.processes:
            kill_group(process)

    @property
    def address(self) -> Address:
        return Address(
            "fake", "127.0.0.1", self.port, "root", self.keys.client.path, self.keys.host.public
        )

    def cut(self) -> None:
        for transport in self._transports:
            with contextlib.suppress(OSError, EOFError):
                transport.sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.drop > 0:
                self.drop -= 1
                connection.close()
                continue
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport = paramiko.Transport(connection)
        transport.add_server_key(self._host_key)
        policy = _Policy(self, connection)
        self._transports.append(transport)
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            transport.start_server(event=threading.Event(), server=policy)
        threading.Thread(target=policy.serve_tunnels, args=(transport,), daemon=True).start()


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word: QEMU's forwarding before sshd is up."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield int(listener.getsockname()[1])


# --- a real sshd ---------------------------------------------------------------------------


@cache
def find_sshd() -> str | None:
    """A real sshd: VRINGLAB_TEST_SSHD, one that is installed, or Debian's, unpacked.

    Unpacked, since installing the package would open this machine to logins.
    """
    wanted = os.environ.get("VRINGLAB_TEST_SSHD")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return wanted or shutil.which("sshd", path=path) or _unpacked_sshd()


def _unpacked_sshd() -> str | None:
    """Debian's openssh-server in the cache; None where apt cannot fetch it."""
    target = settings().cache / "test-sshd"
    program = target / "sshd"
    if program.exists():
        return _loadable(program)
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        made = Path(name) / "made"
        for package in ("openssh-server", "libwrap0", "libwtmpdb0"):
            subprocess.run(
                ["apt-get", "-q", "download", package],
                cwd=name,
                capture_output=True,
                timeout=90,
                check=False,
            )
        for archive in Path(name).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, made], capture_output=True, check=False)
        if not (made / "usr/sbin/sshd").exists():
            return None
        # sshd runs itself again by its full path.
        libraries = ":".join(str(target / part) for part in ("lib", "usr/lib"))
        triplets = ":".join(f"{part}/x86_64-linux-gnu" for part in libraries.split(":"))
        (made / "sshd").write_text(
            f'#!/bin/sh\nexport LD_LIBRARY_PATH={triplets}\nexec {target}/usr/sbin/sshd "$@"\n'
        )
        (made / "sshd").chmod(0o755)
        with contextlib.suppress(OSError):
            made.rename(target)
    return _loadable(program) if program.exists() else None


def _loadable(program: Path) -> str | None:
    # It may lack a library that is not in those packages; the loader says so by this status.
    tried = subprocess.run([program, "-V"], capture_output=True, check=False)
    return None if tried.returncode == 127 else str(program)


@dataclass
class RealServer:
    """OpenSSH's sshd on a port of its own; its user is whoever runs the tests."""

    keys: Keys
    folder: Path
    program: str
    #: Further lines of its configuration.
    more: str = ""
    #: A folder of 2 MiB for its sessions alone, which can be filled; takes root.
    small: Path | None = None

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        authorized = self.folder / "authorized_keys"
        authorized.write_text(self.keys.client.public + "\n")
        self._config = self.folder / "sshd_config"
        self._config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.keys.host.path}\n"
            f"AuthorizedKeysFile {authorized}\nStrictModes no\nUsePAM no\nPidFile none\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\n{self.more}"
            f"{self._helpers()}"
        )

    def _helpers(self) -> str:
        """Since 9.8 sshd is several programs; unpacked ones are not where it expects them."""
        folder = Path(self.program).parent / "usr" / "lib" / "openssh"
        names = {"SshdSessionPath": "sshd-session", "SshdAuthPath": "sshd-auth"}
        return "".join(
            f"{option} {folder / name}\n"
            for option, name in names.items()
            if (folder / name).exists()
        )

    def _argv(self) -> list[str]:
        argv = [self.program, "-D", "-e", "-f", str(self._config)]
        if self.small is not None:
            inside = f'mount -t tmpfs -o size=2m none {self.small} && exec "$@"'
            argv = ["unshare", "-m", "sh", "-c", inside, "sh", *argv]
        if os.geteuid() != 0:
            return argv
        with contextlib.suppress(KeyError):
            pwd.getpwnam("sshd")
            Path("/run/sshd").mkdir(exist_ok=True)
            return argv
        # As root sshd wants an account and a folder that its package makes; here it sees both.
        passwd = self.folder / "passwd"
        entry = "sshd:x:64999:65534::/run/sshd:/usr/sbin/nologin\n"
        passwd.write_text(Path("/etc/passwd").read_text() + entry)
        inside = (
            f"mount --bind {passwd} /etc/passwd && mount -t tmpfs none /run && mkdir /run/sshd && "
            'exec "$@"'
        )
        return ["unshare", "-m", "sh", "-c", inside, "sh", *argv]

    def __enter__(self) -> Self:
        self._log = (self.folder / "sshd.log").open("wb")
        self._process = subprocess.Popen(
            self._argv(), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        deadline = time.monotonic() + 30
        while b"Server listening" not in (self.folder / "sshd.log").read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError((self.folder / "sshd.log").read_text())
            time.sleep(0.01)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cut()
        self._process.kill()
        self._process.wait()
        self._log.close()

    @property
    def address(self) -> Address:
        user = pwd.getpwuid(os.geteuid()).pw_name
        return Address(
            "sshd", "127.0.0.1", self.port, user, self.keys.client.path, self.keys.host.public
        )

    def cut(self) -> None:
        for task in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            for pid in task.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
