"""The two ends of a vsock benchmark: who listens, who connects, and on which processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vringlab.lab.lab import Lab
from vringlab.transport.ssh import Machine
from vringlab.workloads.base import Params

Direction = Literal["h-g-h", "g-h-g"]

#: The host's context id (linux/vm_sockets.h, VMADDR_CID_HOST).
HOST_CID = 2
#: fio keeps its port in a signed short.
HIGHEST_PORT = 32767
_FIRST_PORT = 20000

#: Starting and ending a tool under nested emulation takes seconds, not milliseconds.
TOOL_MARGIN_S = 60.0


@dataclass(frozen=True)
class End:
    """One end.

    Attributes:
        machine: Where its tool runs.
        cpu: The processor that the tool is pinned to, as that machine counts.
    """

    machine: Machine
    cpu: int


def ends(lab: Lab, direction: Direction) -> tuple[End, End, int]:
    """Connector, listener, and the context id that the connector dials.

    The guest's tool has its last vCPU: its first takes the device's interrupts.
    """
    host = End(lab.host.machine, lab.guest.layout.tools)
    guest = End(lab.guest.machine, lab.guest.spec.vcpus - 1)
    if direction == "h-g-h":
        return host, guest, lab.guest.cid
    return guest, host, HOST_CID


class Ports:
    """Ports for one run after the other: a port just closed may still be in use."""

    def __init__(self) -> None:
        self._next = _FIRST_PORT

    def take(self) -> int:
        """The next port, from a range that fio can express."""
        port = self._next
        self._next = _FIRST_PORT if port >= HIGHEST_PORT else port + 1
        return port


class VsockBenchmark:
    """What every benchmark between two vsock ends has in common."""

    def __init__(self) -> None:
        self._ports = Ports()

    def guest_options(self, points: list[Params]) -> dict[str, object]:  # noqa: ARG002 - protocol
        """Nothing beyond a vsock device, which every guest has."""
        return {}
