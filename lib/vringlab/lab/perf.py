"""Instructions on a KVM host with a real processor, by `perf stat`: guest and host apart.

The processor counts them itself, in user space and kernel of either side; there are no functions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vringlab.errors import InfrastructureError
from vringlab.lab.attribution import Area, Profile, Row
from vringlab.lab.counter import Side
from vringlab.lab.events import HOST_SWITCHES
from vringlab.transport.ssh import Machine

#: What is counted beside the instructions, as it is called in samples.
GUEST_CYCLES = "cycles of the guest"
HOST_CYCLES = "cycles of the host"

#: Modifiers of perf events (perf-list(1)): G guest, H host, u user space, k kernel.
_EVENTS: dict[str, tuple[Side, Area]] = {
    "instructions:Gu": ("guest", "user"),
    "instructions:Gk": ("guest", "kernel"),
    "instructions:Hu": ("host", "user"),
    "instructions:Hk": ("host", "kernel"),
}
#: Counted beside them, whatever of it there is.
_OTHERS = {
    "cycles:G": GUEST_CYCLES,
    "cycles:H": HOST_CYCLES,
    "context-switches": HOST_SWITCHES,
}
_READY = "counting"
_ANSWER_S = 30.0
_LINE = re.compile(r"^(?P<value>[^,]*),[^,]*,(?P<event>[^,]+),")


@dataclass
class PerfCount:
    """What perf counted while a block ran; empty until the block ended.

    Attributes:
        profile: Instructions by side and area, of all processors that were watched.
        others: Other figures, by what they are.
    """

    profile: Profile = field(default_factory=lambda: Profile(()))
    others: dict[str, int] = field(default_factory=dict)


def perf_argv(cpus: Sequence[int]) -> list[str]:
    """The command: it counts until it is sent a line.

    Args:
        cpus: Processors of the host to watch.
    """
    return [
        *("perf", "stat", "-x,", "-a", "-C", ",".join(map(str, cpus))),
        *(word for event in (*_EVENTS, *_OTHERS) for word in ("-e", event)),
        *("--", "sh", "-c", f"echo {_READY}; read -r line"),
    ]


def parse(text: str) -> tuple[Profile, dict[str, int]]:
    """What `perf stat -x,` prints.

    Raises:
        InfrastructureError: instructions are not among it; the message says why.
    """
    values: dict[str, int] = {}
    refused: dict[str, str] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        if found["value"].isdigit():
            values[found["event"]] = int(found["value"])
        else:
            refused[found["event"]] = found["value"].strip("<> ")
    missing = [event for event in _EVENTS if event not in values]
    if missing:
        why = refused.get(missing[0], "perf does not tell it")
        raise InfrastructureError(
            f"instructions cannot be counted: {missing[0]} is {why}",
            remedy="a virtual machine may not show its processor's counters to its kernel; "
            "kernel.perf_event_paranoid may forbid them",
            stderr=text,
        )
    rows = [Row(*_EVENTS[event], None, None, (values[event],)) for event in _EVENTS]
    notes = tuple(
        f"{what} not available ({event}: {refused.get(event, 'not told')})"
        for event, what in _OTHERS.items()
        if event not in values
    )
    others = {what: values[event] for event, what in _OTHERS.items() if event in values}
    return Profile(tuple(rows), notes), others


@contextmanager
def counting(machine: Machine, cpus: Sequence[int]) -> Iterator[PerfCount]:
    """Count while the block runs.

    Args:
        machine: The KVM host; perf is its own, as it belongs to its kernel.
        cpus: Processors to watch.

    Raises:
        InfrastructureError: perf is missing, or instructions cannot be counted there.
        TransientError: the connection was lost.
    """
    process = machine.start(f"exec {shlex.join(perf_argv(cpus))}", keep_input=True)
    try:
        try:
            process.wait_for(_READY, _ANSWER_S)
        except InfrastructureError as error:
            raise InfrastructureError(
                "perf does not count on the KVM host",
                remedy="install it there (Debian: linux-perf); it needs root, or "
                "kernel.perf_event_paranoid at -1",
                host=machine.name,
                stderr=error.stderr,
            ) from error
        found = PerfCount()
        yield found
        process.send(b"\n")
        done = process.wait(_ANSWER_S)
        found.profile, found.others = parse(done.stderr)
    finally:
        process.close()
