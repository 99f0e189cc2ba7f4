"""The image's own QEMU as a program of this machine: what the embedded host runs in.

So its version never depends on the distribution here, and what was measured under one machine's
QEMU can be measured again under the same one elsewhere. It brings its libraries and their loader
along; of this machine it needs the kernel.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Mapping
from pathlib import Path

PROGRAM = "qemu-system-x86_64"

#: Written by a hook of the image's build: the libraries that its QEMU is linked with.
LIBRARIES = "etc/vringlab/qemu-libraries"

_BINARY = f"usr/bin/{PROGRAM}"
_LOADER = "usr/lib64/ld-linux-x86-64.so.2"
#: For direct boot of a kernel (multi-stage and by PVH), and the option ROM of virtio-net.
_FIRMWARE = (
    "usr/share/seabios/bios-256k.bin",
    "usr/share/seabios/bios.bin",
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/pvh.bin",
    "usr/share/qemu/efi-virtio.rom",
)

_WRAPPER = f"""\
#!/bin/sh
# Made with the image. The name of the program is kept for messages; process and signals are QEMU's.
here=${{0%/*}}
exec "$here/lib/loader" --library-path "$here/lib" --argv0 {PROGRAM} "$here/lib/{PROGRAM}" \\
    -L "$here/firmware" "$@"
"""


def unpack(archive: tarfile.TarFile, target: Path) -> None:
    """Take QEMU out of a root file system.

    Args:
        archive: The root, with `LIBRARIES` in it.
        target: Folder that is made; `PROGRAM` in it is what is run.

    Raises:
        KeyError: the root lacks a part of it.
    """
    members = {member.name.removeprefix("./"): member for member in archive.getmembers()}

    def copy(name: str, to: Path) -> None:
        stream = archive.extractfile(_followed(members, name))
        to.write_bytes(b"" if stream is None else stream.read())

    listing = archive.extractfile(members[LIBRARIES])
    libraries = b"" if listing is None else listing.read()
    for folder in (target, target / "lib", target / "firmware"):
        folder.mkdir()
    copy(_BINARY, target / "lib" / PROGRAM)
    copy(_LOADER, target / "lib" / "loader")
    for path in libraries.decode().split():
        copy(path.lstrip("/"), target / "lib" / posixpath.basename(path))
    for path in _FIRMWARE:
        copy(path, target / "firmware" / posixpath.basename(path))
    (target / PROGRAM).write_text(_WRAPPER)
    for program in (target / PROGRAM, target / "lib" / PROGRAM, target / "lib" / "loader"):
        program.chmod(0o755)


def _followed(members: Mapping[str, tarfile.TarInfo], name: str) -> tarfile.TarInfo:
    """The file that a name leads to, through links of it and of its folders."""
    for _ in range(20):
        member = members.get(name)
        if member is not None and not member.issym():
            return member
        if member is not None:
            name = _joined(name, member.linkname)
            continue
        head, tail = name, ""
        while head := posixpath.dirname(head):
            tail = name[len(head) + 1 :]
            link = members.get(head)
            if link is not None and link.issym():
                break
        else:
            raise KeyError(name)
        name = posixpath.join(_joined(head, members[head].linkname), tail)
    raise KeyError(name)


def _joined(name: str, link: str) -> str:
    return posixpath.normpath(posixpath.join("/", posixpath.dirname(name), link)).lstrip("/")
