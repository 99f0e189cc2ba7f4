"""Instructions for one unit of a workload's work, beside its time.

After its timed run, a workload is run once more in two sizes, and what was executed meanwhile is
counted around each. The unit's cost is the slope between the two:

    (instructions of the long run - of the short run) / (units of the long run - of the short run)

What both took alike (connections, processes, our own commands) cancels. What goes on beside the
work, such as clock ticks, does not: it takes longer with more of it, and is a part of the cost.

The KVM host does not poll for halted guests meanwhile (kvm.halt_poll_ns): it would execute as much
as it had to wait, which says how busy this machine was.

Two more such runs tell, by the same slope, the exits from the guest and the context switches: what
counts exits executes instructions itself, so it has runs of its own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vringlab.campaign.tables import INSTRUCTIONS
from vringlab.campaign.work import FORMAT, SIZES_S, WAITING, WORKING, Work, sizes
from vringlab.errors import InfrastructureError, TransientError
from vringlab.kernels.module import BuiltModule
from vringlab.lab import events, perf
from vringlab.lab.counter import (
    Area,
    Code,
    Counter,
    Profile,
    Row,
    Side,
    attribute,
    kernel_code,
    module_code,
)
from vringlab.lab.lab import Lab
from vringlab.transport.ssh import Machine
from vringlab.workloads.base import Metric, Outcome

#: Metrics of what else is counted, and their unit.
_OTHERS: Mapping[str, tuple[str, str]] = {
    events.EXITS: ("exits", "event"),
    events.HOST_SWITCHES: ("switches_host", "event"),
    events.GUEST_SWITCHES: ("switches_guest", "event"),
    perf.HOST_CYCLES: ("cycles_host", "cycle"),
    perf.GUEST_CYCLES: ("cycles_guest", "cycle"),
}
_HALT_POLL = "/sys/module/kvm/parameters/halt_poll_ns"
#: Functions with less than this share of the instructions are kept as one.
_LEAST = 0.0005


@dataclass(frozen=True)
class Counted:
    """What was executed while something ran.

    Attributes:
        outcome: What the run itself gave.
        profile: Instructions.
        others: Other figures beside them, by what they are.
    """

    outcome: Outcome
    profile: Profile
    others: Mapping[str, int] = field(default_factory=dict)


class Meter(Protocol):
    """Counts instructions on a lab."""

    def loaded(self, built: BuiltModule | None, side: Side) -> None:
        """Remember where an arm's modules lie, which was just loaded; none for a kernel's arm.

        Raises:
            InfrastructureError: they are not loaded.
            TransientError: the connection was lost.
        """
        ...

    def around(self, run: Callable[[], Outcome]) -> Counted:
        """Count what is executed while `run` runs.

        Raises:
            TransientError, InfrastructureError: as for `run`, or it cannot be counted.
        """
        ...


class PluginMeter:
    """By the emulator of the embedded host, by function; see `lab.counter`.

    Args:
        lab: The guest and its host.
        counter: The host's counter.
    """

    def __init__(self, lab: Lab, counter: Counter) -> None:
        self._lab = lab
        self._counter = counter
        self._kernels: list[Code] = []
        self._arm: list[Code] = []

    def loaded(self, built: BuiltModule | None, side: Side) -> None:
        """See `Meter`."""
        machine = (self._lab.guest if side == "guest" else self._lab.host).machine
        self._arm = [module_code(machine, side, built)] if built is not None else []

    def around(self, run: Callable[[], Outcome]) -> Counted:
        """See `Meter`."""
        if not self._kernels:
            self._kernels = [
                kernel_code(self._lab.host.machine, "host"),
                kernel_code(self._lab.guest.machine, "guest"),
            ]
        before = self._counter.read()
        outcome = run()
        found = self._counter.read() - before
        return Counted(outcome, attribute(found, [*self._kernels, *self._arm]))


class PerfMeter:
    """By the processor of a user's host, guest and host apart; see `lab.perf`.

    Args:
        machine: The host, where its own programs run.
        cpus: Processors to watch.
    """

    def __init__(self, machine: Machine, cpus: Sequence[int]) -> None:
        self._machine = machine
        self._cpus = cpus

    def loaded(self, built: BuiltModule | None, side: Side) -> None:
        """See `Meter`; there are no functions."""

    def around(self, run: Callable[[], Outcome]) -> Counted:
        """See `Meter`."""
        with perf.counting(self._machine, self._cpus) as found:
            outcome = run()
        return Counted(outcome, found.profile, found.others)


class Counting:
    """Counts on one guest.

    Args:
        lab: The guest and its host.
        meter: What counts there.
    """

    def __init__(self, lab: Lab, meter: Meter) -> None:
        self._lab = lab
        self._meter = meter
        self.loaded = meter.loaded
        self._noted = False

    def add(self, outcome: Outcome, run: Callable[[float], Outcome]) -> Outcome:
        """Run a workload again, and add what it executes for one unit of work to its figures.

        Args:
            outcome: Its timed run. One that is invalid is not counted.
            run: Runs it for so many seconds.

        Raises:
            TransientError, InfrastructureError: as for the workload.
        """
        if not outcome.valid:
            return _without(outcome, "the sample is invalid")
        with self._halted():
            counted = [self._meter.around(functools.partial(run, size)) for size in SIZES_S]
            traced, notes = self._traced(run)
        for made in (*(one.outcome for one in counted), *(one for one, _ in traced)):
            if made.reason:
                return _without(outcome, f"a counted run was invalid: {made.reason}")
        short, long = counted
        done = sizes(short.outcome, long.outcome)
        if done is None:
            return _without(outcome, "the two runs did not do a different amount of work")
        others = _slopes(done, short.others, long.others)
        again = sizes(*(made for made, _ in traced))
        if again is None:
            notes.append("exits and context switches: the two runs did not do different work")
        else:
            others = {**_slopes(again, *(found for _, found in traced)), **others}
        left_out, more = self._polling(long.profile)
        return _with(outcome, long.profile - short.profile, done, left_out, others, [*more, *notes])

    def _traced(
        self, run: Callable[[float], Outcome]
    ) -> tuple[list[tuple[Outcome, Mapping[str, int]]], list[str]]:
        """Two runs with what happened in each."""
        lab = self._lab
        found: list[tuple[Outcome, Mapping[str, int]]] = []
        notes: list[str] = []
        with events.counting_events(lab.host, lab.guest) as counter:
            for size in SIZES_S:
                before = counter.read()
                made = run(size)
                happened = counter.read() - before
                found.append((made, happened.counts))
                notes += happened.notes
        return found, list(dict.fromkeys(notes))

    @contextmanager
    def _halted(self) -> Iterator[None]:
        """Have the KVM host sleep while a guest is halted, instead of polling for it."""
        machine = self._lab.host.machine
        before = machine.run(["cat", _HALT_POLL]).stdout.strip()
        back = f"echo {before} > {_HALT_POLL}"
        if not self._noted:
            self._lab.host.on_change(back)
            self._lab.host.on_change(events.undo(self._lab.guest))
            self._noted = True
        machine.run(f"echo 0 > {_HALT_POLL}")
        try:
            yield
        finally:
            # A host that was lost has nothing to be given back.
            with suppress(TransientError):
                machine.run(back)

    def _polling(self, found: Profile) -> tuple[frozenset[tuple[Side, Area, int]], list[str]]:
        """What is executed to look for work all the time, and cannot be told from work."""
        notes = [*found.notes]
        guest = self._lab.guest
        if not guest.spec.nics:
            return frozenset(), notes
        if isinstance(self._meter, PerfMeter):
            notes.append("testpmd polls all the time: its processor is not counted")
            return frozenset(), notes
        notes.append(
            "testpmd polls all the time: user space of the host is left out on its processor, and "
            "with it what testpmd did for the packets"
        )
        return frozenset({("host", "user", guest.layout.backend)}), notes


def _without(outcome: Outcome, why: str) -> Outcome:
    return replace(outcome, context={**outcome.context, "instructions": {"not available": why}})


def _slopes(
    done: tuple[Work, Work], less: Mapping[str, int], more: Mapping[str, int]
) -> dict[str, float]:
    """Counts for one unit, of all that happened at all."""
    units = done[1].count - done[0].count
    return {
        name: (value - less.get(name, 0)) / units
        for name, value in more.items()
        if value or less.get(name, 0)
    }


def _with(
    outcome: Outcome,
    found: Profile,
    done: tuple[Work, Work],
    left_out: frozenset[tuple[Side, Area, int]],
    others: Mapping[str, float],
    notes: list[str],
) -> Outcome:
    less, more = done
    units = more.count - less.count

    def kept(row: Row) -> float:
        return (
            sum(
                count
                for vcpu, count in enumerate(row.vcpus)
                if (row.side, row.area, vcpu) not in left_out
            )
            / units
        )

    def total(sides: tuple[Side, ...], areas: tuple[Area, ...]) -> float:
        return sum(kept(row) for row in found.rows if row.side in sides and row.area in areas)

    metrics = {
        "instructions": total(("host", "guest"), WORKING),
        "instructions_guest": total(("guest",), WORKING),
        "instructions_host": total(("host",), WORKING),
    }
    if any(row.function is not None for row in found.rows):
        metrics["instructions_module"] = total(("host", "guest"), ("module",))
    record = {
        "format": FORMAT,
        "unit": more.unit,
        "work": [less.count, more.count],
        "rows": _rows(found, kept, metrics["instructions"]),
        "others": dict(others),
        "waiting": total(("host", "guest"), WAITING),
        "notes": notes,
    }
    return replace(
        outcome,
        metrics=(
            *outcome.metrics,
            *(Metric(name, value, "instruction") for name, value in metrics.items()),
            *(
                Metric(name, others[what], unit)
                for what, (name, unit) in _OTHERS.items()
                if what in others
            ),
        ),
        raw={**outcome.raw, f"{INSTRUCTIONS}.json": (json.dumps(record, indent=1) + "\n").encode()},
        context={
            **outcome.context,
            "instructions": {"for one": more.unit, "method": "slope of two runs", "notes": notes},
        },
    )


def _rows(found: Profile, kept: Callable[[Row], float], total: float) -> list[list[Any]]:
    """Side, area, module, function and instructions for one unit; the small ones as one."""
    rows: list[list[Any]] = []
    rest: dict[tuple[Side, Area], float] = {}
    for row in found.rows:
        value = kept(row)
        if abs(value) >= _LEAST * abs(total) or row.area == "module":
            rows.append([row.side, row.area, row.module, row.function, value])
        else:
            key = (row.side, row.area)
            rest[key] = rest.get(key, 0.0) + value
    return rows + [[side, area, None, "(the rest)", value] for (side, area), value in rest.items()]


def counting_of(lab: Lab) -> tuple[Counting | None, str]:
    """What counts on a lab, or why nothing can.

    Raises:
        TransientError: the connection was lost.
    """
    host = lab.host
    try:
        if host.counter is not None:
            host.counter.read()
            return Counting(lab, PluginMeter(lab, host.counter)), ""
        if host.bare is None:
            return None, host.count_refusal
        watched = [lab.guest.layout.tools, *lab.guest.layout.vcpus]
        if not lab.guest.spec.nics:
            watched.append(lab.guest.layout.backend)
        with perf.counting(host.bare, watched):
            pass
        return Counting(lab, PerfMeter(host.bare, watched)), ""
    except TransientError:
        raise
    except InfrastructureError as error:
        return None, f"{error.message}{f' ({error.remedy})' if error.remedy else ''}"
