"""What else a unit of work takes: exits from the guest by their reason, and context switches.

Exits are counted by the KVM host's own kernel, in a histogram on its tracepoint kvm_exit, and only
those of this guest's threads. That takes some hundred instructions for each exit, so nothing that
is timed, or whose instructions are counted, runs meanwhile.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vringlab.errors import InfrastructureError, TransientError

if TYPE_CHECKING:
    from vringlab.lab.embedded import HostMachine
    from vringlab.lab.guest import Guest
    from vringlab.transport.ssh import Machine

#: What is counted, as it is called in samples.
EXITS = "exits"
HOST_SWITCHES = "context switches of the host"
GUEST_SWITCHES = "context switches of the guest"
#: Before the name of a reason.
BY_REASON = "exits: "

_TRACEFS = "/sys/kernel/tracing"
_EVENT = "events/kvm/kvm_exit"
_HISTOGRAM = "hist:keys=common_pid,isa,exit_reason"
#: isa in the tracepoint (arch/x86/kvm/trace.h): 1 is Intel's VMX. SVM, 2, is the other table.
_VMX = 1
#: Intel keeps flags above its reasons, such as of an entry that failed.
_VMX_REASON = 0xFFFF
_LINE = re.compile(
    r"common_pid:\s*(?P<thread>\d+), isa:\s*(?P<isa>\d+), exit_reason:\s*(?P<reason>\d+)\s*\} "
    r"hitcount:\s*(?P<count>\d+)"
)
_NAME = re.compile(r'\{ (?P<code>[^{}"]+), "(?P<name>[^"]+)" \}')
_CONTEXT = re.compile(r"^ctxt (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Events:
    """Counts since some time before; only differences mean anything.

    Attributes:
        counts: Number by what it is; `exits` in all, and `exits: hlt` of each reason.
        notes: What is not available, with the reason.
    """

    counts: Counter[str]
    notes: tuple[str, ...] = ()

    def __sub__(self, other: Events) -> Events:
        """What happened between two readings."""
        found = Counter(self.counts)
        found.subtract(other.counts)
        return Events(found, tuple(dict.fromkeys((*self.notes, *other.notes))))


class EventCounter:
    """Counts events on a host and its guest; made by `counting_events`.

    Args:
        host: The KVM host.
        guest: The guest.
        threads: Threads of the guest's virtual processors on the host, among others.
        instance: The folder that traces; None when exits cannot be counted.
        names: Reasons by isa and code.
        refusal: Why exits cannot be counted.
    """

    def __init__(
        self,
        host: Machine,
        guest: Machine,
        threads: Collection[int],
        instance: str | None,
        names: dict[tuple[int, int], str],
        refusal: str = "",
    ) -> None:
        self._host = host
        self._guest = guest
        self._threads = frozenset(threads)
        self._instance = instance
        self._names = names
        self._notes = (f"exits by reason are not available: {refusal}",) if refusal else ()

    def read(self) -> Events:
        """What happened until now.

        Raises:
            TransientError: a connection was lost.
            InfrastructureError: it cannot be read any more.
        """
        histogram = f"; cat {self._instance}/{_EVENT}/hist" if self._instance else ""
        said = self._host.run(f"cat /proc/stat{histogram}").stdout
        counts = Counter(
            {
                HOST_SWITCHES: _switches(said),
                GUEST_SWITCHES: _switches(self._guest.run("cat /proc/stat").stdout),
            }
        )
        if self._instance:
            counts += exits_of(said, self._threads, self._names)
        return Events(counts, self._notes)


def undo(guest: Guest) -> str:
    """How what counts a guest's exits is taken from the host again, one line of shell text."""
    instance = _instance(guest)
    return (
        f"[ ! -d {instance} ] || {{ echo '!{_HISTOGRAM}' > {instance}/{_EVENT}/trigger; "
        f"rmdir {instance}; }}"
    )


def _instance(guest: Guest) -> str:
    return f"{_TRACEFS}/instances/vringlab-exits-{guest.cid}"


@contextmanager
def counting_events(host: HostMachine, guest: Guest) -> Iterator[EventCounter]:
    """Count events until the block ends.

    A host whose kernel or rights do not allow it counts no exits, and the readings say why.

    Args:
        host: The KVM host, which knows how to `undo` it if it must.
        guest: The guest on it.

    Raises:
        TransientError: a connection was lost.
    """
    machine = host.machine
    instance, end = _instance(guest), undo(guest)
    names: dict[tuple[int, int], str] = {}
    refusal = ""
    try:
        try:
            # What a run that was killed left behind counts from another time.
            form = machine.run(
                f"{end}; mkdir {instance} && echo '{_HISTOGRAM}' > {instance}/{_EVENT}/trigger "
                f"&& cat {instance}/{_EVENT}/format",
            ).stdout
            names = reasons(form)
        except TransientError:
            raise
        except InfrastructureError as error:
            words = error.stderr.strip().splitlines()
            refusal = words[-1] if words else error.message
        yield EventCounter(
            machine, guest.machine, guest.threads, None if refusal else instance, names, refusal
        )
    finally:
        # A host that was lost has nothing to be given back.
        with suppress(TransientError):
            machine.run(end, check=False)


def reasons(form: str) -> dict[tuple[int, int], str]:
    """Names of exit reasons by isa and code, from a tracepoint's format as its kernel prints it.

    Args:
        form: Text of events/kvm/kvm_exit/format: one condition with Intel's table, then AMD's.
    """
    _, _, printed = form.partition("print fmt:")
    intel, _, amd = printed.partition(" : ")
    found: dict[tuple[int, int], str] = {}
    for isa, text in ((_VMX, intel), (_VMX + 1, amd)):
        for item in _NAME.finditer(text):
            code = sum(int(part, 0) for part in item["code"].split("+"))
            # The field has 32 bits, and its table one reason of -1.
            found.setdefault((isa, code & 0xFFFFFFFF), item["name"].lower())
    return found


def exits_of(
    said: str, threads: Collection[int], names: dict[tuple[int, int], str]
) -> Counter[str]:
    """Exits of some threads by reason, from a histogram as the kernel prints it.

    Args:
        said: Text of events/kvm/kvm_exit/hist.
        threads: Threads of the host.
        names: See `reasons`; one that it lacks is called by its number.
    """
    found: Counter[str] = Counter()
    for item in _LINE.finditer(said):
        if int(item["thread"]) not in threads:
            continue
        isa, code = int(item["isa"]), int(item["reason"])
        if isa == _VMX:
            code &= _VMX_REASON
        name = names.get((isa, code), f"reason {code:#x}")
        found[f"{BY_REASON}{name}"] += int(item["count"])
        found[EXITS] += int(item["count"])
    return found


def _switches(said: str) -> int:
    found = _CONTEXT.search(said)
    if found is None:
        raise InfrastructureError(
            "/proc/stat does not tell context switches", remedy="is /proc mounted there?"
        )
    return int(found[1])
