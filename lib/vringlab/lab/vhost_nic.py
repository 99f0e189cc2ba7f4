"""The guest's second virtio-net device, on vhost-net and a TAP of its own, plugged in and out.

Benchmarks run over it. It is never on QEMU's command line: vhost_net can be unloaded on the host
only while nobody uses it, so an arm of that module is loaded between unplugging and plugging.
Plugging takes the same way at boot, which tells its vhost worker from that of vsock: it is the
thread that was not there before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vringlab.errors import InfrastructureError
from vringlab.lab.pinning import pin

if TYPE_CHECKING:
    from vringlab.lab.embedded import HostMachine
    from vringlab.lab.guest import Guest

TAP = "vringlab-b0"
HOST_ADDRESS = "192.168.78.1"
GUEST_ADDRESS = "192.168.78.2"
MAC = "52:54:00:76:6c:02"
PORT = "bench-port"
_DEVICE = "bench"
_NETDEV = "benchnet"


def workers(host: HostMachine, pid: int) -> tuple[int, ...]:
    """Thread ids of the vhost workers of a QEMU, wherever this kernel keeps them.

    Since 6.4 a vhost worker is a task of QEMU, before that a kernel thread `vhost-<pid>`.
    """
    listing = host.machine.run(
        f"for t in /proc/{pid}/task/* /proc/[0-9]*; do "
        f'read -r name 2>/dev/null < "$t/comm" && [ "$name" = "vhost-{pid}" ] && '
        'echo "${t##*/}"; done; true'
    ).stdout.split()
    return tuple(sorted({int(tid) for tid in listing}))


def plug(host: HostMachine, guest: Guest) -> None:
    """Give the guest the device, and pin its vhost worker; an interface follows by itself.

    Raises:
        InfrastructureError: QEMU refused it, or no vhost worker came with it.
        TransientError: the host or QEMU was lost.
    """
    guest.monitor.execute(
        "netdev_add",
        {
            "type": "tap",
            "id": _NETDEV,
            "ifname": TAP,
            "script": "no",
            "downscript": "no",
            "vhost": True,
        },
    )
    guest.monitor.execute(
        "device_add",
        {"driver": "virtio-net-pci", "id": _DEVICE, "netdev": _NETDEV, "mac": MAC, "bus": PORT},
    )
    found = workers(host, guest.qemu_pid)
    new = [tid for tid in found if tid not in guest.vhost_threads]
    if len(new) != 1:
        raise InfrastructureError(
            f"{len(new)} vhost workers came with the benchmark's network device, not one",
            remedy="QEMU falls back to its own copying where it cannot use vhost-net: see whether "
            "vhost_net is loaded on the KVM host and /dev/vhost-net can be opened",
            host=host.machine.name,
        )
    guest.net_worker = new[0]
    guest.vhost_threads = (*guest.vhost_threads, new[0])
    guest.threads[new[0]] = guest.layout.backend
    pin(host.machine, {new[0]: guest.layout.backend})


def unplug(guest: Guest) -> None:
    """Take the device from the guest; nothing happens when it has none.

    Raises:
        TransientError: the guest did not let go of it in time.
        InfrastructureError: QEMU refused or is gone.
    """
    if guest.net_worker is None:
        return
    guest.monitor.execute_until(
        "device_del", {"id": _DEVICE}, "DEVICE_DELETED", {"device": _DEVICE}
    )
    guest.monitor.execute("netdev_del", {"id": _NETDEV})
    gone = guest.net_worker
    guest.net_worker = None
    guest.vhost_threads = tuple(tid for tid in guest.vhost_threads if tid != gone)
    guest.threads.pop(gone, None)
