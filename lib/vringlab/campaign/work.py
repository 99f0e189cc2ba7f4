"""A unit of a workload's work, and how it is kept what one takes.

Apart from what counts it (`campaign.instructions`), since readers touch files only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vringlab.workloads.base import Outcome

#: Of a cell's profile.
FORMAT = 1
#: Lengths of the two runs, s; whole ones, which is all that some tools understand.
SIZES_S = (1.0, 3.0)
#: What is done to wait is no cost of the work: how much of it there is says how busy this machine
#: was, or how long another processor took.
WAITING = ("idle", "spin")
WORKING = ("user", "kernel", "module")
#: The benchmark's own programs: equal in all arms, but for what they do to begin and end, which
#: takes millions of instructions more or less each time (fio calibrates its clock by the clock).
#: Kept apart from other user space, which on a KVM host is the VMM's.
TOOLS = "tools"
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


def sizes(short: Outcome, long: Outcome) -> tuple[Work, Work] | None:
    """The work of two runs of one workload; None unless the longer one did more of it."""
    less, more = work(short), work(long)
    if less is None or more is None or more.count <= less.count:
        return None
    return less, more
