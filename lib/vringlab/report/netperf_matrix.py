"""Changes over a matrix of message sizes and sessions, published and measured, in one form.

The mail of 2014 (seed 001) gives its figures as such a matrix: for each direction, size and number
of sessions the change of throughput, CPU use and normalised throughput. Figures and tables of a
netperf run read the blocks made here, so they cannot contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from vringlab.analysis.audit_figures import check_duplicates
from vringlab.analysis.claims import Claim, load_claims
from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import point_text
from vringlab.analysis.units import METRICS
from vringlab.campaign.experiment import Value
from vringlab.errors import UserError
from vringlab.report.summary import ArmRow, Summary, summarise

#: Directions of the matrix, in the mail's order and words.
DIRECTIONS: Mapping[str, str] = MappingProxyType(
    {"guest-rx": "Guest rx stream", "guest-tx": "Guest tx stream", "rr": "TCP_RR"}
)

#: Change from which on a cell has its full colour, in every heat map alike.
FULL_COLOUR = 0.2

#: What spans a block.
_AXES = ("direction", "size", "sessions")

Place = tuple[int, int]
Sure = Literal["published", "beyond noise", "seen", "not seen", "one boot", "no interval", "none"]


@dataclass(frozen=True)
class MatrixColumn:
    """One column of the matrix.

    Attributes:
        metrics: Its metrics; a point has one of them.
        title: What it is.
    """

    metrics: tuple[str, ...]
    title: str

    @property
    def better(self) -> int:
        """+1 when more is better, -1 when less is."""
        return METRICS[self.metrics[0]].better


#: The three columns of the mail.
COLUMNS = (
    MatrixColumn(("throughput", "transactions"), "throughput"),
    MatrixColumn(("cpu",), "host CPU"),
    MatrixColumn(("throughput_per_cpu", "transactions_per_cpu"), "normalised throughput"),
)


@dataclass(frozen=True)
class Change:
    """One figure of a matrix.

    Attributes:
        change: Change against the reference as a fraction; None when there is none.
        printed: The same as the mail writes it, `+0.7773%`; empty without.
        sure: How sure it is: `published` figures have no interval; an interval may exclude no
            change and the noise floor, only no change (`seen`), neither (`not seen`), hold for
            one boot alone and exclude no change there, or be unknown.
        problem: Why there is no change, in a word or two.
    """

    change: float | None
    printed: str
    sure: Sure
    problem: str = ""

    @property
    def shown(self) -> str:
        """The change in a few characters, or why there is none."""
        if self.change is None:
            return self.problem
        percent = 100 * self.change
        if abs(percent) < 0.05:
            return "0.0"
        if abs(percent) < 99.95:
            return f"{percent:+.1f}"
        return f"{percent:+.0f}" if percent < 900 else f"x{1 + self.change:.3g}"


@dataclass(frozen=True)
class Block:
    """All figures of one direction and arm from one source.

    Attributes:
        direction: Key of `DIRECTIONS`.
        arm: The arm above the line.
        reference: The arm below it.
        version: Version of the patch whose mail has the figures; empty for measured ones.
        about: Source in words.
        cells: By (size, sessions), one change for each column.
        repeats: Places whose row repeats another one digit for digit, with that one.
        rows: The measured rows behind it.
    """

    direction: str
    arm: str
    reference: str
    version: str
    about: str
    cells: Mapping[Place, tuple[Change, ...]]
    repeats: Mapping[Place, Place] = field(default_factory=dict)
    rows: tuple[ArmRow, ...] = field(default=(), repr=False)

    @property
    def title(self) -> str:
        """Arms and source in words."""
        return f"{self.arm} against {self.reference}, {self.about}"


def place_of(params: Mapping[str, object]) -> Place | None:
    """Size and sessions of a point of a matrix; None for a point of something else."""
    size, sessions = params.get("size"), params.get("sessions")
    if params.get("direction") not in DIRECTIONS or size is None or sessions is None:
        return None
    try:
        return int(str(size)), int(str(sessions))
    except ValueError:
        return None


def published_blocks(experiment: str, columns: Sequence[MatrixColumn] = COLUMNS) -> list[Block]:
    """The published matrices of an experiment by version and direction; none when it has none."""
    try:
        claims = load_claims(experiment)
    except UserError:
        return []
    return blocks_of(claims, columns)


def blocks_of(claims: Sequence[Claim], columns: Sequence[MatrixColumn] = COLUMNS) -> list[Block]:
    """The matrices among claims, by version and direction."""
    repeats = _repeats(claims)
    blocks = []
    for version in dict.fromkeys(claim.version for claim in claims):
        for direction in DIRECTIONS:
            found: dict[Place, dict[str, Claim]] = {}
            for claim in claims:
                place = place_of(claim.params)
                if place and (claim.version, claim.params["direction"]) == (version, direction):
                    found.setdefault(place, {})[claim.metric] = claim
            if not found:
                continue
            first = next(iter(next(iter(found.values())).values()))
            when = f", {first.date}" if first.date else ""
            ended = "" if first.status == "standing" else f", {first.status}"
            blocks.append(
                Block(
                    direction,
                    arm=first.arms[1],
                    reference=first.arms[0],
                    version=version,
                    about=f"published ({version}{when}{ended})",
                    cells={
                        place: tuple(_published(column, row) for column in columns)
                        for place, row in sorted(found.items())
                    },
                    repeats=repeats.get((version, direction), {}),
                )
            )
    return blocks


def _published(column: MatrixColumn, row: Mapping[str, Claim]) -> Change:
    claim = next((row[name] for name in column.metrics if name in row), None)
    if claim is None or claim.change is None:
        return Change(None, "", "none", "none given")
    stated = claim.published.change
    printed = f"{100 * claim.change:+.4f}%" if stated is None else f"{stated:+f}%"
    return Change(claim.change, printed, "published")


def _repeats(claims: Sequence[Claim]) -> dict[tuple[str, str], dict[Place, Place]]:
    """What the audit says of repeated rows, by version and direction."""
    by_id = {claim.id: claim for claim in claims}
    found: dict[tuple[str, str], dict[Place, Place]] = {}
    for finding in check_duplicates(claims):
        places: dict[tuple[str, str], list[Place]] = {}
        for name in finding.claims:
            claim = by_id[name]
            place = place_of(claim.params)
            if place is not None:
                key = (claim.version, str(claim.params["direction"]))
                places.setdefault(key, []).append(place)
        for key, some in places.items():
            first, *later = dict.fromkeys(some)
            found.setdefault(key, {}).update(dict.fromkeys(later, first))
    return found


#: How sure a measured figure is, in one character, for text.
SIGNS: Mapping[Sure, str] = MappingProxyType(
    {"beyond noise": "*", "seen": "+", "one boot": "1", "not seen": "~", "no interval": "?"}
)
_WORDS: Mapping[Sure, str] = MappingProxyType(
    {
        "beyond noise": "the interval is beyond the noise floor",
        "seen": "it excludes no change, but not the noise floor",
        "one boot": "it excludes no change, but is of one boot alone",
        "not seen": "the interval includes no change",
        "no interval": "one block, no interval",
    }
)


def seed_lines(blocks: Sequence[Block]) -> list[str]:
    """Blocks in the form of the mail of 2014: `64/1/+0.7773% -8.6224% +10.2866%`.

    A place without a figure says why; a row that repeats another is flagged; how sure each measured
    figure is stands behind its row, since four decimals say nothing of it.
    """
    lines: list[str] = []
    for block in blocks:
        lines += [
            f"{DIRECTIONS[block.direction]}, {block.title}:",
            "size(B)/sessions/throughput/cpu/normalized thru/",
        ]
        for place, changes in block.cells.items():
            size, sessions = place
            figures = " ".join(change.printed or change.problem for change in changes)
            again = block.repeats.get(place)
            flag = f"   (= {again[0]}/{again[1]}, digit for digit)" if again else ""
            signs = [SIGNS.get(change.sure, "") for change in changes]
            flag += f"   ({' '.join(signs)})" if all(signs) else ""
            lines.append(f"{size}/{sessions}/{figures}{flag}")
        lines.append("")
    used = {change.sure for block in blocks for row in block.cells.values() for change in row}
    legend = "; ".join(f"{sign}: {_WORDS[sure]}" for sure, sign in SIGNS.items() if sure in used)
    return [*lines, f"({legend})"] if legend else lines[:-1]


def run_lines(run: RunFrames | Summary, whole: bool = True) -> list[str]:
    """Measured and published matrices of a run in the mail's form; none for other workloads.

    Args:
        run: The run, or its summary over the metrics of `COLUMNS`.
        whole: Whether published rows are shown that the run did not measure.
    """
    names = [name for column in COLUMNS for name in column.metrics]
    summary = run if isinstance(run, Summary) else summarise(run, names)
    stated = published_blocks(summary.run.plan.experiment)
    blocks = [block for w in summary.workloads for block in measured_blocks(summary, w)]
    if not blocks:
        return []
    mine = {(block.direction, place) for block in blocks for place in block.cells}
    kept = []
    for block in stated:
        cells = {
            place: row
            for place, row in block.cells.items()
            if whole or (block.direction, place) in mine
        }
        kept += [replace(block, cells=cells)] if cells else []
    return seed_lines([b for direction in DIRECTIONS for b in beside(direction, blocks, kept)])


def beside(direction: str, measured: Sequence[Block], stated: Sequence[Block]) -> list[Block]:
    """Blocks of one direction: what is claimed first, the claim below it; noise last."""
    mine = [block for block in measured if block.direction == direction]
    claims = [block for block in stated if block.direction == direction]
    about = list(dict.fromkeys(block.arm for block in claims))
    found = [block for arm in about for block in [*mine, *claims] if block.arm == arm]
    return [*found, *(block for block in mine if block.arm not in about)]


def matrix_points(summary: Summary, workload: str) -> dict[str, list[Mapping[str, Value]]]:
    """The points of a workload that span a matrix, by direction in the mail's order."""
    points = [params for params in summary.points(workload) if place_of(params) is not None]
    found = {
        direction: [params for params in points if params["direction"] == direction]
        for direction in DIRECTIONS
    }
    return {direction: some for direction, some in found.items() if some}


def measured_blocks(
    summary: Summary, workload: str, columns: Sequence[MatrixColumn] = COLUMNS
) -> list[Block]:
    """The measured matrices of a workload, by direction, other parameters and arm.

    The twin of the reference is an arm like others: its changes are noise.
    """
    rows: dict[tuple[str, str, str], dict[Place, dict[str, ArmRow]]] = {}
    points = matrix_points(summary, workload)
    others = _varying(params for some in points.values() for params in some)
    for row in summary.rows:
        place = place_of(row.params)
        if row.workload != workload or row.is_reference or place is None:
            continue
        rest = point_text({name: row.params[name] for name in others if name in row.params})
        key = (str(row.params["direction"]), rest, row.arm)
        rows.setdefault(key, {}).setdefault(place, {})[row.metric] = row
    blocks = []
    order = list(DIRECTIONS)
    # Other arms before the twin: they are the question, it is the noise.
    for key in sorted(rows, key=lambda key: (order.index(key[0]), key[1])):
        direction, rest, arm = key
        found = rows[key]
        first = next(iter(next(iter(found.values())).values()))
        about = ", ".join(part for part in ("measured here", rest) if part)
        cells = {
            place: tuple(_measured(column, row) for column in columns)
            for place, row in sorted(found.items())
        }
        behind = tuple(row for some in found.values() for row in some.values())
        about += ": the same again, so noise" if first.is_twin else ""
        blocks.append(Block(direction, arm, first.reference, "", about, cells, rows=behind))
    twins = [block for block in blocks if block.rows[0].is_twin]
    others_first = [block for block in blocks if not block.rows[0].is_twin]
    return [*others_first, *twins]


def _varying(points: Iterable[Mapping[str, Value]]) -> list[str]:
    """Parameters beside those of the matrix that have more than one value."""
    values: dict[str, set[str]] = {}
    for params in points:
        for name, value in params.items():
            values.setdefault(name, set()).add(str(value))
    return [name for name, some in values.items() if name not in _AXES and len(some) > 1]


def _measured(column: MatrixColumn, rows: Mapping[str, ArmRow]) -> Change:
    mine = [rows[name] for name in column.metrics if name in rows]
    row = next((row for row in mine if row.effect is not None), mine[0] if mine else None)
    if row is None:
        return Change(None, "", "none", "none")
    found = row.effect
    if found is None or not np.isfinite(found.ratio):
        invalid = row.invalid and not row.valid
        return Change(
            None, "", "none", "invalid" if invalid else "no pair" if row.valid else "none"
        )
    sure: Sure = "seen"
    if not found.interval.known:
        sure = "no interval"
    elif found.interval.low <= 1 <= found.interval.high:
        sure = "not seen"
    elif row.beyond_noise:
        sure = "beyond noise"
    elif found.unit == "block":
        sure = "one boot"
    change = found.ratio - 1
    return Change(change, f"{100 * change:+.4f}%", sure)
