"""Loading an arm: a module of the guest is replaced while it runs, and its identity checked."""

from __future__ import annotations

from vringlab.errors import InfrastructureError
from vringlab.kernels.module import BuiltModule
from vringlab.lab.guest import WORK, Guest
from vringlab.transport.ssh import Machine

_SWAP_S = 60.0
_SCRIPT = "/usr/lib/vringlab/swap-module"


def loaded_build_id(machine: Machine, module: str) -> str:
    """The GNU build-id of a loaded module, hexadecimal; empty when it is not loaded.

    Raises:
        TransientError: the connection was lost.
    """
    # The note: three 4-byte words, `GNU\\0`, then the id (ELF specification, note section).
    done = machine.run(
        f"busybox tail -c +17 /sys/module/{module}/notes/.note.gnu.build-id | busybox xxd -p | "
        "busybox tr -d '\\n'",
        check=False,
    )
    return done.stdout.strip()


def swap(guest: Guest, built: BuiltModule) -> None:
    """Replace the guest's module by `built`, and check that it is the one now loaded.

    With `virtio_net` the management interface goes and comes back; the connection bears it.

    Raises:
        InfrastructureError: the module was refused or another one is loaded (kworkflow#1198:
            never measure what was not asked for).
        TransientError: the guest did not come back in time.
    """
    machine = guest.machine
    folder = f"{WORK}/modules"
    remote = f"{folder}/{built.build_id}.ko"
    result = f"{WORK}/swap.result"
    if built.build_id not in guest.delivered:
        machine.run(["mkdir", "-p", folder])
        machine.put(built.path, remote)
        guest.delivered.add(built.build_id)
    # From here on what was loaded may be gone, whatever comes of it.
    guest.loaded.pop(built.module, None)
    network = " ".join(guest.management) if built.module == "virtio_net" else ""
    # The script goes on while the network is away, and what it prints arrives once it is back.
    done = machine.run(
        f"{_SCRIPT} {result} {built.module} {remote} {network} >/dev/null 2>&1; cat {result}",
        timeout=_SWAP_S,
        remedy="the guest's network did not come back after the swap",
    )
    status, _, detail = done.stdout.strip().partition(" ")
    if status != "ok":
        log = machine.run("dmesg | tail -n 10", check=False).stdout
        raise InfrastructureError(
            f"the arm's {built.module} could not be loaded: {detail}",
            remedy="the module must be built for the very kernel that runs; see the guest's log",
            host="guest",
            stderr=log,
        )
    if detail != built.build_id:
        raise InfrastructureError(
            f"{built.module} did not take: build-id {detail or 'unknown'} is loaded, "
            f"{built.build_id} was asked for",
            remedy="nothing was measured; reboot the guest (--switch reboot)",
            host="guest",
        )
    guest.loaded[built.module] = detail
