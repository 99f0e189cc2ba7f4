"""What `make bench` compares with, made ready once in the cache: virtme-ng, and a kernel's build.

Both stand in a Debian of their own, unpacked into a folder and entered by bubblewrap: nothing is
installed on this machine, and all that they start ends when the benchmark is killed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vringlab.cachedir import OnStep, Store, there
from vringlab.errors import InfrastructureError
from vringlab.image.build import Image
from vringlab.kernels.buildroot import BuildRoot, bootstrap
from vringlab.kernels.whole import FRAGMENT, prepare_base, source_of
from vringlab.lab.accel import Accelerator
from vringlab.settings import settings
from vringlab.transport import local

VIRTME_NG = "1.42"
_BASE = "debian:6.12"

#: What virtme-ng calls, and what it takes when it is there, as on any Debian that is not a
#: container: virtiofsd for the root, and udev, without which Debian's kernel does not load the
#: driver of the port by which virtme-ng hears its command.
_VIRTME_ROOT = (
    *("base-files", "bash", "busybox-static", "coreutils", "dash", "diffutils", "file"),
    *("findutils", "grep", "hostname", "iproute2", "kbd", "kmod", "libc-bin", "mawk", "mount"),
    *("passwd", "procps", "python3", "sed", "udev", "util-linux", "virtiofsd"),
)

#: What a whole kernel needs beyond a module.
_KERNEL_TOOLS = (
    *("base-files", "bash", "bc", "binutils", "bison", "coreutils", "cpio", "dash", "diffutils"),
    *("findutils", "flex", "gcc", "grep", "kmod", "libc6-dev", "libelf-dev", "libssl-dev", "m4"),
    *("make", "mawk", "perl", "python3-minimal", "sed", "xz-utils"),
)
_UNREAD = ("doc", "info", "locale", "man")
_UNREAD_OPTIONS = tuple(f"path-exclude=/usr/share/{name}/*" for name in _UNREAD)

_PIP_S = 600.0
_BOOT_S = 600.0
_MAKE_S = 3600.0
_SPACE_GB = 1.5
_SOURCE = "/run/source"
#: What make would print, and what it prints.
_WOULD_COMPILE = re.compile(r"echo '  (?:CC|AS)(?: \[M\])? +[^']*'")
_COMPILED = re.compile(r"^\s+(?:CC|AS)(?: \[M\])?\s", re.M)


def store() -> Store:
    """Where all of it is kept."""
    return Store(settings().cache / "bench")


def _key(name: str, *inputs: object) -> str:
    return f"{name}-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:12]}"


def _enter(root: Path, *, writable: bool = False) -> list[str]:
    return [
        *("bwrap", "--die-with-parent", "--unshare-pid", "--new-session"),
        *("--bind" if writable else "--ro-bind", str(root), "/"),
        *("--dev-bind", "/dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--tmpfs", "/tmp"),
        *("--clearenv", "--setenv", "HOME", "/tmp", "--setenv", "LC_ALL", "C.UTF-8"),
        *("--setenv", "PATH", "/opt/virtme-ng/bin:/opt/qemu:/usr/sbin:/usr/bin:/sbin:/bin"),
    ]


# --- virtme-ng -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Virtme:
    """virtme-ng from PyPI in a Debian with the kernel of our image.

    Attributes:
        folder: Where it is.
        image: The image, whose QEMU it is given and whose kernel it boots.
        kvm: Whether its guest runs under KVM.
    """

    folder: Path
    image: Image
    kvm: bool

    @property
    def python_path(self) -> Path:
        """Its Python packages."""
        return self.folder / "root/opt/virtme-ng"

    def argv(self) -> list[str]:
        """What boots a guest for `uname -r`."""
        return [
            *_enter(self.folder / "root"),
            *("--ro-bind", str(self.image.qemu.parent), "/opt/qemu"),
            *("--setenv", "PYTHONPATH", "/opt/virtme-ng", "vng"),
            *([] if self.kvm else ["--disable-kvm"]),
            *("--run", f"/boot/vmlinuz-{self.image.release}", "--", "uname", "-r"),
        ]

    def boot(self) -> float:
        """Boot a guest, and let it end; wall seconds until the answer of `uname -r`.

        Raises:
            InfrastructureError: it did not boot, or another kernel than asked for.
        """
        answered = None
        said: list[str] = []
        with tempfile.TemporaryFile("w+") as errors:
            begin = time.monotonic()
            process = subprocess.Popen(
                self.argv(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            deadline = threading.Timer(_BOOT_S, local.kill_group, [process])
            deadline.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    said.append(line)
                    if line.strip() == self.image.release and answered is None:
                        answered = time.monotonic() - begin
                process.wait()
            finally:
                deadline.cancel()
                local.kill_group(process)
            errors.seek(0)
            told = errors.read()
        if answered is None or process.returncode != 0:
            raise InfrastructureError(
                f"virtme-ng's guest did not say that it runs {self.image.release}",
                remedy="see its words; run the command by hand with -v",
                command=self.argv(),
                host="local",
                stdout="".join(said),
                stderr=told,
                returncode=process.returncode,
            )
        return answered


def ensure_virtme(image: Image, accelerator: Accelerator, on_step: OnStep) -> Virtme:
    """virtme-ng, made ready when the cache does not have it (some 120 MB to fetch).

    Raises:
        InfrastructureError: venv, pip, mmdebstrap, bubblewrap, the network or the disk failed.
    """
    kept = store()
    key = _key("virtme-ng", VIRTME_NG, image.version, image.suite, _VIRTME_ROOT)

    def build(folder: Path) -> None:
        on_step(f"fetching virtme-ng {VIRTME_NG} and a Debian for it (once)")
        _make_virtme(image, folder)

    made = kept.ensure(key, there, build, on_step=on_step, space_gb=_SPACE_GB)
    return Virtme(made, image, accelerator.name == "kvm")


def _make_virtme(image: Image, folder: Path) -> None:
    venv, root = folder / "venv", folder / "root"
    local.run(
        [sys.executable, "-m", "venv", str(venv)],
        timeout=_PIP_S,
        tethered=True,
        remedy="install what makes virtual environments: apt install python3-venv",
    )
    # The image's own kernel, with all modules: virtme-ng takes what it needs of them.
    hook = (
        'set -eu; export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"; cd "$1"; '
        f"apt-get -q download linux-image-{image.release}={image.version}; "
        'for deb in linux-image-*.deb; do dpkg-deb -x "$deb" "$1"; rm "$deb"; done'
    )
    bootstrap(
        image.suite,
        root,
        _VIRTME_ROOT,
        dpkgopts=_UNREAD_OPTIONS,
        hooks=(hook,),
        what="the Debian for virtme-ng",
    )
    target = root / "opt/virtme-ng"
    (root / "opt/qemu").mkdir(parents=True)
    local.run(
        [
            *(str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile"),
            *("--disable-pip-version-check", "--target", str(target), f"virtme-ng=={VIRTME_NG}"),
        ],
        timeout=_PIP_S,
        tethered=True,
        remedy="check the network and the package index (PIP_INDEX_URL)",
    )
    shutil.rmtree(venv)
    for program in (target / "bin").iterdir():
        _, _, rest = program.read_text().partition("\n")
        program.write_text(f"#!/usr/bin/python3\n{rest}")
    # Packages' scripts would have done that, and its first start.
    work = f"depmod -a {image.release}; python3 -m compileall -q /usr/lib/python3* /opt/virtme-ng"
    local.run(
        [*_enter(root, writable=True), "sh", "-c", work],
        timeout=_PIP_S,
        check=False,
        remedy_missing="install bubblewrap, or run `make setup`",
    )
    if not (root / f"usr/lib/modules/{image.release}/modules.dep").is_file():
        raise InfrastructureError(
            "depmod failed for virtme-ng's kernel", remedy="free some space", host="local"
        )


# --- a whole kernel ------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A build from nothing.

    Attributes:
        seconds: Wall time.
        idle_s: Wall time of the same when there is nothing to do.
        files: Sources compiled.
    """

    seconds: float
    idle_s: float
    files: int

    def of(self, files: int) -> float:
        """Seconds that a build of so many files would take, at this one's rate."""
        return self.idle_s + (self.seconds - self.idle_s) * files / self.files


@dataclass(frozen=True)
class KernelSample:
    """Folders of a kernel's tree, built by the kernel's own Makefile as part of a whole kernel.

    Attributes:
        root: A build root with what whole kernels need.
        source: The kernel's source.
        out: Where it is built.
        targets: The folders, such as `drivers/net/`.
    """

    root: BuildRoot
    source: Path
    out: Path
    targets: tuple[str, ...]

    def _make(self, *arguments: str, check: bool = True) -> local.Completed:
        return local.run(
            [
                *self.root.sandbox(self.out),
                *("--ro-bind", str(self.source), _SOURCE),
                *("make", "--no-print-directory", "-C", _SOURCE, "O=/run/module", *arguments),
            ],
            timeout=_MAKE_S,
            check=check,
            remedy=f"see make's words; remove {store().folder} to begin anew",
            remedy_missing="install bubblewrap, or run `make setup`",
        )

    def configure(self) -> None:
        """Configure as `vringlab try --build full` does, and build what every target needs."""
        self._make("-s", "defconfig", "kvm_guest.config")
        with (self.out / ".config").open("a") as config:
            config.write(FRAGMENT)
        self._make("-s", "olddefconfig")
        self._make("-s", self._jobs, "prepare")

    @property
    def _jobs(self) -> str:
        return f"-j{os.cpu_count() or 1}"

    def files_of_whole(self) -> int:
        """How many sources the kernel and its modules have, by make's word, when none is built."""
        # It ends at the first archive that is not there; by then it has told all that it compiles.
        told = self._make("-n", "-k", self._jobs, "all", check=False).stdout
        return len(set(_WOULD_COMPILE.findall(told)))

    def build(self) -> Built:
        """Build the folders from nothing, and once more with nothing to do."""
        for target in self.targets:
            shutil.rmtree(self.out / target, ignore_errors=True)
        return self._timed(*self.targets)

    def whole(self) -> Built:
        """Build the kernel and all its modules from nothing, and once more with nothing to do."""
        self._make("-s", "clean")
        return self._timed("all")

    def _timed(self, *targets: str) -> Built:
        done = self._make(self._jobs, *targets)
        files = len(_COMPILED.findall(done.stdout))
        return Built(done.seconds, self._make(self._jobs, *targets).seconds, files)


def kernel_sample(
    image: Image, targets: Sequence[str], out: Path, on_step: OnStep
) -> tuple[BuildRoot, KernelSample]:
    """The arms' build root, and folders of the same source to be built with the same compiler.

    Raises:
        InfrastructureError: mmdebstrap, bubblewrap, the network or the disk failed.
    """
    root = prepare_base(_BASE, image, on_step=on_step).root
    _, source = source_of(_BASE, image, on_step=on_step)
    kept = store()
    key = _key("kernel-tools", image.suite, root.compiler, _KERNEL_TOOLS)

    def build(folder: Path) -> None:
        on_step("fetching what whole kernels are built with (once)")
        bootstrap(
            image.suite,
            folder / "root",
            _KERNEL_TOOLS,
            dpkgopts=_UNREAD_OPTIONS,
            what="the tools for a whole kernel",
        )
        awk = folder / "root/usr/bin/awk"
        if not awk.exists():
            awk.symlink_to("mawk")

    made = kept.ensure(key, there, build, on_step=on_step, space_gb=_SPACE_GB)
    tools = replace(root, path=made / "root")
    sample = KernelSample(tools, source, out, tuple(targets))
    out.mkdir(parents=True)
    on_step("configuring the kernel")
    sample.configure()
    return root, sample
