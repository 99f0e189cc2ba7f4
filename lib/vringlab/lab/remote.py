"""A user's own machine as the KVM host: our image is its user space, its kernel is measured.

Only a kernel, sshd and rights are needed there. The image is copied once, all tools run in it, and
`lease` sees to it that nothing of ours is left when the campaign ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vringlab.errors import InfrastructureError, UserError
from vringlab.image.build import Image
from vringlab.lab import accel, facts
from vringlab.lab.accel import Accelerator
from vringlab.lab.embedded import HostMachine
from vringlab.lab.lease import ROOT_DISK, Lease
from vringlab.settings import settings
from vringlab.transport.login import Target, connect
from vringlab.transport.ssh import Machine

PREFIX = "ssh://"
#: Options of a host's address: change its settings for the run; allow its modules to be replaced.
TUNE = "tune"
SWAP = "swap-host-module"
OPTIONS = frozenset({TUNE, SWAP})

_CHUNK = 8 * 2**20
#: Room that a host must keep beside the image.
_SPARE_BYTES = 64 * 2**20
#: Slower links do not finish in a bearable time.
_BYTES_PER_S = 200_000


def parse(address: str) -> Target:
    """Read a host's address.

    Raises:
        UserError: it is none, or has an option that is not known.
    """
    target = Target.parse(address)
    unknown = sorted(target.options - OPTIONS)
    if unknown:
        raise UserError(
            f"{address!r} has an unknown option {unknown[0]!r}",
            remedy=f"known: {', '.join(sorted(OPTIONS))}",
        )
    return target


def with_options(address: str, *, tune: bool = False, swap_host_module: bool = False) -> str:
    """The address with options added to it, as a run remembers it.

    Raises:
        UserError: an option for a host that is none of the user's.
    """
    wanted = [name for name, on in ((TUNE, tune), (SWAP, swap_host_module)) if on]
    if not wanted:
        return address
    if not address.startswith(PREFIX):
        raise UserError(
            f"--{wanted[0]} is for a host of your own, not for {address!r}",
            remedy="give --host ssh://[user@]host[:port] with it",
        )
    base, _, given = address.partition("?")
    words = dict.fromkeys([*filter(None, given.split("&")), *wanted])
    return f"{base}?{'&'.join(words)}"


def require_leave(address: str) -> None:
    """Refuse arms of the host's own modules on a user's host, unless the user allowed them.

    Raises:
        UserError: they were not allowed.
    """
    if address.startswith(PREFIX) and SWAP not in parse(address).options:
        raise UserError(
            f"the arms are modules of the KVM host {parse(address)} itself, and would replace its "
            "own for the length of the run",
            remedy=f"allow it with --{SWAP}, or measure on the embedded host",
        )


# --- the image -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file on the host: bytes that are there, and whether all was checked."""

    size: int
    checked: bool


@cache
def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def image_path(image: Image) -> str:
    """Where the image lies on a host; by content, since each build of a recipe has its own keys."""
    return f"{settings().host_cache}/{image.digest}-{_sha256(image.root)[:16]}/root.squashfs"


def stage_image(
    machine: Machine, root: str, image: Image, *, on_step: Callable[[str], None] = lambda _: None
) -> str:
    """Copy the image to the host unless it is there; returns its path.

    A copy that was cut off goes on where it ended. It gets its name when its SHA-256 is right.

    Args:
        machine: The connection to the host, which must be ours (`lease.Lease`).
        root: What makes a command run as root there.
        image: The image.
        on_step: Told how far it is.

    Raises:
        InfrastructureError: no room, no rights, or it arrives damaged twice.
        TransientError: the connection was lost.
    """
    path = image_path(image)
    total = image.root.stat().st_size
    digest = _sha256(image.root)
    folder, part = os.path.dirname(path), f"{path}.part"  # noqa: PTH120 - of another machine
    shell = machine.inside(f"{root}sh -c")
    for _ in range(2):
        done = shell.run(
            f"mkdir -p {folder} && {{ cat {path}.sha256; wc -c < {path}; }} 2>/dev/null; echo; "
            f"wc -c < {part} 2>/dev/null || echo 0; df -Pk {folder} | tail -n 1",
            remedy=f"{settings().host_cache} must be writable by root there, or set "
            "VRINGLAB_HOST_CACHE to another folder",
        )
        checked, _, rest = done.stdout.rpartition("\n\n")
        if checked.split() == [digest, str(total)]:
            return path
        lines = rest.strip().splitlines()
        sent = min(int(lines[0]), total)
        free = int(lines[-1].split()[3]) * 1024
        if free < total - sent + _SPARE_BYTES:
            raise _no_room(machine, folder, free, total - sent)
        _send(shell, image.root, part, sent, total, on_step)
        on_step(f"{machine.name}: checking the image")
        seen = shell.run(["sha256sum", part], timeout=600).stdout.split()
        if seen[:1] == [digest]:
            shell.run(f"mv -f {part} {path} && echo {digest} > {path}.sha256")
            return path
        shell.run(["rm", "-f", part])
    raise InfrastructureError(
        f"the image arrives damaged on {machine.name}",
        remedy="see whether its disk is sound",
        host=machine.name,
    )


def _no_room(machine: Machine, folder: str, free: int, needed: int) -> InfrastructureError:
    return InfrastructureError(
        f"the disk of {machine.name} is full: {free / 1e6:.0f} MB free in {folder}, "
        f"{(needed + _SPARE_BYTES) / 1e6:.0f} MB needed",
        remedy="free some space there, or set VRINGLAB_HOST_CACHE to a folder on another disk",
        host=machine.name,
    )


def _send(
    shell: Machine, source: Path, part: str, sent: int, total: int, on_step: Callable[[str], None]
) -> None:
    """Append to `part` from `sent` on."""
    if sent == 0:
        shell.run(f": > {part}")
    told = -1
    with source.open("rb") as stream:
        stream.seek(sent)
        while data := stream.read(_CHUNK):
            percent = 100 * sent // total
            if percent // 20 > told:
                told = percent // 20
                on_step(f"{shell.name}: copying the image, {total / 1e6:.0f} MB, {percent} %")
            done = shell.run(
                f"cat >> {part} && wc -c < {part}",
                input=data,
                timeout=60 + len(data) / _BYTES_PER_S,
                check=False,
            )
            sent += len(data)
            if done.returncode != 0 or done.stdout.strip() != str(sent):
                # What fills the disk must not stay there.
                free = int(shell.run(f"df -Pk {part} | tail -n 1").stdout.split()[3]) * 1024
                shell.run(["rm", "-f", part])
                if free < _CHUNK or "No space" in done.stderr:
                    raise _no_room(shell, part, free, total - sent + len(data))
                raise InfrastructureError(
                    f"the image could not be copied to {shell.name}",
                    remedy="see the words of the host above",
                    host=shell.name,
                    stderr=done.stderr,
                    returncode=done.returncode,
                )


# --- what the host is ----------------------------------------------------------------------


def host_kind(cpu: dict[str, Any]) -> str:
    """`physical`, `nested`, or `emulated` for a virtual machine without hardware under it.

    Args:
        cpu: `facts.parse(...)["cpu"]`.
    """
    if "QEMU TCG" in str(cpu.get("model")):
        return "emulated"
    return "nested" if cpu.get("hypervisor") else "physical"


#: Shell text that prints the first address range of ours that something else on the host uses.
NETWORKS_SCRIPT = (
    "ip -4 -o route show 2>/dev/null | grep -E '(^|[^0-9.])192\\.168\\.(77|78)\\.' | "
    "grep -v 'dev vringlab' | head -n 1"
)


def _check(machine: Machine) -> None:
    if machine.run(["uname", "-m"]).stdout.strip() != "x86_64":
        raise UserError(
            f"{machine.name} is no x86-64 machine",
            remedy="guests are x86-64 and need KVM; use another host",
            host=machine.name,
        )
    taken = machine.run(NETWORKS_SCRIPT, check=False).stdout.strip()
    if taken:
        raise InfrastructureError(
            f"{machine.name} already has a network that the guest shall have: {taken}",
            remedy="192.168.77.0/24 and 192.168.78.0/24 must be free on the host",
            host=machine.name,
        )


def _swap_refusal(release: str, image: Image) -> str:
    if release == image.release:
        return ""
    return f"it runs kernel {release}, and arms are built for {image.release}"


def undo_swap(module: str, build_id: str) -> str:
    """Shell text by which a host gets its own module back, and which does nothing when it has it.

    Args:
        module: Name of the module.
        build_id: Of the host's own; empty when none was loaded.
    """
    loaded = f"[ -d /sys/module/{module} ]"
    if not build_id:
        return f"! {loaded} || rmmod {module}"
    note = f"/sys/module/{module}/notes/.note.gnu.build-id"
    # The id stands behind 16 bytes of header (ELF specification, note section).
    seen = f"$(od -An -v -tx1 -j16 {note} 2>/dev/null | tr -dc 0-9a-f)"
    return f'[ "{seen}" = {build_id} ] || {{ ! {loaded} || rmmod {module}; modprobe {module}; }}'


#: For every processor: its governor's file and what is in it.
_GOVERNORS = "grep . /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor 2>/dev/null; true"
_BALANCER = "for d in /proc/[0-9]*; do read -r n 2>/dev/null < $d/comm && "
_BALANCER += '[ "$n" = irqbalance ] && echo ${d#/proc/}; done; true'


def tune(machine: Machine, record: Callable[[str], None]) -> list[str]:
    """Set the processors' governor to `performance` and hold irqbalance; returns what was done.

    Args:
        machine: The host, as root.
        record: Told how each change is undone, before it is made.

    Raises:
        TransientError: the connection was lost.
    """
    done = []
    before = [line.rpartition(":") for line in machine.run(_GOVERNORS).stdout.splitlines()]
    others = [(path, name) for path, _, name in before if name != "performance"]
    if others:
        record("; ".join(f"echo {name} > {path}" for path, name in others))
        machine.run(
            "; ".join(f"echo performance > {path}" for path, _ in others),
            remedy="the processors' driver has no governor `performance`",
        )
        done.append(f"governor of {len(others)} processors set to performance")
    for pid in machine.run(_BALANCER).stdout.split():
        # Stopped, not ended: whatever supervises it notices nothing.
        record(f"! grep -qsx irqbalance /proc/{pid}/comm || kill -CONT {pid}")
        machine.run(f"kill -STOP {pid}")
        done.append(f"irqbalance ({pid}) held")
    return done


# --- opening it ----------------------------------------------------------------------------


@contextmanager
def user_host(
    address: str,
    image: Image,
    *,
    run: str = "",
    on_step: Callable[[str], None] = lambda _: None,
) -> Iterator[HostMachine]:
    """Take a user's host, and leave it as it was with the block.

    Args:
        address: `ssh://[user@]host[:port][?options]`.
        image: What runs there beside its kernel, and is the guest.
        run: The run that it is taken for.
        on_step: Told what is being done.

    Raises:
        UserError: a wrong address, an unknown host key, or no rights.
        InfrastructureError: the host lacks something, and says what.
        TransientError: it did not answer, or somebody else has it.
    """
    target = parse(address)
    with ExitStack() as stack:
        on_step(f"logging in to {target}")
        machine = stack.enter_context(connect(target))
        _check(machine)
        lease = stack.enter_context(Lease(machine, run=run, on_step=on_step))
        lease.open(stage_image(machine, lease.root, image, on_step=on_step))
        inside = lease.inside
        fault = accel.host_kvm_fault(inside)
        if fault:
            raise InfrastructureError(
                f"KVM cannot be used on {machine.name}: {fault}",
                remedy=f"`vringlab doctor ssh://{target}` names what is missing and how to mend it",
                host=machine.name,
            )
        if TUNE in target.options:
            for change in tune(inside, lease.record):
                on_step(f"{machine.name}: {change}")
        text = inside.run(facts.script(tools=False), check=False).stdout
        known = facts.parse(text)
        yield HostMachine(
            machine=inside,
            kind=host_kind(known["cpu"]),
            image=image,
            accelerator=Accelerator("kvm", "a probe guest booted under it"),
            qemu_argv=(),
            console=Path(os.devnull),
            vcpu_threads=(),
            root_disk=ROOT_DISK,
            on_change=lease.record,
            swap_refusal=_swap_refusal(str(known["kernel"]["release"]), image),
            lost_is_undone=True,
            bare=machine.inside(f"{lease.root}sh -c"),
        )
