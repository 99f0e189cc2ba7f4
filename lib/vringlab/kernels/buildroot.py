"""Build roots: the compiler, headers and source that belong to one base kernel.

A build root is only unpacked, never configured or booted: packages are extracted by mmdebstrap
without running their scripts. So it needs neither root, nor sub-ids, nor a mount, and its files
belong to the caller. Builds run in it under bubblewrap, which sees it read-only.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from vringlab.cachedir import OnStep, Store
from vringlab.errors import InfrastructureError, UserError
from vringlab.kernels.base import BaseKernel
from vringlab.kernels.source import MODULES, ModuleSource
from vringlab.settings import settings
from vringlab.transport import local

#: Where a build sees its own folder, and the only place that it can write to. Not /tmp: that
#: may be where the caller's checkout is, when the root is the caller's own.
WORK = "/run/module"

#: What the kernel's makefiles call, beside what the headers depend on.
_TOOLS = (
    "base-files",
    "bash",
    "binutils",
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "gcc",
    "grep",
    "kmod",
    "make",
    "mawk",
    "sed",
    "xz-utils",
)

#: Nobody reads these in a build root; without them it is a third of the size.
_EXCLUDED = (
    "/boot/*",
    "/usr/bin/*-lto-dump-*",
    "/usr/lib/klibc/*",
    "/usr/lib/modules/*/kernel/*",
    "/usr/lib/systemd/*",
    "/usr/lib/udev/*",
    "/usr/libexec/gcc/*/lto1",
    "/usr/share/doc/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/man/*",
)

#: Packages that hold the modules, by suite, where the headers do not depend on them.
_MODULES_IN = {"bookworm": ("linux-image",), "trixie-backports": ("linux-modules",)}

_SPACE_GB = 1.5
_FETCH_SECONDS = 1800.0
#: Raise it when the content of a build root changes, so that old ones are not used.
_RECIPE = 1

_SETUP = "run `make setup`, or install it: apt install {package}"
_NAMESPACES = (
    "bubblewrap needs user namespaces: as root, set kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu) or user.max_user_namespaces=15000"
)

# What apt prints -> what is wrong, and the remedy.
_FAULTS: tuple[tuple[str, str, str], ...] = (
    (
        r"No space left on device|not enough free space",
        "the disk is full",
        "free some space, or point VRINGLAB_CACHE to a larger disk",
    ),
    (
        r"Version '.*' for '.*' was not found|Unable to locate package",
        "the archive no longer has this kernel",
        "build the image again, so that it takes the archive's newest kernel of this series",
    ),
    (
        r"Temporary failure resolving|Could not resolve|Failed to fetch|Could not connect"
        r"|Network is unreachable|Connection timed out",
        "the package archive cannot be reached",
        "check the network (and http_proxy), then run the same command again",
    ),
    (
        r"NO_PUBKEY|is not signed|signature",
        "the package archive's signature cannot be checked",
        "install the debian-archive-keyring package, new enough to know the suite",
    ),
)


def _bubblewrapped(
    argv: list[str], *, timeout: float, env: dict[str, str] | None = None
) -> local.Completed:
    """Run a bubblewrap command; tell its own failure from that of what it runs."""
    done = local.run(
        argv,
        timeout=timeout,
        check=False,
        env=env,
        remedy_missing=_SETUP.format(package="bubblewrap"),
    )
    if done.returncode != 0 and done.stderr.startswith("bwrap: "):
        raise InfrastructureError(
            "bubblewrap cannot make a sandbox here",
            remedy=_NAMESPACES,
            command=argv,
            host="local",
            stderr=done.stderr,
            returncode=done.returncode,
        )
    return done


@dataclass(frozen=True)
class BuildRoot:
    """A build root, ready for use.

    Attributes:
        kernel: The base kernel that it builds modules for.
        path: The root folder.
        archive: Source archive of the same version.
        compiler: First line of the compiler's version, e.g. `x86_64-linux-gnu-gcc-14 (Debian
            14.2.0-19) 14.2.0`.
        kernel_dir: The kernel's build folder, as seen inside the root.
    """

    kernel: BaseKernel
    path: Path
    archive: Path
    compiler: str
    kernel_dir: str

    def sandbox(self, work: Path) -> list[str]:
        """Argument vector that runs a command in the root, without network or other processes.

        Args:
            work: Folder of this machine that the command sees, writable, as `WORK`.
        """
        return [
            "bwrap",
            *("--unshare-all", "--die-with-parent", "--new-session", "--uid", "0", "--gid", "0"),
            *("--ro-bind", str(self.path), "/"),
            *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run", "--bind", str(work), WORK),
            *("--chdir", WORK, "--clearenv"),
            *("--setenv", "PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            *("--setenv", "LC_ALL", "C", "--setenv", "TMPDIR", "/run", "--setenv", "HOME", "/run"),
        ]

    def run(
        self, argv: list[str], work: Path, *, timeout: float = 60, check: bool = True
    ) -> local.Completed:
        """Run a command in the root.

        Raises:
            InfrastructureError: bubblewrap is missing or may not work here, or the command
                failed (with `check`) or did not end in time.
        """
        command = [*self.sandbox(work), *argv]
        done = _bubblewrapped(command, timeout=timeout)
        if check and done.returncode != 0:
            raise InfrastructureError(
                f"{argv[0]} failed in the build root",
                remedy=f"remove {self.path.parent}, so that it is made again",
                command=command,
                host="local",
                stdout=done.stdout,
                stderr=done.stderr,
                returncode=done.returncode,
            )
        return done

    @property
    def config(self) -> str:
        """The kernel's configuration as text; empty where there is none.

        Not by way of `kernel_dir`, which is a link to a path inside the root.
        """
        headers = self.path / "usr/src" / f"linux-headers-{self.kernel.release}"
        for folder in (headers, self.path / self.kernel_dir.lstrip("/")):
            if (folder / ".config").is_file():
                return (folder / ".config").read_text()
        return ""

    def shipped(self, module: ModuleSource) -> bytes | None:
        """The distribution's own build of a module (ELF), to compare ours with; None without."""
        folder = self.path / "usr/lib/modules" / self.kernel.release / "kernel" / module.directory
        packed = folder / f"{module.name}.ko.xz"
        if packed.is_file():
            return lzma.decompress(packed.read_bytes())
        plain = folder / f"{module.name}.ko"
        return plain.read_bytes() if plain.is_file() else None


def packages(kernel: BaseKernel) -> tuple[str, ...]:
    """What a build root of that kernel is made of, with exact versions where they matter."""
    return (
        *_TOOLS,
        f"linux-headers-{kernel.release}={kernel.version}",
        f"linux-source-{kernel.series}={kernel.version}",
        # Their headers do not bring the modules along, with which ours are compared.
        *(
            f"{name}-{kernel.release}={kernel.version}"
            for name in _MODULES_IN.get(kernel.suite, ())
        ),
    )


def _excluded(kernel: BaseKernel) -> tuple[str, ...]:
    """Paths that are not unpacked; before trixie, some were not below /usr."""
    if kernel.suite != "bookworm":
        return _EXCLUDED
    moved = [path[4:] for path in _EXCLUDED if path.startswith("/usr/lib/")]
    return (*_EXCLUDED, *moved)


def _key(kernel: BaseKernel) -> str:
    state = (_RECIPE, kernel, packages(kernel), _excluded(kernel), sorted(MODULES))
    return f"{kernel.release}-{hashlib.sha256(repr(state).encode()).hexdigest()[:12]}"


#: Suites that extend another one: both are searched, and what is asked for is taken from it.
_EXTENDS = {"trixie-backports": "trixie"}


def is_extension(suite: str) -> bool:
    """Whether a suite only extends another one, as backports do."""
    return suite in _EXTENDS


def _bootstrap_argv(
    suite: str,
    root: Path,
    include: tuple[str, ...],
    dpkgopts: tuple[str, ...] = (),
    hooks: tuple[str, ...] = (),
) -> list[str]:
    base = _EXTENDS.get(suite, suite)
    # The mirror is mmdebstrap's own choice, so it writes the line that is then said again.
    extend = (
        f"sed -n 's|^\\(deb .*\\) {base} main|\\1 {suite} main|p' \"$1\"/etc/apt/sources.list "
        '> "$1"/etc/apt/sources.list.d/extended.list'
    )
    merged = "/usr/share/mmdebstrap/hooks/merged-usr"
    return [
        # The same machine, only that all that it starts ends when this process is killed.
        *("bwrap", "--die-with-parent", "--unshare-pid", "--dev-bind", "/", "/"),
        *("--proc", "/proc", "--"),
        *("mmdebstrap", "--variant=extract", "--format=directory", "--architectures=amd64"),
        # Chrootless is what lets an ordinary user do it. The check that is skipped warns root
        # of packages' scripts that would change the machine; `extract` runs no script at all.
        *("--mode=chrootless", "--skip=check/chrootless"),
        *(f"--dpkgopt={item}" for item in dpkgopts),
        # Before trixie, packages still had files in /bin and /lib.
        *([f"--hook-dir={merged}"] if base == "bookworm" else []),
        *([f"--setup-hook={extend}"] if base != suite else []),
        *(f"--extract-hook={hook}" for hook in hooks),
        f"--include={','.join(include)}",
        *(base, str(root)),
    ]


def _explain(text: str) -> tuple[str, str]:
    for pattern, why, remedy in _FAULTS:
        if re.search(pattern, text):
            return why, remedy
    return "mmdebstrap failed", "see its last lines above"


def bootstrap(
    suite: str,
    root: Path,
    include: tuple[str, ...],
    *,
    dpkgopts: tuple[str, ...] = (),
    hooks: tuple[str, ...] = (),
    what: str = "the packages",
) -> None:
    """Unpack packages of a Debian suite into a folder, as an ordinary user.

    Args:
        suite: The suite.
        root: The folder.
        include: Packages, with `=VERSION` where it matters; what they depend on comes too.
        dpkgopts: Options of dpkg, such as paths to leave out.
        hooks: Shell commands at the end; `$1` is the folder.
        what: What it is for, for messages.

    Raises:
        InfrastructureError: mmdebstrap or bubblewrap is missing, or what they say is wrong.
    """
    local.find_tool("mmdebstrap", _SETUP.format(package="mmdebstrap"))
    argv = _bootstrap_argv(suite, root, include, dpkgopts, hooks)
    done = _bubblewrapped(argv, timeout=_FETCH_SECONDS, env={"TMPDIR": str(root.parent)})
    if done.returncode != 0:
        why, remedy = _explain(done.stderr)
        raise InfrastructureError(
            f"{what} could not be made: {why}",
            remedy=remedy,
            command=argv,
            host="local",
            stderr=done.stderr,
            returncode=done.returncode,
        )


def _bootstrap(kernel: BaseKernel, root: Path) -> None:
    shipped = [
        f"path-include=/{place}/modules/*/kernel/{module.directory}/{module.name}.ko*"
        for place in ("usr/lib", "lib")
        for module in MODULES.values()
    ]
    dpkgopts = (
        *(f"path-exclude={path}" for path in _excluded(kernel)),
        *shipped,
    )
    what = f"the build root of {kernel.version}"
    bootstrap(kernel.suite, root, packages(kernel), dpkgopts=dpkgopts, what=what)


def _finish(kernel: BaseKernel, folder: Path) -> BuildRoot:
    """Make what packages' scripts would have made, and move the archive out of the root."""
    root = folder / "root"
    archive = folder / f"linux-source-{kernel.series}.tar.xz"
    (root / "usr/src" / archive.name).rename(archive)
    awk = root / "usr/bin/awk"
    if not awk.exists():
        awk.symlink_to("mawk")
    # As root, mmdebstrap makes device nodes; the sandbox has its own.
    shutil.rmtree(root / "dev")
    for name in ("dev", "proc", "run"):
        (root / name).mkdir(exist_ok=True)
    kernel_dir = f"/lib/modules/{kernel.release}/build"
    made = BuildRoot(kernel, root, archive, compiler="", kernel_dir=kernel_dir)
    # Debian's headers say there which compiler the kernel was built with.
    show = f"include {kernel_dir}/.kernelvariables\nall:\n\t@$(CC) --version\n"
    (folder / "work").mkdir()
    (folder / "work" / "Makefile").write_text(show)
    version = made.run(["make", "--no-print-directory", "all"], folder / "work")
    shutil.rmtree(folder / "work")
    return BuildRoot(kernel, root, archive, version.stdout.splitlines()[0], kernel_dir)


def _load(kernel: BaseKernel, folder: Path) -> BuildRoot | None:
    try:
        made = json.loads((folder / "buildroot.json").read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return BuildRoot(
        kernel=kernel,
        path=folder / "root",
        archive=folder / made["archive"],
        compiler=made["compiler"],
        kernel_dir=made["kernel_dir"],
    )


def ensure_buildroot(
    kernel: BaseKernel, *, on_step: OnStep, cache: Path | None = None
) -> BuildRoot:
    """The build root of a base kernel; made when the cache does not have it.

    Making it fetches about 300 MB. Several processes that ask at once make it once.

    Args:
        kernel: The exact kernel.
        on_step: Receives a line before each step that takes time.
        cache: Cache folder; the settings' when None.

    Raises:
        InfrastructureError: mmdebstrap or bubblewrap is missing, the archive cannot be reached
            or no longer has that version, the disk is full, or namespaces are forbidden.
        UserError: this machine is not of the kernel's architecture.
    """
    if os.uname().machine != "x86_64":
        raise UserError(
            f"modules for {kernel.release} cannot be built on {os.uname().machine}",
            remedy="use an x86-64 machine; cross-building is not supported",
        )
    store = Store((cache or settings().cache) / "buildroots")
    key = _key(kernel)

    def build(folder: Path) -> None:
        on_step(f"fetching headers, compiler and source of {kernel.version} (once)")
        _bootstrap(kernel, folder / "root")
        made = _finish(kernel, folder)
        (folder / "buildroot.json").write_text(
            json.dumps(
                {
                    "spec": kernel.spec,
                    "release": kernel.release,
                    "version": kernel.version,
                    "suite": kernel.suite,
                    "compiler": made.compiler,
                    "kernel_dir": made.kernel_dir,
                    "archive": made.archive.name,
                    "packages": packages(kernel),
                },
                indent=2,
            )
        )

    return store.ensure(
        key,
        lambda folder: _load(kernel, folder),
        build,
        on_step=on_step,
        space_gb=_SPACE_GB,
    )


def cached_roots(cache: Path | None = None) -> tuple[BuildRoot, ...]:
    """Build roots that are in the cache, the newest of each base kernel; nothing is made.

    Args:
        cache: Cache folder; the settings' when None.
    """
    found: dict[str, BuildRoot] = {}
    for file in sorted(((cache or settings().cache) / "buildroots").glob("*/buildroot.json")):
        try:
            made = json.loads(file.read_text())
            spec = made.get("spec") or f"debian:{'.'.join(made['version'].split('.')[:2])}"
            kernel = BaseKernel(spec, made["release"], made["version"], made["suite"])
            root = _load(kernel, file.parent)
        except (OSError, ValueError, KeyError):
            continue
        known = found.get(spec)
        if root is not None and (known is None or known.kernel.number < kernel.number):
            found[spec] = root
    return tuple(found.values())
