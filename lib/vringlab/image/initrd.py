"""The small initrd: busybox, five or so modules and one script, as a newc cpio archive.

It is not compressed: it lies on a fast disk, and would be unpacked by an emulated processor.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_FILE = 0o100000
_FOLDER = 0o040000


@dataclass(frozen=True)
class Entry:
    """A file or (without content) a folder of the archive; `mode` holds permission bits only."""

    name: str
    content: bytes | None
    mode: int


def cpio(entries: Iterable[Entry]) -> bytes:
    """A newc archive (kernel: Documentation/driver-api/early-userspace/buffer-format.rst).

    Every field is fixed, so equal entries give equal bytes.
    """
    out = bytearray()

    def add(name: str, mode: int, content: bytes, inode: int) -> None:
        encoded = name.encode() + b"\0"
        header = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        out.extend(b"070701" + b"".join(b"%08X" % field for field in header) + encoded)
        out.extend(b"\0" * (-len(out) % 4))
        out.extend(content)
        out.extend(b"\0" * (-len(out) % 4))

    for inode, entry in enumerate(entries, start=1):
        kind = _FOLDER if entry.content is None else _FILE
        add(entry.name, kind | entry.mode, entry.content or b"", inode)
    add("TRAILER!!!", 0, b"", 0)
    return bytes(out)


def module_order(dependencies: str, wanted: Iterable[str]) -> list[str]:
    """Paths of modules in loading order, each after what it needs.

    Args:
        dependencies: Text of `modules.dep`: `path: needed needed`, dependencies in the order
            in which modprobe removes them, so the last is loaded first.
        wanted: Names of modules, with underscores.

    Raises:
        KeyError: a wanted module is not listed (it may be built in; then do not ask for it).
    """
    by_name: dict[str, tuple[str, list[str]]] = {}
    for line in dependencies.splitlines():
        path, _, needs = line.partition(":")
        name = posixpath.basename(path).split(".ko")[0].replace("-", "_")
        by_name[name] = (path, needs.split())
    order: list[str] = []
    for name in wanted:
        path, needed = by_name[name]
        for each in [*reversed(needed), path]:
            if each not in order:
                order.append(each)
    return order


def build(busybox: bytes, script: bytes, modules: Mapping[str, bytes]) -> bytes:
    """The initrd; `modules` maps file names to contents, in loading order."""
    entries = [
        Entry("bin", None, 0o755),
        Entry("dev", None, 0o755),
        Entry("modules", None, 0o755),
        Entry("bin/busybox", busybox, 0o755),
        Entry("init", script, 0o755),
        *(Entry(f"modules/{name}", content, 0o644) for name, content in modules.items()),
        Entry("modules/order", "".join(f"{name}\n" for name in modules).encode(), 0o644),
    ]
    return cpio(entries)
