"""Two opinions on an arm: its time, and the instructions that its work took.

Instructions hardly move with the load of the machine, so they are told apart where clocks are
not; but they say nothing of waiting. What the two say together says why an arm is faster, or that
noise hides whether it is. Effects are those of `summarise`; whether one is seen is decided as in
`trial_view`: beyond no change and the noise floor of the A/A pair, after adjusting for the number
of figures that are looked at together, which are here the two of each arm and point. The
instructions of guest and host alone are a family of their own, and asked only whether work moved
between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd

from vringlab.analysis import instructions
from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import point_text
from vringlab.analysis.stats import Effect
from vringlab.analysis.units import METRICS
from vringlab.campaign.experiment import Value
from vringlab.campaign.work import UNITS
from vringlab.report.summary import ArmRow, Summary, amount, at, ratio_text, summarise
from vringlab.report.trial_view import Finding, judge

#: What a workload's time is, the first of these that it has.
TIMES = ("rtt_mean", "pps_tx", "throughput", "transactions")
INSTRUCTIONS = "instructions"
#: The instructions of each side alone.
SIDES: Mapping[str, str] = MappingProxyType(
    {"guest": "instructions_guest", "host": "instructions_host"}
)
#: What else a unit of work takes, told beside them and judged by nobody.
EVENTS = ("exits", "switches_guest", "switches_host")
CYCLES = ("cycles_guest", "cycles_host")
_EVENT_NAMES = {
    "exits": "exits from the guest",
    "switches_guest": "context switches of the guest",
    "switches_host": "of the host",
}

Word = Literal[
    "both better",
    "both worse",
    "neither",
    "fewer instructions, time undecided",
    "fewer instructions but not faster: waiting, not work",
    "more instructions, time undecided",
    "more instructions but not slower",
    "faster with as many instructions: less waiting",
    "faster, instructions undecided",
    "slower with as many instructions: more waiting",
    "slower, instructions undecided",
    "work moves from guest to host",
    "work moves from host to guest",
    "disagree",
    "not exercised",
    "not available",
    "equal arms agree",
    "equal arms differ",
]

State = Literal["better", "worse", "none"]


@dataclass(frozen=True)
class Opinion:
    """Both opinions on one arm at one parameter point.

    Attributes:
        arm: The arm.
        workload: What measured it.
        params: The parameter point.
        point: The point in words, by the parameters that vary.
        time: The effect on the workload's time; None when the point has no such metric.
        counted: The effect on the instructions; None when none were counted.
        sides: The effects on those of guest and host alone, as far as there are any.
        events: The effects on exits and context switches, as far as there are any; not judged.
        unit: What the instructions are for: `round trip`, `packet`; empty when not known.
        word: What both say together.
        because: The numbers and what follows from them, without the word.
    """

    arm: str
    workload: str
    params: Mapping[str, Value]
    point: str
    time: ArmRow | None = field(repr=False)
    counted: ArmRow | None = field(repr=False)
    sides: Mapping[str, ArmRow] = field(repr=False)
    events: Mapping[str, ArmRow] = field(repr=False)
    unit: str
    word: Word
    because: str

    @property
    def sentence(self) -> str:
        """The word with its numbers."""
        return f"{self.word}: {self.because}."

    @property
    def beside(self) -> str:
        """Exits and context switches for one unit, as a sentence; empty when none were counted."""
        told = [
            f"{amount(row.level.mean, row.unit)} {_EVENT_NAMES[name]} ({_change(row)})"
            for name, row in self.events.items()
            if row.level is not None and row.effect is not None
        ]
        return f"For one {self.unit or 'unit'}: {', '.join(told)}." if told else ""

    @property
    def is_twin(self) -> bool:
        """Whether it is the A/A pair."""
        return any(row is not None and row.is_twin for row in (self.time, self.counted))


@dataclass(frozen=True)
class Gain:
    """A change with its sign turned so that more is better, on the log scale.

    Attributes:
        state: Whether it is seen, and which way.
        mean: The change.
        low: Lower end of its interval.
        high: Upper end.
    """

    state: State
    mean: float
    low: float
    high: float

    def holds(self, size: float) -> bool:
        """Whether the interval holds a change of that size."""
        return self.low <= size <= self.high


def gain_of(effect: Effect, state: State) -> Gain:
    """An effect as a gain; of a time and of a rate it has the same size."""
    better = METRICS[effect.pairs.metric].better
    ends = better * np.log(np.maximum([effect.interval.low, effect.interval.high], 1e-300))
    return Gain(state, effect.improvement, float(ends.min()), float(ends.max()))


def together(time: Gain, counted: Gain) -> tuple[Word, str]:
    """What the gains in time and in instructions say together, and why.

    A time that is proportional to the instructions changes by the same ratio, a rate by its
    inverse: so the two are compared in size.
    """
    if time.state == counted.state:
        return _same(time, counted)
    if time.state == "none":
        return _time_undecided(time, counted)
    if counted.state == "none":
        return _instructions_undecided(time, counted)
    return "disagree", (
        "fewer instructions, and slower: what is left waits longer"
        if counted.state == "better"
        else "more instructions, and faster: they are executed where nobody waits for them, or "
        "save waiting elsewhere"
    )


def _same(time: Gain, counted: Gain) -> tuple[Word, str]:
    if time.state == "none":
        return "neither", "neither is told apart from no change"
    word: Word = "both better" if time.state == "better" else "both worse"
    if time.holds(counted.mean):
        return word, "the time changes as the instructions do"
    more = abs(time.mean) > abs(counted.mean)
    return word, f"the time changes by {'more' if more else 'less'} than the instructions explain"


def _time_undecided(time: Gain, counted: Gain) -> tuple[Word, str]:
    fewer = counted.state == "better"
    # Beyond the instructions' gain the time's interval may go on; what counts is the near side.
    excluded = time.high < counted.mean if fewer else time.low > counted.mean
    if excluded:
        why = "the time's interval excludes a change of the instructions' size"
        if fewer:
            return "fewer instructions but not faster: waiting, not work", why
        return "more instructions but not slower", why
    word: Word = (
        "fewer instructions, time undecided" if fewer else "more instructions, time undecided"
    )
    if time.holds(0):
        return word, (
            "the time's interval holds both no change and one of the instructions' size: noise "
            "hides it"
        )
    return word, (
        "the time's change does not stand against the noise floor and the number of figures"
    )


def _instructions_undecided(time: Gain, counted: Gain) -> tuple[Word, str]:
    faster = time.state == "better"
    excluded = counted.high < time.mean if faster else counted.low > time.mean
    if excluded:
        why = "the instructions' interval excludes a change of the time's size"
        if faster:
            return "faster with as many instructions: less waiting", why
        return "slower with as many instructions: more waiting", why
    word: Word = "faster, instructions undecided" if faster else "slower, instructions undecided"
    return word, "the instructions' interval holds a change of the time's size, and is not decided"


def method(run: RunFrames) -> str:
    """What was counted and how, for readers of the figures."""
    emulated = set(run.samples["host_kind"]) <= {"emulated", "simulated"}
    whose = "the emulated processors" if emulated else "the host's processors, as perf reads them"
    waits = ", what was executed to wait (idle loops, spinning for a lock)" if emulated else ""
    tools = "the tools' own user space" if emulated else "the tools' own user space in the guest"
    return (
        f"Instructions are those of {whose}, in host and guest together, for one unit of work: the "
        "slope between two untimed runs of different length, so that what both take alike cancels. "
        f"Left out are {tools}{waits}, and what kernels do because time passes."
    )


def refusal(run: RunFrames) -> str:
    """Why a run has no instructions; empty when it has some."""
    if INSTRUCTIONS in set(run.samples["metric"]):
        return ""
    if not run.plan.count_instructions:
        return "it was not asked for (run --count-instructions)"
    known = run.provenance.get("instructions")
    why = known.get("not available") if isinstance(known, Mapping) else None
    return str(why or "no sample has them")


def unit_of(run: RunFrames, workload: str, params: Mapping[str, Value]) -> str:
    """What instructions are for at a point: `round trip`, `packet`; empty when not known."""
    there = set(at(run.samples, workload, params)["metric"])
    return next((unit for name, (unit, _) in UNITS.items() if name in there), "")


def opinions(run: RunFrames, level: float = 0.95) -> list[Opinion]:
    """Both opinions on each arm but the reference, by workload, point and arm.

    Empty for a run that was not asked to count.

    Args:
        run: The run.
        level: Level of the intervals, and of the whole family after Holm's adjustment.
    """
    if not run.plan.count_instructions:
        return []
    return [*run.once(("opinions", level), lambda: _opinions(run, level))]


def _opinions(run: RunFrames, level: float) -> list[Opinion]:
    summary = summary_of(run, level)
    found = []
    rows_of = {
        (arm, workload, point_text(params)): (
            params,
            {row.metric: row for row in summary.of(workload, params) if row.arm == arm},
        )
        for workload in summary.workloads
        for params in summary.points(workload)
        for arm in summary.arms
        if arm != run.plan.reference
    }
    pairs = {place: _pair_of(rows) for place, (_, rows) in rows_of.items()}
    looked_at = [
        row for pair in pairs.values() for row in pair if row is not None and not row.is_twin
    ]
    alone = [
        row
        for _, rows in rows_of.values()
        for name, row in rows.items()
        if name in SIDES.values() and not row.is_twin
    ]
    judged = {
        id(row): item
        for family in (looked_at, alone)
        for row, item in zip(family, judge(run, family, level), strict=True)
    }
    for (arm, workload, _), (params, rows) in rows_of.items():
        time, counted = pair = pairs[arm, workload, point_text(params)]
        if time is None and counted is None:
            continue
        unit = unit_of(run, workload, params)
        sides = {side: rows[name] for side, name in SIDES.items() if name in rows}
        findings = [judged.get(id(row)) for row in pair]
        moved = _moved({side: judged.get(id(row)) for side, row in sides.items()})
        events = {name: rows[name] for name in EVENTS if name in rows}
        word, because = _judged(run, time, counted, sides, unit, findings, moved)
        point = summary.label(workload, params)
        found.append(
            Opinion(arm, workload, params, point, time, counted, sides, events, unit, word, because)
        )
    return found


def _pair_of(rows: Mapping[str, ArmRow]) -> tuple[ArmRow | None, ArmRow | None]:
    """The rows of time and of instructions among those of an arm at a point."""
    name = next((name for name in TIMES if name in rows), "")
    return rows.get(name), rows.get(INSTRUCTIONS)


def _judged(
    run: RunFrames,
    time: ArmRow | None,
    counted: ArmRow | None,
    sides: Mapping[str, ArmRow],
    unit: str,
    findings: Sequence[Finding | None],
    moved: Word | None,
) -> tuple[Word, str]:
    lacking = _lacking(run, time, counted)
    if lacking:
        return "not available", lacking
    assert time is not None
    assert counted is not None
    assert time.effect is not None
    assert counted.effect is not None
    parts = ", ".join(f"{side} {_change(row)}" for side, row in sides.items() if row.effect)
    numbers = (
        f"{time.metric} {_change(time)}, instructions {_change(counted)}"
        f"{f' for one {unit}' if unit else ''}{f' ({parts})' if parts else ''}"
    )
    if time.is_twin:
        return _equal(time, counted, numbers)
    if any(item is not None and item.word == "not exercised" for item in findings):
        return "not exercised", f"{numbers}; no changed function ran, so neither is of the patch"
    word, why = together(
        *(
            gain_of(effect, _state(item))
            for effect, item in zip((time.effect, counted.effect), findings, strict=True)
        )
    )
    if moved is None:
        return word, f"{numbers}; {why}"
    if word == "neither":
        return moved, f"{numbers}; neither their sum nor the time is told apart from no change"
    return word, f"{numbers}; {why}; {moved}"


def _moved(sides: Mapping[str, Finding | None]) -> Word | None:
    """That one side does with fewer instructions and the other needs more; else None."""
    fewer = {
        side: found.better for side, found in sides.items() if found and found.better is not None
    }
    if fewer == {"guest": True, "host": False}:
        return "work moves from guest to host"
    if fewer == {"guest": False, "host": True}:
        return "work moves from host to guest"
    return None


def _lacking(run: RunFrames, time: ArmRow | None, counted: ArmRow | None) -> str:
    """Why there are not two opinions; empty when there are."""
    if time is None:
        return f"the workload has none of {', '.join(TIMES)}"
    for row in (time, counted):
        if row is None:
            return f"instructions: {refusal(run) or 'none were counted here'}"
        if row.effect is None:
            why = row.problem or "no pair of samples"
            return why if row.metric in why else f"{row.metric}: {why}"
        if not row.effect.interval.known:
            return f"{row.metric}: one block has no spread"
    return ""


def _change(row: ArmRow) -> str:
    return ratio_text(row).removesuffix(" *")


def _state(finding: Finding | None) -> State:
    if finding is None or finding.word != "effect seen":
        return "none"
    return "better" if finding.better else "worse"


def _equal(time: ArmRow, counted: ArmRow, numbers: str) -> tuple[Word, str]:
    apart = [
        row.metric
        for row in (time, counted)
        if row.effect is not None and not gain_of(row.effect, "none").holds(0)
    ]
    if not apart:
        return "equal arms agree", f"{numbers}; the same driver twice, not told apart"
    return "equal arms differ", (
        f"{numbers}; the same driver twice, and {' and '.join(apart)} apart beyond chance: order "
        "or carry-over matters in this run"
    )


def chosen(run: RunFrames, workload: str | None = None, level: float = 0.95) -> Opinion | None:
    """The opinion that stands for a run: the first point that has both, the last arm of the plan.

    None where no arm has both.

    Args:
        run: The run.
        workload: Only this one.
        level: Level of the intervals.
    """
    usable = [
        item
        for item in opinions(run, level)
        if workload in (None, item.workload)
        and not item.is_twin
        and all(row is not None and row.effect is not None for row in (item.time, item.counted))
    ]
    if not usable:
        return None
    first = usable[0]
    place = (first.workload, first.params)
    return [item for item in usable if (item.workload, item.params) == place][-1]


def chosen_rows(
    run: RunFrames,
    read: Callable[[RunFrames], pd.DataFrame],
    workload: str | None = None,
    level: float = 0.95,
) -> tuple[Opinion, pd.DataFrame] | None:
    """What was kept where the opinion stands that `chosen` gives, with it; None where none does.

    Args:
        run: The run.
        read: Reads it: `analysis.instructions.profiles` or `events`.
        workload: Only this one.
        level: Level of the intervals.

    Raises:
        UserError: as for `read`.
    """
    item = chosen(run, workload, level)
    if item is None:
        return None
    return item, instructions.at(read(run), item.workload, item.params)


def lines(run: RunFrames) -> list[str]:
    """Both opinions as text, one line for each arm and point, the method last.

    Empty for a run that was not asked to count.
    """
    if not run.plan.count_instructions:
        return []
    why = refusal(run)
    if why:
        return [f"Instructions are not available: {why}."]
    told = [
        f"{', '.join(_subject(item))}: {item.sentence}{f' {item.beside}' if item.beside else ''}"
        for item in opinions(run)
    ]
    return [*told, method(run)]


def _subject(item: Opinion) -> list[str]:
    return [part for part in (item.arm, item.workload, item.point) if part]


def table(run: RunFrames) -> pd.DataFrame:
    """Both opinions as a table: arm, where, the two changes with their intervals, the word, why."""
    rows = [
        {
            "arm": item.arm,
            "workload": item.workload,
            "point": item.point,
            "time": _cell(item.time, f"{item.time.metric} " if item.time is not None else ""),
            "instructions": _cell(item.counted),
            **{side: _cell(item.sides.get(side)) for side in SIDES},
            "for one": item.unit,
            "both say": item.word,
            "because": item.because.partition("; ")[2] or item.because,
        }
        for item in opinions(run)
    ]
    columns = ["arm", "workload", "point", "time", "instructions", *SIDES]
    return pd.DataFrame(rows, columns=[*columns, "for one", "both say", "because"])


def _cell(row: ArmRow | None, before: str = "") -> str:
    return "" if row is None or row.effect is None else before + _change(row)


def summary_of(run: RunFrames, level: float = 0.95) -> Summary:
    """The summary over the metrics that both opinions are about, for the figures."""
    metrics = [*TIMES, INSTRUCTIONS, *SIDES.values(), *EVENTS]
    return run.once(("opinions' summary", level), lambda: summarise(run, metrics, level))
