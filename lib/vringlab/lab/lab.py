"""What a workload sees: a KVM host, a guest on it, and where things run."""

from __future__ import annotations

from dataclasses import dataclass

from vringlab.lab import pinning
from vringlab.lab.embedded import HostMachine
from vringlab.lab.guest import Guest


@dataclass(frozen=True)
class Lab:
    """A KVM host with a running guest.

    Attributes:
        host: The KVM host.
        guest: The guest.
    """

    host: HostMachine
    guest: Guest

    def pinning_drift(self) -> list[str]:
        """Pinned threads that are not where they were put, in words."""
        wanted = self.guest.threads
        return pinning.drift(wanted, pinning.observe(self.host.machine, wanted))
