"""A machine reached over SSH: commands, files and tunnels on one connection.

paramiko's known traps are handled here and nowhere else: both output streams are drained
together (its window deadlocks otherwise past 2 MiB), and every wait has a deadline
(`recv_exit_status` has none).
"""

from __future__ import annotations

import base64
import contextlib
import copy
import logging
import select
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import paramiko
from paramiko.pkey import UnknownKeyType

from vringlab.errors import InfrastructureError, TransientError, UserError
from vringlab.transport.local import Completed

#: Whatever fails here is raised as an error of ours; paramiko would print tracebacks besides.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)

_CHUNK = 65536
#: A command that is over its time is ended on the far side first; then we stop waiting.
_GRACE_S = 10.0
_RETRY_S = 0.1
_ATTEMPT_S = 30.0
_SEND_POLL_S = 0.005
#: paramiko closes the channels of a lost connection a moment before it says that it is lost.
_LOSS_S = 0.2
#: What paramiko raises when a connection breaks, depending on where it notices.
_LOST = (OSError, EOFError, paramiko.SSHException)


class Credentials(Protocol):
    """What is checked of a machine, and what is shown to it."""

    @property
    def host_key_types(self) -> Sequence[str]:
        """Kinds of host keys to ask for first."""
        ...

    def check(self, seen: paramiko.PKey) -> None:
        """Refuse a machine that shows another key than expected; nothing was sent to it yet.

        Raises:
            InfrastructureError, UserError: it is not the machine that was meant, or unknown.
        """
        ...

    def log_in(self, transport: paramiko.Transport) -> None:
        """Log in.

        Raises:
            paramiko.AuthenticationException: refused.
        """
        ...

    @property
    def refused(self) -> InfrastructureError:
        """What to raise when the machine refuses us."""
        ...


class Peer(Protocol):
    """A machine to connect to: an `Address`, or a login by the user's own configuration."""

    @property
    def name(self) -> str:
        """What error messages call it."""
        ...

    @property
    def host(self) -> str:
        """Host name or address."""
        ...

    @property
    def port(self) -> int:
        """TCP port."""
        ...

    @property
    def attempt_s(self) -> float:
        """Seconds that one attempt to connect may take."""
        ...

    @property
    def unreachable(self) -> str:
        """The remedy when it does not answer."""
        ...

    def credentials(self) -> Credentials:
        """Read what the connection needs, before it is opened.

        Raises:
            UserError: a key cannot be read.
        """
        ...

    def dial(self, timeout: float) -> socket.socket:
        """Open a connection to it, where no other machine is in between.

        Raises:
            OSError: nobody answered.
        """
        ...


def dial(host: str, port: int, timeout: float) -> socket.socket:
    """A TCP connection on which no small request waits for an acknowledgement.

    Raises:
        OSError: nobody answered.
    """
    connection = socket.create_connection((host, port), timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


@dataclass(frozen=True)
class _Pinned:
    """One key each."""

    address: Address
    expected: paramiko.PKey
    key: paramiko.PKey

    @property
    def host_key_types(self) -> Sequence[str]:
        return (self.expected.get_name(),)

    def check(self, seen: paramiko.PKey) -> None:
        if seen != self.expected:
            raise InfrastructureError(
                f"{self.address.name} shows another host key than expected: "
                f"{seen.get_name()} {seen.get_base64()}",
                remedy="another machine answers on this address, or the image was "
                "rebuilt while the machine ran; nothing was sent to it",
                host=self.address.name,
            )

    def log_in(self, transport: paramiko.Transport) -> None:
        transport.auth_publickey(self.address.user, self.key)

    @property
    def refused(self) -> InfrastructureError:
        address = self.address
        return InfrastructureError(
            f"{address.name} refused the key {address.key} for {address.user}",
            remedy="add the key to the account's authorized_keys",
            host=address.name,
        )


@dataclass(frozen=True)
class Address:
    """Where a machine's sshd answers, and who it must prove to be.

    Attributes:
        name: What error messages call it (`embedded`, `guest`, `root@kvm1`).
        host: Host name or address, as seen from the machine that opens the connection.
        port: TCP port.
        user: Login name.
        key: Private key file.
        host_key: The only accepted host key, `ssh-ed25519 AAAA...`.
    """

    name: str
    host: str
    port: int
    user: str
    key: Path
    host_key: str

    @property
    def attempt_s(self) -> float:
        """Seconds that one attempt to connect may take."""
        return _ATTEMPT_S

    @property
    def unreachable(self) -> str:
        """The remedy when it does not answer."""
        return "see whether it is up, and raise VRINGLAB_BOOT_TIMEOUT on a slow machine"

    def credentials(self) -> Credentials:
        """The expected host key and our own.

        Raises:
            UserError: one of them cannot be read.
        """
        kind, _, encoded = self.host_key.partition(" ")
        try:
            expected = paramiko.PKey.from_type_string(kind, base64.b64decode(encoded))
        except (ValueError, EOFError, paramiko.SSHException, UnknownKeyType) as error:
            raise UserError(
                f"the host key expected of {self.name} is none: {self.host_key!r}",
                remedy="give its type and base64, as in known_hosts: `ssh-ed25519 AAAA...`",
                host=self.name,
            ) from error
        try:
            key = paramiko.Ed25519Key.from_private_key_file(str(self.key))
        except (OSError, paramiko.SSHException) as error:
            raise UserError(
                f"the SSH key {self.key} cannot be read: {error}",
                remedy="check the path and its permissions",
                host=self.name,
            ) from error
        return _Pinned(self, expected, key)

    def dial(self, timeout: float) -> socket.socket:
        """Open a connection to it.

        Raises:
            OSError: nobody answered.
        """
        return dial(self.host, self.port, timeout)


def _command_text(command: Sequence[str] | str) -> str:
    return command if isinstance(command, str) else shlex.join(command)


class Process:
    """A command that runs on the far side while we go on.

    Made by `Machine.start`. Its output is collected, and its input handed over, whenever it is
    waited for or looked at; both at once, so neither side can block the other.
    """

    def __init__(
        self, machine: Machine, channel: paramiko.Channel, command: str, input: bytes
    ) -> None:
        self._machine = machine
        self._channel = channel
        self._command = command
        self._input = memoryview(input)
        self._out = bytearray()
        self._err = bytearray()
        self._begin = time.monotonic()

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._out.decode(errors="replace")

    @property
    def stdout_bytes(self) -> bytes:
        """What it has printed so far, as it came."""
        return bytes(self._out)

    @property
    def stderr(self) -> str:
        """What it has printed on standard error so far."""
        return self._err.decode(errors="replace")

    @property
    def running(self) -> bool:
        """Whether it has not ended yet (as far as we have heard)."""
        self._exchange(0.0)
        return not self._channel.exit_status_ready()

    def _exchange(self, wait_s: float) -> None:
        """Hand over input and take output; wait up to `wait_s` for something to come."""
        channel = self._channel
        # Whoever ended without reading the rest, or broke the connection: its status says so.
        with contextlib.suppress(*_LOST):
            while self._input and channel.send_ready():
                self._input = self._input[channel.send(bytes(self._input[:_CHUNK])) :]
                if not self._input:
                    channel.shutdown_write()
        if self._input:
            # paramiko does not say when the far side is ready for more.
            wait_s = min(wait_s, _SEND_POLL_S)
        if channel.closed or channel.eof_received:
            # Its descriptor stays readable from here on, and would make us spin.
            channel.status_event.wait(max(0.0, wait_s))
        else:
            # poll: select cannot see descriptors above 1023.
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            poll.poll(max(0.0, wait_s) * 1000)
        # Receiving tells the far side that there is room again, which can fail too.
        with contextlib.suppress(*_LOST):
            while channel.recv_ready():
                self._out += channel.recv(_CHUNK)
            while channel.recv_stderr_ready():
                self._err += channel.recv_stderr(_CHUNK)

    def _error(self, message: str, remedy: str) -> TransientError:
        return TransientError(
            message,
            remedy=remedy,
            command=self._command,
            host=self._machine.name,
            stdout=self.stdout,
            stderr=self.stderr,
        )

    def _status(self) -> int:
        """Its exit status once it has ended; -1 when a signal ended it.

        Raises:
            TransientError: it was the connection that ended.
        """
        status = self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1
        # -1 is what paramiko says when no status came: the command died of a signal (which it
        # does not tell), or the connection broke, which its thread may be finding out just now.
        if status == -1 and not self._machine.outlives(_LOSS_S):
            raise self._error(
                "the connection was lost while the command ran",
                "see whether the machine is still up; `vringlab resume` continues a run",
            )
        return status

    def send(self, data: bytes) -> None:
        """Hand over more input to a command that was started with `keep_input`.

        May be called from any thread.

        Raises:
            TransientError: the connection was lost, or the command has ended.
        """
        try:
            self._channel.sendall(data)
        except _LOST as error:
            raise self._error(
                "the command takes no more input",
                "see its words; the connection may be lost",
            ) from error

    def wait_for(self, text: str, timeout: float) -> None:
        """Wait until standard output or error holds `text`.

        Raises:
            InfrastructureError: it ended without.
            TransientError: the deadline passed or the connection was lost.
        """
        deadline = time.monotonic() + timeout
        wanted = text.encode()
        while True:
            left = deadline - time.monotonic()
            ended = self._channel.closed or (
                self._channel.exit_status_ready() and self._channel.eof_received
            )
            self._exchange(min(left, 0.5) if not ended else 0.0)
            if wanted in self._out or wanted in self._err:
                return
            if ended:
                raise InfrastructureError(
                    f"the command ended before it printed {text!r}",
                    command=self._command,
                    host=self._machine.name,
                    stdout=self.stdout,
                    stderr=self.stderr,
                    returncode=self._status(),
                )
            if left <= 0:
                raise self._error(
                    f"the command did not print {text!r} within {timeout:g} s",
                    "the machine may be overloaded; look at its console",
                )

    def wait(self, timeout: float) -> Completed:
        """Wait for its end; a return code of -1 says that a signal ended it.

        Its channel is closed in any case: after the deadline it may still run, unheard.

        Raises:
            TransientError: the deadline passed or the connection was lost.
        """
        deadline = time.monotonic() + timeout
        channel = self._channel
        try:
            while not (channel.closed or (channel.exit_status_ready() and channel.eof_received)):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._error(
                        f"the command did not end within {timeout:g} s",
                        "a slower machine may need a longer time; look at its load",
                    )
                self._exchange(min(left, 0.5))
            self._exchange(0.0)
            status = self._status()
        finally:
            self.close()
        return Completed(self.stdout, self.stderr, status, time.monotonic() - self._begin)

    def close(self) -> None:
        """Give up on it: our end is closed, which ends a program that reads or writes."""
        with contextlib.suppress(*_LOST):
            self._channel.close()


class Machine:
    """An open SSH connection; a context manager.

    Args:
        address: Where to connect, which host key to accept, how to log in.
        timeout: Seconds until it must have answered. A machine that boots refuses, accepts and
            closes, or stays silent for a while: all of these are waited out.
        via: The machine to tunnel through, or None.

    Raises:
        TransientError: it never answered.
        InfrastructureError: another host key, or our key was refused.
        UserError: a key of ours cannot be read, or the user does not know the host's key.
    """

    def __init__(self, address: Peer, *, timeout: float, via: Machine | None = None) -> None:
        self.address = address
        self.name = address.name
        self._prefix = ""
        self._transport = self._connect(timeout, via)

    def __enter__(self) -> Self:
        """Return the open connection."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close the connection; commands that still run are not waited for."""
        self._transport.close()

    @property
    def alive(self) -> bool:
        """Whether the connection still stands."""
        return bool(self._transport.is_active())

    def outlives(self, seconds: float) -> bool:
        """Whether the connection still stands after `seconds`; says at once when it does not."""
        self._transport.join(seconds)
        return self.alive

    def _connect(self, timeout: float, via: Machine | None) -> paramiko.Transport:
        deadline = time.monotonic() + timeout
        credentials = self.address.credentials()
        last = "no attempt was made"
        while (left := deadline - time.monotonic()) > 0:
            if via is not None and not via.alive:
                raise self._lost(ConnectionError(f"{via.name}, on the way to it, is gone"))
            # One attempt may not use up the whole deadline: a machine that is booting can
            # swallow the first packets and would answer a second attempt at once.
            attempt = min(left, self.address.attempt_s)
            begin = time.monotonic()
            transport: paramiko.Transport | None = None
            try:
                transport = paramiko.Transport(self._socket(attempt, via))
                transport.banner_timeout = attempt
                transport.auth_timeout = attempt
                options = transport.get_security_options()
                options.key_types = _first(credentials.host_key_types, options.key_types)
                transport.start_client(timeout=attempt)
                credentials.check(transport.get_remote_server_key())
                begin = time.monotonic()
                credentials.log_in(transport)
            except _LOST as error:
                # paramiko reports a connection lost, or silent, at this point as a refusal too.
                refused = (
                    isinstance(error, paramiko.AuthenticationException)
                    and transport is not None
                    and transport.is_active()
                    and time.monotonic() - begin < attempt
                )
                last = f"{type(error).__name__}: {error}"
                if transport is not None:
                    transport.close()
                if refused:
                    raise credentials.refused from error
                time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
                continue
            except BaseException:
                if transport is not None:
                    transport.close()
                raise
            # A dead peer is noticed although nothing is sent for minutes.
            transport.set_keepalive(15)
            return transport
        raise TransientError(
            f"{self.name} did not answer on SSH within {round(timeout, 1):g} s; last: {last}",
            remedy=self.address.unreachable,
            host=self.name,
        )

    def inside(self, prefix: str) -> Self:
        """The same connection, with every command run by `prefix`: in a container, as root.

        Args:
            prefix: Shell text that takes one more word, the command: `sudo -n sh -c`.
        """
        other = copy.copy(self)
        other._prefix = prefix
        return other

    def _socket(self, timeout: float, via: Machine | None) -> socket.socket | paramiko.Channel:
        if via is not None:
            return via.open_tcp(self.address.host, self.address.port, timeout)
        return self.address.dial(timeout)

    def _lost(self, error: Exception) -> TransientError:
        return TransientError(
            f"the connection to {self.name} was lost: {str(error) or type(error).__name__}",
            remedy="see whether the machine is still up; `vringlab resume` continues a run",
            host=self.name,
        )

    def open_tcp(self, host: str, port: int, timeout: float) -> paramiko.Channel:
        """A TCP connection made by this machine (`direct-tcpip`).

        Raises:
            OSError, paramiko.SSHException: the far side refused; the caller knows the remedy.
        """
        return self._transport.open_channel(
            "direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=timeout
        )

    @contextlib.contextmanager
    def tunnel(self, host: str, port: int, *, timeout: float) -> Iterator[socket.socket]:
        """A local socket joined to `host:port` as this machine sees it.

        For libraries that want a real socket rather than a paramiko channel.

        Raises:
            TransientError: nothing listened there before the deadline.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                channel = self.open_tcp(host, port, max(0.1, deadline - time.monotonic()))
                break
            except _LOST as error:
                if not self.alive:
                    raise self._lost(error) from error
                if time.monotonic() > deadline:
                    raise TransientError(
                        f"nothing answered on {host}:{port} of {self.name} within {timeout:g} s: "
                        f"{error}",
                        remedy="see whether the program that listens there is up",
                        host=self.name,
                    ) from error
                time.sleep(_RETRY_S)
        ours, theirs = socket.socketpair()
        pumps = [
            threading.Thread(target=_pump, args=pair, daemon=True)
            for pair in ((channel, theirs), (theirs, channel))
        ]
        for pump in pumps:
            pump.start()
        try:
            yield ours
        finally:
            with contextlib.suppress(OSError):
                ours.close()
            with contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(*_LOST):
                channel.close()
            for pump in pumps:
                pump.join(timeout=5)
            theirs.close()

    def start(
        self, command: Sequence[str] | str, *, input: bytes = b"", keep_input: bool = False
    ) -> Process:
        """Begin a command and return at once.

        Args:
            command: Argument vector, or shell text.
            input: Its standard input, which is then closed; handed over while it is waited for.
            keep_input: Leave its standard input open instead, for `Process.send`.

        Raises:
            TransientError: the connection is lost.
        """
        text = _command_text(command)
        try:
            channel = self._transport.open_session(timeout=60)
            channel.exec_command(f"{self._prefix} {shlex.quote(text)}" if self._prefix else text)
            if not input and not keep_input:
                channel.shutdown_write()
        except _LOST as error:
            raise self._lost(error) from error
        return Process(self, channel, text, input)

    def run(
        self,
        command: Sequence[str] | str,
        *,
        timeout: float = 60.0,
        input: bytes = b"",
        check: bool = True,
        remedy: str = "",
    ) -> Completed:
        """Run a command to its end.

        At the deadline it is killed on the far side, then the wait ends.

        Args:
            command: Argument vector, or shell text.
            timeout: Seconds allowed.
            input: Its standard input.
            check: Raise when the exit status is not 0.
            remedy: What to say when it fails.

        Raises:
            InfrastructureError: it failed (with `check`).
            TransientError: the connection was lost, or the deadline passed.
        """
        text = _command_text(command)
        # Without a terminal, sshd leaves a command running when its channel closes. A shell stays
        # above it: killed, `timeout` has no exit status of its own, and the shell says 137.
        bounded = f"timeout -s KILL {timeout:g} sh -c {shlex.quote(text)}; exit $?"
        done = self.start(bounded, input=input).wait(timeout + _GRACE_S)
        # The far side has a clock of its own.
        if done.returncode == 137 and done.seconds >= 0.9 * timeout:
            raise TransientError(
                f"the command did not end within {timeout:g} s",
                remedy=remedy or "a slower machine may need a longer time; look at its load",
                command=text,
                host=self.name,
                stdout=done.stdout,
                stderr=done.stderr,
            )
        if check and done.returncode != 0:
            raise InfrastructureError(
                "the command failed",
                remedy=remedy,
                command=text,
                host=self.name,
                stdout=done.stdout,
                stderr=done.stderr,
                returncode=done.returncode,
            )
        return done

    def put(self, content: bytes | Path, path: str, *, mode: int = 0o644) -> None:
        """Write a file there, under a temporary name that is renamed when all has arrived.

        Raises:
            InfrastructureError: no such folder, no space.
            TransientError: the connection was lost.
        """
        data = content.read_bytes() if isinstance(content, Path) else content
        target = shlex.quote(path)
        self.run(
            f"cat > {target}.part && [ $(wc -c < {target}.part) = {len(data)} ] && "
            f"chmod {mode:o} {target}.part && mv -f {target}.part {target} || "
            # What fills a disk must not stay there.
            f"{{ rm -f {target}.part; exit 1; }}",
            input=data,
            timeout=120 + len(data) / 500_000,
            remedy=f"see whether {path} can be written and its file system has room",
        )

    def get(self, path: str, *, timeout: float = 120.0) -> bytes:
        """The content of a file there.

        Raises:
            InfrastructureError: it cannot be read.
            TransientError: the connection was lost.
        """
        process = self.start(["cat", "--", path])
        done = process.wait(timeout)
        if done.returncode != 0:
            raise InfrastructureError(
                f"{path} cannot be read",
                host=self.name,
                stderr=done.stderr,
                returncode=done.returncode,
            )
        return process.stdout_bytes


def _first(wanted: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The known ones, those that are wanted in front."""
    front = [kind for kind in wanted if kind in known]
    return tuple(dict.fromkeys([*front, *known]))


def _pump(source: socket.socket | paramiko.Channel, sink: socket.socket | paramiko.Channel) -> None:
    """Carry one direction to its end and hand the end on; the other direction may go on."""
    with contextlib.suppress(*_LOST):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
        return
    for end in (source, sink):
        with contextlib.suppress(*_LOST):
            end.close() if isinstance(end, paramiko.Channel) else end.shutdown(socket.SHUT_RDWR)
