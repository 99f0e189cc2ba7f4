"""Kernels that a guest boots other than the image's: kernel, initrd and modules, made once.

The userland stays the image's. The modules are a second read-only disk that the bundle's own
initrd lays over the root, so that the guest finds them where it looks for its kernel's.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import posixpath
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vringlab.cachedir import OnStep, Store
from vringlab.errors import InfrastructureError, UserError
from vringlab.image import initrd
from vringlab.image.build import Image
from vringlab.image.kernel_file import decompressed, uncompressed
from vringlab.image.recipe import Recipe
from vringlab.kernels.base import SUPPORTED, BaseKernel, check_spec, is_held, resolve
from vringlab.kernels.buildroot import bootstrap, is_extension
from vringlab.settings import settings
from vringlab.transport import local

INIT = Path(__file__).parent / "initrd-init"

#: Raise it when the content of a bundle changes, so that old ones are not used.
_RECIPE = 2
_SPACE_GB = 1.5
_PACK_S = 600.0
_DEPMOD_S = 120.0

#: Loaded before the image's own initrd modules: 6.1 has it as a module, later kernels built in.
_BUS = "virtio_pci"

#: Packages of the root that `pack` takes its tools from.
TOOLS = ("base-files", "busybox-static", "kmod")

#: What the release's own packages are called: until 6.12 all is in `image`.
_PACKAGES = ("image", "binary", "modules", "base")


@dataclass(frozen=True)
class KernelBundle:
    """A kernel for guests.

    Attributes:
        folder: Its folder; never changed once it has its name.
        digest: What names it: all that it was made of.
        kernel: The kernel.
    """

    folder: Path
    digest: str
    kernel: BaseKernel

    @property
    def vmlinuz(self) -> Path:
        """The kernel, for direct boot."""
        return self.folder / "vmlinuz"

    @property
    def vmlinux(self) -> Path:
        """The same uncompressed, for emulated machines."""
        return self.folder / "vmlinux"

    @property
    def initrd(self) -> Path:
        """Its small initrd."""
        return self.folder / "initrd"

    @property
    def modules(self) -> Path:
        """A squashfs with `/usr/lib/modules/RELEASE`."""
        return self.folder / "modules.squashfs"


def _key(spec: str, recipe: Recipe) -> str:
    state = (
        *(_RECIPE, spec, SUPPORTED.get(check_spec(spec)[1]), _PACKAGES),
        *(recipe.module_folders, recipe.initrd_modules, INIT.read_text()),
    )
    return hashlib.sha256(repr(state).encode()).hexdigest()[:16]


def load_bundle(folder: Path) -> KernelBundle | None:
    """The bundle in a folder; None where there is no whole one."""
    try:
        made = json.loads((folder / "bundle.json").read_text())
        return KernelBundle(folder, made["digest"], BaseKernel(**made["kernel"]))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def ensure_bundle(
    spec: str, *, on_step: OnStep, recipe: Recipe | None = None, cache: Path | None = None
) -> KernelBundle:
    """The bundle of a Debian kernel: the one in the cache, or made now (some 100 MB to fetch).

    Args:
        spec: The base kernel, e.g. `debian:6.1`.
        on_step: Told what takes time.
        recipe: Says which modules are kept; that of the settings' suite when None.
        cache: Cache folder; the settings' when None.

    Raises:
        UserError: not a Debian kernel.
        InfrastructureError: a tool, the network or the disk failed, or the packages hold no
            kernel of that series.
    """
    kind, series = check_spec(spec)
    if kind != "debian":
        raise UserError(
            f"{spec} is not a distribution's kernel", remedy="it has to be built as a whole"
        )
    recipe = recipe or Recipe(suite=settings().suite)
    digest = _key(spec, recipe)
    store = Store((cache or settings().cache) / "kernels")
    key = f"debian-{series}-{digest}"

    def build(folder: Path) -> None:
        on_step(f"fetching the kernel of {spec} (once)")
        root = folder / "root"
        version = _fetch(SUPPORTED[series], root)
        tree = root / "kernel"
        release = _release(tree)
        kernel = resolve(spec, suite=SUPPORTED[series], release=release, version=version)
        pack(tree, kernel, root, folder, recipe, on_step)
        shutil.rmtree(root)
        write_bundle(folder, digest, kernel)

    return store.ensure(key, load_bundle, build, on_step=on_step, space_gb=_SPACE_GB)


def write_bundle(folder: Path, digest: str, kernel: BaseKernel) -> None:
    """Say what a folder's bundle is; the last thing that is written."""
    document = {"digest": digest, "kernel": asdict(kernel)}
    (folder / "bundle.json").write_text(json.dumps(document, indent=1) + "\n")


def _fetch(suite: str, root: Path) -> str:
    """Unpack the newest kernel of a suite below `root`/kernel, with tools; its package version."""
    items = " ".join(_PACKAGES)
    # Without being asked for, apt takes nothing from a suite that only extends another one; being
    # asked for, it would take nothing from a suite's security updates.
    target = f"-t {suite}" if is_extension(suite) else ""
    hook = (
        'set -eu; export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"; root=$1; '
        'mkdir -p "$root/debs" "$root/kernel"; cd "$root/debs"; '
        f'get() {{ apt-get -q {target} download "$1"; }}; get linux-image-amd64; '
        # The meta package names the release, and the release its packages.
        "name=$(dpkg-deb -f linux-image-amd64_*.deb Depends | "
        "grep -o 'linux-image-[^ ,]*' | head -n 1); rm linux-image-amd64_*.deb; "
        f"for item in {items}; do package=linux-$item-${{name#linux-image-}}; "
        '[ -z "$(apt-cache pkgnames "$package" | grep -Fx "$package")" ] || get "$package"; done; '
        'dpkg-deb -f "$name"_*.deb Version > "$root/kernel-version"; '
        'for deb in *.deb; do dpkg-deb -x "$deb" "$root/kernel"; rm "$deb"; done'
    )
    bootstrap(suite, root, TOOLS, hooks=(hook,))
    return (root / "kernel-version").read_text().strip()


def _modules_of(tree: Path) -> Path:
    for place in ("usr/lib/modules", "lib/modules"):
        found = sorted((tree / place).glob("*"))
        if found:
            return found[0]
    raise InfrastructureError(
        "the kernel's packages hold no modules",
        remedy="this suite arranges them differently; see vringlab/kernels/bundle.py",
        host="local",
    )


def _release(tree: Path) -> str:
    return _modules_of(tree).name


def pack(
    tree: Path,
    kernel: BaseKernel,
    tools: Path,
    target: Path,
    recipe: Recipe,
    on_step: OnStep,
) -> None:
    """Make a bundle's files out of an installed kernel.

    Args:
        tree: Has `boot/vmlinuz-RELEASE` and `lib/modules/RELEASE`, or as newer packages do.
        kernel: The kernel.
        tools: A root with kmod and a static busybox.
        target: Gets the files.
        recipe: Says which modules are kept.
        on_step: Told what takes time.

    Raises:
        InfrastructureError: something is missing from the tree, or a tool failed.
    """
    on_step(f"packing kernel {kernel.release} for guests")
    images = [
        *tree.glob("boot/vmlinuz-*"),
        *tree.glob("usr/lib/modules/*/vmlinuz"),
        *tree.glob("lib/modules/*/vmlinuz"),
    ]
    if not images:
        raise InfrastructureError(
            f"the packages of {kernel.version} hold no kernel image",
            remedy="this suite arranges them differently; see vringlab/kernels/bundle.py",
            host="local",
        )
    packed = images[0].read_bytes()
    (target / "vmlinuz").write_bytes(packed)
    (target / "vmlinux").write_bytes(uncompressed(packed))
    kept = target / "modules" / "usr" / "lib" / "modules" / kernel.release
    _keep(_modules_of(tree), kept, recipe.module_folders)
    for name in ("dev", "proc", "run"):
        (tools / name).mkdir(exist_ok=True)
    local.run(
        [
            *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", str(tools), "/"),
            *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run"),
            *("--bind", str(target / "modules"), "/run"),
            *("/usr/sbin/depmod", "-a", "-b", "/run/usr", kernel.release),
        ],
        timeout=_DEPMOD_S,
        remedy="see depmod's words above",
        remedy_missing="run `make setup`, or install it: apt install bubblewrap",
    )
    modules = dict(_initrd_modules(kept, (_BUS, *recipe.initrd_modules)))
    busybox = next(tools.glob("**/bin/busybox")).read_bytes()
    (target / "initrd").write_bytes(initrd.build(busybox, INIT.read_bytes(), modules))
    local.run(
        [
            *("gensquashfs", "-q", "-c", "lz4", "-b", "131072", "--all-root"),
            *("--pack-dir", str(target / "modules"), str(target / "modules.squashfs")),
        ],
        timeout=_PACK_S,
        remedy="free some space; see gensquashfs's lines above",
        remedy_missing="install squashfs-tools-ng, or run `make setup`",
    )
    shutil.rmtree(target / "modules")


def _keep(source: Path, target: Path, folders: tuple[str, ...]) -> None:
    """Copy the modules that a virtual machine can use, unpacked."""
    target.mkdir(parents=True)
    for file in source.glob("modules.*"):
        if file.name.startswith(("modules.builtin", "modules.order")):
            shutil.copy(file, target / file.name)
    for pattern in folders:
        for place in sorted((source / "kernel").glob(pattern)):
            for file in [place] if place.is_file() else sorted(place.rglob("*.ko*")):
                if ".ko" not in file.name:
                    continue
                name = file.relative_to(source).as_posix()
                bare = re.sub(r"\.ko\.(?:xz|zst|gz)$", ".ko", name)
                (target / bare).parent.mkdir(parents=True, exist_ok=True)
                (target / bare).write_bytes(_unpacked(file))


def _unpacked(file: Path) -> bytes:
    data = file.read_bytes()
    if file.suffix == ".xz":
        return lzma.decompress(data)
    if file.suffix == ".zst":
        return decompressed(data)
    return decompressed(data, "gzip") if file.suffix == ".gz" else data


def _initrd_modules(modules: Path, wanted: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    listed = (modules / "modules.dep").read_text()
    builtin = modules / "modules.builtin"
    names = {
        posixpath.basename(line).removesuffix(".ko").replace("-", "_")
        for line in (builtin.read_text().splitlines() if builtin.is_file() else ())
    }
    try:
        order = initrd.module_order(listed, [name for name in wanted if name not in names])
    except KeyError as error:
        raise InfrastructureError(
            f"this kernel has no {error.args[0]}, which its guests need to find their root",
            remedy="switch it on in the kernel's configuration (virtio_blk, squashfs, overlayfs)",
            host="local",
        ) from None
    for path in order:
        yield posixpath.basename(path), (modules / path).read_bytes()


def base_kernel(
    spec: str, image: Image, *, on_step: OnStep
) -> tuple[BaseKernel, KernelBundle | None]:
    """The base kernel of a name, and how a guest boots it; the image's own needs no bundle.

    Args:
        spec: The base kernel.
        image: The image.
        on_step: Told what takes time.

    Raises:
        UserError: not a base kernel, or the image holds another one of its series.
        InfrastructureError: as for `ensure_bundle`.
    """
    if is_held(spec, image.release):
        own = resolve(spec, suite=image.suite, release=image.release, version=image.version)
        return own, None
    bundle = ensure_bundle(spec, on_step=on_step, recipe=Recipe(suite=image.suite))
    return bundle.kernel, bundle


def as_record(bundle: KernelBundle) -> Mapping[str, object]:
    """For provenance."""
    return {
        "release": bundle.kernel.release,
        "package": bundle.kernel.version,
        "base": bundle.kernel.spec,
        "bundle": bundle.digest,
    }
