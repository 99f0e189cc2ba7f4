"""What a run says of each arm: its figure, its samples, and its ratio to the reference.

Tables, figures, the HTML report and the text for a mail all read this one summary, so they cannot
contradict each other. A fault of the data does not raise: it stands in the row as its problem.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import PARAM, point_text
from vringlab.analysis.power import noise_floor
from vringlab.analysis.stats import Effect, Interval, Level, effect, level_of
from vringlab.analysis.units import METRICS, humanize, percent_text
from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import TWIN_SUFFIX, Value
from vringlab.errors import UserError, VringlabError

#: Metrics that tables show when none are named: what the mails state of a workload. A workload
#: that has none of them shows all that it has.
HEADLINE = (
    *("rtt_p1", "rtt_mean", "rtt_p99"),
    *("pps_tx", "pps_rx", "tx_interrupts"),
    *("throughput", "transactions", "cpu", "throughput_per_cpu", "transactions_per_cpu"),
    *("slab_peak", "slab_median"),
    *("instructions", "instructions_guest", "instructions_host"),
)

_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass(frozen=True)
class ArmRow:
    """One arm at one parameter point, for one metric.

    Attributes:
        workload: Name of the workload.
        params: The parameter point.
        metric: Name of the metric.
        unit: Unit of all figures.
        arm: Name of the arm as kept with the samples.
        reference: Name of the reference arm.
        valid: Number of valid samples that have the metric.
        invalid: Number of invalid samples.
        reasons: Why they are invalid, with how many each.
        printed: Smallest and largest figure of the invalid samples; None when they have none.
        level: The arm's own figure; None without a valid sample.
        effect: Ratio to the reference; None for the reference itself, or where there is none.
        floor: Noise floor of the A/A pair as a ratio above 1; None without one.
        problem: Why level or effect is missing, one sentence; empty when neither is.
    """

    workload: str
    params: Mapping[str, Value]
    metric: str
    unit: str
    arm: str
    reference: str
    valid: int
    invalid: int
    reasons: Mapping[str, int]
    printed: tuple[float, float] | None
    level: Level | None
    effect: Effect | None = field(repr=False)
    floor: float | None
    problem: str

    @property
    def is_reference(self) -> bool:
        """Whether it is the arm that the others are compared with."""
        return self.arm == self.reference

    @property
    def is_twin(self) -> bool:
        """Whether it is the reference measured under a second name."""
        return self.arm == self.reference + TWIN_SUFFIX

    @property
    def beyond_noise(self) -> bool:
        """Whether the ratio's interval excludes both 1 and the noise floor.

        An interval that holds for one boot only shows nothing of others, so never.
        """
        found = self.effect
        if found is None or found.unit in ("block", "none") or not found.interval.known:
            return False
        floor = self.floor or 1.0
        return found.interval.low > floor or found.interval.high < 1 / floor


@dataclass(frozen=True)
class Summary:
    """All rows of a run, with what stands above every table and figure.

    Attributes:
        run: The run.
        rows: By workload, point, metric and arm, in that order.
        level: Level of all intervals.
    """

    run: RunFrames = field(repr=False)
    rows: tuple[ArmRow, ...]
    level: float

    @cached_property
    def arms(self) -> tuple[str, ...]:
        """Arms in order of showing: the reference, its twin, then the others."""
        return arm_order(self.run)

    @cached_property
    def workloads(self) -> tuple[str, ...]:
        """Workloads that have rows, in order."""
        return tuple(dict.fromkeys(row.workload for row in self.rows))

    def points(self, workload: str) -> list[Mapping[str, Value]]:
        """Parameter points of a workload in order."""
        found: dict[str, Mapping[str, Value]] = {}
        for row in self.rows:
            if row.workload == workload:
                found.setdefault(point_text(row.params), row.params)
        return list(found.values())

    def metrics(self, workload: str) -> tuple[str, ...]:
        """Metrics of a workload in order."""
        return tuple(dict.fromkeys(r.metric for r in self.rows if r.workload == workload))

    def of(
        self, workload: str, params: Mapping[str, object] | None = None, metric: str | None = None
    ) -> list[ArmRow]:
        """Rows of a workload, of one point and metric where they are given."""
        return [
            row
            for row in self.rows
            if row.workload == workload
            and (params is None or dict(row.params) == dict(params))
            and (metric is None or row.metric == metric)
        ]

    def shared(self, workload: str) -> dict[str, Value]:
        """Parameters that have one value at all points of a workload."""
        points = self.points(workload)
        if not points:
            return {}
        return {
            name: value
            for name, value in points[0].items()
            if len(points) > 1 and all(point.get(name) == value for point in points)
        }

    def label(self, workload: str, params: Mapping[str, Value]) -> str:
        """A point by the parameters that vary, `payload=64`; all of them when only one point."""
        shared = self.shared(workload)
        return point_text({name: value for name, value in params.items() if name not in shared})


def arm_order(run: RunFrames) -> tuple[str, ...]:
    """Arms of a run in order of showing: the reference, its twin, then the others."""
    plan = run.plan
    known = [*plan.arms, *sorted(set(run.samples["arm"]) - set(plan.arms))]
    first = [arm for arm in (plan.reference, plan.twin) if arm is not None]
    return tuple(dict.fromkeys([*first, *known]))


def _value_order(run: RunFrames) -> dict[tuple[str, str], list[Value]]:
    """Values of each workload's parameters in the order of the experiment's file.

    The plan has them shuffled. Where the file is not here the values are sorted.
    """
    order: dict[tuple[str, str], list[Value]] = {}
    with suppress(UserError):
        for use in experiments.of_run(run.path, run.plan.experiment).workloads:
            for name, values in use.matrix.items():
                known = order.setdefault((use.workload, name), [])
                known += [value for value in values if value not in known]
    return order


def sorted_points(run: RunFrames, workload: str) -> list[Mapping[str, Value]]:
    """The parameter points of a workload in the order of the experiment's file."""
    order = _value_order(run)
    points = run.plan.points(workload)
    # A parameter that varies comes before one that does not, so that it leads a label.
    places: list[dict[str, tuple[int, float, str]]] = []
    for point in points:
        place: dict[str, tuple[int, float, str]] = {}
        for name, value in point.items():
            known = order.get((workload, name), [])
            number = float(value) if isinstance(value, int | float) else 0.0
            rank = known.index(value) if value in known else len(known)
            place[name] = (rank, number, str(value))
        places.append(place)
    pairs = sorted(zip(places, points, strict=True), key=lambda pair: list(pair[0].values()))
    return [point for _, point in pairs]


def at(samples: pd.DataFrame, workload: str, params: Mapping[str, Value]) -> pd.DataFrame:
    """Rows of one workload at one parameter point."""
    rows = samples[samples["workload"] == workload]
    for name, value in params.items():
        column = rows[PARAM + name]
        # A column whose values were of several types is kept as text.
        text = pd.api.types.is_string_dtype(column) or column.dtype == object
        rows = rows[column == (str(value) if text else value)]
    return rows


def reason_kind(reason: str) -> str:
    """A reason without its figures: reasons of one kind are told in one sentence."""
    return _NUMBER.sub("#", reason)


def reason_kinds(reasons: Mapping[str, int]) -> dict[str, int]:
    """Reasons that differ in their figures only, counted together under the first's words."""
    groups: dict[str, list[str]] = {}
    for reason in reasons:
        groups.setdefault(reason_kind(reason), []).append(reason)
    return {
        one[0] if len(one) == 1 else f"such as: {one[0]}": sum(reasons[reason] for reason in one)
        for one in groups.values()
    }


def metric_order(samples: pd.DataFrame, workload: str) -> list[str]:
    """Metrics that a workload's samples have, valid or not, in the order of the registry."""
    found = set(samples.loc[samples["workload"] == workload, "metric"]) - {"none"}
    return [*(name for name in METRICS if name in found), *sorted(found - set(METRICS))]


def headline(samples: pd.DataFrame, workload: str) -> list[str]:
    """The metrics of a workload that are shown when none are named."""
    found = metric_order(samples, workload)
    return [name for name in found if name in HEADLINE] or found


def summarise(run: RunFrames, metrics: Sequence[str] | None = None, level: float = 0.95) -> Summary:
    """Summarise a run; never raises for a fault of the data.

    Args:
        run: The run; it may be empty, go on, or lack an arm.
        metrics: Metrics to show; the headline ones when None.
        level: Level of the intervals.
    """
    rows: list[ArmRow] = []
    samples = run.samples
    measured = set(samples["workload"])
    for workload in run.plan.workloads:
        if workload not in measured:
            continue
        wanted = headline(samples, workload)
        if metrics is not None:
            wanted = [name for name in metric_order(samples, workload) if name in metrics]
        for params in sorted_points(run, workload):
            here = at(samples, workload, params)
            if here.empty:
                continue
            # Not every point need have every metric: streams have no transactions.
            there = set(here["metric"])
            for name in [name for name in wanted if name in there] or wanted or ["none"]:
                rows += _rows(run, here, workload, params, name, level)
    return Summary(run, tuple(rows), level)


def _rows(
    run: RunFrames,
    here: pd.DataFrame,
    workload: str,
    params: Mapping[str, Value],
    metric: str,
    level: float,
) -> Iterable[ArmRow]:
    reference = run.plan.reference
    floor = None
    if run.plan.twin:
        with suppress(VringlabError):
            floor = noise_floor(here, metric, reference, level=level).floor
    units = here.loc[here["metric"] == metric, "unit"]
    for arm in arm_order(run):
        mine = here[here["arm"] == arm]
        cells = mine.drop_duplicates("cell_id")
        bad = cells[~cells["valid"].astype(bool)]
        values = mine[mine["metric"] == metric]
        printed = values.loc[~values["valid"].astype(bool), "value"].dropna()
        own: Level | None = None
        ratio: Effect | None = None
        problem = ""
        try:
            own = level_of(here, metric, arm, level=level)
            if arm != reference:
                ratio = effect(here, metric, arm, reference, level=level, draws=0)
        except VringlabError as error:
            problem = "not measured" if mine.empty else error.message
        yield ArmRow(
            workload=workload,
            params=params,
            metric=metric,
            unit=str(units.iloc[0]) if len(units) else "",
            arm=arm,
            reference=reference,
            valid=int(values["valid"].astype(bool).sum()),
            invalid=len(bad),
            reasons=dict(Counter(reason or "no reason given" for reason in bad["reason"])),
            printed=(float(printed.min()), float(printed.max())) if len(printed) else None,
            level=own,
            effect=ratio,
            floor=floor,
            problem=problem,
        )


# Words that tables and figures share


def count(number: int, noun: str) -> str:
    """`1 boot`, `2 boots`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def amount(value: float, unit: str, metric: str = "") -> str:
    """A figure for people: `1.23 ms`, `594 kpps`."""
    number, _, name = humanize(value, unit).partition(" ")
    if "e" in number and abs(value) < 1e15:
        number = f"{value:.0f}"
    if abs(float(number)) < 99.95:
        number = _three(float(number))
    # What is only counted has no unit.
    text = f"{number} {name}".rstrip()
    # `k/s` says of what only beside the metric's name; packets have a unit of their own.
    return text.replace("/s", "pps") if metric.startswith("pps_") and unit == "1/s" else text


def span(interval: Interval, unit: str, metric: str = "") -> str:
    """An interval of figures, `[493, 716] kpps`; empty when nothing is known."""
    if not interval.known:
        return ""
    if interval.high > 1000 * interval.low:
        return "[over x1000 wide]"
    # Both ends in the unit of the upper one: a reader compares digits, not prefixes.
    number, _, name = amount(interval.high, unit, metric).partition(" ")
    # The number is rounded, the prefix is a power of ten.
    scale = 10.0 ** round(np.log10(interval.high / float(number))) if float(number) else 1.0
    low = interval.low / scale
    first = f"{low:.0f}" if low >= 99.95 else _three(low)
    return f"[{first}, {number}] {name}".rstrip()


def _three(value: float) -> str:
    """Three digits, the last one also where it is a zero, so that columns line up."""
    return f"{value:#.3g}".removesuffix(".") if value else "0"


def heading(run: RunFrames) -> str:
    """Base kernel, host kind and size of a run in one line: what stands under every title."""
    samples = run.samples
    cells = samples["cell_id"].nunique() if len(samples) else 0
    boots = samples[["host", "boot"]].drop_duplicates().shape[0] if len(samples) else 0
    blocks = samples["block"].nunique() if len(samples) else 0
    size = f"n={count(cells, 'sample')} in {count(blocks, 'block')} of {count(boots, 'boot')}"
    if len(run.plan.cells) > cells:
        size += f" ({len(run.plan.cells)} samples planned)"
    return ", ".join([run.plan.base_kernel, host_text(run), size])


def host_text(run: RunFrames) -> str:
    """The kind of host in words; simulated figures shout."""
    if run.simulated:
        return "SIMULATED, no measurement"
    kinds = sorted(set(run.samples["host_kind"])) or [run.host_kind or "unknown"]
    return f"{' and '.join(kinds)} host"


def change_text(ratio: float) -> str:
    """A ratio as a change: `+62.8 %`; far from 1 as a factor or with more digits."""
    if ratio > 1000:
        return ">x1000"
    if ratio < 0.001:
        return "<-99.9 %"
    if ratio >= 10:
        return f"x{ratio:.3g}"
    if ratio < 0.1:
        return f"{100 * (ratio - 1):.2f} %"
    return percent_text(ratio - 1)


def ratio_text(row: ArmRow) -> str:
    """The ratio to the reference as a change with its interval; empty for the reference.

    A star marks an interval beyond the noise floor.
    """
    found = row.effect
    if found is None:
        return ""
    if not found.interval.known:
        return f"{change_text(found.ratio)} [n=1]"
    low, high = change_text(found.interval.low), change_text(found.interval.high)
    # The sign and the unit once are enough inside brackets.
    mark = " (1 boot)" if found.unit == "block" else " *" if row.beyond_noise else ""
    return f"{change_text(found.ratio)} [{low.removesuffix(' %')}, {high.removesuffix(' %')}]{mark}"


def finite(value: float | None) -> float | None:
    """The value, or None where there is no number to show."""
    return value if value is not None and np.isfinite(value) else None


def run_notes(summary: Summary) -> list[str]:
    """What a reader should know of the run as a whole, one sentence each."""
    run = summary.run
    notes = []
    if run.simulated:
        notes.append("SIMULATED: every figure is a random number; nothing was measured.")
    measured = set(run.samples["arm"])
    missing = [arm for arm in arm_order(run) if arm not in measured]
    if missing and len(run.samples):
        notes.append(f"No sample of {', '.join(missing)} yet.")
    done = int(run.samples["cell_id"].nunique()) if len(run.samples) else 0
    if done < len(run.plan.cells):
        notes.append(f"{done} of {len(run.plan.cells)} planned samples are there.")
    if run.superseded:
        notes.append(
            f"{count(run.superseded, 'sample')} measured again because a guest died; "
            "the first ones are in no table."
        )
    return [*notes, *(f"{note[0].upper()}{note[1:]}." for note in run.notes)]
