"""The sources of the modules that arms change, out of the base kernel's source package."""

from __future__ import annotations

import hashlib
import lzma
import posixpath
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from vringlab.cachedir import OnStep, Store, there
from vringlab.errors import InfrastructureError, UserError
from vringlab.settings import settings


@dataclass(frozen=True)
class ModuleSource:
    """Where a kernel module comes from and how it is built outside the kernel's tree.

    Attributes:
        name: The module's name, as in `/sys/module`.
        directory: Its folder in the kernel's tree.
        objects: Its sources without suffix; the module is linked from them.
        headers: Private headers, by their path from that folder.
        flags: Lines of its Makefile that set the compiler's flags.
    """

    name: str
    directory: str
    objects: tuple[str, ...]
    headers: tuple[str, ...] = field(default=())
    flags: tuple[str, ...] = field(default=())

    @property
    def files(self) -> tuple[str, ...]:
        """All its files, relative to the kernel's tree."""
        names = (*(f"{item}.c" for item in self.objects), *self.headers)
        return tuple(posixpath.normpath(f"{self.directory}/{name}") for name in names)

    @property
    def kbuild(self) -> str:
        """The Kbuild file of its out-of-tree build."""
        lines = [f"obj-m := {self.name}.o"]
        # A module of one source of its own name must not list itself: kbuild calls that a cycle.
        if self.objects != (self.name,):
            lines.append(f"{self.name}-y := {' '.join(f'{item}.o' for item in self.objects)}")
        lines += self.flags
        return "\n".join(lines) + "\n"


def _table(*modules: ModuleSource) -> Mapping[str, ModuleSource]:
    return MappingProxyType({module.name: module for module in modules})


#: The series of the kernel whose Makefiles the table below repeats.
TABLE_OF = (6, 12)

#: The modules of virtio, vsock and vhost; names and sources are those of the kernel's Makefiles.
MODULES = _table(
    ModuleSource("virtio_net", "drivers/net", ("virtio_net",)),
    ModuleSource("vmw_vsock_virtio_transport", "net/vmw_vsock", ("virtio_transport",)),
    ModuleSource(
        "vmw_vsock_virtio_transport_common", "net/vmw_vsock", ("virtio_transport_common",)
    ),
    ModuleSource("vhost", "drivers/vhost", ("vhost",), ("vhost.h",)),
    ModuleSource("vhost_net", "drivers/vhost", ("net",), ("vhost.h",)),
    ModuleSource("vhost_vsock", "drivers/vhost", ("vsock",), ("vhost.h",)),
)


def find_module(name: str, modules: Mapping[str, ModuleSource] = MODULES) -> ModuleSource:
    """The module of that name.

    Raises:
        UserError: arms cannot change it; lists those that can be changed.
    """
    try:
        return modules[name]
    except KeyError:
        raise UserError(
            f"module {name!r} is not one that arms can change",
            remedy=f"choose one of: {', '.join(sorted(modules))}",
        ) from None


@dataclass(frozen=True)
class SourceTree:
    """Part of a kernel's tree: whole folders of C files, without their subfolders.

    Attributes:
        folder: Has the kernel's own layout below it (`net/vmw_vsock/...`).
        version: Version of the source package.
    """

    folder: Path
    version: str

    def read(self, module: ModuleSource) -> dict[str, bytes]:
        """The module's files by their path in the kernel's tree.

        Raises:
            InfrastructureError: the source package lacks one.
        """
        return self.read_files(module.files, module.name)

    def read_files(self, names: Iterable[str], module: str) -> dict[str, bytes]:
        """Files of the tree by their path.

        Args:
            names: Their paths.
            module: What they are for, for messages.

        Raises:
            InfrastructureError: the source package lacks one.
        """
        found: dict[str, bytes] = {}
        for name in names:
            path = self.folder / name
            if not path.is_file():
                raise InfrastructureError(
                    f"the source of {self.version} has no {name}, needed for {module}",
                    remedy="this base kernel arranges its sources differently; see MODULES in "
                    "vringlab/kernels/source.py",
                    host="local",
                )
            found[name] = path.read_bytes()
        return found


def _wanted(name: str, folders: frozenset[str]) -> str | None:
    """The member's path in the kernel's tree if it is a C file directly in a wanted folder."""
    # Debian's archive has one folder at the top, linux-source-6.12/.
    path = PurePosixPath(*PurePosixPath(name).parts[1:])
    if path.suffix in {".c", ".h"} and path.parent.as_posix() in folders and ".." not in path.parts:
        return path.as_posix()
    return None


def extract(archive: Path, folders: Iterable[str], target: Path) -> int:
    """Take the C files directly inside `folders` out of a source archive; one pass over it.

    Args:
        archive: A tar file, compressed in any way that Python reads.
        folders: Folders of the kernel's tree, e.g. `net/vmw_vsock`.
        target: Gets the files, with the kernel's layout.

    Returns:
        The number of files written.

    Raises:
        InfrastructureError: the archive is damaged, or has none of one of the folders.
    """
    wanted = frozenset(folders)
    seen: set[str] = set()
    count = 0
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                name = _wanted(member.name, wanted) if member.isfile() else None
                stream = tar.extractfile(member) if name is not None else None
                if name is None or stream is None:
                    continue
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(stream.read())
                seen.add(PurePosixPath(name).parent.as_posix())
                count += 1
    # lzma and zlib have errors of their own; all mean that the archive cannot be read.
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise InfrastructureError(
            f"the kernel's source archive {archive} is damaged: {error}",
            remedy="remove its folder, so that it is fetched again",
            host="local",
        ) from None
    if missing := sorted(wanted - seen):
        raise InfrastructureError(
            f"the kernel's source archive has no {', '.join(missing)}",
            remedy="this base kernel arranges its sources differently; see MODULES in "
            "vringlab/kernels/source.py",
            host="local",
        )
    return count


def ensure_source(
    archive: Path,
    version: str,
    *,
    on_step: OnStep,
    modules: Mapping[str, ModuleSource] = MODULES,
    cache: Path | None = None,
) -> SourceTree:
    """The sources of all `modules`, unpacked once per source version.

    Args:
        archive: The source package's archive.
        version: The source package's version.
        on_step: Receives a line before the archive is read (some ten seconds).
        modules: The modules whose folders are wanted.
        cache: Cache folder; the settings' when None.

    Raises:
        InfrastructureError: the archive is damaged or lacks a folder; the disk is full.
    """
    folders = {posixpath.dirname(name) for module in modules.values() for name in module.files}
    return ensure_folders(archive, version, folders, on_step=on_step, cache=cache)


def ensure_folders(
    archive: Path,
    version: str,
    wanted: Iterable[str],
    *,
    on_step: OnStep,
    cache: Path | None = None,
) -> SourceTree:
    """The C files directly in some folders, unpacked once; all in a tree that is a folder.

    Args:
        archive: The source package's archive, or the folder of a tree.
        version: The source package's version.
        wanted: Folders of the kernel's tree. Those of the modules of this collection come
            together, whichever of them is wanted.
        on_step: Receives a line before the archive is read (some ten seconds).
        cache: Cache folder; the settings' when None.

    Raises:
        InfrastructureError: the archive is damaged or lacks a folder; the disk is full.
    """
    if archive.is_dir():
        return SourceTree(folder=archive, version=version)
    ours = {module.directory for module in MODULES.values()}
    folders = sorted(ours if set(wanted) <= ours else set(wanted))
    key = f"{version}-{hashlib.sha256(repr((version, folders)).encode()).hexdigest()[:12]}"
    store = Store((cache or settings().cache) / "sources")

    def build(target: Path) -> None:
        on_step(f"reading {', '.join(folders)} out of the kernel's source")
        extract(archive, folders, target)

    entry = store.ensure(key, there, build, on_step=on_step)
    return SourceTree(folder=entry, version=version)
