"""Instructions for one unit of a workload's work, beside its time.

A workload is run in two sizes, a short run and the timed one, and what was executed meanwhile is
counted around each. The unit's cost is the slope between the two:

    (instructions of the long run - of the short run) / (units of the long run - of the short run)

What both took alike (connections, processes, our own commands) cancels. What goes on beside the
work, such as clock ticks, does not: it takes longer with more of it, and is a part of the cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vringlab.campaign.tables import INSTRUCTIONS
from vringlab.errors import InfrastructureError, TransientError
from vringlab.kernels.module import BuiltModule
from vringlab.lab.counter import (
    Area,
    Code,
    Counter,
    Profile,
    Reading,
    Row,
    Side,
    attribute,
    kernel_code,
    module_code,
)
from vringlab.lab.lab import Lab
from vringlab.workloads.base import Metric, Outcome

FORMAT = 1
#: Length of the short run as a share of the timed one, and at least, s.
_SHORT = 0.1
_SHORT_S = 1.0
#: What is done to wait is no cost of the work: how much of it there is says how busy this machine
#: was, or how long another processor took.
WAITING: tuple[Area, ...] = ("idle", "spin")
WORKING: tuple[Area, ...] = ("user", "kernel", "module")
#: Functions with less than this share of the instructions are kept as one.
_LEAST = 0.0005

#: What a rate counts, and how many of them one unit of the metric is.
UNITS: Mapping[str, tuple[str, float]] = {
    "round_trips": ("round trip", 1.0),
    "transactions": ("transaction", 1.0),
    "pps_tx": ("packet", 1.0),
    "datagrams": ("datagram", 1.0),
    "throughput": ("byte", 1 / 8),
}


@dataclass(frozen=True)
class Work:
    """What a run did.

    Attributes:
        unit: What is counted: `round trip`, `packet`.
        count: How many.
    """

    unit: str
    count: float


def work(outcome: Outcome) -> Work | None:
    """The timed work of an outcome; None when it tells no rate.

    Work before the timed window is the same in runs of any length, so that a slope is free of it.
    """
    rates = {metric.name: metric.value for metric in outcome.metrics}
    for name, (unit, factor) in UNITS.items():
        if rates.get(name):
            return Work(unit, rates[name] * factor * outcome.window_s)
    return None


class Counting:
    """Counts on one guest; knows what is loaded in it.

    Args:
        lab: The guest and its host.
        counter: The host's counter.
    """

    def __init__(self, lab: Lab, counter: Counter) -> None:
        self._lab = lab
        self._counter = counter
        self._kernels: list[Code] | None = None
        self._arm: list[Code] = []

    def loaded(self, built: BuiltModule | None, side: Side) -> None:
        """Remember where an arm's modules lie, which was just loaded; none for a kernel's arm.

        Raises:
            InfrastructureError: they are not loaded.
            TransientError: the connection was lost.
        """
        machine = (self._lab.guest if side == "guest" else self._lab.host).machine
        self._arm = [module_code(machine, side, built)] if built is not None else []

    def _codes(self) -> list[Code]:
        if self._kernels is None:
            self._kernels = [
                kernel_code(self._lab.host.machine, "host"),
                kernel_code(self._lab.guest.machine, "guest"),
            ]
        return [*self._kernels, *self._arm]

    def measure(self, run: Callable[[float], Outcome], duration_s: float) -> Outcome:
        """Run a workload in two sizes and add what it executed to the figures of the longer one.

        Args:
            run: Runs it for so many seconds.
            duration_s: The timed run.

        Raises:
            TransientError, InfrastructureError: as for the workload.
        """
        codes = self._codes()
        begin = self._counter.read()
        short = run(max(_SHORT_S, _SHORT * duration_s))
        middle = self._counter.read()
        long = run(duration_s)
        end = self._counter.read()
        less, more = work(short), work(long)
        if less is None or more is None or more.count <= less.count:
            return _without(long, "the two runs did not do a different amount of work")
        found = _slope(middle - begin, end - middle, codes)
        left_out, notes = self._polling(found)
        return _with(long, found, less, more, left_out, notes)

    def _polling(self, found: Profile) -> tuple[frozenset[tuple[Side, Area, int]], list[str]]:
        """What is executed to look for work all the time, and cannot be told from work."""
        notes = [*found.notes]
        if any(
            row.function in ("kvm_vcpu_halt", "kvm_vcpu_check_block") and row.side == "host"
            for row in found.rows
        ):
            notes.append("the host's halt polling (kvm.halt_poll_ns) is counted as its work")
        if not self._lab.guest.spec.nics:
            return frozenset(), notes
        notes.append(
            "testpmd polls all the time: user space of the host is left out on its processor, and "
            "with it what testpmd did for the packets"
        )
        return frozenset({("host", "user", self._lab.guest.layout.backend)}), notes


def _slope(short: Reading, long: Reading, codes: list[Code]) -> Profile:
    return attribute(long, codes) - attribute(short, codes)


def _without(outcome: Outcome, why: str) -> Outcome:
    return replace(outcome, context={**outcome.context, "instructions": {"not available": why}})


def _with(
    outcome: Outcome,
    found: Profile,
    less: Work,
    more: Work,
    left_out: frozenset[tuple[Side, Area, int]],
    notes: list[str],
) -> Outcome:
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
        "instructions_module": total(("host", "guest"), ("module",)),
    }
    record = {
        "format": FORMAT,
        "unit": more.unit,
        "work": [less.count, more.count],
        "rows": _rows(found, kept, metrics["instructions"]),
        "waiting": total(("host", "guest"), WAITING),
        "notes": notes,
    }
    return replace(
        outcome,
        metrics=(
            *outcome.metrics,
            *(Metric(name, value, "instruction") for name, value in metrics.items()),
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
    if lab.host.counter is None:
        return None, lab.host.count_refusal
    try:
        lab.host.counter.read()
    except TransientError:
        raise
    except InfrastructureError as error:
        return None, error.message
    return Counting(lab, lab.host.counter), ""
