"""Whole kernels, for bases that no distribution builds: `tree:`, `tarball:` and `git:`.

A tree that its owner has built is taken as it is. Anything else is built by tuxmake, once for
identical source, configuration and compiler (some ten minutes on two cores), and what out-of-tree
builds of modules need of it is kept beside it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vringlab.cachedir import OnStep, Store, there
from vringlab.errors import InfrastructureError, UserError, VringlabError
from vringlab.image.build import Image
from vringlab.image.recipe import Recipe
from vringlab.kernels.base import BaseKernel, check_spec, folder_name
from vringlab.kernels.buildroot import BuildRoot, bootstrap, ensure_buildroot
from vringlab.kernels.bundle import (
    TOOLS,
    KernelBundle,
    base_kernel,
    load_bundle,
    pack,
    write_bundle,
)
from vringlab.settings import settings
from vringlab.transport import local

#: What a lab's guest needs beyond `defconfig` and `kvm_guest.config`, and modules for what the
#: collection's arms replace. Few drivers: none of the hardware's is of use in a virtual machine.
FRAGMENT = """\
CONFIG_LOCALVERSION_AUTO=n
CONFIG_MODULES=y
CONFIG_MODULE_UNLOAD=y
CONFIG_PVH=y
CONFIG_VIRTIO_BLK=m
CONFIG_VIRTIO_NET=m
CONFIG_SQUASHFS=m
CONFIG_SQUASHFS_LZ4=y
CONFIG_OVERLAY_FS=m
CONFIG_VSOCKETS=m
CONFIG_VIRTIO_VSOCKETS=m
CONFIG_VHOST_MENU=y
CONFIG_VHOST_NET=m
CONFIG_VHOST_VSOCK=m
CONFIG_TUN=m
CONFIG_NET_PKTGEN=m
CONFIG_KPROBES=y
CONFIG_KPROBE_EVENTS=y
CONFIG_BPF_SYSCALL=y
CONFIG_BPF_JIT=y
CONFIG_BPF_EVENTS=y
CONFIG_FTRACE=y
CONFIG_FUNCTION_TRACER=y
CONFIG_KALLSYMS_ALL=y
CONFIG_DRM=n
CONFIG_SOUND=n
CONFIG_WLAN=n
CONFIG_USB_SUPPORT=n
CONFIG_DEBUG_INFO_NONE=y
"""

#: Raise it when the way of building changes, so that older results are not used.
_RECIPE = 2
_BUILD_S = 4 * 3600.0
_GIT_S = 3600.0
_SPACE_GB = 6.0
_NEEDED = ("vmlinux", "Module.symvers", ".config", "include/config/kernel.release")
_IMAGE = "arch/x86/boot/bzImage"
_COMPILER = re.compile(r'^CONFIG_CC_VERSION_TEXT="(.*)"$', re.MULTILINE)
_MAJOR = re.compile(r"(\d+)\.\d+(?:\.\d+)?\s*(?:\d{8})?$")
_MAKEFILE = re.compile(r"^(VERSION|PATCHLEVEL|SUBLEVEL|EXTRAVERSION) *=[ \t]*(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Base:
    """A base kernel with all that arms and guests need of it.

    Attributes:
        kernel: The kernel.
        root: What modules are built against.
        bundle: What guests boot; None for the image's own kernel.
    """

    kernel: BaseKernel
    root: BuildRoot
    bundle: KernelBundle | None


def prepare_base(spec: str, image: Image, *, on_step: OnStep) -> Base:
    """A base kernel, fetched or built where the cache does not have it.

    Args:
        spec: The base kernel.
        image: The image.
        on_step: Told what takes time.

    Raises:
        UserError: not a base kernel, no such tree, archive or revision, or a compiler of another
            major version than the one a built tree was built with.
        InfrastructureError: a tool, the network or the disk failed, or the kernel does not build.
    """
    if check_spec(spec)[0] == "debian":
        kernel, bundle = base_kernel(spec, image, on_step=on_step)
        return Base(kernel, ensure_buildroot(kernel, on_step=on_step), bundle)
    return ensure_whole(spec, on_step=on_step)


def guest_kernel(spec: str, image: Image, *, on_step: OnStep) -> KernelBundle | None:
    """What guests boot for a base kernel; None for the image's own. Errors as `prepare_base`."""
    if check_spec(spec)[0] == "debian":
        return base_kernel(spec, image, on_step=on_step)[1]
    return ensure_whole(spec, on_step=on_step).bundle


def ensure_whole(spec: str, *, on_step: OnStep, cache: Path | None = None) -> Base:
    """A kernel of a tree, an archive or a revision; see `prepare_base`."""
    kind, what = check_spec(spec)
    cache = cache or settings().cache
    if kind == "tree":
        tree = Path(what).expanduser().resolve()
        _check_tree(tree, spec)
        if is_built(tree):
            return _adopt(spec, tree, on_step, cache)
        return _build(spec, tree, _state_of_tree(tree), on_step, cache)
    if kind == "tarball":
        archive = Path(what).expanduser()
        if not archive.is_file():
            raise UserError(f"no archive {what}", remedy="name a kernel's source archive")
        state = _file_digest(archive)
        return _build(spec, _unpacked(archive, state, on_step, cache), state, on_step, cache)
    url, _, ref = what.rpartition("@")
    commit = _commit(url, ref)
    return _build(spec, _checkout(url, ref, commit, on_step, cache), commit, on_step, cache)


# --- sources --------------------------------------------------------------------------------


def _check_tree(tree: Path, spec: str) -> None:
    if not (tree / "Kbuild").is_file() or not (tree / "Makefile").is_file():
        raise UserError(
            f"{spec} is not the tree of a kernel",
            remedy="name the folder that has the kernel's Makefile and Kbuild",
        )


def source_version(tree: Path) -> str:
    """The version that a tree's Makefile states, e.g. `6.12.118`.

    Raises:
        UserError: it states none.
    """
    fields = dict(_MAKEFILE.findall((tree / "Makefile").read_text()[:2000]))
    numbers = [fields.get(name, "").strip() for name in ("VERSION", "PATCHLEVEL", "SUBLEVEL")]
    if not all(number.isdigit() for number in numbers):
        raise UserError(
            f"the Makefile of {tree} states no version", remedy="name a kernel's source tree"
        )
    return ".".join(numbers) + str(fields.get("EXTRAVERSION", "")).strip()


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _git(*arguments: str, timeout: float = 300.0) -> local.Completed:
    return local.run(
        ["git", *arguments],
        timeout=timeout,
        check=False,
        env={"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"},
        remedy_missing="run `make setup`, or install it: apt install git",
    )


def _state_of_tree(tree: Path) -> str:
    """What tells the content of a tree from another; of a git tree its commit and changes."""
    head = _git("-C", str(tree), "rev-parse", "HEAD")
    if head.returncode == 0:
        changes = _git("-C", str(tree), "diff", "HEAD").stdout
        others = _git("-C", str(tree), "status", "--porcelain").stdout
        return hashlib.sha256(f"{head.stdout}{changes}{others}".encode()).hexdigest()
    state = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        if path.is_file():
            stat = path.stat()
            name = path.relative_to(tree)
            state.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return state.hexdigest()


def _unpacked(archive: Path, state: str, on_step: OnStep, cache: Path) -> Path:
    store = Store(cache / "trees")
    key = f"tarball-{state[:16]}"

    def build(folder: Path) -> None:
        on_step(f"unpacking {archive.name} (once)")
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(
                f"{archive} cannot be unpacked: {error}", remedy="fetch it again"
            ) from None

    entry = store.ensure(key, there, build, on_step=on_step, space_gb=_SPACE_GB)
    tops = [item for item in entry.iterdir() if item.is_dir()]
    tree = tops[0] if len(tops) == 1 else entry
    _check_tree(tree, f"tarball:{archive}")
    return tree


def _commit(url: str, ref: str) -> str:
    if re.fullmatch(r"[0-9a-f]{40}", ref):
        return ref
    done = _git("ls-remote", url, ref, f"{ref}^{{}}")
    found = [line.split() for line in done.stdout.splitlines()]
    if done.returncode != 0 or not found:
        raise UserError(
            f"{url} has no revision {ref!r}"
            if done.returncode == 0
            else f"the revisions of {url} cannot be read",
            remedy="check the address and the revision (a tag, a branch, or a whole commit id)",
            host="local",
            stderr=done.stderr,
        )
    # Of an annotated tag the peeled line has the commit.
    return next((commit for commit, name in found if name.endswith("^{}")), found[0][0])


def _checkout(url: str, ref: str, commit: str, on_step: OnStep, cache: Path) -> Path:
    store = Store(cache / "trees")
    key = f"git-{commit[:16]}"

    def build(folder: Path) -> None:
        on_step(f"fetching {ref} of {url} (once)")
        _git("init", "-q", str(folder))
        for arguments in (
            ("fetch", "-q", "--depth=1", url, commit),
            ("checkout", "-q", "FETCH_HEAD"),
        ):
            done = _git("-C", str(folder), *arguments, timeout=_GIT_S)
            if done.returncode != 0:
                raise UserError(
                    f"{ref} of {url} cannot be fetched",
                    remedy="check the address, the revision and the network",
                    host="local",
                    stderr=done.stderr,
                )

    entry = store.ensure(key, there, build, on_step=on_step, space_gb=_SPACE_GB)
    _check_tree(entry, f"git:{url}@{ref}")
    return entry


def source_of(spec: str, image: Image, *, on_step: OnStep) -> tuple[str, Path]:
    """The whole source of a base kernel, as a base kernel of its own and as a folder.

    Args:
        spec: The base kernel; of a distribution's kernel the source package is taken.
        image: The image.
        on_step: Told what takes time.

    Raises:
        UserError, InfrastructureError: as for `prepare_base`.
    """
    cache = settings().cache
    kind, what = check_spec(spec)
    if kind == "debian":
        kernel, _ = base_kernel(spec, image, on_step=on_step)
        spec = f"tarball:{ensure_buildroot(kernel, on_step=on_step).archive}"
        kind, what = check_spec(spec)
    if kind == "tree":
        tree = Path(what).expanduser().resolve()
        _check_tree(tree, spec)
        return spec, tree
    if kind == "tarball":
        archive = Path(what).expanduser()
        return spec, _unpacked(archive, _file_digest(archive), on_step, cache)
    url, _, ref = what.rpartition("@")
    return spec, _checkout(url, ref, _commit(url, ref), on_step, cache)


def patched_tree(tree: Path, diffs: Sequence[str], *, on_step: OnStep) -> Path:
    """A copy of a tree with patches applied; made once for the same of both.

    Args:
        tree: The tree.
        diffs: The patches in order.
        on_step: Told what takes time.

    Raises:
        UserError: one does not apply.
        InfrastructureError: the disk is full.
    """
    state = hashlib.sha256(repr((str(tree), _state_of_tree(tree), list(diffs))).encode())
    store = Store(settings().cache / "trees")
    key = f"patched-{state.hexdigest()[:16]}"

    def build(folder: Path) -> None:
        on_step("copying the source and patching it")
        for item in tree.iterdir():
            if item.name != ".git":
                local.run(
                    ["cp", "-r", "--reflink=auto", str(item), str(folder / item.name)],
                    timeout=_GIT_S,
                )
        for number, diff in enumerate(diffs, start=1):
            _patch(folder, number, diff)

    return store.ensure(key, there, build, on_step=on_step, space_gb=_SPACE_GB)


def _patch(folder: Path, number: int, diff: str) -> None:
    done = local.run(
        ["git", "apply", "--verbose", "--whitespace=nowarn", "-"],
        timeout=300.0,
        input=diff,
        cwd=folder,
        check=False,
        # Inside a repository git would skip, silently, what it takes to be outside of it.
        env={"GIT_DIR": str(folder / ".no-repository"), "LC_ALL": "C"},
        remedy_missing="run `make setup`, or install it: apt install git",
    )
    if done.returncode != 0:
        raise UserError(
            f"patch {number} does not apply to this base",
            remedy="port it to this base, or use one that takes it (--base)",
            host="local",
            stderr=done.stderr,
        )


# --- a tree that is built already -----------------------------------------------------------


def is_built(tree: Path) -> bool:
    """Whether a tree holds a whole build: kernel, modules' symbols, configuration."""
    return all((tree / name).is_file() for name in (*_NEEDED, _IMAGE))


def check_compiler(config: str, compiler: str) -> None:
    """Refuse a compiler of another major version than the kernel's.

    Args:
        config: The kernel's configuration, which names its compiler.
        compiler: First line of our compiler's `--version`.

    Raises:
        UserError: the majors differ.
    """
    stated = _COMPILER.search(config)
    theirs = _MAJOR.search(stated.group(1).strip()) if stated else None
    ours = _MAJOR.search(compiler.strip())
    if theirs and ours and theirs.group(1) != ours.group(1):
        assert stated is not None
        raise UserError(
            f"the kernel was built by {stated.group(1)}, and the compiler here is {compiler}",
            remedy=f"install gcc {theirs.group(1)} and make it the `gcc` of your PATH, or build "
            "the kernel again with the one that is here",
        )


def _compiler() -> str:
    done = local.run(
        ["gcc", "--version"], timeout=60, remedy_missing="install gcc, or run `make setup`"
    )
    return done.stdout.splitlines()[0]


def _adopt(spec: str, tree: Path, on_step: OnStep, cache: Path) -> Base:
    config = (tree / ".config").read_text()
    compiler = _compiler()
    check_compiler(config, compiler)
    release = (tree / "include/config/kernel.release").read_text().strip()
    kernel = BaseKernel(spec, release, source_version(tree), "")
    state = "\0".join(_file_digest(tree / name) for name in (*_NEEDED, _IMAGE))
    recipe = Recipe()
    digest = hashlib.sha256(
        repr((_RECIPE, state, recipe.module_folders, recipe.initrd_modules)).encode()
    ).hexdigest()[:16]
    store = Store(cache / "kernels")
    key = f"{folder_name(spec)}-{digest}"

    def build(folder: Path) -> None:
        _pack_tree(tree, kernel, folder, recipe, on_step)
        write_bundle(folder, digest, kernel)

    bundle = store.ensure(key, load_bundle, build, on_step=on_step, space_gb=_SPACE_GB / 4)
    root = BuildRoot(kernel, Path("/"), tree, compiler, str(tree))
    return Base(kernel, root, bundle)


def _pack_tree(
    tree: Path, kernel: BaseKernel, folder: Path, recipe: Recipe, on_step: OnStep
) -> None:
    """A bundle's files out of a built tree; tools come from Debian."""
    on_step(f"installing the modules of {kernel.release}")
    stage, tools = folder / "stage", folder / "tools"
    local.run(
        [
            *("make", "-s", "-C", str(tree), f"INSTALL_MOD_PATH={stage}", "INSTALL_MOD_STRIP=1"),
            *("DEPMOD=true", "modules_install"),
        ],
        timeout=_BUILD_S,
        remedy=f"is {tree} built as a whole? run `make` there",
    )
    (stage / "boot").mkdir(parents=True)
    shutil.copy(tree / _IMAGE, stage / "boot" / f"vmlinuz-{kernel.release}")
    bootstrap("trixie", tools, TOOLS)
    pack(stage, kernel, tools, folder, recipe, on_step)
    shutil.rmtree(stage)
    shutil.rmtree(tools)


# --- a build --------------------------------------------------------------------------------


def _build(spec: str, tree: Path, state: str, on_step: OnStep, cache: Path) -> Base:
    compiler = _compiler()
    version = source_version(tree)
    inputs = (_RECIPE, state, version, compiler, FRAGMENT)
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]
    store = Store(cache / "wholes")
    key = f"{folder_name(spec)}-{digest}"

    def build(folder: Path) -> None:
        on_step(f"building the whole kernel of {spec} (once; some ten minutes and more)")
        _Whole(spec, tree, version, compiler, digest, folder).run(on_step)

    folder = store.ensure(
        key,
        lambda path: path if (path / "metadata.json").is_file() else None,
        build,
        on_step=on_step,
        space_gb=_SPACE_GB,
        keep_failed=True,
    )
    made = json.loads((folder / "metadata.json").read_text())
    kernel = BaseKernel(**made["kernel"])
    bundle = KernelBundle(folder, digest, kernel)
    root = BuildRoot(kernel, Path("/"), tree, compiler, str(folder / "build"))
    return Base(kernel, root, bundle)


class _Whole:
    """One build of a whole kernel, with metadata that survives a kill."""

    def __init__(
        self, spec: str, tree: Path, version: str, compiler: str, digest: str, folder: Path
    ) -> None:
        self.spec = spec
        self.tree = tree
        self.version = version
        self.digest = digest
        self.folder = folder
        self.begin = time.monotonic()
        self.metadata: dict[str, Any] = {
            "status": "building",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "spec": spec,
            "version": version,
            "compiler": compiler,
            "fragment": FRAGMENT,
        }

    def run(self, on_step: OnStep) -> None:
        """Build, and keep kernel, modules and what modules are built against."""
        self._write()
        try:
            release = self._make()
            kernel = BaseKernel(self.spec, release, self.version, "")
            stage = self.folder / "stage"
            stage.mkdir()
            out = self.folder / "out"
            with tarfile.open(out / "modules.tar.xz") as tar:
                # Its links lead to the folder it was built in.
                tar.extractall(stage, [item for item in tar if not item.issym()], filter="data")
            (stage / "boot").mkdir()
            shutil.copy(out / "bzImage", stage / "boot" / f"vmlinuz-{release}")
            tools = self.folder / "tools"
            bootstrap("trixie", tools, TOOLS)
            pack(stage, kernel, tools, self.folder, Recipe(), on_step)
            for item in (stage, tools):
                shutil.rmtree(item)
            for path in self._objects():
                path.unlink()
            write_bundle(self.folder, self.digest, kernel)
            self.metadata.update(status="built", kernel=asdict(kernel))
        except VringlabError as error:
            self.metadata.update(status="failed", error=str(error))
            raise
        except BaseException as error:
            self.metadata.update(status="interrupted", error=repr(error))
            raise
        finally:
            self.metadata["seconds"] = round(time.monotonic() - self.begin, 1)
            self._write()

    def _write(self) -> None:
        path = self.folder / "metadata.json"
        path.with_suffix(".new").write_text(json.dumps(self.metadata, indent=2) + "\n")
        path.with_suffix(".new").replace(path)

    def _make(self) -> str:
        if importlib.util.find_spec("tuxmake") is None:
            raise InfrastructureError(
                "tuxmake is not installed, which builds whole kernels",
                remedy="pip install tuxmake; a tree that you have built yourself needs none",
                host="local",
            )
        fragment = self.folder / "vringlab.config"
        fragment.write_text(FRAGMENT)
        out, build = self.folder / "out", self.folder / "build"
        argv = [
            *(sys.executable, "-m", "tuxmake", "--directory", str(self.tree)),
            *("--output-dir", str(out), "--build-dir", str(build), "--target-arch", "x86_64"),
            *("--toolchain", "gcc", "--kconfig", "defconfig", "--kconfig-add", "kvm_guest.config"),
            *("--kconfig-add", str(fragment), "--fail-fast", "config", "kernel", "modules"),
        ]
        done = local.run(argv, timeout=_BUILD_S, check=False, tethered=True)
        release = build / "include/config/kernel.release"
        if done.returncode != 0 or not (out / "bzImage").is_file() or not release.is_file():
            log = out / "build.log"
            said = log.read_text(errors="replace") if log.is_file() else done.stderr
            raise InfrastructureError(
                f"the whole kernel of {self.spec} does not build",
                remedy="see its last lines; its build needs flex, bison, bc, libelf-dev and "
                "libssl-dev (apt install them); a tree must be clean: make mrproper",
                command=argv,
                host="local",
                stderr=said,
                returncode=done.returncode,
            )
        return release.read_text().strip()

    def _objects(self) -> Iterator[Path]:
        """What building modules against it does not need, which is most of it."""
        build = self.folder / "build"
        for path in build.rglob("*"):
            kept = path.is_relative_to(build / "scripts") or path.is_relative_to(build / "tools")
            if path.suffix in (".o", ".a", ".ko", ".cmd") and path.is_file() and not kept:
                yield path
