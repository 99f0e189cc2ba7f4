"""Which path the packets of an arm took: counted beside a run of the workload that is not timed.

A patch that the workload never reaches changes nothing that was measured. So every arm runs every
point of the plan once more, shortly and untimed, while the experiment's functions are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vringlab.campaign.experiment import Probes, Value

#: Format of paths.json.
FORMAT = 1
#: Length of such a run, s: thousands of packets, also where everything is emulated.
PASS_S = 1.0


@dataclass(frozen=True)
class PathPass:
    """What was counted while one arm ran one point.

    Attributes:
        arm: The arm.
        workload: The workload.
        params: The point.
        tool: `bpftrace` or `tracefs`; empty when nothing could be counted.
        counts: Calls by counter; those that could not be counted are missing.
        missing: Counters that could not be counted, with the reason.
        shares: Percent by name of share; a share of nothing is missing.
        exercised: Whether the path that the arm is about ran; None when it cannot be told.
        notes: What a reader should know, one sentence each.
    """

    arm: str
    workload: str
    params: Mapping[str, Value]
    tool: str
    counts: Mapping[str, int]
    missing: Mapping[str, str]
    shares: Mapping[str, float]
    exercised: bool | None
    notes: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """For paths.json."""
        return {**asdict(self), "notes": list(self.notes)}

    @property
    def headline(self) -> str:
        """`path exercised, direct-share 99.2 %`."""
        word = {True: "path exercised", False: "path NOT exercised", None: "path unknown"}
        shares = [f"{name} {value:.1f} %" for name, value in self.shares.items()]
        return ", ".join([word[self.exercised], *shares])


def judge(
    probes: Probes,
    arm: str,
    workload: str,
    params: Mapping[str, Value],
    counts: Mapping[str, int],
    *,
    tool: str = "",
    missing: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> PathPass:
    """What counts say of an arm's path.

    The path ran when one of the counters that prove it is above 0. It did not when all of them
    are 0. Counters that could not be counted leave it open unless another one proves it.

    Args:
        probes: The experiment's.
        arm: The arm that ran.
        workload: What ran.
        params: Its point.
        counts: Calls by counter.
        tool: What counted.
        missing: Counters that could not be counted, with the reason.
        notes: What else a reader should know.
    """
    proof = probes.proof.get(arm, ())
    known = [counts[name] for name in proof if name in counts]
    exercised: bool | None = None
    if any(known):
        exercised = True
    elif known and len(known) == len(proof):
        exercised = False
    shares = {}
    for share in probes.shares:
        parts = [counts.get(name) for name in share.among]
        whole = sum(part for part in parts if part is not None)
        if share.of in counts and None not in parts and whole:
            shares[share.name] = 100 * counts[share.of] / whole
    return PathPass(
        arm=arm,
        workload=workload,
        params=dict(params),
        tool=tool,
        counts=dict(counts),
        missing=dict(missing or {}),
        shares=shares,
        exercised=exercised,
        notes=tuple(dict.fromkeys(notes)),
    )


def from_record(record: Mapping[str, Any]) -> PathPass:
    """A pass as `as_record` wrote it.

    Raises:
        TypeError, KeyError: it is none.
    """
    return PathPass(**{**record, "notes": tuple(record["notes"])})


def summary(passes: Sequence[PathPass]) -> dict[str, object]:
    """What the provenance says of an arm: whether its path ran, in all and by point.

    Args:
        passes: Those of one arm.
    """
    known = [found.exercised for found in passes if found.exercised is not None]
    return {
        "exercised": any(known) if known else None,
        "points": [
            {"workload": item.workload, "params": dict(item.params), "exercised": item.exercised}
            for item in passes
        ],
    }
