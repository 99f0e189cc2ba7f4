"""Builds the image once per recipe, under a temporary name, and finds it again."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

from vringlab.cachedir import OnStep, Store
from vringlab.errors import InfrastructureError
from vringlab.image import emulator, initrd
from vringlab.image.kernel_file import uncompressed
from vringlab.image.recipe import FILES, SOURCES, Recipe
from vringlab.settings import settings
from vringlab.transport import local

#: Where our own files are in the root file system.
PREFIX = "/usr/lib/vringlab"
#: mmdebstrap unpacks some 700 MB and packs them again; the compressed image is about half.
_NEEDED_GB = 3.2
#: Two minutes here; a slow network takes its time.
_BUILD_S = 3600.0


@dataclass(frozen=True)
class Image:
    """A built image.

    Attributes:
        folder: Its content-addressed folder; never changed once it has its name.
        digest: The recipe's digest.
        suite: Debian suite.
        release: Kernel release (`uname -r`).
        version: Version of the kernel's package, e.g. `6.12.118-1`.
        tools: Versions of the packages that measure.
        host_key: Public SSH host key (`ssh-ed25519 AAAA...`) of lab host and guest.
    """

    folder: Path
    digest: str
    suite: str
    release: str
    version: str
    tools: dict[str, str]
    host_key: str

    @property
    def root(self) -> Path:
        """The squashfs root."""
        return self.folder / "root.squashfs"

    @property
    def kernel(self) -> Path:
        """The kernel, for direct boot."""
        return self.folder / "vmlinuz"

    @property
    def vmlinux(self) -> Path:
        """The same kernel uncompressed, for emulated machines."""
        return self.folder / "vmlinux"

    @property
    def initrd(self) -> Path:
        """The small initrd."""
        return self.folder / "initrd"

    @property
    def qemu(self) -> Path:
        """Its QEMU, to be run on this machine."""
        return self.folder / "qemu" / emulator.PROGRAM

    @property
    def counter(self) -> Path:
        """The plugin with which its QEMU counts instructions (`vringlab.lab.counter`)."""
        return self.folder / "qemu" / "vringlab-count.so"

    @property
    def client_key(self) -> Path:
        """Private key that lab host and guest accept; readable by its owner only."""
        return self.folder / "id_ed25519"


def load(folder: Path) -> Image | None:
    """The image in `folder`, or None if there is no complete one."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return None
    values = json.loads(manifest.read_text())
    return Image(folder=folder, **values)


def _compile(what: str, target: Path) -> None:
    """Build our C tools (`all`), or the `plugin` of the image's QEMU.

    The tools statically, so that the image's libc need not be this machine's.
    """
    local.run(
        ["make", "-s", "-C", str(SOURCES), what, f"OUT={target}", "STATIC=1"],
        timeout=120,
        remedy_missing="install make, gcc and libc6-dev, or run `make setup`",
        remedy="the tools of lib/vringlab/image/src need gcc and a static libc",
    )


def _hooks(recipe: Recipe, work: Path) -> list[str]:
    """Customisation of the root, as mmdebstrap hooks; `$1` is the root.

    The kernel is unpacked rather than installed: installing would generate Debian's own initrd,
    which takes longer than all the rest of this function and is never booted.
    """
    keep = " ".join(shlex.quote(name) for name in recipe.module_folders)
    prune = (
        'cd "$1"/usr/lib/modules/*/kernel; mkdir ../kept; '
        f'for item in {keep}; do for path in $item; do [ -e "$path" ] || continue; '
        'mkdir -p ../kept/"$(dirname "$path")"; mv "$path" ../kept/"$path"; done; done; '
        "cd ..; rm -rf kernel; mv kept kernel; "
        # Decompressed here once instead of at every modprobe under emulation.
        "find kernel -name '*.ko.xz' -exec xz -d {} +; "
    )
    return [
        # apt of the building machine, pointed at the root: the root itself has none.
        f'export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"; cd "$1"/var/tmp && apt-get -q download '
        f'"$(apt-cache depends {recipe.kernel} | sed -n "s/.*Depends: //p" | head -n 1)"',
        'for deb in "$1"/var/tmp/linux-image-*.deb; do '
        'printf "vringlab-kernel\\t%s\\n" "$(dpkg-deb -f "$deb" Version)" '
        '> "$1"/var/tmp/kernel-version; '
        'dpkg-deb -x "$deb" "$1"; rm "$deb"; done',
        prune,
        'chroot "$1" depmod -a "$(basename "$1"/usr/lib/modules/*)"',
        f'mkdir -p "$1"{PREFIX} "$1"/etc/vringlab',
        f"sync-in {shlex.quote(str(work / 'prefix'))} {PREFIX}",
        f"sync-in {shlex.quote(str(work / 'etc'))} /etc/vringlab",
        f'chmod 0755 "$1"{PREFIX}/* && chmod 0600 "$1"/etc/vringlab/ssh_host_ed25519_key',
        'cp "$1"/etc/vringlab/inittab "$1"/etc/inittab',
        'for name in init poweroff; do ln -sf /usr/bin/busybox "$1"/usr/sbin/$name; done',
        f'for tool in "$1"{PREFIX}/vringlab-*; do ln -sf "../lib/vringlab/$(basename "$tool")" '
        '"$1"/usr/bin/; done',
        # Accounts must not be locked for sshd, and nobody has a password.
        'sed -i "s|^root:[^:]*|root:*|" "$1"/etc/shadow',
        'rm -rf "$1"/var/cache/apt "$1"/usr/share/bash-completion "$1"/boot/System.map*',
        f'chroot "$1" ldd /usr/bin/{emulator.PROGRAM} | sed -n "s/.*=> \\([^ ]*\\) .*/\\1/p" '
        f'> "$1"/{emulator.LIBRARIES}',
        '{ chroot "$1" dpkg-query -W; cat "$1"/var/tmp/kernel-version; } '
        '> "$1"/etc/vringlab/packages; rm "$1"/var/tmp/kernel-version',
    ]


def _debootstrap(recipe: Recipe, work: Path, tar: Path) -> None:
    rootless = os.geteuid() != 0
    local.find_tool("mmdebstrap", "install mmdebstrap, or run `make setup`")
    argv = [
        # As root it mounts /proc and more into the root it makes: where nobody else sees it, and
        # where no mount outlives it.
        *([] if rootless else ["unshare", "--mount", "--propagation", "private"]),
        "mmdebstrap",
        f"--mode={'unshare' if rootless else 'root'}",
        "--variant=essential",
        f"--include={','.join(recipe.packages)}",
        '--aptopt=Apt::Install-Recommends "false"',
        "--format=tar",
        *(f"--dpkgopt=path-exclude={path}" for path in recipe.dpkg_excludes),
        *(f"--customize-hook={hook}" for hook in _hooks(recipe, work)),
        recipe.suite,
        "-",
    ]
    done = local.run(
        argv,
        timeout=_BUILD_S,
        # Through a pipe: in unshare mode the builder is another user, who may not write here.
        output=tar,
        # The half-made root goes with our folder when all is killed. Rootless it cannot be there,
        # since that other user may not pass through a home.
        env=None if rootless else {"TMPDIR": str(work)},
        check=False,
        tethered=True,
    )
    if done.returncode != 0:
        raise InfrastructureError(
            "the root file system could not be built",
            remedy="see mmdebstrap's lines above: no network, no space, or (without root) no "
            "entry for you in /etc/subuid",
            command=argv[: argv.index("--format=tar")],
            host="local",
            stderr=done.stderr,
            returncode=done.returncode,
        )


def _read_members(tar: Path, modules: tuple[str, ...], target: Path) -> tuple[str, bytes]:
    """Take the kernel, the parts of the initrd and QEMU out of the root; write them.

    Returns the kernel's release and the list of installed packages.
    """
    try:
        with tarfile.open(tar) as archive:
            members = {m.name.removeprefix("./"): m for m in archive.getmembers() if m.isfile()}

            def read(name: str) -> bytes:
                stream = archive.extractfile(members[name])
                return b"" if stream is None else stream.read()

            kernel = next(
                (name for name in members if name.startswith("boot/vmlinuz-")), "boot/vmlinuz-*"
            )
            release = kernel.removeprefix("boot/vmlinuz-")
            packed = read(kernel)
            (target / "vmlinuz").write_bytes(packed)
            (target / "vmlinux").write_bytes(uncompressed(packed))
            base = f"usr/lib/modules/{release}"
            order = initrd.module_order(read(f"{base}/modules.dep").decode(), modules)
            content = {path.rsplit("/", 1)[1]: read(f"{base}/{path}") for path in order}
            (target / "initrd").write_bytes(
                initrd.build(read("usr/bin/busybox"), (FILES / "initrd-init").read_bytes(), content)
            )
            emulator.unpack(archive, target / "qemu")
            return release, read("etc/vringlab/packages")
    except (KeyError, tarfile.TarError) as error:
        missing = error.args[0] if isinstance(error, KeyError) else f"readable end: {error}"
        raise InfrastructureError(
            f"the root file system that mmdebstrap made has no {missing}",
            remedy="the suite's kernel, busybox or QEMU may have changed; see the image's recipe",
            host="local",
        ) from error


def _make_keys(work: Path, target: Path, etc: Path) -> str:
    """A client key and a host key of this image alone; returns the public host key."""
    for path in (target / "id_ed25519", etc / "ssh_host_ed25519_key"):
        local.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vringlab", "-f", str(path)],
            timeout=60,
            cwd=work,
            remedy_missing="install openssh-client, or run `make setup`",
        )
    shutil.copy(target / "id_ed25519.pub", etc / "authorized_keys")
    return " ".join((etc / "ssh_host_ed25519_key.pub").read_text().split()[:2])


def ensure_image(recipe: Recipe | None = None, *, on_step: OnStep = lambda _: None) -> Image:
    """The image of a recipe: the one in the cache, or built now (about two minutes).

    Args:
        recipe: Ingredients; those of the settings' suite when None.
        on_step: Told what is being done.

    Raises:
        InfrastructureError: a tool, the network or the disk failed. Nothing is left behind.
    """
    recipe = recipe or Recipe(suite=settings().suite)
    digest = recipe.digest()
    store = Store(settings().cache / "images")
    return store.ensure(
        digest,
        load,
        lambda target: _build(recipe, target, digest, on_step),
        on_step=on_step,
        space_gb=_NEEDED_GB,
    )


def _build(recipe: Recipe, target: Path, digest: str, on_step: OnStep) -> None:
    # Inside the target, so that it goes with it when we are killed.
    work = target / "work"
    prefix, etc, tar = work / "prefix", work / "etc", work / "root.tar"
    for folder in (work, prefix, etc):
        folder.mkdir()
        # mmdebstrap reads these as another user when it runs rootless.
        folder.chmod(0o755)
    for name in ("setup", "net-up", "swap-module"):
        shutil.copy(FILES / name, prefix / name)
    for name in ("inittab", "sshd_config"):
        shutil.copy(FILES / name, etc / name)
    on_step("compiling the measuring tools")
    _compile("all", prefix)
    host_key = _make_keys(work, target, etc)
    on_step(f"building the root file system ({recipe.suite}, by mmdebstrap)")
    _debootstrap(recipe, work, tar)
    on_step("packing the root file system")
    release, listing = _read_members(tar, recipe.initrd_modules, target)
    _compile("plugin", target / "qemu")
    # In the root too: lab hosts start their guests from there.
    with tarfile.open(tar, "a") as archive:
        archive.add(target / "vmlinux", f"./boot/vmlinux-{release}")
        archive.add(target / "initrd", "./boot/initrd")
    _pack(tar, target / "root.squashfs")
    packages = dict(line.split("\t", 1) for line in listing.decode().splitlines() if "\t" in line)
    manifest = {
        "digest": digest,
        "suite": recipe.suite,
        "release": release,
        "version": packages.pop("vringlab-kernel"),
        "tools": {
            name: version
            for name, version in packages.items()
            if name.split(":")[0] in recipe.packages
        },
        "host_key": host_key,
    }
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(work)


def _pack(tar: Path, squashfs: Path) -> None:
    # lz4: the fastest to unpack, and unpacking happens on an emulated processor.
    local.run(
        ["tar2sqfs", "-q", "-f", "-c", "lz4", "-b", "131072", "-j", "2", str(squashfs)],
        timeout=_BUILD_S,
        input=tar,
        tethered=True,
        remedy="free some space; see tar2sqfs's lines above",
        remedy_missing="install squashfs-tools-ng, or run `make setup`",
    )
