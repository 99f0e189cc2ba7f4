"""The guest: provisioned over SSH on a KVM host, under KVM, with the devices that are measured."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vringlab.errors import HostLost, InfrastructureError, TransientError, UserError
from vringlab.kernels.bundle import KernelBundle
from vringlab.lab import testpmd, vhost_nic
from vringlab.lab.embedded import HostMachine
from vringlab.lab.pinning import Layout, pin
from vringlab.lab.qmp import Monitor
from vringlab.settings import settings
from vringlab.transport.ssh import Address, Machine

#: Folder on the KVM host for everything of one guest.
WORK = "/run/vringlab"
_TAP = "vringlab0"
_HOST_ADDRESS = "192.168.77.1"
_GUEST_ADDRESS = "192.168.77.2"
_MANAGEMENT_MAC = "52:54:00:76:6c:01"
_FIRST_CID = 3
_FIRST_QMP_PORT = 4444
_TRIES = 32
#: How often it is asked whether the guest still runs, s.
_WATCH_S = 1.0
#: Share of the time to boot after which a guest counts as hung, if it can be started again.
_FIRST_TRY = 0.4
#: A guest that goes on answers within this time, or it is dead.
_WAKE_S = 30.0
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: What `leave` tells of a guest.
LEFT = frozenset(
    {
        "cid",
        "qemu_argv",
        "threads",
        "vhost_threads",
        "net_worker",
        "boot_id",
        "qemu",
        "qmp_port",
        "testpmd",
        "layout",
    }
)

#: As for the embedded host, and: security modules and a second processor cost seconds at boot
#: under nested emulation (the latter joins when the guest is set up), and so do RCU's quiet waits,
#: at boot and whenever a driver is unloaded.
_FAST_BOOT = (
    "mitigations=off random.trust_cpu=on tsc=reliable no_timer_check cryptomgr.notests "
    "audit=0 lsm=none maxcpus=1 8250.nr_uarts=1 rcupdate.rcu_expedited=1"
)


@dataclass(frozen=True)
class VhostUserNic:
    """A virtio-net device served by testpmd over vhost-user.

    Attributes:
        packed: Packed ring instead of split.
        ring_size: Entries of the transmit ring; a power of two, 256 to 1024.
    """

    packed: bool
    ring_size: int

    def __post_init__(self) -> None:
        """Refuse what QEMU refuses, before a machine is touched."""
        if self.ring_size not in (256, 512, 1024):
            raise UserError(
                f"a ring of {self.ring_size} entries is not possible with vhost-user",
                remedy="use 256, 512 or 1024",
            )

    @property
    def name(self) -> str:
        """Such as `split256`."""
        return f"{'packed' if self.packed else 'split'}{self.ring_size}"


@dataclass(frozen=True)
class GuestSpec:
    """How a guest is made.

    Attributes:
        vcpus: Virtual processors.
        memory_mib: Memory; with vhost-user it is a shared memfd, which testpmd maps.
        nics: vhost-user devices, beside the management interface (virtio-net over vhost/TAP).
        shared_memory: Whether guest memory is shared; vhost-user cannot work without.
        kernel_args: Appended to the guest kernel's command line.
        vhost_nic: A second virtio-net device over vhost/TAP, for benchmarks. The management
            interface is then served by QEMU itself, so that vhost_net can be unloaded.
    """

    vcpus: int = 2
    memory_mib: int = 1024
    nics: tuple[VhostUserNic, ...] = ()
    shared_memory: bool = True
    kernel_args: str = ""
    vhost_nic: bool = False

    def __post_init__(self) -> None:
        """Refuse combinations that would boot and then measure nothing (bess#846)."""
        if self.nics and not self.shared_memory:
            raise UserError(
                "vhost-user devices need shared guest memory: testpmd could not see a packet",
                remedy="leave shared_memory on",
            )

    def as_record(self) -> dict[str, object]:
        """For provenance."""
        return asdict(self)


@dataclass
class Processes:
    """What runs for a guest on its host.

    Attributes:
        qemu: Process id of QEMU.
        qmp_port: TCP port of its monitor, on the host's loopback.
        testpmd: Whether there is a testpmd too.
        left: Whether they go on when our block ends, for another one to take over.
    """

    qemu: int
    qmp_port: int
    testpmd: bool
    left: bool = False


@dataclass
class Guest:
    """A running guest.

    Attributes:
        machine: SSH to it, through the KVM host.
        spec: What it was made from.
        cid: Its vsock context id.
        layout: Processors of the KVM host.
        qemu_pid: Process of its QEMU on the KVM host.
        qemu_argv: That QEMU's command line.
        threads: Pinned threads of the KVM host: thread id -> processor.
        vhost_threads: Those of them that are vhost workers.
        net_worker: The one of them that serves the benchmark's device; `None` without that.
        boot_id: What its kernel calls this boot: the same in all guests that were restored from
            one snapshot, since they are one boot.
        processes: What runs for it on the host.
        nics: MAC address of each vhost-user device.
        testpmd_ports: testpmd port of each vhost-user device.
        loaded: Build-id of each module swapped in, by module.
        delivered: Build-ids of modules whose file is in the guest.
    """

    machine: Machine
    spec: GuestSpec
    cid: int
    layout: Layout
    qemu_pid: int
    qemu_argv: tuple[str, ...]
    threads: dict[int, int]
    vhost_threads: tuple[int, ...]
    monitor: Monitor
    boot_id: str
    processes: Processes
    nics: dict[VhostUserNic, str] = field(default_factory=dict)
    testpmd_ports: dict[VhostUserNic, int] = field(default_factory=dict)
    loaded: dict[str, str] = field(default_factory=dict)
    delivered: set[str] = field(default_factory=set)
    net_worker: int | None = None

    @property
    def management(self) -> tuple[str, str, str]:
        """MAC, address with prefix and gateway of the management interface."""
        return _MANAGEMENT_MAC, f"{_GUEST_ADDRESS}/24", _HOST_ADDRESS

    @property
    def address(self) -> str:
        """The guest's address on the management network (virtio-net over vhost/TAP)."""
        return _GUEST_ADDRESS

    @property
    def host_address(self) -> str:
        """The KVM host's address on the management network."""
        return _HOST_ADDRESS


def nic_mac(index: int) -> str:
    """MAC address of the vhost-user device at `index` (0-based)."""
    return f"52:54:00:76:6d:{index + 1:02x}"


def qemu_argv(
    spec: GuestSpec,
    *,
    release: str,
    host_kind: str,
    cid: int,
    qmp_port: int,
    root_disk: str = "/dev/vda",
    kernel_folder: str = "",
) -> list[str]:
    """QEMU's command line on the KVM host; pure, so that it can be read before anything boots.

    Args:
        spec: The guest.
        release: Release of the kernel.
        host_kind: Kind of the host.
        cid: vsock context id.
        qmp_port: TCP port of the monitor on the host's loopback.
        root_disk: The image, as the host sees it.
        kernel_folder: Where another kernel than the image's is, with its initrd and modules.
    """
    emulated = host_kind == "emulated"
    file = "vmlinux" if emulated else "vmlinuz"
    append = (
        f"console=ttyS0 quiet panic=-1 {_FAST_BOOT if emulated else ''} vringlab.role=guest "
        f"vringlab.mac={_MANAGEMENT_MAC} vringlab.address={_GUEST_ADDRESS}/24 "
        f"vringlab.gateway={_HOST_ADDRESS} "
        f"vringlab.modules=virtio_net,vmw_vsock_virtio_transport,pktgen {spec.kernel_args}"
    )
    memory = "memory-backend-memfd" if spec.shared_memory else "memory-backend-ram"
    share = ",share=on" if spec.shared_memory else ""
    argv = [
        "qemu-system-x86_64",
        *("-name", "vringlab-guest,debug-threads=on"),
        *("-accel", "kvm"),
        # XSAVE under emulated SVM has sizes that the guest's kernel warns of; nothing here uses it.
        *("-cpu", "host,xsave=off" if emulated else "host"),
        *("-machine", "q35,hpet=off,i8042=off,sata=off,smbus=off"),
        *("-smp", str(spec.vcpus), "-m", str(spec.memory_mib)),
        *("-object", f"{memory},id=mem,size={spec.memory_mib}M{share}"),
        *("-numa", "node,memdev=mem"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *(
            "-kernel",
            f"{kernel_folder}/{file}" if kernel_folder else f"/boot/{file}-{release}",
            "-initrd",
            f"{kernel_folder or '/boot'}/initrd",
        ),
        *("-append", " ".join(append.split())),
        *("-drive", f"file={root_disk},if=none,id=root,format=raw,readonly=on,file.locking=off"),
        *("-device", "virtio-blk-pci,drive=root"),
        *(_modules_disk(kernel_folder) if kernel_folder else ()),
        *(
            "-netdev",
            f"tap,id=mgmt,ifname={_TAP},script=no,downscript=no,"
            f"vhost={'off' if spec.vhost_nic else 'on'}",
        ),
        *("-device", f"virtio-net-pci,netdev=mgmt,mac={_MANAGEMENT_MAC}"),
        *("-device", f"vhost-vsock-pci,guest-cid={cid}"),
        *("-device", "virtio-rng-pci"),
        *("-serial", f"file:{WORK}/console.log"),
        *("-qmp", f"tcp:127.0.0.1:{qmp_port},server=on,wait=off"),
        *("-daemonize", "-pidfile", f"{WORK}/qemu.pid"),
    ]
    if spec.vhost_nic:
        argv += ["-device", f"pcie-root-port,id={vhost_nic.PORT},chassis=1,slot=1"]
    for index, nic in enumerate(spec.nics):
        argv += [
            *("-chardev", f"socket,id=c{index},path={WORK}/vhost{index}.sock"),
            *("-netdev", f"vhost-user,id=v{index},chardev=c{index}"),
            "-device",
            f"virtio-net-pci,netdev=v{index},mac={nic_mac(index)},vectors=4,"
            f"packed={'on' if nic.packed else 'off'},tx_queue_size={nic.ring_size},"
            "rx_queue_size=256",
        ]
    return argv


def _modules_disk(folder: str) -> tuple[str, ...]:
    """The second disk, from which a kernel's own initrd lays its modules over the root."""
    file = f"file={folder}/modules.squashfs,if=none,id=modules,format=raw,readonly=on"
    return ("-drive", file, "-device", "virtio-blk-pci,drive=modules")


def _deliver(host: HostMachine, kernel: KernelBundle) -> str:
    """Bring a kernel to the host, once; the folder there."""
    folder = f"{WORK}/kernels/{kernel.digest}"
    if host.machine.run(["test", "-d", folder], check=False).returncode == 0:
        return folder
    host.machine.run(["mkdir", "-p", f"{folder}.new"])
    image = kernel.vmlinux if host.kind == "emulated" else kernel.vmlinuz
    for file in (image, kernel.initrd, kernel.modules):
        host.machine.put(file, f"{folder}.new/{file.name}")
    host.machine.run(["mv", f"{folder}.new", folder])
    return folder


def prepare_host(host: HostMachine) -> None:
    """Make the host ready for guests: work folder and TAP devices. Repeating it changes nothing.

    Raises:
        InfrastructureError: KVM, vhost or TUN is missing on the host, or a right to use it.
    """
    taps = {_TAP: _HOST_ADDRESS, vhost_nic.TAP: vhost_nic.HOST_ADDRESS}
    for tap in taps:
        host.on_change(f"[ ! -d /sys/class/net/{tap} ] || ip link delete {tap}")
    networks = "".join(
        f" && {{ [ -d /sys/class/net/{tap} ] || {{ ip tuntap add {tap} mode tap && "
        f"ip addr add {address}/24 dev {tap}; }}; }} && ip link set {tap} up"
        for tap, address in taps.items()
    )
    host.machine.run(
        "for device in kvm vhost-vsock vhost-net net/tun; do "
        'if ! [ -c "/dev/$device" ]; then echo "/dev/$device is missing" >&2; exit 1; fi; done; '
        f"mkdir -p {WORK}{networks}",
        remedy="load kvm_amd or kvm_intel, vhost_vsock, vhost_net and tun on the KVM host; the "
        "guest's networks need rights to make TAP devices there",
    )


def _launch(
    host: HostMachine, spec: GuestSpec, kernel: KernelBundle | None = None
) -> tuple[int, tuple[str, ...], int, int]:
    """Start QEMU with the first free CID and monitor port: (pid, argv, cid, port)."""
    cids, ports = itertools.count(_FIRST_CID), itertools.count(_FIRST_QMP_PORT)
    cid, port = next(cids), next(ports)
    folder = _deliver(host, kernel) if kernel is not None else ""
    for _ in range(_TRIES):
        argv = qemu_argv(
            spec,
            release=kernel.kernel.release if kernel else host.image.release,
            host_kind=host.kind,
            cid=cid,
            qmp_port=port,
            root_disk=host.root_disk,
            kernel_folder=folder,
        )
        done = host.machine.run(
            f"rm -f {WORK}/console.log {WORK}/qemu.pid; taskset -c 0 {shlex.join(argv)} && "
            f"cat {WORK}/qemu.pid",
            timeout=settings().boot_timeout,
            check=False,
        )
        if done.returncode == 0:
            return int(done.stdout.split()[-1]), tuple(argv), cid, port
        if "guest cid" in done.stderr and "in use" in done.stderr:
            cid = next(cids)
        elif "in use" in done.stderr and re.search(r"qmp|socket|127\.0\.0\.1", done.stderr):
            port = next(ports)
        else:
            raise InfrastructureError(
                "the guest's QEMU did not start",
                remedy="see QEMU's words above; `vringlab doctor` will name what a host lacks",
                command=argv,
                host=host.machine.name,
                stdout=done.stdout,
                stderr=done.stderr,
                returncode=done.returncode,
            )
    raise InfrastructureError(
        f"no free vsock CID or monitor port in {_TRIES} tries",
        remedy="other guests hold them on this host; end those that are strays",
        host=host.machine.name,
    )


def _await_guest(host: HostMachine, pid: int, deadline: float) -> None:
    """Wait for the word on the guest's console that it is set up; `deadline` is monotonic."""
    limit = max(1.0, deadline - time.monotonic())
    try:
        done = host.machine.run(
            f"until grep -q 'guest is set up' {WORK}/console.log; do "
            f"[ -d /proc/{pid} ] || exit 9; busybox usleep 20000; done",
            timeout=limit,
            check=False,
        )
    except TransientError:
        # Over its time; were the host lost instead, the next line says so.
        done = None
    if done is not None and done.returncode == 0:
        return
    console = host.machine.run(["tail", "-n", "40", f"{WORK}/console.log"], check=False).stdout
    raise TransientError(
        f"the guest never came up ({limit:.0f} s)"
        if done is None
        else "the guest's QEMU ended while it booted",
        remedy="its console's last lines are above; a slow machine may need a longer "
        "VRINGLAB_BOOT_TIMEOUT",
        host="guest",
        stderr=console,
    )


def _find_threads(
    host: HostMachine, pid: int, layout: Layout, vcpus: list[int]
) -> tuple[dict[int, int], tuple[int, ...]]:
    """Threads to pin: vCPUs and vhost workers.

    Raises:
        InfrastructureError: no vhost worker was found; then none could be pinned or accounted.
    """
    workers = vhost_nic.workers(host, pid)
    if not workers:
        raise InfrastructureError(
            f"no vhost worker thread was found for the guest (QEMU {pid})",
            remedy="is the management interface on vhost, and vhost_vsock in use? Without the "
            "worker its processor can neither be pinned nor accounted",
            host=host.machine.name,
        )
    threads = dict(zip(vcpus, layout.vcpus, strict=True))
    threads |= dict.fromkeys(workers, layout.backend)
    return threads, workers


def _end_qemu(host: HostMachine, pid: int) -> None:
    with contextlib.suppress(InfrastructureError):
        host.machine.run(
            f"kill -KILL {pid}; while [ -d /proc/{pid} ]; do busybox usleep 10000; done",
            timeout=60,
            check=False,
        )


def _end(host: HostMachine, processes: Processes) -> None:
    """End a guest's processes, and wait until QEMU is gone: its CID, TAP and memory come free."""
    if processes.left:
        return
    if processes.qemu:
        _end_qemu(host, processes.qemu)
    if processes.testpmd:
        testpmd.end(host.machine, WORK)


@contextlib.contextmanager
def _hanging_up(host: HostMachine, pid: int, guest: Machine) -> Iterator[None]:
    """Close the connection to a guest as soon as its QEMU ends.

    A guest that panics says no goodbye: whoever waits for one of its commands would do so until
    the command's deadline, minutes later.
    """
    watch = host.machine.start(["tail", f"--pid={pid}", "-s", f"{_WATCH_S:g}", "-f", "/dev/null"])
    done = threading.Event()

    def wait() -> None:
        while watch.running:
            if done.wait(_WATCH_S):
                return
        guest.close()

    thread = threading.Thread(target=wait, name="vringlab-guest-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        watch.close()


def _come_up(
    host: HostMachine,
    spec: GuestSpec,
    kernel: KernelBundle | None,
    processes: Processes,
    on_step: Callable[[str], None],
) -> tuple[tuple[str, ...], int, float]:
    """Start QEMU and wait for the guest; once more when it hung: (argv, cid, deadline).

    Under emulation a guest now and then stops in mid-boot and never goes on.
    """
    limit = settings().boot_timeout
    processes.qemu, argv, cid, processes.qmp_port = _launch(host, spec, kernel)
    try:
        _await_guest(host, processes.qemu, time.monotonic() + limit * _FIRST_TRY)
    except HostLost:
        raise
    except TransientError as error:
        on_step(f"{error.message} and is started once more")
        _end_qemu(host, processes.qemu)
        processes.qemu, argv, cid, processes.qmp_port = _launch(host, spec, kernel)
        _await_guest(host, processes.qemu, time.monotonic() + limit)
    return argv, cid, time.monotonic() + limit


@contextlib.contextmanager
def boot_guest(
    host: HostMachine,
    spec: GuestSpec,
    *,
    on_step: Callable[[str], None] = lambda _: None,
    kernel: KernelBundle | None = None,
) -> Iterator[Guest]:
    """Boot a guest on the host (see `prepare_host`), pinned; it ends with the block.

    Args:
        host: A KVM host.
        spec: The guest.
        on_step: Told what is being done.
        kernel: Its kernel; the image's when None.

    Raises:
        TransientError: it never came up; its console's last lines are in the error.
        InfrastructureError: QEMU or testpmd refused, or pinning failed.
    """
    machine = host.machine
    cpus = int(machine.run(["nproc", "--all"]).stdout)
    layout = Layout.plan(cpus, spec.vcpus)
    with contextlib.ExitStack() as stack:
        processes = Processes(0, 0, testpmd=False)
        stack.callback(_end, host, processes)
        if spec.nics:
            processes.testpmd = True
            sockets = [f"{WORK}/vhost{index}.sock" for index in range(len(spec.nics))]
            stack.callback(testpmd.start(host.machine, WORK, sockets, layout).close)
        on_step("booting the guest")
        argv, cid, deadline = _come_up(host, spec, kernel, processes, on_step)
        monitor = stack.enter_context(_monitor(host, processes.qmp_port))
        threads, workers = _find_threads(host, processes.qemu, layout, monitor.vcpu_threads())
        pin(machine, threads)
        guest_machine = stack.enter_context(
            _connected(host, processes.qemu, max(30.0, deadline - time.monotonic()))
        )
        guest = Guest(
            machine=guest_machine,
            spec=spec,
            cid=cid,
            layout=layout,
            qemu_pid=processes.qemu,
            qemu_argv=argv,
            threads=threads,
            vhost_threads=workers,
            monitor=monitor,
            boot_id=guest_machine.run(["cat", _BOOT_ID]).stdout.strip(),
            processes=processes,
            nics={nic: nic_mac(index) for index, nic in enumerate(spec.nics)},
            testpmd_ports={nic: index for index, nic in enumerate(spec.nics)},
        )
        if spec.vhost_nic:
            vhost_nic.plug(host, guest)
        yield guest


@contextlib.contextmanager
def _monitor(host: HostMachine, port: int) -> Iterator[Monitor]:
    with (
        host.machine.tunnel("127.0.0.1", port, timeout=60) as tunnel,
        Monitor(tunnel, name="guest") as monitor,
    ):
        yield monitor


@contextlib.contextmanager
def _connected(host: HostMachine, pid: int, timeout: float) -> Iterator[Machine]:
    """SSH to the guest, hung up when its QEMU ends."""
    image = host.image
    address = Address("guest", _GUEST_ADDRESS, 22, "root", image.client_key, image.host_key)
    with (
        Machine(address, timeout=timeout, via=host.machine) as machine,
        _hanging_up(host, pid, machine),
    ):
        yield machine


# --- left by one, taken over by another ------------------------------------------------------


def leave(guest: Guest) -> dict[str, Any]:
    """Pause a guest, to be taken over later; it and its processes outlive the block it is in.

    Returns:
        What `taken_over` needs, for a JSON file.

    Raises:
        InfrastructureError: its QEMU refused or is gone.
    """
    guest.monitor.execute("stop")
    guest.processes.left = True
    return {
        "cid": guest.cid,
        "qemu_argv": list(guest.qemu_argv),
        "threads": sorted(guest.threads.items()),
        "vhost_threads": list(guest.vhost_threads),
        "net_worker": guest.net_worker,
        "boot_id": guest.boot_id,
        "qemu": guest.processes.qemu,
        "qmp_port": guest.processes.qmp_port,
        "testpmd": guest.processes.testpmd,
        "layout": guest.layout.as_record(),
    }


@contextlib.contextmanager
def taken_over(
    host: HostMachine,
    spec: GuestSpec,
    left: Mapping[str, Any],
    awake: Callable[[Machine], None] = lambda _: None,
) -> Iterator[Guest]:
    """Let a guest go on that was left paused; it ends with the block.

    Args:
        host: The host, restored with the guest in it.
        spec: What the guest was made from.
        left: From `leave`.
        awake: Called with the connection to it before anything else is done there.

    Raises:
        TransientError: it does not answer.
        InfrastructureError: its QEMU is gone.
    """
    processes = Processes(left["qemu"], left["qmp_port"], left["testpmd"])
    with contextlib.ExitStack() as stack:
        stack.callback(_end, host, processes)
        monitor = stack.enter_context(_monitor(host, processes.qmp_port))
        monitor.execute("cont")
        machine = stack.enter_context(_connected(host, processes.qemu, _WAKE_S))
        awake(machine)
        yield Guest(
            machine=machine,
            spec=spec,
            cid=left["cid"],
            layout=Layout.of_record(left["layout"]),
            qemu_pid=processes.qemu,
            qemu_argv=tuple(left["qemu_argv"]),
            threads=dict(left["threads"]),
            vhost_threads=tuple(left["vhost_threads"]),
            monitor=monitor,
            boot_id=left["boot_id"],
            processes=processes,
            nics={nic: nic_mac(index) for index, nic in enumerate(spec.nics)},
            testpmd_ports={nic: index for index, nic in enumerate(spec.nics)},
            net_worker=left["net_worker"],
        )
