"""Builds the image once per recipe, under a temporary name, and finds it again."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from vringlab.errors import InfrastructureError
from vringlab.image import initrd
from vringlab.image.recipe import FILES, SOURCES, Recipe
from vringlab.settings import settings
from vringlab.transport import local

#: Where our own files are in the root file system.
PREFIX = "/usr/lib/vringlab"
#: mmdebstrap unpacks some 700 MB and packs them again; the compressed image is about half.
_NEEDED_BYTES = 3 * 2**30


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
    def initrd(self) -> Path:
        """The small initrd."""
        return self.folder / "initrd"

    @property
    def client_key(self) -> Path:
        """Private key that lab host and guest accept; readable by its owner only."""
        return self.folder / "id_ed25519"


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`: of several processes that want one thing, one builds it.

    The lock is the kernel's, so it ends with its holder however that ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes `target` when the block succeeds.

    Must be used under `exclusive`: leftovers of killed builds of the same target are removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        InfrastructureError: less than `needed` bytes are free where `folder` is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InfrastructureError(
            f"{folder} has {free / 2**30:.1f} GiB free, {needed / 2**30:.1f} GiB are needed",
            remedy="free some space, or set VRINGLAB_CACHE to a folder on a larger disk",
            host="local",
        )


def load(folder: Path) -> Image | None:
    """The image in `folder`, or None if there is no complete one."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return None
    values = json.loads(manifest.read_text())
    return Image(folder=folder, **values)


def _compile_tools(target: Path) -> None:
    """Build our C tools statically, so that the image's libc need not be this machine's."""
    local.run(
        ["make", "-s", "-C", str(SOURCES), "all", f"OUT={target}", "STATIC=1"],
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
        '{ chroot "$1" dpkg-query -W; cat "$1"/var/tmp/kernel-version; } '
        '> "$1"/etc/vringlab/packages; rm "$1"/var/tmp/kernel-version',
    ]


def _debootstrap(recipe: Recipe, work: Path, tar: Path) -> None:
    argv = [
        "mmdebstrap",
        f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
        "--variant=essential",
        f"--include={','.join(recipe.packages)}",
        '--aptopt=Apt::Install-Recommends "false"',
        "--format=tar",
        *(f"--dpkgopt=path-exclude={path}" for path in recipe.dpkg_excludes),
        *(f"--customize-hook={hook}" for hook in _hooks(recipe, work)),
        recipe.suite,
        "-",
    ]
    program = local.find_tool("mmdebstrap", "install mmdebstrap, or run `make setup`")
    log = work / "mmdebstrap.log"
    # Through a pipe: in unshare mode the builder is another user, who may not write here.
    with tar.open("wb") as out, log.open("wb") as err:
        status = subprocess.run(
            [program, *argv[1:]], stdout=out, stderr=err, stdin=subprocess.DEVNULL, check=False
        ).returncode
    if status != 0:
        raise InfrastructureError(
            "the root file system could not be built",
            remedy="see mmdebstrap's lines above: no network, no space, or (without root) no "
            "entry for you in /etc/subuid",
            command=argv[:4],
            host="local",
            stderr=log.read_text(errors="replace"),
            returncode=status,
        )


def _read_members(tar: Path, modules: tuple[str, ...], target: Path) -> tuple[str, bytes]:
    """Take the kernel and the parts of the initrd out of the root; write both.

    Returns the kernel's release and the list of installed packages.
    """
    with tarfile.open(tar) as archive:
        members = {m.name.removeprefix("./"): m for m in archive.getmembers() if m.isfile()}

        def read(name: str) -> bytes:
            stream = archive.extractfile(members[name])
            if stream is None:
                raise InfrastructureError(f"the root file system has no readable {name}")
            return stream.read()

        kernel = next(name for name in members if name.startswith("boot/vmlinuz-"))
        release = kernel.removeprefix("boot/vmlinuz-")
        base = f"usr/lib/modules/{release}"
        order = initrd.module_order(read(f"{base}/modules.dep").decode(), modules)
        content = {path.rsplit("/", 1)[1]: read(f"{base}/{path}") for path in order}
        (target / "vmlinuz").write_bytes(read(kernel))
        (target / "initrd").write_bytes(
            initrd.build(read("usr/bin/busybox"), (FILES / "initrd-init").read_bytes(), content)
        )
        return release, read("etc/vringlab/packages")


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


def ensure_image(
    recipe: Recipe | None = None, *, on_step: Callable[[str], None] = lambda _: None
) -> Image:
    """The image of a recipe: the one in the cache, or built now (about two minutes).

    Args:
        recipe: Ingredients; those of the settings' suite when None.
        on_step: Told what is being done.

    Raises:
        InfrastructureError: a tool, the network or the disk failed. Nothing is left behind.
    """
    recipe = recipe or Recipe(suite=settings().suite)
    digest = recipe.digest()
    images = settings().cache / "images"
    folder = images / digest
    found = load(folder)
    if found is not None:
        return found
    with exclusive(images / f"{digest}.lock"):
        found = load(folder)
        if found is not None:
            return found
        require_space(images, _NEEDED_BYTES)
        with fresh_folder(folder) as target, tempfile.TemporaryDirectory(dir=images) as scratch:
            work = Path(scratch)
            # mmdebstrap reads these as another user when it runs rootless.
            work.chmod(0o755)
            prefix, etc = work / "prefix", work / "etc"
            prefix.mkdir()
            etc.mkdir()
            for name in ("setup", "net-up", "swap-module"):
                shutil.copy(FILES / name, prefix / name)
            for name in ("inittab", "sshd_config"):
                shutil.copy(FILES / name, etc / name)
            on_step("compiling the measuring tools")
            _compile_tools(prefix)
            host_key = _make_keys(work, target, etc)
            tar = work / "root.tar"
            on_step(f"building the root file system ({recipe.suite}, by mmdebstrap)")
            _debootstrap(recipe, work, tar)
            on_step("packing the root file system")
            release, listing = _read_members(tar, recipe.initrd_modules, target)
            _pack(tar, target / "root.squashfs")
            packages = dict(
                line.split("\t", 1) for line in listing.decode().splitlines() if "\t" in line
            )
            image = Image(
                folder=folder,
                digest=digest,
                suite=recipe.suite,
                release=release,
                version=packages.pop("vringlab-kernel"),
                tools={
                    name: version
                    for name, version in packages.items()
                    if name.split(":")[0] in recipe.packages
                },
                host_key=host_key,
            )
            values = asdict(image)
            del values["folder"]
            (target / "manifest.json").write_text(json.dumps(values, indent=1) + "\n")
    return image


def _pack(tar: Path, squashfs: Path) -> None:
    # lz4: the fastest to unpack, and unpacking happens on an emulated processor.
    program = local.find_tool("tar2sqfs", "install squashfs-tools-ng, or run `make setup`")
    with tar.open("rb") as source:
        done = subprocess.run(
            [program, "-q", "-f", "-c", "lz4", "-b", "131072", "-j", "2", str(squashfs)],
            stdin=source,
            capture_output=True,
            check=False,
        )
    if done.returncode != 0:
        raise InfrastructureError(
            "the root file system could not be packed",
            remedy="free some space; see tar2sqfs's lines above",
            command="tar2sqfs",
            host="local",
            stderr=done.stderr.decode(errors="replace"),
            returncode=done.returncode,
        )
