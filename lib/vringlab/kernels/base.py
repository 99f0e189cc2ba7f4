"""Base kernels: the unpatched kernel that every arm of an experiment starts from."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from vringlab.errors import UserError

#: Kernel series that arms can be built on -> the Debian suite that carries it. `7.x` is whatever
#: the newest kernel of that major is there.
SUPPORTED: dict[str, str] = {"6.1": "bookworm", "6.12": "trixie", "7.x": "trixie-backports"}

_FORMS = {
    "debian": "a distribution's package, as debian:6.12",
    "git": "a revision, as git:URL@REF",
    "tarball": "a source archive, as tarball:PATH",
    "tree": "a source folder, as tree:PATH",
}
_RELEASE = re.compile(r"^(\d+\.\d+)(?:\.(\d+))?(?:[-+.].*)?$")


def _now() -> str:
    return "of Debian there are " + ", ".join(f"debian:{series}" for series in SUPPORTED)


@dataclass(frozen=True)
class BaseKernel:
    """One exact kernel: modules built for it load into it and into no other.

    Attributes:
        spec: What was asked for, e.g. `debian:6.12`.
        release: What `uname -r` prints on it, e.g. `6.12.118+deb13-amd64`.
        version: Version of its Debian packages, e.g. `6.12.118-1`; of other kernels, the source's.
        suite: Debian suite that its compiler comes from, e.g. `trixie`; empty for this machine's.
    """

    spec: str
    release: str
    version: str
    suite: str

    @property
    def name(self) -> str:
        """Its name in folders, e.g. `debian-6.12`."""
        return folder_name(self.spec)

    @property
    def series(self) -> str:
        """The stable series, e.g. `6.12`."""
        return ".".join(map(str, self.number[:2]))

    @property
    def number(self) -> tuple[int, ...]:
        """The upstream version, e.g. (6, 12, 118)."""
        return version_number(self.version)


def version_number(version: str) -> tuple[int, ...]:
    """The leading dotted numbers of a kernel version: `6.12.118-1` -> (6, 12, 118).

    Raises:
        UserError: it does not begin with one.
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    if match is None:
        raise UserError(
            f"{version!r} is not a kernel version",
            remedy="a kernel version is like 6.12 or 6.12.118",
        )
    return tuple(int(part) for part in match.group().split("."))


def check_spec(spec: str) -> tuple[str, str]:
    """The kind of a base kernel and what of that kind, from its name.

    Args:
        spec: e.g. `debian:6.12`: ("debian", "6.12").

    Raises:
        UserError: not a base kernel, or a series that no Debian suite carries.
    """
    kind, separator, rest = spec.partition(":")
    if not separator or kind not in _FORMS or not rest:
        raise UserError(
            f"{spec!r} does not name a base kernel",
            remedy=f"name {'; '.join(_FORMS.values())}; {_now()}",
        )
    if kind == "debian" and rest not in SUPPORTED:
        raise UserError(f"base kernel {spec!r} is not supported", remedy=_now())
    if kind == "git" and not rest.rpartition("@")[0]:
        raise UserError(f"{spec!r} does not say which revision", remedy="write git:URL@REF")
    return kind, rest


def folder_name(spec: str) -> str:
    """A base kernel's name in folders: `debian:6.12` -> `debian-6.12`.

    Raises:
        UserError: as `check_spec`.
    """
    kind, rest = check_spec(spec)
    if kind == "debian":
        return f"debian-{rest}"
    last = rest.rpartition("@")[2] if kind == "git" else Path(rest).name
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", last).strip("-.")[:40] or kind
    return f"{kind}-{plain}-{hashlib.sha256(rest.encode()).hexdigest()[:8]}"


def is_held(spec: str, release: str) -> bool:
    """Whether a kernel of that release is one of the base kernel's series.

    Args:
        spec: e.g. `debian:6.12`.
        release: What `uname -r` prints, e.g. the image's.

    Raises:
        UserError: as `check_spec`.
    """
    kind, rest = check_spec(spec)
    match = _RELEASE.match(release)
    return kind == "debian" and match is not None and _fits(match.group(1), rest)


def _fits(series: str, wanted: str) -> bool:
    return series == wanted or (
        wanted.endswith(".x") and series.startswith(f"{wanted.removesuffix('x')}")
    )


def resolve(spec: str, *, suite: str, release: str, version: str) -> BaseKernel:
    """The base kernel that was asked for, as the very kernel that was found.

    Args:
        spec: What was asked for, e.g. `debian:6.12`.
        suite: The Debian suite that it was found in.
        release: Its release.
        version: Version of its package.

    Raises:
        UserError: `spec` is not supported, or what was found is another kernel.
    """
    _, series = check_spec(spec)
    if not is_held(spec, release) or suite != SUPPORTED[series]:
        raise UserError(
            f"{spec} is asked for, but the image holds {release} of {suite}",
            remedy=f"build the image of {SUPPORTED[series]} (VRINGLAB_SUITE={SUPPORTED[series]}), "
            "or ask for the base kernel that the image holds",
        )
    # Debian puts the upstream version into both; if they disagree, two packages were mixed up.
    # Until bookworm the release had the ABI's number in place of the last.
    named, packaged = version_number(release), version_number(version)
    if named != packaged and not (named[:2] == packaged[:2] and named[2:] == (0,)):
        raise UserError(
            f"kernel {release} cannot come from a package of version {version}",
            remedy="take release and version from one image",
        )
    return BaseKernel(spec=spec, release=release, version=version, suite=suite)
