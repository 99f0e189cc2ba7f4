"""Which processor runs what on the KVM host: asked for, done, and read back.

Drift is a reason for invalidity: a vhost worker that moved onto the vCPU's core changes a
latency by more than most patches do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vringlab.errors import InfrastructureError
from vringlab.transport.ssh import Machine


@dataclass(frozen=True)
class Layout:
    """Processors of the KVM host by what runs on them (each an index).

    Attributes:
        tools: The measuring tool's host end, sshd, QEMU's main loop, testpmd's main thread.
        backend: What serves the queue: vhost worker or testpmd's polling thread.
        vcpus: One per virtual processor of the guest.
    """

    tools: int
    backend: int
    vcpus: tuple[int, ...]

    @classmethod
    def plan(cls, cpus: int, vcpus: int) -> Layout:
        """One processor each, as far as they reach.

        Args:
            cpus: Processors of the KVM host.
            vcpus: Virtual processors of the guest.

        Raises:
            InfrastructureError: fewer than two processors more than the guest has.
        """
        if cpus < vcpus + 2:
            raise InfrastructureError(
                f"the KVM host has {cpus} processors; a guest of {vcpus} needs {vcpus + 2}: "
                "one for the tools and one for the vhost worker or testpmd",
                remedy="use a larger host, or VRINGLAB_LAB_CPUS for the embedded one",
            )
        return cls(tools=0, backend=1, vcpus=tuple(range(2, 2 + vcpus)))

    def as_record(self) -> dict[str, object]:
        """For provenance."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Layout:
        """The layout that `as_record` wrote, also after a way through JSON."""
        return cls(record["tools"], record["backend"], tuple(record["vcpus"]))


def pin(host: Machine, wanted: Mapping[int, int]) -> None:
    """Pin threads of the host.

    Args:
        host: The KVM host.
        wanted: Thread id -> processor.

    Raises:
        InfrastructureError: a thread is gone or the processor does not exist.
    """
    if wanted:
        host.run(
            " && ".join(f"taskset -p -c {cpu} {tid} >/dev/null" for tid, cpu in wanted.items()),
            remedy="see whether the guest's QEMU still runs and the processors exist",
        )


def observe(host: Machine, threads: Mapping[int, int]) -> dict[int, str]:
    """Where threads may run now, as the kernel prints it (`2`, `0-3`); `gone` for ended ones."""
    if not threads:
        return {}
    # One program for all threads, not one for each: they cost 0.1 s apiece on an emulated host.
    files = " ".join(f"/proc/{tid}/status" for tid in threads)
    script = (
        f"grep -Hs ^Cpus_allowed_list: {files} | "
        r"sed -n 's|^/proc/\([0-9]*\)/status:[^:]*:[[:space:]]*|\1 |p'"
    )
    seen = dict.fromkeys(threads, "gone")
    for line in host.run(script, check=False).stdout.splitlines():
        tid, _, cpus = line.partition(" ")
        seen[int(tid)] = cpus
    return seen


def drift(wanted: Mapping[int, int], seen: Mapping[int, str]) -> list[str]:
    """What is not where it shall be, in words; empty when all is."""
    return [
        f"thread {tid} is on {seen.get(tid, 'gone')} instead of processor {cpu}"
        for tid, cpu in wanted.items()
        if seen.get(tid) != str(cpu)
    ]
