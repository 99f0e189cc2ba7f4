"""How QEMU may run here: KVM only where a guest really boots under it, else emulation.

/dev/kvm can exist, make a VM, and then hang or abort at its first instruction; both were seen.
So a 64 KiB firmware of four instructions is run first (it tells a broken KVM within a second),
then a real kernel.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vringlab.errors import InfrastructureError, TransientError
from vringlab.image.build import Image
from vringlab.transport import local
from vringlab.transport.ssh import Machine

QEMU = "qemu-system-x86_64"
QEMU_MISSING = "the image has one: run `vringlab build`; or install qemu-system-x86"

#: mov al,0x10; out 0xf4,al; hlt: at the reset vector, sixteen bytes below the firmware's end.
_ROM = bytes(0xFFF0) + b"\xb0\x10\xe6\xf4\xf4\xeb\xfd" + bytes(9)
#: isa-debug-exit ends QEMU with (value << 1) | 1.
_ROM_STATUS = (0x10 << 1) | 1
_ROM_DEADLINE_S = 5.0
_KERNEL_DEADLINE_S = 20.0
#: Times as long on another host, which may be emulated.
_PATIENCE = 12


@dataclass(frozen=True)
class Accelerator:
    """What QEMU runs on.

    Attributes:
        name: `kvm` or `tcg`.
        reason: Why, in words for a reader: what the probe saw.
    """

    name: str
    reason: str

    @property
    def host_kind(self) -> str:
        """What a lab host on it is called in samples: `nested` under KVM, else `emulated`."""
        return "nested" if self.name == "kvm" else "emulated"


_ROM_ARGV = (
    *("-machine", "pc", "-m", "16", "-no-reboot"),
    *("-device", "isa-debug-exit,iobase=0xf4,iosize=4"),
)
_UNDER_KVM = ("-accel", "kvm", "-cpu", "host", "-nodefaults", "-display", "none")
_LINUX_ARGV = (
    *("-machine", "q35", "-m", "512", "-no-reboot", "-serial", "stdio"),
    *("-append", "console=ttyS0 panic=-1 quiet vringlab.role=probe"),
)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix(f"{QEMU}: ") if lines else "no message"


def qemu_of(image: Image | None) -> str:
    """The QEMU that runs here: the image's own, or this machine's where there is no image yet."""
    return str(image.qemu) if image is not None else QEMU


def _attempt(qemu: str, argv: list[str], deadline_s: float) -> local.Completed | None:
    """Run QEMU under KVM; None when it hung."""
    try:
        return local.run(
            [qemu, *_UNDER_KVM, *argv],
            timeout=deadline_s,
            check=False,
            remedy_missing=QEMU_MISSING,
        )
    except InfrastructureError as error:
        if "did not end within" in error.message:
            return None
        raise


def kvm_fault(image: Image | None, device: Path = Path("/dev/kvm")) -> str:
    """Why KVM cannot be used here; an empty string when a probe guest booted under it.

    Args:
        image: Its QEMU is used, and its kernel booted as the second stage; when None, this
            machine's QEMU, and only the firmware is tried.
        device: The KVM device.

    Raises:
        InfrastructureError: there is no QEMU.
    """
    if not device.exists():
        return f"there is no {device}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} may not be opened by this user (add yourself to the group kvm)"
    with tempfile.TemporaryDirectory() as folder:
        rom = Path(folder) / "probe.rom"
        rom.write_bytes(_ROM)
        done = _attempt(qemu_of(image), [*_ROM_ARGV, "-bios", str(rom)], _ROM_DEADLINE_S)
    fault = _rom_fault(done, device)
    if fault or image is None:
        return fault
    boot = ("-kernel", str(image.kernel), "-initrd", str(image.initrd))
    done = _attempt(qemu_of(image), [*_LINUX_ARGV, *boot], _KERNEL_DEADLINE_S)
    return _linux_fault(done, device)


def _rom_fault(done: local.Completed | None, device: Path) -> str:
    if done is None:
        return f"{device} exists but a guest of four instructions hung under it"
    if done.returncode != _ROM_STATUS:
        return f"{device} exists but a guest aborted under it: {_last_line(done.stderr)}"
    return ""


def _linux_fault(done: local.Completed | None, device: Path) -> str:
    if done is None:
        return f"{device} exists but a Linux guest hung under it"
    if "probe booted" not in done.stdout:
        return f"{device} exists but a Linux guest died under it: {_last_line(done.stderr)}"
    return ""


def host_kvm_fault(machine: Machine, image: Image | None = None, kernel: str = "vmlinuz") -> str:
    """Why KVM cannot be used on another host; an empty string when a probe guest booted there.

    Args:
        machine: The host, as root in the image.
        image: Its kernel is booted as the second stage; only the firmware is tried when None.
        kernel: Which form of it: `vmlinuz`, or `vmlinux` on an emulated host.

    Raises:
        InfrastructureError: the host has no room for the probe.
        TransientError: the connection was lost.
    """
    device = Path("/dev/kvm")
    if machine.run(["test", "-c", str(device)], check=False).returncode != 0:
        return f"there is no {device}: switch virtualisation on in the firmware, load kvm_*"

    def attempt(argv: list[str], deadline_s: float) -> local.Completed | None:
        try:
            return machine.run([QEMU, *_UNDER_KVM, *argv], timeout=deadline_s, check=False)
        except TransientError:
            if machine.alive:
                return None
            raise

    # An emulated host takes seconds to start a QEMU, and many when others need its processors.
    rom = "/tmp/vringlab-probe.rom"
    machine.put(_ROM, rom)
    fault = _rom_fault(attempt([*_ROM_ARGV, "-bios", rom], _PATIENCE * _ROM_DEADLINE_S), device)
    if fault or image is None:
        return fault
    machine.put(image.initrd, "/tmp/vringlab-probe.initrd")
    boot = ("-kernel", f"/boot/{kernel}-{image.release}", "-initrd", "/tmp/vringlab-probe.initrd")
    return _linux_fault(attempt([*_LINUX_ARGV, *boot], _PATIENCE * _KERNEL_DEADLINE_S), device)


def _nested_fault() -> str:
    for vendor in ("amd", "intel"):
        parameter = Path(f"/sys/module/kvm_{vendor}/parameters/nested")
        if parameter.exists():
            if parameter.read_text().strip() in ("1", "Y"):
                return ""
            return f"nested virtualisation is off here (load kvm_{vendor} with nested=1)"
    return ""


def choose(image: Image | None, wish: str = "auto") -> Accelerator:
    """What the embedded host shall run on.

    Args:
        image: See `kvm_fault`.
        wish: `auto`, or `kvm` / `tcg` to insist.

    Raises:
        InfrastructureError: KVM was insisted on and does not work.
    """
    if wish == "tcg":
        return Accelerator("tcg", "asked for")
    fault = kvm_fault(image) or _nested_fault()
    if not fault:
        return Accelerator("kvm", "a probe guest booted under /dev/kvm")
    if wish == "kvm":
        raise InfrastructureError(
            f"KVM cannot be used: {fault}",
            remedy="unset VRINGLAB_ACCEL to emulate instead, or mend /dev/kvm",
            host="local",
        )
    return Accelerator("tcg", fault)
