"""Block-paired log ratios of two arms: the numbers that every interval and verdict rests on.

Within a boot a block holds each arm once per parameter point. The log ratio of two arms within
one block has neither the boot's offset nor the slow drift of the machine in it; what is left is
noise from run to run and, possibly, an effect that differs from boot to boot. An arm that a
block holds twice (ABBA) is averaged on the log scale first.

When every arm has boots of its own (`--switch reboot`), no boot holds both arms. Arms are then
paired across boots by block, and boots that share a block count as one cluster: the boot's
offset is in the ratio then, and only more clusters help against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from vringlab.analysis import units
from vringlab.errors import MeasurementInvalid, UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Metrics that count events in the timed window, so that 0 is a figure and not a failure.
COUNTS = frozenset({"tx_interrupts", "kicks", "vmexits"})

#: Added to each count before the logarithm, in every arm alike: it lets a count of 0 stand, keeps
#: the log of a Poisson count nearly unbiased (Anscombe, "On estimating binomial response
#: relations", Biometrika 43, 1956), and changes a count of 1,000 by 0.05 %.
HALF_COUNT = 0.5

#: Relative error of a figure read from a histogram of fio: bin midpoints are off by at most this
#: (64 bins per octave, half a bin).
BIN_ERROR = 1 / 128

PARAM = "param_"

#: What names a boot: within a run boots are numbered, so another run's `b01` is another boot.
BOOT = ["run_id", "host", "boot"]

_COLUMNS = (
    "run_id",
    "cell_id",
    "block",
    "position",
    "boot",
    "host",
    "host_kind",
    "arm",
    "base_kernel",
    "workload",
    "metric",
    "value",
    "unit",
    "valid",
    "reason",
    "started",
    "window_s",
)


@dataclass(frozen=True)
class Pairs:
    """Paired log ratios of one arm against a reference, one per block.

    Attributes:
        metric: Name of the metric.
        unit: Unit of the values behind the ratios.
        arm: Name of the arm above the line.
        reference: Name of the arm below it.
        params: Parameters that were asked for; all other points are averaged within a block.
        workload: Workload that measured it.
        log_ratio: log(arm / reference) per block, shape (blocks,).
        boot: Index of each block's boot (cluster of boots when paired across boots), (blocks,).
        host: Index of each boot's host, shape (boots,).
        table: The same with labels, one row per block: host, boot, block, log_arm, log_reference,
            log_ratio, started.
        samples: Valid samples that went into the ratios.
        invalid: Reasons of the samples left out, with how many each.
        unpaired: Valid samples whose block lacks the other arm.
        across_boots: Whether no boot held both arms.
        host_kinds: Kinds of the hosts: emulated, nested, physical, simulated.
        notes: What a reader of the ratios should know, one sentence each.
    """

    metric: str
    unit: str
    arm: str
    reference: str
    params: Mapping[str, object]
    workload: str
    log_ratio: Floats
    boot: Ints
    host: Ints
    table: pd.DataFrame = field(repr=False)
    samples: int
    invalid: Mapping[str, int]
    unpaired: int
    across_boots: bool
    host_kinds: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """Number of paired blocks."""
        return self.log_ratio.size

    @property
    def boots(self) -> int:
        """Number of clusters: boots, or groups of boots paired with each other."""
        return self.host.size

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return int(np.unique(self.host).size)

    @property
    def boot_means(self) -> Floats:
        """Mean log ratio of each boot, each block weighing the same, shape (boots,)."""
        return np.bincount(self.boot, self.log_ratio, self.boots) / np.bincount(
            self.boot, minlength=self.boots
        )

    def first(self, blocks: int) -> Pairs:
        """The pairs that were measured first, as if the run had ended after them."""
        boot = self.boot[:blocks]
        # Blocks are in order of measuring, boot by boot.
        boots = int(boot.max()) + 1 if boot.size else 0
        return replace(
            self,
            log_ratio=self.log_ratio[:blocks],
            boot=boot,
            host=self.host[:boots],
            table=self.table.head(blocks),
        )


def param_columns(samples: pd.DataFrame) -> list[str]:
    """Names of the columns that hold parameters of the matrix."""
    return [str(column) for column in samples.columns if str(column).startswith(PARAM)]


def point_text(params: Mapping[str, object]) -> str:
    """A parameter point as people write it, `payload=64, ring=split`; empty for none."""
    return ", ".join(f"{name}={value}" for name, value in params.items())


def check_columns(samples: pd.DataFrame) -> None:
    """Refuse a frame that is not one of samples.

    Raises:
        UserError: columns are missing; names them.
    """
    lacking = [column for column in _COLUMNS if column not in samples.columns]
    if lacking:
        raise UserError(
            f"samples lack the columns {', '.join(lacking)}",
            remedy="give a frame as vringlab.analysis.frames loads it",
        )


def _equals(column: pd.Series, wanted: object) -> pd.Series:
    """Which entries equal a wanted value, though one side may be text and the other a number."""
    if isinstance(wanted, int | float) and not isinstance(wanted, bool):
        numbers = pd.to_numeric(column, errors="coerce")
        return numbers == float(wanted)
    text = column.astype(str).str.casefold()
    return text == str(wanted).casefold()


def at_point(samples: pd.DataFrame, params: Mapping[str, object] | None) -> pd.DataFrame:
    """The rows of one parameter point.

    Args:
        samples: Samples, with a column `param_<name>` for each parameter.
        params: Name and value of the parameters to hold fixed.

    Raises:
        UserError: the samples have no such parameter, or no row with that value.
    """
    rows = samples
    for name, wanted in (params or {}).items():
        column = PARAM + name
        if column not in rows.columns:
            known = ", ".join(c.removeprefix(PARAM) for c in param_columns(samples)) or "none"
            raise UserError(
                f"the samples have no parameter {name!r}", remedy=f"parameters here: {known}"
            )
        kept = rows[_equals(rows[column], wanted)]
        if kept.empty:
            here = sorted({str(value) for value in rows[column].dropna().unique()})
            raise UserError(
                f"no sample has {name}={wanted}",
                remedy=f"values of {name} here: {', '.join(here) or 'none'}",
            )
        rows = kept
    return rows


def select(
    samples: pd.DataFrame,
    metric: str,
    arms: Sequence[str],
    params: Mapping[str, object] | None,
    workload: str | None,
) -> tuple[pd.DataFrame, dict[str, int], str]:
    """Valid rows of one metric and some arms, the reasons of the invalid ones, the workload."""
    spec = units.metric(metric)
    check_columns(samples)
    rows = at_point(samples, params)
    if workload is not None:
        rows = rows[rows["workload"] == workload]
        if rows.empty:
            raise UserError(
                f"no sample is of workload {workload!r}",
                remedy="workloads here: " + ", ".join(sorted(set(samples["workload"]))),
            )
    here = set(rows["arm"])
    for arm in arms:
        if arm not in here:
            raise UserError(
                f"no sample is of arm {arm!r}",
                remedy=f"arms here: {', '.join(sorted(here)) or 'none'}",
            )
    rows = rows[rows["arm"].isin(list(arms))]
    # An invalid sample may have no row for the metric, so its reason is counted by cell.
    valid = rows["valid"].astype(bool)
    bad = rows[~valid].drop_duplicates(["run_id", "cell_id"])
    invalid = dict(Counter(reason or "no reason given" for reason in bad["reason"].astype(str)))
    rows = rows[valid & (rows["metric"] == metric)]
    if rows.empty:
        raise MeasurementInvalid(
            f"no valid sample of {metric} for {' or '.join(arms)}"
            + (f": {_reasons(invalid)}" if invalid else ""),
            remedy="measure again after mending the cause"
            if invalid
            else "metrics here: " + ", ".join(sorted(set(samples["metric"]))),
        )
    tools = sorted(set(rows["workload"]))
    if len(tools) > 1:
        raise UserError(
            f"{metric} was measured by {' and '.join(tools)}, which are not to be mixed",
            remedy="name the workload",
        )
    found = sorted(set(rows["unit"].astype(str)))
    if len(found) > 1:
        raise UserError(
            f"{metric} has mixed units: {', '.join(found)}",
            remedy=f"bring all samples to {spec.unit} before they are analysed",
        )
    units.factor(found[0], spec.unit)
    _check_values(rows, metric)
    return rows, invalid, tools[0]


def _reasons(invalid: Mapping[str, int]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in invalid.items())


def _cells(rows: pd.DataFrame, mask: npt.NDArray[np.bool_]) -> str:
    names = [str(name) for name in rows["cell_id"].to_numpy()[mask]]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_values(rows: pd.DataFrame, metric: str) -> None:
    key = ["run_id", "cell_id"]
    if rows.duplicated(key).any():
        twice = rows.duplicated(key).to_numpy(dtype=np.bool_)
        raise UserError(
            f"{metric} stands more than once for cell {_cells(rows, twice)}",
            remedy="the same run was probably loaded twice: concatenate each run once",
        )
    values = pd.to_numeric(rows["value"], errors="coerce").to_numpy(dtype=np.float64)
    checks = (
        (~np.isfinite(values), "is not a finite number"),
        (values < 0, "is negative, which it cannot be"),
        ((values == 0) & (metric not in COUNTS), "is 0 in a sample marked valid"),
    )
    for mask, problem in checks:
        if mask.any():
            raise MeasurementInvalid(
                f"{metric} {problem}: cell {_cells(rows, mask)}",
                remedy="mend the workload's parser or validity check; such a sample is invalid",
            )


def values_log(rows: pd.DataFrame, metric: str) -> tuple[Floats, list[str]]:
    """Natural logs of the values, with half a count added where the metric counts events."""
    values = pd.to_numeric(rows["value"]).to_numpy(dtype=np.float64)
    if metric not in COUNTS:
        return np.log(values), []
    zero = values == 0
    window = pd.to_numeric(rows["window_s"], errors="coerce").to_numpy(dtype=np.float64)
    if not (np.isfinite(window) & (window > 0)).all():
        if zero.any():
            raise MeasurementInvalid(
                f"{metric} is 0 and the timed window is unknown: cell {_cells(rows, zero)}",
                remedy="a count of 0 can only be read together with the length of the window",
            )
        return np.log(values), []
    notes = []
    if zero.any():
        notes.append(
            f"{int(zero.sum())} of {zero.size} samples counted no event; half a count was added "
            "to every count, so the ratio is a bound and not a size"
        )
    return np.log((values * window + HALF_COUNT) / window), notes


def _wide(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Mean log by key and arm, one column per arm; an arm measured twice is averaged."""
    grouped = rows.groupby([*keys, "arm"], sort=True, dropna=False)["log"].mean()
    return grouped.unstack("arm")


def pair(
    samples: pd.DataFrame,
    metric: str,
    arm: str,
    reference: str,
    params: Mapping[str, object] | None = None,
    workload: str | None = None,
) -> Pairs:
    """Pair two arms within blocks.

    Args:
        samples: Tidy samples, one row per sample and metric (`RunFrames.samples`).
        metric: Name in `units.METRICS`.
        arm: Arm above the line.
        reference: Arm below it.
        params: Parameters to hold fixed. Points that are left free are paired each for itself
            and averaged within a block on the log scale, so that the ratio is a geometric mean
            over the points.
        workload: Needed when several workloads measured the metric.

    Raises:
        UserError: unknown metric, unit, arm, parameter or workload; mixed units; rows twice.
        MeasurementInvalid: no valid sample, no block with both arms, or a value that cannot be.
    """
    if arm == reference:
        raise UserError(
            f"arm {arm!r} cannot be compared with itself",
            remedy=f"for noise, compare it with its twin {reference}.aa",
        )
    rows, invalid, tool = select(samples, metric, (arm, reference), params, workload)
    logs, notes = values_log(rows, metric)
    rows = rows.assign(log=logs)
    points = [c for c in param_columns(rows) if rows[c].nunique(dropna=False) > 1]
    if arm not in set(rows["arm"]) or reference not in set(rows["arm"]):
        lone = arm if arm not in set(rows["arm"]) else reference
        raise MeasurementInvalid(
            f"no valid sample of {metric} for arm {lone!r}"
            + (f": {_reasons(invalid)}" if invalid else ""),
            remedy="measure both arms",
        )
    inside = _wide(rows, [*BOOT, "block", *points]).dropna()
    across = inside.empty
    if across:
        inside = _wide(rows, ["run_id", "host", "block", *points]).dropna()
    if inside.empty:
        raise MeasurementInvalid(
            f"no block has a valid sample of {metric} for both {arm!r} and {reference!r}",
            remedy="measure both arms in each block",
        )
    blocks, used, clusters = _blocks(rows, inside, points, arm, reference, across)
    if points:
        names = ", ".join(point.removeprefix(PARAM) for point in points)
        notes.append(f"geometric mean over the points of {names}")
        if blocks["points"].nunique() > 1:
            notes.append("some blocks lack some of these points")
    if across:
        notes.append("each arm had boots of its own: paired across boots by block")
    kernels = sorted(set(rows["base_kernel"].astype(str)))
    if len(kernels) > 1:
        notes.append(f"arms or boots differ in base kernel: {', '.join(kernels)}")
    hosts, host = np.unique(
        blocks.groupby("cluster")["host"].first().to_numpy(dtype=str), return_inverse=True
    )
    return Pairs(
        metric=metric,
        unit=str(rows["unit"].iloc[0]),
        arm=arm,
        reference=reference,
        params=dict(params or {}),
        workload=tool,
        log_ratio=blocks["log_ratio"].to_numpy(dtype=np.float64),
        boot=clusters,
        host=host.astype(np.int64) if hosts.size else np.zeros(0, dtype=np.int64),
        table=blocks.drop(columns=["cluster", "points"]),
        samples=used,
        invalid=invalid,
        unpaired=len(rows) - used,
        across_boots=across,
        host_kinds=tuple(sorted(set(rows["host_kind"].astype(str)))),
        notes=tuple(notes),
    )


def _blocks(
    rows: pd.DataFrame,
    wide: pd.DataFrame,
    points: list[str],
    arm: str,
    reference: str,
    across: bool,
) -> tuple[pd.DataFrame, int, Ints]:
    """One row per block in order of measuring, samples used, and each block's cluster."""
    keys = [name for name in wide.index.names if name not in points]
    wide = wide.rename(columns={arm: "log_arm", reference: "log_reference"})
    wide = wide.assign(points=1)
    grouped = wide.groupby(level=keys, sort=True, dropna=False)
    blocks = grouped.agg({"log_arm": "mean", "log_reference": "mean", "points": "sum"})
    # Which samples stand behind the pairs: those of a paired block and point.
    joined = rows.merge(wide.index.to_frame(index=False), on=list(wide.index.names), how="inner")
    started = joined.groupby(keys, dropna=False)["started"].min()
    blocks["started"] = started
    blocks = blocks.reset_index().rename_axis(columns=None)
    blocks["log_ratio"] = blocks["log_arm"] - blocks["log_reference"]
    if across:
        label = _linked_boots(joined, blocks)
        blocks["boot"] = label
    order = blocks.groupby(BOOT)["started"].transform("min")
    blocks = blocks.assign(first=order).sort_values(
        ["first", *BOOT, "started", "block"], kind="stable"
    )
    cluster, _ = pd.factorize(pd.MultiIndex.from_frame(blocks[BOOT]))
    blocks = blocks.drop(columns="first").assign(cluster=cluster).reset_index(drop=True)
    return blocks, len(joined), np.asarray(cluster, dtype=np.int64)


def _linked_boots(rows: pd.DataFrame, blocks: pd.DataFrame) -> list[str]:
    """For each block the name of its cluster: boots that share a block are linked."""
    block, _ = pd.factorize(pd.MultiIndex.from_frame(rows[["run_id", "host", "block"]]))
    boot, _ = pd.factorize(pd.MultiIndex.from_frame(rows[BOOT]))
    many = int(block.max()) + 1
    size = many + int(boot.max()) + 1
    links = coo_array((np.ones(block.size), (block, many + boot)), shape=(size, size))
    _, label = connected_components(links, directed=False)
    named: dict[int, set[str]] = {}
    for name, component in zip(rows["boot"].astype(str), label[many + boot], strict=True):
        named.setdefault(int(component), set()).add(name)
    first = {
        (run, host, number): int(label[index])
        for run, host, number, index in zip(
            rows["run_id"], rows["host"], rows["block"], block, strict=True
        )
    }
    keys = zip(blocks["run_id"], blocks["host"], blocks["block"], strict=True)
    return ["+".join(sorted(named[first[key]])) for key in keys]
