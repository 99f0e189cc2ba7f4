"""What is in the root file system, and the digest that names it.

Lab host and guest boot the same image: tools of one version on both ends, one thing to build.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILES = Path(__file__).parent / "files"
SOURCES = Path(__file__).parent / "src"

#: How the ingredients are put together decides the result too.
_BUILDERS = tuple(
    Path(__file__).parent / f"{name}.py" for name in ("build", "emulator", "initrd", "kernel_file")
)


@dataclass(frozen=True)
class Recipe:
    """The ingredients of an image.

    Attributes:
        suite: Debian suite; its kernel and tools are used.
        packages: Installed by name, with what they depend on.
        dpkg_excludes: Paths that are not unpacked: nobody reads a manual in a lab guest.
        kernel: Meta package of the kernel, unpacked only: its own initrd is never used.
        module_folders: Folders of `kernel/` that are kept; the rest serves hardware that no
            virtual machine has.
        initrd_modules: Loaded before there is a root, in this order after what they need.
    """

    suite: str = "trixie"
    packages: tuple[str, ...] = (
        "bash",
        "bpftrace",
        "busybox-static",
        "dpdk-dev",
        "ethtool",
        "fio",
        "iproute2",
        "kmod",
        "netperf",
        "openssh-server",
        "procps",
        "qemu-system-x86",
    )
    dpkg_excludes: tuple[str, ...] = (
        "/usr/share/man/*",
        "/usr/share/doc/*",
        "/usr/share/info/*",
        "/usr/share/locale/*",
        "/usr/share/lintian/*",
        "/usr/include/*",
        "/usr/lib/x86_64-linux-gnu/*.a",
    )
    kernel: str = "linux-image-amd64"
    module_folders: tuple[str, ...] = (
        "arch/x86",
        "block",
        "crypto",
        "drivers/block",
        "drivers/char",
        "drivers/crypto/ccp",
        "drivers/net/tap.ko*",
        "drivers/net/tun.ko*",
        "drivers/net/veth.ko*",
        "drivers/net/virtio_net.ko*",
        "drivers/net/net_failover.ko*",
        "drivers/vhost",
        "drivers/virtio",
        "fs/overlayfs",
        "fs/squashfs",
        "fs/ext4",
        "fs/jbd2",
        "fs/mbcache.ko*",
        "lib",
        "net/802",
        "net/8021q",
        "net/bridge",
        "net/core",
        "net/ipv4",
        "net/llc",
        "net/packet",
        "net/sched",
        "net/vmw_vsock",
        "virt",
    )
    initrd_modules: tuple[str, ...] = ("virtio_blk", "squashfs", "overlay")

    def digest(self) -> str:
        """Content address: recipe, builders, our files and tools' sources; 16 hex digits."""
        state = hashlib.sha256()
        state.update(json.dumps(asdict(self), sort_keys=True).encode())
        sources = [*SOURCES.glob("*.[ch]"), SOURCES / "Makefile"]
        files = [path for path in FILES.iterdir() if path.is_file()]
        for path in sorted([*files, *sources, *_BUILDERS]):
            state.update(path.name.encode() + b"\0")
            state.update(hashlib.sha256(path.read_bytes()).digest())
        return state.hexdigest()[:16]
