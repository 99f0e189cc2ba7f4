"""Base kernels that no distribution builds: trees, archives, revisions; and kernels for guests."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest

from vringlab import cachedir
from vringlab.errors import InfrastructureError, UserError
from vringlab.image.recipe import Recipe
from vringlab.kernels import bundle, whole
from vringlab.kernels.base import BaseKernel

MAKEFILE = "VERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 118\nEXTRAVERSION =\nNAME = Toy\n"
CONFIG = 'CONFIG_CC_VERSION_TEXT="gcc (Debian {major}.2.0-14+deb12u1) {major}.2.0"\nCONFIG_X=m\n'


def silent(_line: str) -> None:
    pass


def make_tree(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "Kbuild").write_text("obj-y += drivers/\n")
    return folder


def make_built(folder: Path, major: str) -> Path:
    tree = make_tree(folder)
    for name in ("vmlinux", "Module.symvers", "arch/x86/boot/bzImage"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / ".config").write_text(CONFIG.format(major=major))
    release = tree / "include/config/kernel.release"
    release.parent.mkdir(parents=True)
    release.write_text("6.12.118-mine\n")
    return tree


# --- compilers ------------------------------------------------------------------------------


def test_a_compiler_of_another_major_is_refused() -> None:
    ours = "gcc (Debian 12.2.0-14+deb12u1) 12.2.0"
    whole.check_compiler(CONFIG.format(major=12), ours)
    with pytest.raises(UserError, match="kernel was built by gcc") as caught:
        whole.check_compiler(CONFIG.format(major=14), ours)
    assert "14.2.0" in caught.value.message
    assert "12.2.0" in caught.value.message
    assert "install gcc 14" in caught.value.remedy
    # What states no compiler is believed.
    whole.check_compiler("CONFIG_X=m\n", ours)


def test_a_tree_built_by_another_compiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_compiler", lambda: "gcc (Debian 12.2.0-14) 12.2.0")
    tree = make_built(tmp_path / "linux", "14")
    with pytest.raises(UserError, match="kernel was built by"):
        whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=tmp_path / "cache")


# --- a built tree ---------------------------------------------------------------------------


def test_a_built_tree_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "_compiler", lambda: "gcc (Debian 12.2.0-14) 12.2.0")
    packed: list[BaseKernel] = []
    monkeypatch.setattr(whole, "_pack_tree", lambda _tree, kernel, *_: packed.append(kernel))
    tree = make_built(tmp_path / "linux", "12")
    base = whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=tmp_path / "cache")
    assert (base.kernel.release, base.kernel.number) == ("6.12.118-mine", (6, 12, 118))
    assert base.root.kernel_dir == str(tree)
    assert "CONFIG_X=m" in base.root.config
    assert base.bundle is not None
    assert base.bundle.kernel == base.kernel
    again = whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=tmp_path / "cache")
    assert len(packed) == 1
    assert again == base
    (tree / "Module.symvers").write_text("another build")
    whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=tmp_path / "cache")
    assert len(packed) == 2


# --- sources --------------------------------------------------------------------------------


def test_what_is_no_kernel_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not the tree of a kernel"):
        whole.ensure_whole(f"tree:{tmp_path / 'empty'}", on_step=silent, cache=cache)
    with pytest.raises(UserError, match="no archive"):
        whole.ensure_whole(f"tarball:{tmp_path / 'none.tar'}", on_step=silent, cache=cache)
    (tmp_path / "bad.tar").write_text("no archive at all")
    with pytest.raises(UserError, match="cannot be unpacked"):
        whole.ensure_whole(f"tarball:{tmp_path / 'bad.tar'}", on_step=silent, cache=cache)
    with pytest.raises(UserError, match="cannot be read"):
        whole.ensure_whole(f"git:{tmp_path / 'none'}@v1", on_step=silent, cache=cache)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "Makefile").write_text("all:\n")
    with pytest.raises(UserError, match="states no version"):
        whole.source_version(tmp_path / "odd")


class Builds:
    """Stands in for tuxmake and for packing: counts builds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trees: list[Path] = []
        monkeypatch.setattr(whole, "_compiler", lambda: "gcc (Debian 12.2.0-14) 12.2.0")
        monkeypatch.setattr(cachedir, "require_space", lambda *_: None)
        monkeypatch.setattr(whole._Whole, "_make", lambda build: self.make(build))
        monkeypatch.setattr(whole, "bootstrap", lambda _s, root, _i: root.mkdir())
        monkeypatch.setattr(whole, "pack", lambda *_: None)
        self.fault: BaseException | None = None

    def make(self, build: whole._Whole) -> str:
        self.trees.append(build.tree)
        early = json.loads((build.folder / "metadata.json").read_text())
        assert early["status"] == "building"
        if self.fault is not None:
            raise self.fault
        out = build.folder / "out"
        out.mkdir()
        (out / "bzImage").write_text("image")
        (build.folder / "build" / "drivers").mkdir(parents=True)
        (build.folder / "build" / "drivers" / "x.o").write_text("object")
        (build.folder / "build" / "Module.symvers").write_text("")
        with tarfile.open(out / "modules.tar.xz", "w:xz") as tar:
            tar.add(build.tree / "Kbuild", "lib/modules/6.12.118/modules.order")
            link = tarfile.TarInfo("lib/modules/6.12.118/build")
            link.type, link.linkname = tarfile.SYMTYPE, str(build.folder / "build")
            tar.addfile(link)
        return "6.12.118"


def test_identical_sources_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds(monkeypatch)
    cache = tmp_path / "cache"
    tree = make_tree(tmp_path / "linux-6.12.118")
    archive = tmp_path / "linux.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(tree, tree.name)
    first = whole.ensure_whole(f"tarball:{archive}", on_step=silent, cache=cache)
    again = whole.ensure_whole(f"tarball:{archive}", on_step=silent, cache=cache)
    assert len(builds.trees) == 1
    assert first == again
    assert first.kernel.spec == f"tarball:{archive}"
    assert first.bundle is not None
    folder = first.bundle.folder
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["status"] == "built"
    assert metadata["fragment"] == whole.FRAGMENT
    # Of the build's folder is kept what modules are built against.
    assert (folder / "build" / "Module.symvers").is_file()
    assert not list((folder / "build").rglob("*.o"))
    (tree / "Kbuild").write_text("obj-y += drivers/ net/\n")
    whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=cache)
    (tree / "Kbuild").write_text("obj-y += drivers/ net/ virt/\n")
    whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=cache)
    assert len(builds.trees) == 3


def test_a_failed_or_interrupted_build_says_so_and_leaves_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(monkeypatch)
    tree = make_tree(tmp_path / "linux")
    for fault, status in (
        (InfrastructureError("it does not build"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ):
        builds.fault = fault
        with pytest.raises(type(fault)):
            whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=tmp_path / "cache")
        (kept,) = (tmp_path / "cache" / "wholes").glob(".failed-*")
        metadata = json.loads((kept / "metadata.json").read_text())
        assert metadata["status"] == status
        assert metadata["seconds"] >= 0
    builds.fault = None
    whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=tmp_path / "cache")
    assert len(builds.trees) == 3


def test_a_revision_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds(monkeypatch)
    tree = make_tree(tmp_path / "linux")

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", tree, "-c", "user.name=x", "-c", "user.email=x@x", *arguments],
            check=True,
            capture_output=True,
        )

    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "v1", "-m", "annotated")
    cache = tmp_path / "cache"
    by_tag = whole.ensure_whole(f"git:file://{tree}@v1", on_step=silent, cache=cache)
    assert by_tag.kernel.number == (6, 12, 118)
    whole.ensure_whole(f"git:file://{tree}@v1", on_step=silent, cache=cache)
    assert len(builds.trees) == 1
    with pytest.raises(UserError, match="no revision 'v2'"):
        whole.ensure_whole(f"git:file://{tree}@v2", on_step=silent, cache=cache)


def test_without_tuxmake_its_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_compiler", lambda: "gcc 12.2.0")
    monkeypatch.setattr(cachedir, "require_space", lambda *_: None)
    monkeypatch.setattr("vringlab.kernels.whole.importlib.util.find_spec", lambda _name: None)
    tree = make_tree(tmp_path / "linux")
    with pytest.raises(InfrastructureError, match="tuxmake is not installed") as caught:
        whole.ensure_whole(f"tree:{tree}", on_step=silent, cache=tmp_path / "cache")
    assert "pip install tuxmake" in caught.value.remedy


# --- a kernel for guests --------------------------------------------------------------------


def bz_image(kernel: bytes) -> bytes:
    """A bzImage as the boot protocol describes it, with a gzip payload."""
    # gzip's own trailer is the size that other formats get appended.
    payload = gzip.compress(kernel)
    head = bytearray(1024)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 0, len(payload))
    return bytes(head) + payload


def test_modules_are_pruned_unpacked_and_the_initrds_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lzma

    tree = tmp_path / "tree"
    modules = tree / "lib/modules/6.1.0-57-amd64"
    for name, data in {
        "kernel/drivers/block/virtio_blk.ko.xz": lzma.compress(b"blk"),
        "kernel/drivers/gpu/huge.ko": b"gpu",
        "kernel/fs/squashfs/squashfs.ko": b"squash",
        "kernel/fs/overlayfs/overlay.ko": b"overlay",
        "modules.builtin": b"kernel/lib/x.ko\n",
        "kernel/drivers/virtio/virtio_pci.ko": b"bus",
        "modules.order": b"",
    }.items():
        (modules / name).parent.mkdir(parents=True, exist_ok=True)
        (modules / name).write_bytes(data)
    (tree / "boot").mkdir()
    (tree / "boot/vmlinuz-6.1.0-57-amd64").write_bytes(bz_image(b"\x7fELF kernel"))
    tools = tmp_path / "tools"
    (tools / "bin").mkdir(parents=True)
    (tools / "bin/busybox").write_bytes(b"busybox")
    target = tmp_path / "target"
    target.mkdir()
    seen: list[list[str]] = []

    def run(argv: list[str], **_: object) -> None:
        seen.append(argv)
        if "/usr/sbin/depmod" in argv:
            folder = target / "modules/usr/lib/modules/6.1.0-57-amd64"
            assert (folder / "kernel/drivers/block/virtio_blk.ko").read_bytes() == b"blk"
            assert not (folder / "kernel/drivers/gpu").exists()
            (folder / "modules.dep").write_text(
                "kernel/drivers/block/virtio_blk.ko:\nkernel/fs/squashfs/squashfs.ko:\n"
                "kernel/fs/overlayfs/overlay.ko:\nkernel/drivers/virtio/virtio_pci.ko:\n"
            )

    monkeypatch.setattr("vringlab.kernels.bundle.local.run", run)
    kernel = BaseKernel("debian:6.1", "6.1.0-57-amd64", "6.1.192-3", "bookworm")
    bundle.pack(tree, kernel, tools, target, Recipe(), silent)
    assert (target / "vmlinux").read_bytes() == b"\x7fELF kernel"
    initrd = (target / "initrd").read_bytes()
    for part in (b"squashfs.ko", b"overlay.ko", b"busybox", b"lowerdir=/mod:/ro"):
        assert part in initrd
    # Without the bus that it sits on, the disk would never appear.
    assert 0 < initrd.index(b"virtio_pci.ko") < initrd.index(b"virtio_blk.ko")
    assert [argv[0] for argv in seen] == ["bwrap", "gensquashfs"]


def test_a_kernel_without_what_its_guest_needs_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text("kernel/fs/squashfs/squashfs.ko:\n")
    with pytest.raises(InfrastructureError, match="no virtio_blk"):
        list(bundle._initrd_modules(tmp_path, ("virtio_blk", "squashfs")))
    # What is built in need not be loaded.
    (tmp_path / "modules.builtin").write_text("kernel/drivers/block/virtio_blk.ko\n")
    (tmp_path / "kernel/fs/squashfs").mkdir(parents=True)
    (tmp_path / "kernel/fs/squashfs/squashfs.ko").write_bytes(b"s")
    found = dict(bundle._initrd_modules(tmp_path, ("virtio_blk", "squashfs")))
    assert list(found) == ["squashfs.ko"]
