"""Logging in to a user's own machine, as their `ssh` would: configuration, keys, known hosts.

Only in one thing it differs from `ssh`: nobody is asked. A host key that is not known is refused,
with its fingerprint and the command that accepts it, and so is one that has changed.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import hmac
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import paramiko

from vringlab.errors import InfrastructureError, UserError
from vringlab.transport import ssh
from vringlab.transport.ssh import Credentials, Machine

#: A machine that is not up within this time is not coming up for us.
ANSWER_S = 60.0
_SCHEME = "ssh"
_PORT = 22
_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
#: Those of ssh_config(5), IdentityFile, that paramiko can use.
_IDENTITIES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
_INCLUDES_DEEP = 16
_JUMPS = 8
#: An RSA key is offered under the names of its signatures (RFC 8332).
_SIGNATURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")}
)


@dataclass(frozen=True)
class Target:
    """What `ssh://[user@]host[:port][?options]` says.

    Attributes:
        host: As given: a name of ~/.ssh/config, a host name or an address.
        user: None to leave it to the configuration.
        port: None to leave it to the configuration.
        options: Names after the question mark, for whoever uses the host.
    """

    host: str
    user: str | None = None
    port: int | None = None
    options: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read an address, with or without `ssh://` in front.

        Raises:
            UserError: it is none.
        """

        def wrong(why: str) -> UserError:
            return UserError(
                f"{text!r} is no SSH address: {why}",
                remedy="give ssh://[user@]host[:port]; the host may be a name of ~/.ssh/config",
            )

        try:
            parts = urlsplit(text if "://" in text else f"{_SCHEME}://{text}")
            port = parts.port
        except ValueError as error:
            raise wrong(str(error)) from error
        if parts.scheme != _SCHEME:
            raise wrong(f"it begins with {parts.scheme}://")
        if not parts.hostname or parts.hostname.startswith("-"):
            raise wrong("it names no host")
        if parts.password is not None:
            raise wrong("passwords are not taken, only keys")
        if parts.path not in ("", "/") or parts.fragment:
            raise wrong("nothing may follow the port")
        # urlsplit makes host names small, and names of the configuration may have capitals.
        place = parts.netloc.rpartition("@")[2]
        named = re.search(re.escape(parts.hostname), place, re.IGNORECASE)
        return cls(
            host=named[0] if named else parts.hostname,
            user=parts.username or None,
            port=port,
            options=frozenset(word for word in parts.query.split("&") if word),
        )

    def __str__(self) -> str:
        """As `ssh` takes it, without the options."""
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{user}{host}{f':{self.port}' if self.port else ''}"


# --- known_hosts ---------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownKey:
    """A line of a known_hosts file that is about the host.

    Attributes:
        marker: `@revoked`, or empty. Those of authorities are left out: we check no certificates.
        kind: Kind of the key.
        encoded: Its base64.
        file: Where it stands.
        line: And in which line, from 1.
    """

    marker: str
    kind: str
    encoded: str
    file: Path
    line: int


def _names_host(patterns: str, name: str) -> bool:
    """Whether the first field of a known_hosts line (sshd(8)) is about `name`."""
    if patterns.startswith("|1|"):
        try:
            _, _, salt, digest = patterns.split("|")
            seen = hmac.digest(base64.b64decode(salt), name.encode(), "sha1")
            return hmac.compare_digest(seen, base64.b64decode(digest))
        except ValueError:
            return False
    found = False
    for pattern in patterns.lower().split(","):
        wanted = pattern.removeprefix("!")
        # In known_hosts only * and ? are special, and brackets mark a port.
        if fnmatchcase(name, wanted.replace("[", "[[]")):
            if wanted != pattern:
                return False
            found = True
    return found


def known_keys(files: Sequence[Path], name: str) -> list[KnownKey]:
    """What known_hosts files say of a host.

    Args:
        files: Missing ones are skipped.
        name: `host`, or `[host]:port` where the port is not 22; small letters.
    """
    found = []
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) < 3 or words[0].startswith("#") or marker not in ("", "@revoked"):
                continue
            patterns, kind, encoded = words[:3]
            # A revoked key is revoked for whoever shows it under a name that fits.
            if _names_host(patterns, name):
                found.append(KnownKey(marker, kind, encoded, file, number))
    return found


# --- the configuration ---------------------------------------------------------------------


def _with_includes(text: str, folder: Path, depth: int = 0) -> str:
    """Configuration text with `Include` lines replaced by the files; paramiko skips them."""
    lines = []
    for line in text.splitlines():
        match = re.match(r"\s*include[\s=]+(.*)", line, re.IGNORECASE)
        if match is None or depth >= _INCLUDES_DEEP:
            lines.append(line)
            continue
        for word in shlex.split(match[1]):
            path = Path(word).expanduser()
            # A relative name is meant from the folder of the file's owner (ssh_config(5)).
            for name in sorted(Path("/").glob(str(folder / path)[1:])):
                with contextlib.suppress(OSError):
                    inner = name.read_text(errors="replace")
                    lines.append(_with_includes(inner, folder, depth + 1))
    return "\n".join(lines)


def _read_config(target: Target) -> paramiko.SSHConfig:
    """The address, the user's configuration, the system's: the first value counts."""
    own = Path.home() / ".ssh" / "config"
    said = (
        f"User {target.user}" if target.user else "",
        f"Port {target.port}" if target.port else "",
    )
    texts = ["\n".join(said)]
    for path in (own, _SYSTEM_CONFIG):
        try:
            text = _with_includes(path.read_text(errors="replace"), path.parent)
            # By itself, so that a fault is told of the file that has it.
            paramiko.SSHConfig.from_text(text)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, paramiko.SSHException) as error:
            if path != own:
                # Not the user's to mend; what it says is seldom of use here.
                continue
            raise UserError(
                f"{path} cannot be used: {error}",
                remedy="see whether `ssh -G HOST` accepts it",
            ) from error
        texts.append(text)
    merged = paramiko.SSHConfig()
    merged.parse(StringIO("Host *\n" + "\nHost *\n".join(texts)))
    return merged


def _lookup(target: Target) -> dict[str, Any]:
    config, host = _read_config(target), target.host
    try:
        return dict(config.lookup(host))
    # `Match exec` needs a library that is not there; canonical names may not resolve.
    except (ImportError, paramiko.SSHException, OSError) as error:
        raise UserError(
            f"the configuration of {host} in ~/.ssh/config cannot be used: {error}",
            remedy="`Match exec` and CanonicalizeHostname are not supported: give "
            "ssh://user@host:port, or a Host entry of its own",
        ) from error


def _paths(words: str) -> tuple[Path, ...]:
    return tuple(
        Path(word).expanduser() for word in shlex.split(words) if word.lower() not in ("none", "")
    )


@dataclass(frozen=True)
class Login:
    """How to reach and enter one machine; a `ssh.Peer`.

    Attributes:
        name: As the user calls it.
        host: Host name or address to connect to.
        port: TCP port.
        user: Login name.
        alias: Under which name its key is looked up; the host and port when empty.
        known_hosts: Files with known host keys, the one to add to first.
        identities: Private key files to try.
        identities_only: Use no other keys of the agent than those.
        agent: Whether a running agent is asked.
        jumps: Machines on the way, `[user@]host[:port]` each.
        command: A command that makes the connection instead; empty for none.
        attempt_s: Seconds that one attempt to connect may take.
        tunnelled: Whether the connection comes by another machine.
    """

    name: str
    host: str
    port: int
    user: str
    alias: str = ""
    known_hosts: tuple[Path, ...] = ()
    identities: tuple[Path, ...] = ()
    identities_only: bool = False
    agent: bool = True
    jumps: tuple[str, ...] = ()
    command: str = ""
    attempt_s: float = 30.0
    tunnelled: bool = False

    @property
    def unreachable(self) -> str:
        """The remedy when it does not answer."""
        by = f" -p {self.port}" if self.port != _PORT else ""
        return f"see whether `ssh{by} {self.user}@{self.host}` reaches it from here"

    @property
    def known_as(self) -> str:
        """The name in known_hosts."""
        if self.alias:
            return self.alias.lower()
        host = self.host.lower()
        return host if self.port == _PORT else f"[{host}]:{self.port}"

    def credentials(self) -> Credentials:
        """Known host keys and our own.

        Raises:
            UserError: there is no key to log in with.
        """
        return _Own(self)

    def dial(self, timeout: float) -> socket.socket:
        """Open a connection to it.

        Raises:
            UserError: there is no such host.
            OSError: nobody answered.
        """
        if self.command:
            return _by_command(self.command)
        try:
            return ssh.dial(self.host, self.port, timeout)
        except socket.gaierror as error:
            if error.errno not in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
                raise
            raise UserError(
                f"there is no host {self.host!r}: {error.strerror}",
                remedy="check its name; it may be a Host of ~/.ssh/config",
                host=self.name,
            ) from error


def _by_command(command: str) -> socket.socket:
    """A socket whose other end is the input and output of a command (`ProxyCommand`)."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    # It ends when our end is closed.
    threading.Thread(target=process.wait, daemon=True).start()
    return ours


def resolve(target: Target) -> Login:
    """A login by ~/.ssh/config and /etc/ssh/ssh_config.

    Raises:
        UserError: the configuration cannot be read.
    """
    known = _lookup(target)
    jumps = str(known.get("proxyjump") or "")
    command = str(known.get("proxycommand") or "")
    identities = known.get("identityfile") or _IDENTITIES
    try:
        port = int(known.get("port", _PORT))
        seconds = float(known.get("connecttimeout", 30.0))
    except ValueError as error:
        raise UserError(
            f"~/.ssh/config has no number for {target.host}: {error}",
            remedy="mend its Port or ConnectTimeout",
        ) from error
    files = f"{known.get('userknownhostsfile') or _KNOWN_HOSTS}"
    system = f"{known.get('globalknownhostsfile') or _SYSTEM_KNOWN_HOSTS}"
    return Login(
        name=str(target),
        host=str(known.get("hostname", target.host)),
        port=port,
        user=str(known.get("user") or getpass.getuser()),
        alias=str(known.get("hostkeyalias") or ""),
        known_hosts=(*_paths(files), *_paths(system)),
        identities=tuple(Path(path).expanduser() for path in identities),
        identities_only=str(known.get("identitiesonly", "no")).lower() == "yes",
        agent=str(known.get("identityagent", "")).lower() != "none",
        jumps=() if jumps.lower() == "none" else tuple(filter(None, jumps.split(","))),
        command="" if command.lower() == "none" else command,
        attempt_s=max(1.0, seconds),
    )


def route(target: Target, _seen: tuple[str, ...] = ()) -> list[Login]:
    """The logins to go through, the target's last.

    Raises:
        UserError: the configuration cannot be read, or its ProxyJump leads in a circle.
    """
    if str(target) in _seen or len(_seen) > _JUMPS:
        raise UserError(
            f"ProxyJump leads in a circle: {' > '.join((*_seen, str(target)))}",
            remedy="mend ~/.ssh/config; `ProxyJump none` ends a chain",
        )
    login = resolve(target)
    # The first jump may have jumps of its own; each later one is reached from the one before.
    found: list[Login] = []
    for place, jump in enumerate(login.jumps):
        there = Target.parse(jump)
        found += route(there, (*_seen, str(target))) if place == 0 else [_behind(resolve(there))]
    return [*found, _behind(login) if found else login]


def _behind(login: Login) -> Login:
    return replace(login, tunnelled=True, command="")


@contextlib.contextmanager
def connect(target: Target, *, timeout: float = ANSWER_S) -> Iterator[Machine]:
    """A connection to a user's machine, through the machines on the way to it.

    Args:
        target: Where to.
        timeout: Seconds until all of them must have answered.

    Raises:
        UserError: the configuration or a key is of no use, or a host key is not known.
        InfrastructureError: a host key has changed or was revoked, or we were refused.
        TransientError: somebody did not answer.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        machine: Machine | None = None
        for login in route(target):
            left = max(1.0, deadline - time.monotonic())
            machine = stack.enter_context(Machine(login, timeout=left, via=machine))
        assert machine is not None, "a route ends at its target"
        yield machine


# --- who it is, and who we are -------------------------------------------------------------


@dataclass
class _Own:
    """The user's known hosts and keys; made anew for each connection."""

    login: Login
    tried: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @cached_property
    def known(self) -> list[KnownKey]:
        return known_keys(self.login.known_hosts, self.login.known_as)

    @property
    def host_key_types(self) -> Sequence[str]:
        kinds = [entry.kind for entry in self.known if not entry.marker]
        return [name for kind in kinds for name in _SIGNATURES.get(kind, (kind,))]

    def check(self, seen: paramiko.PKey) -> None:
        shown = (seen.get_name(), seen.get_base64())
        fits = [entry for entry in self.known if (entry.kind, entry.encoded) == shown]
        revoked = [entry for entry in fits if entry.marker]
        if revoked:
            raise self._refusal(InfrastructureError, "a revoked host key", seen, revoked, "")
        if fits or self._known_without_port(shown):
            return
        others = [entry for entry in self.known if not entry.marker]
        same_kind = [entry for entry in others if entry.kind == seen.get_name()]
        accept = self._accept(seen)
        if same_kind or others:
            (first, *_) = same_kind or others
            forget = f"ssh-keygen -R {shlex.quote(self.login.known_as)} -f {_shown(first.file)}"
            raise self._refusal(
                InfrastructureError,
                "another host key than it had",
                seen,
                others,
                "the machine was installed anew, or another one answers in its place. Ask "
                f"whoever runs it; if the fingerprint is right: `{forget}`, then `{accept}`",
            )
        raise self._refusal(
            UserError,
            "a host key that is not known",
            seen,
            [],
            "compare the fingerprint with what the machine itself says "
            f"(`ssh-keygen -lf /etc/ssh/ssh_host_{_short(seen)}_key.pub` there); if it is the "
            f"same, accept it: `{accept}`",
        )

    def _known_without_port(self, shown: tuple[str, str]) -> bool:
        # ssh too takes a key that is known for the host's usual port.
        login = self.login
        if login.alias or login.port == _PORT:
            return False
        entries = known_keys(login.known_hosts, login.host.lower())
        fits = [entry for entry in entries if (entry.kind, entry.encoded) == shown]
        return bool(fits) and not any(entry.marker for entry in fits) and not self.known

    def _accept(self, seen: paramiko.PKey) -> str:
        login = self.login
        file = _shown(login.known_hosts[0] if login.known_hosts else Path("~/.ssh/known_hosts"))
        if login.alias or login.tunnelled or login.command:
            # ssh-keyscan sees what answers here, and that is another machine or none.
            line = f"{login.known_as} {seen.get_name()} {seen.get_base64()}"
            return f"echo {shlex.quote(line)} >> {file}"
        by = f" -p {login.port}" if login.port != _PORT else ""
        return f"ssh-keyscan -t {_short(seen)}{by} {shlex.quote(login.host)} >> {file}"

    def _refusal(
        self,
        kind: type[UserError] | type[InfrastructureError],
        what: str,
        seen: paramiko.PKey,
        entries: Sequence[KnownKey],
        remedy: str,
    ) -> UserError | InfrastructureError:
        places = ", ".join(f"{entry.file}:{entry.line}" for entry in entries)
        return kind(
            f"{self.login.name} shows {what}: {seen.get_name()} {fingerprint(seen)}"
            + (f" (compare {places})" if places else "")
            + "; nothing was sent to it",
            remedy=remedy or "do not use this machine before its key was replaced",
            host=self.login.name,
        )

    def _keys(self, agent: paramiko.Agent | None) -> Iterator[tuple[str, paramiko.PKey]]:
        """Keys to try, as `ssh` orders them: of the agent those of the files first."""
        files = [path for path in self.login.identities if path.exists()]
        wanted = {_public_of(path) for path in files} - {""}
        held: list[paramiko.PKey] = [] if agent is None else list(agent.get_keys())
        names = {key.get_base64() for key in held}
        ours = [key for key in held if key.get_base64() in wanted]
        rest = [] if self.login.identities_only else [key for key in held if key not in ours]
        for key in ours + rest:
            yield f"{key.get_name()} {fingerprint(key)} of the agent", key
        for path in files:
            if _public_of(path) in names:
                continue
            try:
                yield str(path), paramiko.PKey.from_path(path)
            except (paramiko.PasswordRequiredException, TypeError):
                self.skipped.append(f"{path} has a passphrase and is not in the agent (ssh-add it)")
            except (OSError, ValueError, paramiko.SSHException) as error:
                self.skipped.append(f"{path} cannot be used: {str(error) or type(error).__name__}")
            except paramiko.pkey.UnknownKeyType:
                self.skipped.append(f"{path} is of a kind that is not supported")

    def log_in(self, transport: paramiko.Transport) -> None:
        agent: paramiko.Agent | None = None
        if self.login.agent and os.environ.get("SSH_AUTH_SOCK"):
            with contextlib.suppress(OSError, paramiko.SSHException):
                agent = paramiko.Agent()
        try:
            self._log_in(transport, agent)
        finally:
            if agent is not None:
                agent.close()

    def _log_in(self, transport: paramiko.Transport, agent: paramiko.Agent | None) -> None:
        self.tried.clear()
        self.skipped.clear()
        for name, key in self._keys(agent):
            try:
                transport.auth_publickey(self.login.user, key)
            except paramiko.AuthenticationException as error:
                if "timeout" in str(error).lower():
                    # Silence is no refusal.
                    raise paramiko.SSHException(str(error)) from error
                # Lost or silent rather than refused: the caller finds out and tries again.
                if not transport.is_active() and not self.tried:
                    raise
                self.tried.append(name)
                if not transport.is_active():
                    raise self.refused from None
                continue
            return
        raise self.refused

    @property
    def refused(self) -> InfrastructureError:
        login = self.login
        keys = ", ".join(self.tried) or "none: there is no usable one"
        return InfrastructureError(
            f"{login.name} does not let {login.user} in; keys tried: {keys}",
            remedy="; ".join(
                [
                    *self.skipped,
                    f"see whether `ssh {login.user}@{login.host}` gets in without a password "
                    "(`ssh-copy-id`, or IdentityFile and IdentitiesOnly in ~/.ssh/config: "
                    "servers end a connection after some wrong keys)",
                ]
            ),
            host=login.name,
        )


def fingerprint(key: paramiko.PKey) -> str:
    """`SHA256:...`, as OpenSSH prints it."""
    return str(key.fingerprint)


def _shown(path: Path) -> str:
    """A path as it is typed: with `~` for the home."""
    home = str(Path.home())
    text = str(path)
    return (
        f"~{shlex.quote(text)[len(home) :]}" if text.startswith(f"{home}/") else shlex.quote(text)
    )


def _short(key: paramiko.PKey) -> str:
    """The kind of a key as ssh-keyscan and file names have it."""
    name = key.get_name()
    return "ecdsa" if name.startswith("ecdsa") else name.removeprefix("ssh-")


def _public_of(path: Path) -> str:
    """The base64 of the public half beside a private key; empty without that file."""
    public = path if path.suffix == ".pub" else path.with_name(f"{path.name}.pub")
    try:
        return public.read_text(errors="replace").split()[1]
    except (OSError, IndexError):
        return ""
