"""/proc/interrupts and `ethtool -S`, as counters to be read twice and subtracted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vringlab.errors import InfrastructureError

_CPU = re.compile(r"CPU(\d{1,5})")
_LINE = re.compile(r"\s*([A-Za-z0-9_]{1,32}):\s+(.*)")
_COUNT = re.compile(r"\d{1,20}")
_OUTPUT = re.compile(r"virtio(\d{1,5})-output\.(\d{1,5})")
_STAT = re.compile(r"^\s+([A-Za-z0-9_.\[\]-]{1,64}):\s*(\d{1,20})\s*$", re.MULTILINE)
#: `tx0_kicks` since virtio_net took its names from the device's statistics (seen on 6.12),
#: `tx_queue_0_kicks` before.
_KICKS = re.compile(r"tx(?:_queue_)?(\d{1,5})_kicks")


@dataclass(frozen=True)
class Interrupts:
    """One reading of /proc/interrupts.

    Attributes:
        cpus: The CPUs of its columns; offline ones have none.
        counts: Name -> counts, one a CPU in the order of `cpus`. The name is the handler's
            (`virtio1-output.0`), or the label for the lines without one (`LOC`). Lines of one
            name are added up.
        numbers: Name -> interrupt numbers, for /proc/irq/N/smp_affinity.
    """

    cpus: tuple[int, ...]
    counts: Mapping[str, tuple[int, ...]]
    numbers: Mapping[str, tuple[int, ...]]


def parse(text: str) -> Interrupts:
    """Read the text of /proc/interrupts.

    Raises:
        InfrastructureError: it has no line of CPUs.
    """
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if _CPU.match(line.strip())), None)
    if head is None:
        raise InfrastructureError(
            "this is not the text of /proc/interrupts: it names no CPU",
            remedy="look at what the guest printed instead",
            stdout=text,
        )
    cpus = tuple(int(number) for number in _CPU.findall(lines[head]))
    counts: dict[str, tuple[int, ...]] = {}
    numbers: dict[str, tuple[int, ...]] = {}
    for line in lines[head + 1 :]:
        match = _LINE.match(line)
        if match is None:
            continue
        label, fields = match[1], match[2].split()
        values = fields[: len(cpus)]
        # ERR and MIS have one count for the whole machine: no line of ours.
        if len(values) < len(cpus) or not all(_COUNT.fullmatch(value) for value in values):
            continue
        row = tuple(int(value) for value in values)
        numbered = label.isdigit()
        for name in _handlers(fields[len(cpus) :]) if numbered else [label]:
            before = counts.get(name, (0,) * len(cpus))
            counts[name] = tuple(a + b for a, b in zip(before, row, strict=True))
            if numbered:
                numbers[name] = (*numbers.get(name, ()), int(label))
    return Interrupts(cpus, counts, numbers)


def _handlers(fields: list[str]) -> list[str]:
    # "PCI-MSIX-0000:00:02.0   2-edge   virtio0-output.0"; a shared line: "... usb1, virtio0".
    parts = " ".join(fields).split(",")
    return [part.split()[-1] for part in parts if part.split()]


def tx_queues(reading: Interrupts, device: str) -> dict[int, str]:
    """The transmit interrupts of a virtio device: queue -> name.

    Args:
        reading: What was read.
        device: The device, `virtio1`, as /sys/class/net/DEV/device points to it.

    Raises:
        InfrastructureError: it has none: an unknown device, or one without MSI-X, whose only
            interrupt does not tell transmit from receive.
    """
    found = {}
    for name in reading.counts:
        match = _OUTPUT.fullmatch(name)
        if match and f"virtio{match[1]}" == device:
            found[int(match[2])] = name
    if not found:
        known = ", ".join(sorted(n for n in reading.counts if n.startswith("virtio"))) or "none"
        raise InfrastructureError(
            f"{device} has no transmit interrupt of its own",
            remedy=(
                f"virtio interrupts there are: {known}. A device with one plain {device} line "
                "runs without MSI-X: give it vectors (vectors=4 and more)"
            ),
        )
    return dict(sorted(found.items()))


def delta(before: Interrupts, after: Interrupts, name: str) -> dict[int, int]:
    """Interrupts between two readings: CPU -> count, for the CPUs of both.

    Raises:
        InfrastructureError: a reading lacks the name, or a counter went backwards: the driver
            was reloaded between them.
    """
    for which, reading in (("first", before), ("second", after)):
        if name not in reading.counts:
            raise InfrastructureError(
                f"the {which} reading of /proc/interrupts has no {name}",
                remedy="the device went away or changed its number: find it by its MAC again",
            )
    old = dict(zip(before.cpus, before.counts[name], strict=True))
    new = dict(zip(after.cpus, after.counts[name], strict=True))
    found = {cpu: new[cpu] - old[cpu] for cpu in old if cpu in new}
    if any(count < 0 for count in found.values()):
        raise InfrastructureError(
            f"the counter of {name} went backwards",
            remedy="the driver was reloaded inside the timed window: measure without a swap in it",
        )
    return found


def parse_ethtool(text: str) -> dict[str, int]:
    """The counters of `ethtool -S DEV`.

    Raises:
        InfrastructureError: there is none.
    """
    found = {name: int(value) for name, value in _STAT.findall(text)}
    if not found:
        raise InfrastructureError(
            "ethtool -S printed no counter",
            remedy="look at what it says: the device may be gone or named otherwise",
            stdout=text,
        )
    return found


def kicks(stats: Mapping[str, int]) -> dict[int, int]:
    """How often the driver notified the device of work to send: queue -> count.

    Raises:
        InfrastructureError: the counters are not those of virtio_net.
    """
    found = {
        int(match[1]): value
        for match, value in ((_KICKS.fullmatch(name), value) for name, value in stats.items())
        if match
    }
    if not found:
        raise InfrastructureError(
            "ethtool -S has no kicks of a transmit queue",
            remedy="the device is not virtio_net, or its names are new: see _KICKS",
        )
    return dict(sorted(found.items()))
