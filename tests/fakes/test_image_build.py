"""Images built by programs that stand in for mmdebstrap and its kin, also badly."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fakes.processes import alive, interrupted_when, script, until

from vringlab.errors import InfrastructureError
from vringlab.image import build
from vringlab.image.build import Image, ensure_image
from vringlab.image.kernel_file import uncompressed
from vringlab.image.recipe import Recipe
from vringlab.settings import Settings
from vringlab.transport import local

RELEASE = "6.12.1-toy"
ELF = b"\x7fELF toy kernel"


def bzimage(payload: bytes) -> bytes:
    """A kernel file with one set-up sector and a packed payload, as the boot protocol has it."""
    head = bytearray(1024)
    head[0x1F1] = 1
    head[0x202:0x206] = b"HdrS"
    # gzip's streams end with the unpacked size; the build appends it to all others.
    if not payload.startswith(b"\x1f\x8b"):
        payload += struct.pack("<I", len(ELF))
    struct.pack_into("<II", head, 0x248, 0, len(payload))
    return bytes(head) + payload


KERNEL = bzimage(gzip.compress(ELF, mtime=0))
MODULES = f"./usr/lib/modules/{RELEASE}"
MEMBERS = {
    f"./boot/vmlinuz-{RELEASE}": KERNEL,
    "./usr/bin/busybox": b"busybox",
    f"{MODULES}/modules.dep": b"kernel/a.ko: kernel/b.ko\nkernel/b.ko:\n",
    f"{MODULES}/kernel/a.ko": b"module a",
    f"{MODULES}/kernel/b.ko": b"module b",
    "./usr/bin/qemu-system-x86_64": b"QEMU",
    "./usr/lib64/ld-linux-x86-64.so.2": b"loader",
    "./etc/vringlab/qemu-libraries": b"/lib/x86_64-linux-gnu/libz.so.1\n",
    "./usr/lib/x86_64-linux-gnu/libz.so.1.3": b"zlib",
    "./usr/share/seabios/bios-256k.bin": b"bios",
    "./usr/share/seabios/bios.bin": b"bios",
    "./usr/share/qemu/kvmvapic.bin": b"rom",
    "./usr/share/qemu/linuxboot_dma.bin": b"rom",
    "./usr/share/qemu/pvh.bin": b"rom",
    "./usr/lib/ipxe/qemu/efi-virtio.rom": b"ipxe",
    "./etc/vringlab/packages": b"fio\t3.39-1\nlibc6\t2.41\nvringlab-kernel\t6.12.1-1\n",
}
#: A file's and a folder's links, relative and absolute, as Debian has them.
LINKS = {
    "./lib": "usr/lib",
    "./usr/lib/x86_64-linux-gnu/libz.so.1": "libz.so.1.3",
    "./usr/share/qemu/efi-virtio.rom": "/usr/lib/ipxe/qemu/efi-virtio.rom",
}
RECIPE = Recipe(suite="toy", initrd_modules=("a",))


def root_tar(path: Path, without: str = "") -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in MEMBERS.items():
            if name != without:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        for name, target in LINKS.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return path


class Workshop:
    """A cache and a PATH with stand-ins; `calls` has a line for each mmdebstrap."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.cache = folder / "cache"
        self.images = self.cache / "images"
        self.calls = folder / "calls"
        self.pids = folder / "pids"
        self.tar = root_tar(folder / "root.tar")
        # As root the real one is called in a mount namespace, which a container may forbid.
        script(self.bin / "unshare", 'shift 3; exec "$@"')
        script(
            self.bin / "make",
            "for word; do case $word in plugin) made=vringlab-count.so;; "
            'OUT=*) echo tool > "${word#OUT=}/${made-vringlab-pingpong}";; esac; done',
        )
        script(self.bin / "tar2sqfs", 'for last; do :; done; cat > "$last"')
        self.mmdebstrap(f"cat {self.tar}")

    def mmdebstrap(self, behaviour: str) -> None:
        script(
            self.bin / "mmdebstrap",
            f'echo $$ >> {self.pids}; echo "$*" >> {self.calls}\n{behaviour}',
        )

    @property
    def called(self) -> int:
        return len(self.pids.read_text().split()) if self.pids.exists() else 0

    def left(self) -> list[str]:
        """What is in the folder of images, without locks."""
        if not self.images.exists():
            return []
        return sorted(path.name for path in self.images.iterdir() if path.suffix != ".lock")


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    monkeypatch.setenv("VRINGLAB_CACHE", str(made.cache))
    monkeypatch.setattr(build, "settings", lambda: Settings(cache=made.cache))
    return made


def test_an_image_is_built_once_and_found_again(workshop: Workshop) -> None:
    steps: list[str] = []
    image = ensure_image(RECIPE, on_step=steps.append)
    assert len(steps) == 3
    assert image.folder == workshop.images / RECIPE.digest()
    assert (image.release, image.version, image.suite) == (RELEASE, "6.12.1-1", "toy")
    assert image.tools == {"fio": "3.39-1"}
    assert image.kernel.read_bytes() == KERNEL
    assert image.vmlinux.read_bytes() == ELF
    with tarfile.open(workshop.tar) as made, tarfile.open(image.root) as root:
        assert set(root.getnames()) - set(made.getnames()) == {
            f"./boot/vmlinux-{RELEASE}",
            "./boot/initrd",
        }
    assert stat.S_IMODE(image.client_key.stat().st_mode) == 0o600
    assert image.host_key.startswith("ssh-ed25519 AAAA")
    assert len(image.host_key.split()) == 2
    # Nothing but what is used is kept.
    kept = {path.name for path in image.folder.iterdir()}
    assert kept == {
        *("id_ed25519", "id_ed25519.pub", "initrd", "manifest.json", "root.squashfs"),
        *("qemu", "vmlinux", "vmlinuz"),
    }
    assert ensure_image(RECIPE, on_step=steps.append) == image
    assert len(steps) == 3
    assert workshop.called == 1
    assert workshop.left() == [RECIPE.digest()]


def test_another_recipe_is_another_image(workshop: Workshop) -> None:
    images = [ensure_image(RECIPE), ensure_image(Recipe(suite="other", initrd_modules=("b",)))]
    assert len({image.folder for image in images}) == 2
    assert len({image.host_key for image in images}) == 2
    assert workshop.called == 2


def test_of_several_that_want_it_one_builds(workshop: Workshop) -> None:
    workshop.mmdebstrap(f"sleep 0.5; cat {workshop.tar}")
    found: list[Image] = []
    steps: list[str] = []

    def want() -> None:
        found.append(ensure_image(RECIPE, on_step=steps.append))

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert workshop.called == 1
    assert len(found) == 3
    assert found[0] == found[1] == found[2]
    assert sum("waiting for it" in step for step in steps) == 2


@pytest.mark.parametrize("program", ["mmdebstrap", "tar2sqfs", "make"])
def test_a_program_that_is_not_installed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    find = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else find(name))
    with pytest.raises(InfrastructureError, match=f"'{program}' is not installed") as caught:
        ensure_image(RECIPE)
    assert "make setup" in caught.value.remedy
    assert workshop.left() == []


@pytest.mark.parametrize(
    "behaviour",
    [
        "echo 'E: no network' >&2; exit 25",
        "head -c 4000 {tar}; echo 'E: no network' >&2; exit 25",
        "head -c 4000 {tar}; echo 'E: no network' >&2; kill -KILL $$",
    ],
    ids=["fails", "fails midway", "is killed midway"],
)
def test_an_mmdebstrap_that_does_not_finish(workshop: Workshop, behaviour: str) -> None:
    workshop.mmdebstrap(behaviour.replace("{tar}", str(workshop.tar)))
    with pytest.raises(InfrastructureError, match="could not be built") as caught:
        ensure_image(RECIPE)
    assert "E: no network" in str(caught.value)
    assert "subuid" in caught.value.remedy
    assert caught.value.returncode not in (0, None)
    assert workshop.left() == []
    # The fault gone, the same call works.
    workshop.mmdebstrap(f"cat {workshop.tar}")
    assert ensure_image(RECIPE).release == RELEASE


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (f"./boot/vmlinuz-{RELEASE}", r"has no boot/vmlinuz-\*"),
        ("./usr/bin/busybox", "has no usr/bin/busybox"),
        (f"{MODULES}/modules.dep", "modules.dep"),
        (f"{MODULES}/kernel/b.ko", "kernel/b.ko"),
        ("./etc/vringlab/packages", "has no etc/vringlab/packages"),
    ],
)
def test_a_root_that_lacks_something(workshop: Workshop, without: str, message: str) -> None:
    root_tar(workshop.tar, without)
    with pytest.raises(InfrastructureError, match=message):
        ensure_image(RECIPE)
    assert workshop.left() == []


def test_a_root_that_is_cut_off(workshop: Workshop) -> None:
    workshop.mmdebstrap(f"head -c 1300 {workshop.tar}")
    with pytest.raises(InfrastructureError, match="root file system that mmdebstrap made"):
        ensure_image(RECIPE)
    assert workshop.left() == []


def test_a_wanted_module_that_the_kernel_does_not_have(workshop: Workshop) -> None:
    with pytest.raises(InfrastructureError, match="virtio_blk"):
        ensure_image(Recipe(suite="toy", initrd_modules=("virtio_blk",)))
    assert workshop.left() == []


def test_a_root_that_cannot_be_packed(workshop: Workshop) -> None:
    script(workshop.bin / "tar2sqfs", "echo 'No space left on device' >&2; exit 1")
    with pytest.raises(InfrastructureError, match="tar2sqfs failed") as caught:
        ensure_image(RECIPE)
    assert "No space left" in str(caught.value)
    assert workshop.left() == []


def test_too_little_space_is_told_before_work_is_begun(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(InfrastructureError, match="not enough disk space") as caught:
        ensure_image(RECIPE)
    assert str(workshop.images) in caught.value.message
    assert "1.0 GB free" in caught.value.message
    assert "VRINGLAB_CACHE" in caught.value.remedy
    assert workshop.called == 0
    assert workshop.left() == []


def test_a_cache_that_is_no_folder(workshop: Workshop) -> None:
    workshop.cache.write_text("a file")
    with pytest.raises(InfrastructureError, match="cannot be used") as caught:
        ensure_image(RECIPE)
    assert str(workshop.cache) in caught.value.message


def test_an_interrupted_build_ends_mmdebstrap_and_leaves_nothing(workshop: Workshop) -> None:
    workshop.mmdebstrap(f"sleep 1000 & echo $! >> {workshop.pids}; wait")
    with interrupted_when(lambda: workshop.called == 2), pytest.raises(KeyboardInterrupt):
        ensure_image(RECIPE)
    running = [int(pid) for pid in workshop.pids.read_text().split()]
    assert len(running) == 2
    assert until(lambda: not any(alive(pid) for pid in running))
    assert workshop.left() == []


def test_a_build_killed_by_kill_9_leaves_no_process_and_is_swept_by_the_next(
    workshop: Workshop,
) -> None:
    workshop.mmdebstrap(
        f"sleep 1000 & echo $! >> {workshop.pids}; head -c 2000 {workshop.tar}; wait"
    )
    code = (
        "from vringlab.image.build import ensure_image; from vringlab.image.recipe import Recipe\n"
        "ensure_image(Recipe(suite='toy', initrd_modules=('a',)))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as builder:
        assert until(lambda: workshop.called == 2)
        builder.kill()
    running = [int(pid) for pid in workshop.pids.read_text().split()]
    assert until(lambda: not any(alive(pid) for pid in running))
    assert RECIPE.digest() not in workshop.left()
    assert build.load(workshop.images / RECIPE.digest()) is None
    workshop.mmdebstrap(f"cat {workshop.tar}")
    assert ensure_image(RECIPE).release == RELEASE
    assert workshop.left() == [RECIPE.digest()]


def test_the_manifest_says_what_the_image_is(workshop: Workshop) -> None:
    image = ensure_image(RECIPE)
    manifest = json.loads((image.folder / "manifest.json").read_text())
    assert manifest["digest"] == RECIPE.digest()
    assert manifest["host_key"] == image.host_key
    assert build.load(image.folder) == image
    assert workshop.left() == [RECIPE.digest()]


@pytest.mark.usefixtures("workshop")
def test_qemu_comes_with_its_libraries_and_firmware() -> None:
    folder = ensure_image(RECIPE).qemu.parent
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    wrapper = found.pop("qemu-system-x86_64").decode()
    assert "exec" in wrapper
    assert found.pop("vringlab-count.so") == b"tool\n"
    assert found == {
        "lib/qemu-system-x86_64": b"QEMU",
        "lib/loader": b"loader",
        "lib/libz.so.1": b"zlib",
        "firmware/efi-virtio.rom": b"ipxe",
        **{f"firmware/{name}": b"bios" for name in ("bios-256k.bin", "bios.bin")},
        **{f"firmware/{name}": b"rom" for name in ("kvmvapic.bin", "linuxboot_dma.bin", "pvh.bin")},
    }
    assert stat.S_IMODE((folder / "qemu-system-x86_64").stat().st_mode) == 0o755


def test_the_key_is_one_that_ssh_takes(workshop: Workshop) -> None:
    image = ensure_image(RECIPE)
    done = local.run(["ssh-keygen", "-y", "-f", str(image.client_key)], timeout=60)
    assert done.stdout.startswith("ssh-ed25519 ")
    assert workshop.called == 1


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_kernel_is_unpacked_whatever_packed_it(pack: Callable[[bytes], bytes]) -> None:
    assert uncompressed(bzimage(pack(ELF))) == ELF


@pytest.mark.parametrize(
    "broken", [b"kernel" * 200, bzimage(b"unknown"), bzimage(gzip.compress(b"x"))]
)
def test_kernel_that_cannot_be_unpacked_is_named(broken: bytes) -> None:
    with pytest.raises(InfrastructureError, match="the image's kernel is"):
        uncompressed(broken)
