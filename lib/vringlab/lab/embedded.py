"""The embedded KVM host: a virtual machine of ours that runs KVM guests, on any machine.

Without usable KVM, QEMU emulates a processor with AMD's SVM; /dev/kvm inside is then real to its
guests, only slow. Nothing of it outlives the run: the block that made it ends it, the kernel's
parent-death signal ends it after kill -9, and `owner.reap` removes what a dead owner left on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vringlab.errors import InfrastructureError, TransientError
from vringlab.image.build import Image
from vringlab.lab import owner
from vringlab.lab.accel import QEMU, QEMU_MISSING, Accelerator, qemu_of
from vringlab.lab.qmp import Monitor
from vringlab.settings import settings
from vringlab.transport import local
from vringlab.transport.ssh import Address, Machine

if TYPE_CHECKING:
    from vringlab.lab.counter import Counter

_MAC = "52:54:00:76:6c:00"
_PORT_TRIES = 5
_POLL_S = 0.02
#: Reading or writing a machine's state; less than a tenth of a second here.
_STATE_S = 60.0
IGNORE_SHARED = [{"capability": "x-ignore-shared", "state": True}]

#: Emulation cannot be attacked through speculation, and self tests of ciphers say nothing here.
_FAST_BOOT = (
    "quiet panic=-1 mitigations=off random.trust_cpu=on tsc=reliable no_timer_check "
    "cryptomgr.notests audit=0 8250.nr_uarts=1"
)


@dataclass(frozen=True)
class HostMachine:
    """A running KVM host.

    Attributes:
        machine: The SSH connection to it.
        kind: `emulated`, `nested` or `physical`.
        image: The image whose tools run on it.
        accelerator: What it runs on itself, and why.
        qemu_argv: Command line of the QEMU that runs it (empty for a physical host).
        console: Its console's log.
        vcpu_threads: Threads of its virtual processors on this machine.
        root_disk: The image as the host sees it: the guest's root disk.
        monitor: The monitor of the QEMU that runs it; None for a physical host.
        on_change: Told how a change of the host is undone, one line of shell text, before it is
            made. A host of ours ends with the run and need not remember.
        swap_refusal: Why its modules may not be replaced; empty when they may.
        lost_is_undone: Whether the host undoes all by itself when the connection is lost.
        counter: Its instruction counter; None where there is none.
        count_refusal: Why there is none; empty when there is.
        bare: The host outside of the image's root, for programs that belong to its kernel; None
            for a host of ours, which has none but the image's.
    """

    machine: Machine
    kind: str
    image: Image
    accelerator: Accelerator
    qemu_argv: tuple[str, ...]
    console: Path
    vcpu_threads: tuple[int, ...]
    root_disk: str = "/dev/vda"
    monitor: Monitor | None = None
    on_change: Callable[[str], None] = lambda _: None
    swap_refusal: str = ""
    lost_is_undone: bool = False
    counter: Counter | None = None
    count_refusal: str = "not asked for"
    bare: Machine | None = None


@dataclass(frozen=True)
class Memory:
    """A file that is the host's memory, so that a snapshot need not copy it.

    Attributes:
        file: The file; made when it is missing.
        shared: Whether what the host writes gets into it. Else the host sees its content and keeps
            its own writes to itself, as any number of other hosts do.
        state: What is left of a paused host beside its memory; it goes on from there instead of
            booting.
    """

    file: Path
    shared: bool
    state: Path | None = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def qemu_argv(
    image: Image,
    accelerator: Accelerator,
    port: int,
    console: Path,
    qmp: int,
    memory: Memory | None = None,
    count: int | None = None,
) -> list[str]:
    """QEMU's command line.

    `count` is the descriptor of the instruction counter's socket; without it there is no counter.
    It changes nothing that a snapshot holds.

    Slab caches are not merged on this host, so that those of packets can be told from others
    (`vringlab.workloads.slab`). Measured without KVM, 4 boots each in turn: 8.6 to 9.8 s with
    slab_nomerge and 8.8 to 10.0 s without; it takes 0.6 MB.
    """
    tcg = accelerator.name == "tcg"
    limits = settings()
    append = (
        f"console=ttyS0 {_FAST_BOOT if tcg else 'quiet panic=-1'} slab_nomerge "
        f"vringlab.role=host vringlab.mac={_MAC} vringlab.address=10.0.2.15/24 "
        "vringlab.gateway=10.0.2.2 "
        "vringlab.modules=virtio_net,kvm_amd,kvm_intel,vhost_vsock,vhost_net,tun"
    )
    return [
        qemu_of(image),
        *("-accel", "tcg,thread=multi,tb-size=1024" if tcg else "kvm"),
        # la57: five levels of page tables double the cost of every emulated TLB miss. x2apic: with
        # it a guest's round trip took 12 ms instead of 1 (QEMU 10.0): it waits for clock ticks.
        *("-cpu", "max,la57=off,x2apic=off" if tcg else "host"),
        *("-machine", "q35" if memory is None else "q35,memory-backend=memory"),
        *("-smp", str(limits.lab_cpus), "-m", str(limits.lab_memory_mib)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *(
            "-kernel",
            str(image.vmlinux if tcg else image.kernel),
            "-initrd",
            str(image.initrd),
            "-append",
            append,
        ),
        *("-drive", f"file={image.root},if=none,id=root,format=raw,readonly=on"),
        *("-device", "virtio-blk-pci,drive=root"),
        *("-netdev", f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"),
        *("-device", f"virtio-net-pci,netdev=net,mac={_MAC}"),
        *("-device", "virtio-rng-pci"),
        *("-serial", f"file:{console}"),
        *("-chardev", f"socket,id=qmp,fd={qmp}", "-mon", "chardev=qmp,mode=control"),
        *(_memory_argv(memory, limits.lab_memory_mib) if memory is not None else ()),
        *(("-plugin", f"{_escaped(image.counter)},fd={count}") if count is not None else ()),
    ]


def _escaped(path: Path) -> str:
    # A comma in the path would end it.
    return str(path).replace(",", ",,")


def _memory_argv(memory: Memory, mib: int) -> tuple[str, ...]:
    path = _escaped(memory.file)
    share = "on" if memory.shared else "off"
    return (
        "-object",
        f"memory-backend-file,id=memory,size={mib}M,mem-path={path},share={share}",
        # Tells the kernel that another one went on from where it is: it draws new random numbers.
        *("-device", "vmgenid,guid=auto"),
        *(("-incoming", "defer") if memory.state is not None else ()),
    )


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _ended(process: subprocess.Popen[bytes], log: Path, console: Path) -> InfrastructureError:
    stderr = _read(log)
    kind = TransientError if "host forwarding" in stderr else InfrastructureError
    return kind(
        "the embedded host's QEMU ended while it booted",
        remedy="see its last lines; with too little memory set VRINGLAB_LAB_MEMORY_MIB",
        command=QEMU,
        host="local",
        stdout=_read(console),
        stderr=stderr,
        returncode=process.returncode,
    )


def _await_console(
    process: subprocess.Popen[bytes], console: Path, log: Path, deadline: float
) -> None:
    """Wait for the console's word that the host is set up."""
    while "host is set up" not in _read(console):
        if process.poll() is not None:
            raise _ended(process, log, console)
        if time.monotonic() > deadline:
            raise TransientError(
                f"the embedded host was not up within {settings().boot_timeout:g} s",
                remedy="this machine may be overloaded; raise VRINGLAB_BOOT_TIMEOUT",
                host="embedded",
                stdout=_read(console),
                stderr=_read(log),
            )
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _greeted(
    connection: socket.socket, process: subprocess.Popen[bytes], log: Path
) -> Iterator[Monitor]:
    """QEMU's monitor; where QEMU ended instead, its words."""
    try:
        monitor = Monitor(connection, name="embedded")
    except (TransientError, InfrastructureError) as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        if process.poll() is not None:
            raise _ended(process, log, Path(os.devnull)) from error
        raise
    with monitor:
        yield monitor


def _go_on(monitor: Monitor, state: Path) -> None:
    """Load what is left of a paused host, and let it go on."""
    monitor.execute("migrate-set-capabilities", {"capabilities": IGNORE_SHARED})
    monitor.execute("migrate-incoming", {"uri": f"file:{state}"})
    migrated(monitor)
    monitor.execute("cont")


def migrated(monitor: Monitor) -> None:
    """Wait until QEMU has read or written a machine's state.

    Raises:
        InfrastructureError: it could not.
        TransientError: it took too long.
    """
    deadline = time.monotonic() + _STATE_S
    while (status := monitor.execute("query-migrate")).get("status") != "completed":
        if status.get("status") in ("failed", "cancelled"):
            raise InfrastructureError(
                f"QEMU cannot keep or restore the host: {status.get('error-desc', 'no reason')}",
                remedy="free some disk space",
                host="embedded",
            )
        if time.monotonic() > deadline:
            raise TransientError(
                f"the host's state was not read or written within {_STATE_S:g} s",
                remedy="this machine may be overloaded",
                host="embedded",
            )
        time.sleep(_POLL_S)


class _NoCounter(InfrastructureError):  # noqa: N818 - told to nobody
    """QEMU ended because of its plugin; it can be started without."""


def _plugin_fault(stderr: str) -> str:
    """QEMU's words if it ended because of the plugin; else nothing."""
    words = [line.removeprefix(f"{QEMU}: ") for line in stderr.splitlines()]
    return "; ".join(line for line in words if "plugin" in line or "vringlab-count" in line)


@contextlib.contextmanager
def _counting(ours: socket.socket, vcpus: int) -> Iterator[tuple[Counter | None, str]]:
    """The counter of a host that is up, or why it cannot be read."""
    # Imported late: only who counts needs numpy to start.
    from vringlab.lab.counter import Counter

    with Counter(ours, vcpus) as made:
        try:
            made.read()
        except InfrastructureError as error:
            yield None, error.message
        else:
            yield made, ""


@contextlib.contextmanager
def _boot(
    image: Image, accelerator: Accelerator, folder: Path, memory: Memory | None, count: bool
) -> Iterator[HostMachine]:
    deadline = time.monotonic() + settings().boot_timeout
    port = _free_port()
    console, log = folder / "console.log", folder / "qemu.log"
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        count_ours, count_theirs = (stack.enter_context(end) for end in socket.socketpair())
        argv = qemu_argv(
            image,
            accelerator,
            port,
            console,
            theirs.fileno(),
            memory,
            count_theirs.fileno() if count else None,
        )
        passed = [theirs.fileno(), *([count_theirs.fileno()] if count else [])]
        process = stack.enter_context(
            local.companion(argv, log=log, remedy_missing=QEMU_MISSING, pass_fds=passed)
        )
        theirs.close()
        count_theirs.close()
        owner.record(folder, process.pid)
        try:
            if memory is None or memory.state is None:
                _await_console(process, console, log, deadline)
            monitor = stack.enter_context(_greeted(ours, process, log))
        except InfrastructureError as error:
            if count and (fault := _plugin_fault(error.stderr)):
                raise _NoCounter(fault) from error
            raise
        if memory is not None and memory.state is not None:
            _go_on(monitor, memory.state)
        address = Address("embedded", "127.0.0.1", port, "root", image.client_key, image.host_key)
        machine = stack.enter_context(
            Machine(address, timeout=max(10.0, deadline - time.monotonic()))
        )
        threads = tuple(monitor.vcpu_threads())
        found: tuple[Counter | None, str] = (None, "not asked for")
        if count:
            found = stack.enter_context(_counting(count_ours, len(threads)))
        yield HostMachine(
            machine=machine,
            kind=accelerator.host_kind,
            image=image,
            accelerator=accelerator,
            qemu_argv=tuple(argv),
            console=console,
            vcpu_threads=threads,
            monitor=monitor,
            counter=found[0],
            count_refusal=found[1],
        )


def _count_refusal(image: Image, accelerator: Accelerator) -> str:
    """Why the instructions of a host cannot be counted; empty when that can be tried."""
    if accelerator.name != "tcg":
        return "the embedded host runs under KVM: only an emulated one counts instructions"
    return "" if image.counter.is_file() else "the image has no instruction counter"


@contextlib.contextmanager
def embedded_host(
    image: Image,
    accelerator: Accelerator,
    *,
    on_step: Callable[[str], None] = lambda _: None,
    memory: Memory | None = None,
    count_instructions: bool = False,
) -> Iterator[HostMachine]:
    """Boot the embedded host, or let a paused one go on, and end it with the block.

    Enter it in a thread that lives as long as the host shall (see `local.companion`).

    Args:
        image: Its kernel and root.
        accelerator: From `accel.choose`.
        on_step: Told what is being done.
        memory: A file that is its memory, for a snapshot or from one.
        count_instructions: Whether it shall have an instruction counter; where that is not
            possible it comes up without, and `count_refusal` says why.

    Raises:
        InfrastructureError: QEMU is missing or ended; the console's last lines are in it.
        TransientError: not up within the settings' `boot_timeout`.
    """
    if memory is None or memory.state is None:
        on_step(f"booting the embedded host ({accelerator.name}: {accelerator.reason})")
    refusal = _count_refusal(image, accelerator) if count_instructions else "not asked for"
    for attempt in itertools.count(1):
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(owner.lab_folder())
            try:
                host = stack.enter_context(
                    _boot(image, accelerator, folder, memory, count=not refusal)
                )
            except _NoCounter as error:
                refusal = f"QEMU does not take the instruction counter: {error.message}"
                on_step(f"{refusal}; booting without it")
                continue
            except TransientError as error:
                # Another program took the port between our look and QEMU's bind.
                if "host forwarding" in error.stderr and attempt < _PORT_TRIES:
                    continue
                raise
            yield host if not refusal else replace(host, count_refusal=refusal)
            return
