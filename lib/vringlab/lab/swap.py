"""Loading an arm: a module of guest or host is replaced while it runs, and its identity checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vringlab.errors import InfrastructureError
from vringlab.kernels.module import BuiltModule
from vringlab.lab import vhost_nic
from vringlab.lab.embedded import HostMachine
from vringlab.lab.guest import WORK, Guest
from vringlab.transport.ssh import Machine

_SWAP_S = 60.0
_SCRIPT = "/usr/lib/vringlab/swap-module"
_FOLDER = f"{WORK}/modules"
_RESULT = f"{WORK}/swap.result"
#: Head of a note with a build-id of 20 bytes: sizes of name and content, type, `GNU`.
_BUILD_ID_NOTE = "040000001400000003000000474e5500"
#: Replaces several modules at once, or one that others use.
_SET_FILE = Path(__file__).parent / "swap-modules"
_SET_SCRIPT = f"{WORK}/swap-modules"
#: Modules that no other module uses.
_LEAVES = frozenset({"virtio_net", "vmw_vsock_virtio_transport", "vhost_net", "vhost_vsock", "tun"})


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


def running_kernel(machine: Machine, release: str) -> str:
    """The build-id of the kernel that a machine runs, hexadecimal, checked by its release.

    Raises:
        InfrastructureError: it runs another kernel (kworkflow#1198: never measure what was not
            asked for).
        TransientError: the connection was lost.
    """
    # /sys/kernel/notes holds several notes; the build-id is type 3 of the name `GNU`.
    done = machine.run(
        "uname -r; busybox xxd -p /sys/kernel/notes | busybox tr -d '\\n'", check=False
    )
    running, _, notes = done.stdout.strip().partition("\n")
    if running != release:
        raise InfrastructureError(
            f"the guest runs kernel {running or 'unknown'}, {release} was asked for",
            remedy="nothing was measured; remove the kernel's bundle from the cache",
            host=machine.name,
        )
    _, mark, rest = notes.partition(_BUILD_ID_NOTE)
    return rest[:40] if mark else release


def _replace(machine: Machine, module: str, file: str, build_id: str, network: str = "") -> None:
    """Load `file` in place of a module, and check that it is the one now loaded.

    `file` is shell text; `network` is what the script needs to bring an interface back.
    """
    command = f"{_SCRIPT} {_RESULT} {module} {file} {network}"
    _run_script(machine, command, module, build_id)


def _replace_set(
    machine: Machine, files: Mapping[str, str], ids: Sequence[str], network: str = ""
) -> None:
    """As `_replace`, of several modules in the order of loading, or of one that others use."""
    if machine.run(["test", "-e", _SET_SCRIPT], check=False).returncode != 0:
        machine.run(["mkdir", "-p", WORK])
        machine.put(_SET_FILE, _SET_SCRIPT)
    pairs = " ".join(f"{module} {file}" for module, file in files.items())
    command = f"sh {_SET_SCRIPT} {_RESULT} '{network}' {pairs}"
    _run_script(machine, command, ", ".join(files), " ".join(ids))


def _run_script(machine: Machine, command: str, module: str, build_id: str) -> None:
    # The script goes on while the network is away, and what it prints arrives once it is back.
    done = machine.run(
        f"{command} >/dev/null 2>&1; cat {_RESULT}",
        timeout=_SWAP_S,
        remedy=f"{machine.name}: its network did not come back after the swap",
    )
    status, _, detail = done.stdout.strip().partition(" ")
    if status != "ok":
        log = machine.run("dmesg | tail -n 10", check=False).stdout
        raise InfrastructureError(
            f"{module} could not be loaded: {detail}",
            remedy="the module must be built for the very kernel that runs, and nothing else may "
            f"use the one it replaces; see the log of {machine.name}",
            host=machine.name,
            stderr=log,
        )
    if detail != build_id:
        raise InfrastructureError(
            f"{module} did not take: build-id {detail or 'unknown'} is loaded, "
            f"{build_id} was asked for",
            remedy="nothing was measured; reboot the guest (--switch reboot)",
            host=machine.name,
        )


def swap(guest: Guest, built: BuiltModule) -> None:
    """Replace the guest's module by `built`, and check that it is the one now loaded.

    With `virtio_net` the management interface goes and comes back; the connection bears it.

    Raises:
        InfrastructureError: the module was refused or another one is loaded (kworkflow#1198:
            never measure what was not asked for).
        TransientError: the guest did not come back in time.
    """
    machine = guest.machine
    for item in built.loading:
        if item.build_id not in guest.delivered:
            machine.run(["mkdir", "-p", _FOLDER])
            machine.put(item.path, _remote(item))
            guest.delivered.add(item.build_id)
        # From here on what was loaded may be gone, whatever comes of it.
        guest.loaded.pop(item.module, None)
    nets = any(item.module == "virtio_net" for item in built.loading)
    _load(machine, built, " ".join(guest.management) if nets else "")
    guest.loaded.update({item.module: item.build_id for item in built.loading})


def _remote(built: BuiltModule) -> str:
    return f"{_FOLDER}/{built.build_id}.ko"


def _load(machine: Machine, built: BuiltModule, network: str = "") -> None:
    if len(built.loading) == 1 and built.module in _LEAVES:
        _replace(machine, built.module, _remote(built), built.build_id, network)
        return
    files = {item.module: _remote(item) for item in built.loading}
    _replace_set(machine, files, [item.build_id for item in built.loading], network)


def swap_host(host: HostMachine, guest: Guest | None, built: BuiltModule) -> None:
    """Replace a module of the KVM host by `built`, and check that it is the one now loaded.

    A running guest is without its benchmark device meanwhile: as long as it has that, vhost_net
    is in use. Its vhost worker is then a new thread.

    Args:
        host: The KVM host.
        guest: The guest on it; `None` when none runs.
        built: The module.

    Raises:
        InfrastructureError: the module was refused, also because somebody else uses the one to be
            replaced; or another one is loaded.
        TransientError: the host was lost, or the guest did not let go of its device in time.
    """
    machine = host.machine
    for item in built.loading:
        if machine.run(["test", "-e", _remote(item)], check=False).returncode != 0:
            machine.run(["mkdir", "-p", _FOLDER])
            machine.put(item.path, _remote(item))
    if guest is not None:
        vhost_nic.unplug(guest)
    _load(machine, built)
    if guest is not None:
        vhost_nic.plug(host, guest)


def restore_host(host: HostMachine, module: str, build_id: str) -> None:
    """Load the module that the host came with, and check that it is that.

    No guest may use it any more.

    Args:
        host: The KVM host.
        module: Name of the module.
        build_id: What `loaded_build_id` said before the first swap; empty when none was loaded.

    Raises:
        InfrastructureError: it could not be loaded, or another one is loaded.
    """
    if build_id and module in _LEAVES:
        _replace(host.machine, module, f'"$(modinfo -n {module})"', build_id)
    elif build_id:
        _replace_set(host.machine, {module: f'"$(modinfo -n {module})"'}, [build_id])
    else:
        host.machine.run(f"[ ! -d /sys/module/{module} ] || rmmod {module}")
