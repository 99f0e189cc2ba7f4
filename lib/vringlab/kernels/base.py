"""Base kernels: the unpatched kernel that every arm of an experiment starts from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vringlab.errors import UserError

#: Kernel series that arms can be built on -> the Debian suite that carries it.
SUPPORTED: dict[str, str] = {"6.12": "trixie"}

_FORMS = {
    "debian": "a distribution's package, as debian:6.12",
    "git": "a revision, as git:URL@REF",
    "tarball": "a source archive, as tarball:PATH",
    "tree": "a source folder, as tree:PATH",
}
_RELEASE = re.compile(r"^(\d+\.\d+)(?:\.(\d+))?(?:[-+.].*)?$")


def _now() -> str:
    return "supported now: " + ", ".join(f"debian:{series}" for series in SUPPORTED)


@dataclass(frozen=True)
class BaseKernel:
    """One exact kernel: modules built for it load into it and into no other.

    Attributes:
        spec: What was asked for, e.g. `debian:6.12`.
        release: What `uname -r` prints on it, e.g. `6.12.118+deb13-amd64`.
        version: Version of its Debian packages, e.g. `6.12.118-1`.
        suite: Debian suite that its compiler comes from, e.g. `trixie`.
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
        return self.spec.partition(":")[2]

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


def check_spec(spec: str) -> str:
    """The kernel series that a base kernel's name asks for.

    Args:
        spec: e.g. `debian:6.12`.

    Raises:
        UserError: not a base kernel, or a kind or series that is not supported yet.
    """
    kind, separator, rest = spec.partition(":")
    if not separator or kind not in _FORMS or not rest:
        raise UserError(
            f"{spec!r} does not name a base kernel",
            remedy=f"name {'; '.join(_FORMS.values())}. {_now()}",
        )
    if kind != "debian":
        raise UserError(f"base kernels of the kind {kind!r} are not supported yet", remedy=_now())
    if rest not in SUPPORTED:
        raise UserError(f"base kernel {spec!r} is not supported yet", remedy=_now())
    return rest


def folder_name(spec: str) -> str:
    """A base kernel's name in folders: `debian:6.12` -> `debian-6.12`.

    Raises:
        UserError: as `check_spec`.
    """
    return f"debian-{check_spec(spec)}"


def resolve(spec: str, *, suite: str, release: str, version: str) -> BaseKernel:
    """The base kernel that was asked for, as the very kernel that an image holds.

    Args:
        spec: What was asked for, e.g. `debian:6.12`.
        suite: The image's Debian suite.
        release: The image's kernel release.
        version: Version of the image's kernel package.

    Raises:
        UserError: `spec` is not supported, or the image holds another kernel.
    """
    series = check_spec(spec)
    match = _RELEASE.match(release)
    if match is None or match.group(1) != series or suite != SUPPORTED[series]:
        raise UserError(
            f"{spec} is asked for, but the image holds {release} of {suite}",
            remedy=f"build the image of {SUPPORTED[series]} (VRINGLAB_SUITE={SUPPORTED[series]}), "
            "or ask for the base kernel that the image holds",
        )
    # Debian puts the upstream version into both; if they disagree, two packages were mixed up.
    if version_number(release) != version_number(version):
        raise UserError(
            f"kernel {release} cannot come from a package of version {version}",
            remedy="take release and version from one image",
        )
    return BaseKernel(spec=spec, release=release, version=version, suite=suite)
