"""Instructions for one unit of a workload's work, beside its time.

After its timed run, a workload is run once more in two sizes, and what was executed meanwhile is
counted around each. The unit's cost is the slope between the two:

    (instructions of the long run - of the short run) / (units of the long run - of the short run)

What both took alike (connections, processes, our own commands) cancels. Left out, as what the work
does not cause:

- what is executed to wait, in idle loops and spinning;
- the benchmark tools' own user space, and what polls all the time;
- what kernels do because time passes (clock ticks, balancing of loads, and the exits that these
  cause): it is measured for each guest while programs that need no kernel keep its processors and
  the host's busy, and taken off for as long as the work took longer. Else a unit would cost more
  on a day when the machine is slow.

The KVM host does not poll for halted guests meanwhile (kvm.halt_poll_ns): it would execute as much
as it had to wait, which says how busy this machine was.

Two more such runs tell, by the same slope, the exits from the guest and the context switches: what
counts exits executes instructions itself, so it has runs of its own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vringlab.campaign.tables import INSTRUCTIONS
from vringlab.campaign.work import FORMAT, SIZES_S, TOOLS, WAITING, WORKING, Work, sizes
from vringlab.errors import InfrastructureError, TransientError
from vringlab.kernels.module import BuiltModule
from vringlab.lab import events, perf
from vringlab.lab.attribution import Profile, Row, attribute
from vringlab.lab.counter import Counter, Side
from vringlab.lab.functions import Code, kernel_code, module_code
from vringlab.lab.lab import Lab
from vringlab.transport.ssh import Machine
from vringlab.workloads.base import Metric, Outcome
from vringlab.workloads.vsock_ends import TOOL_MARGIN_S

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
        self._each_second: Profile | None = None

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
            passing = self._passing()
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
        found = long.profile - short.profile
        longer = long.outcome.window_s - short.outcome.window_s
        return _with(
            outcome,
            found - passing.times(longer),
            done,
            self._is_tools,
            others,
            [*found.notes, *self._notes(), *notes],
        )

    def _passing(self) -> Profile:
        """What kernels execute in a second because it passes, on the processors that work uses.

        Measured once for each guest.

        Raises:
            TransientError, InfrastructureError: it cannot be counted.
        """
        if self._each_second is None:
            short, long = (
                self._meter.around(functools.partial(self._busy, size)) for size in SIZES_S
            )
            found = (long.profile - short.profile).only("kernel")
            self._each_second = found.times(1 / (SIZES_S[1] - SIZES_S[0]))
        return self._each_second

    def _busy(self, seconds: float) -> Outcome:
        """Keep the processors of guest and host busy without their kernels."""
        guest, host = self._lab.guest, self._lab.host.machine
        # testpmd does that by itself.
        cpus = [guest.layout.tools, *([] if guest.spec.nics else [guest.layout.backend])]
        limit = seconds + TOOL_MARGIN_S
        there = guest.machine.start(_spinning(range(guest.spec.vcpus), seconds))
        try:
            host.run(_spinning(cpus, seconds), timeout=limit)
            there.wait(limit)
        finally:
            there.close()
        return Outcome((), window_s=seconds)

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

    def _is_tools(self, row: Row, vcpu: int) -> bool:
        """Whether what a row counts on a processor of the host is the benchmark's own programs."""
        if row.area != "user":
            return False
        if row.side == "guest":
            return True
        # perf counts all processors that it watches as one.
        if isinstance(self._meter, PerfMeter):
            return False
        layout = self._lab.guest.layout
        return vcpu == layout.tools or (vcpu == layout.backend and bool(self._lab.guest.spec.nics))

    def _notes(self) -> list[str]:
        """What cannot be told from work, or is left out with it."""
        polls = bool(self._lab.guest.spec.nics)
        if isinstance(self._meter, PerfMeter):
            notes = ["the benchmark's own programs are in the host's user space"]
            if polls:
                notes.append("testpmd polls all the time: its processor is not counted")
            return notes
        if not polls:
            return []
        return [
            "testpmd polls all the time: user space of the host is left out on its processor, and "
            "with it what testpmd did for the packets"
        ]


def _spinning(cpus: Iterable[int], seconds: float) -> str:
    """A command that keeps processors busy in user space."""
    names = " ".join(map(str, cpus))
    program = f"timeout {seconds:g} taskset -c $cpu awk 'BEGIN {{ while (1); }}'"
    return f"for cpu in {names}; do {program} & done; wait"


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
    is_tools: Callable[[Row, int], bool],
    others: Mapping[str, float],
    notes: list[str],
) -> Outcome:
    less, more = done
    costs = _costs(found, more.count - less.count, is_tools)

    def total(sides: tuple[Side, ...], areas: tuple[str, ...]) -> float:
        return sum(cost.value for cost in costs if cost.side in sides and cost.area in areas)

    metrics = {
        "instructions": total(("host", "guest"), WORKING),
        "instructions_guest": total(("guest",), WORKING),
        "instructions_host": total(("host",), WORKING),
    }
    if any(cost.function is not None for cost in costs):
        metrics["instructions_module"] = total(("host", "guest"), ("module",))
    record = {
        "format": FORMAT,
        "unit": more.unit,
        "work": [less.count, more.count],
        "rows": _rows(costs, metrics["instructions"]),
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


@dataclass(frozen=True)
class _Cost:
    """Instructions of a row for one unit of work; the tools' own are a kind of their own."""

    side: Side
    area: str
    module: str | None
    function: str | None
    value: float


def _costs(found: Profile, units: float, is_tools: Callable[[Row, int], bool]) -> list[_Cost]:
    costs = []
    for row in found.rows:
        tools = sum(count for vcpu, count in enumerate(row.vcpus) if is_tools(row, vcpu))
        for area, count in ((row.area, row.instructions() - tools), (TOOLS, tools)):
            if count:
                costs.append(_Cost(row.side, area, row.module, row.function, count / units))
    return costs


def _rows(costs: Iterable[_Cost], total: float) -> list[list[Any]]:
    """Side, area, module, function and instructions for one unit; the small ones as one."""
    rows: list[list[Any]] = []
    rest: dict[tuple[Side, str], float] = {}
    for cost in costs:
        if abs(cost.value) >= _LEAST * abs(total) or cost.area == "module":
            rows.append([cost.side, cost.area, cost.module, cost.function, cost.value])
        else:
            key = (cost.side, cost.area)
            rest[key] = rest.get(key, 0.0) + cost.value
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
