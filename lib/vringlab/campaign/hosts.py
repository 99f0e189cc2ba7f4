"""KVM hosts by name: from the command line or a hosts.yaml, and those that a run may use.

    hosts:
      - url: ssh://root@kvm1
        arch: x86_64
        cpus: 16
        memory_gib: 64
        tags: [epyc, quiet]
      - url: embedded

What an experiment or the user needs of a host is a tag (`epyc`), `arch=x86_64`, `cpus>=8` or
`memory_gib>=16`.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vringlab.errors import UserError
from vringlab.settings import settings

EMBEDDED = "embedded"

_NEED = re.compile(r"(?P<key>cpus|memory_gib)\s*>=\s*(?P<least>\d+)|arch\s*=\s*(?P<arch>\w+)")


class Host(BaseModel):
    """A KVM host that a run may use.

    Attributes:
        url: `embedded`, or an address such as `ssh://root@kvm1`.
        name: What it is called in runs; made from the address when empty.
        arch: Architecture of its processors, as `uname -m` says it.
        cpus: Its processors.
        memory_gib: Its memory.
        tags: Words of the user's for what it can do.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    arch: str | None = None
    cpus: Annotated[int, Field(ge=1)] | None = None
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    tags: tuple[str, ...] = ()

    @property
    def embedded(self) -> bool:
        """Whether it is a machine of vringlab's own."""
        return self.url == EMBEDDED

    def lacks(self, needs: Sequence[str]) -> list[str]:
        """Those of `needs` that it is not known to have.

        Raises:
            UserError: a need that cannot be read.
        """
        return [need for need in needs if not self._has(need)]

    def _has(self, need: str) -> bool:
        found = _NEED.fullmatch(need.strip())
        if found is None:
            if re.search(r"[<>=]", need):
                raise UserError(
                    f"cannot read the need {need!r}",
                    remedy="give a tag, arch=NAME, cpus>=N or memory_gib>=N",
                )
            return need in (*self.tags, *([EMBEDDED] if self.embedded else []))
        known = self._known()
        if found["arch"]:
            return bool(known["arch"] == found["arch"])
        value = known[found["key"]]
        return value is not None and bool(value >= int(found["least"]))

    def _known(self) -> dict[str, Any]:
        limits = settings()
        ours = (
            {
                "arch": platform.machine(),
                "cpus": limits.lab_cpus,
                "memory_gib": limits.lab_memory_mib / 1024,
            }
            if self.embedded
            else {}
        )
        said = {"arch": self.arch, "cpus": self.cpus, "memory_gib": self.memory_gib}
        return {key: ours.get(key) if value is None else value for key, value in said.items()}

    def as_record(self) -> dict[str, object]:
        """For provenance."""
        return self.model_dump(mode="json", exclude_defaults=True)


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a hosts.yaml.

    Raises:
        UserError: it is missing, no YAML, or not of the form above; names the place.
    """
    form = "see `vringlab run --help`; each host needs a url"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", remedy=form) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {error}", remedy=form) from None
    entries = document.get("hosts") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} has no list `hosts`", remedy=form)
    try:
        return [Host.model_validate(entry) for entry in entries]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {place}: {first['msg']}", remedy=form) from None


def from_urls(urls: Sequence[str]) -> list[Host]:
    """Hosts by address alone; one text may hold several, with commas."""
    return [Host(url=url.strip()) for text in urls for url in text.split(",") if url.strip()]


def choose(hosts: Sequence[Host], needs: Sequence[str] = ()) -> tuple[Host, ...]:
    """The hosts that have all that is needed, each with a name of its own.

    `embedded` may be there more than once: each is another machine, `embedded-1`, `embedded-2`.
    Any other host is for one session at a time.

    Raises:
        UserError: no host is left, one is named twice, or a need cannot be read.
    """
    fit = [host for host in hosts if not host.lacks(needs)]
    if not fit:
        said = "; ".join(f"{host.url} lacks {', '.join(host.lacks(needs))}" for host in hosts)
        raise UserError(
            f"no host has all that is needed: {said or 'there is none'}",
            remedy="add what it has to hosts.yaml, or need less",
        )
    # What stands behind a question mark is how a host is used, not which.
    often_named = Counter(host.url.partition("?")[0] for host in fit)
    twice = [url for url, n in often_named.items() if n > 1 and url != EMBEDDED]
    if twice:
        raise UserError(
            f"host {twice[0]} is named twice",
            remedy="a host is measured on by one run at a time: name each once",
        )
    plain = [host.name or _name(host.url) for host in fit]
    often = Counter(plain)
    seen: Counter[str] = Counter()
    named = []
    for host, name in zip(fit, plain, strict=True):
        seen[name] += 1
        own = f"{name}-{seen[name]}" if often[name] > 1 else name
        named.append(host.model_copy(update={"name": own}))
    if len({host.name for host in named}) < len(named):
        raise UserError("two hosts have one name", remedy="give each another `name` in hosts.yaml")
    return tuple(named)


def _name(url: str) -> str:
    """`ssh://root@kvm1:2222/` is `kvm1`."""
    place = (url.partition("://")[2] or url).partition("?")[0]
    bare = re.sub(r":\d+$", "", place.rpartition("@")[2].partition("/")[0])
    return re.sub(r"[^A-Za-z0-9_.-]", "_", bare) or "host"


def require_memory(hosts: Sequence[Host]) -> None:
    """Refuse more machines of our own than this machine has memory for.

    Raises:
        UserError: their memory together is more than is free.
    """
    own = [host for host in hosts if host.embedded]
    if len(own) < 2:
        return
    needed = len(own) * settings().lab_memory_mib
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    if found is not None and int(found[1]) // 1024 < needed:
        raise UserError(
            f"{len(own)} embedded hosts need {needed} MiB, and {int(found[1]) // 1024} MiB are "
            "free here",
            remedy="ask for fewer, or set VRINGLAB_LAB_MEMORY_MIB (3072 at least)",
        )
