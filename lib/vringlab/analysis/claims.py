"""Published figures: what a mail says a patch does, with version, setup and standing.

One YAML file per experiment lies in `data/claims/`; `claim_schema` describes its form. Every
figure, also every cell of a compact table, becomes a `Claim` with an identifier of its own:

    single      `EXPERIMENT/VERSION.ID`
    table cell  `EXPERIMENT/VERSION.TABLE.KEY[.KEY...].METRIC`

Numbers are kept as decimals beside the converted floats, so that the audit knows how far each
was rounded.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from vringlab.analysis.claim_schema import (
    UNVERIFIED,
    ClaimsFile,
    Column,
    Details,
    Figures,
    HostKind,
    Publication,
    State,
    Value,
    read_file,
)
from vringlab.analysis.units import Direction, factor, metric, nearest
from vringlab.errors import UserError
from vringlab.settings import settings

__all__ = [
    "UNVERIFIED",
    "Claim",
    "Environment",
    "Published",
    "experiments",
    "find_claim",
    "load_claims",
    "read_claims",
]


@dataclass(frozen=True)
class Environment:
    """Where a figure was measured, as far as it is stated.

    Attributes:
        kind: Whether the KVM host was a physical machine, itself nested, or is not known.
        kernel: Base kernel release; empty when not stated.
        text: Everything else in the publication's own terms.
    """

    kind: HostKind
    kernel: str
    text: str


@dataclass(frozen=True)
class Published:
    """A figure with the digits in which it was printed; None where it was not.

    Attributes:
        before: Figure without the patch, in `unit`.
        after: Figure with it, in `unit`.
        change: Stated change in percent of before.
        difference: Stated after minus before, in `unit`.
        unit: Unit as written in the file.
        approximate: Whether the source gives it as "about": trailing zeros then mean nothing.
    """

    before: Decimal | None
    after: Decimal | None
    change: Decimal | None
    difference: Decimal | None
    unit: str
    approximate: bool


@dataclass(frozen=True)
class Claim:
    """One published figure.

    Attributes:
        id: Unique name, `EXPERIMENT/...`.
        experiment: Name of the experiment, which is also the file's stem.
        version: Version of the series: `v1`, `rfc`, `merged`.
        message_id: Of the mail, or of its series' cover letter; `unverified` when not known.
        date: Day of publication, when known.
        source: Where the figure was taken from.
        metric: Name in the registry `vringlab.analysis.units.METRICS`.
        unit: Canonical unit of the metric; `before`, `after` and `difference` are in it.
        direction: Which way is better.
        params: The point of the matrix it holds for.
        before: Figure of the first arm, when absolute figures were published.
        after: Figure of the second arm.
        stated_change: Change as a fraction as the source states it, beside raw figures or alone.
        difference: Stated after minus before.
        no_difference: The source says in words that there is none; `change` is then 0.
        n: Runs behind the figure, when stated.
        duration_s: Length of a run in seconds, when stated.
        spread: Relative standard deviation over runs (before, after) as fractions, when stated.
        environment: Where it was measured.
        status: Whether the figure still stands.
        status_by: What withdrew or superseded it.
        arms: Names of the two arms compared, before first.
        workload: Name of the workload that measures it here, or of the tool's role.
        tool: The tool of the publication.
        path: Name of the data path; figures of one path can be held against each other.
        table: Identifier of its table, or of itself when it stands alone.
        published: The digits as printed.
        note: What a reader of this claim should know.
    """

    id: str
    experiment: str
    version: str
    message_id: str
    date: datetime.date | None
    source: str
    metric: str
    unit: str
    direction: Direction
    params: Mapping[str, Value]
    before: float | None
    after: float | None
    stated_change: float | None
    difference: float | None
    no_difference: bool
    n: int | None
    duration_s: float | None
    spread: tuple[float, float] | None
    environment: Environment
    status: State
    status_by: str
    arms: tuple[str, str]
    workload: str
    tool: str
    path: str
    table: str
    published: Published = field(repr=False)
    note: str = field(default="", repr=False)

    @property
    def is_absolute(self) -> bool:
        """Whether it gives figures in its unit, which hold for one kind of machine only."""
        return self.before is not None or self.difference is not None

    @property
    def change(self) -> float | None:
        """After / before - 1: from the raw figures when present, else as stated.

        None when only a difference in the unit was published.
        """
        if self.before is not None and self.after is not None:
            return self.after / self.before - 1
        return 0.0 if self.no_difference else self.stated_change

    @property
    def ratio(self) -> float | None:
        """After / before, when known."""
        change = self.change
        return None if change is None else 1 + change

    @property
    def improvement(self) -> float | None:
        """The change with the sign turned so that more is better."""
        change = self.change
        return None if change is None else change * metric(self.metric).better


@dataclass(frozen=True)
class _Entry:
    """One figure of a file, single or a cell, before what it shares with others is added."""

    local: str
    table: str
    column: Column
    figures: Figures
    details: Details
    params: Mapping[str, Value] = field(default_factory=dict)
    difference: Decimal | None = None
    no_difference: bool = False
    approximate: bool = False


def _entries(publication: Publication) -> Iterator[_Entry]:
    for single in publication.claims:
        yield _Entry(
            local=single.id,
            table=single.id,
            column=single,
            figures=single,
            details=single,
            difference=single.difference,
            no_difference=single.no_difference,
            approximate=single.approximate,
        )
    for table in publication.tables:
        for keys, cells in table.points():
            row = ".".join([table.id, *(str(value) for value in keys.values())])
            for column, cell in zip(table.columns, cells, strict=True):
                if not cell.empty:
                    local = f"{row}.{column.metric}"
                    yield _Entry(local, table.id, column, cell, table, keys)


def _claim(content: ClaimsFile, publication: Publication, version: str, entry: _Entry) -> Claim:
    spec = metric(entry.column.metric)
    scale = factor(entry.column.unit, spec.unit)
    figures, details = entry.figures, entry.details
    spread = details.spread or publication.spread
    duration = details.duration_s or publication.duration_s
    setup = publication.environment

    def canonical(value: Decimal | None) -> float | None:
        return None if value is None else float(value * scale)

    return Claim(
        id=f"{content.experiment}/{version}.{entry.local}",
        experiment=content.experiment,
        version=version,
        message_id=publication.message_id,
        date=publication.date,
        source=publication.source,
        metric=spec.name,
        unit=spec.unit,
        direction=spec.direction,
        params={**publication.params, **details.params, **entry.params},
        before=canonical(figures.before),
        after=canonical(figures.after),
        stated_change=None if figures.change is None else float(figures.change / 100),
        difference=canonical(entry.difference),
        no_difference=entry.no_difference,
        n=details.n or publication.n,
        duration_s=None if duration is None else float(duration),
        spread=(float(spread.before / 100), float(spread.after / 100)) if spread else None,
        environment=Environment(setup.kind, setup.kernel or "", setup.text),
        status=publication.status.state,
        status_by=publication.status.by or "",
        arms=publication.arms,
        workload=details.workload or publication.workload,
        tool=details.tool or publication.tool,
        path=publication.path,
        table=entry.table,
        published=Published(
            figures.before,
            figures.after,
            figures.change,
            entry.difference,
            entry.column.unit,
            entry.approximate,
        ),
        note=" ".join(note for note in (publication.note, details.note) if note),
    )


def read_claims(path: Path) -> list[Claim]:
    """The claims of one file, in its order.

    Raises:
        UserError: the file cannot be read, is no YAML, or breaks the schema: an unknown key,
            metric or unit, a figure that cannot be, before without after, an identifier used
            twice. Names the file, the key and the remedy.
    """
    content = read_file(path)
    claims: dict[str, Claim] = {}
    for index, publication in enumerate(content.publications):
        entries = list(_entries(publication))
        for version in publication.versions:
            for entry in entries:
                claim = _claim(content, publication, version, entry)
                if claim.id in claims:
                    raise UserError(
                        f"claims file {path}: publications[{index}]: "
                        f"identifier {claim.id!r} is used twice",
                        remedy="give each figure of a version an id, and each row keys, of its own",
                    )
                claims[claim.id] = claim
    return list(claims.values())


def experiments(folder: Path | None = None) -> list[str]:
    """Names of the experiments that have claims, sorted."""
    folder = settings().data / "claims" if folder is None else folder
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_claims(experiment: str | None = None, folder: Path | None = None) -> list[Claim]:
    """Claims of one experiment, or of all.

    Args:
        experiment: Its name; None for every file of the folder.
        folder: Where the files are; `data/claims` of the collection when None.

    Raises:
        UserError: no claims for that name (the remedy lists those that exist), or a file that
            `read_claims` refuses.
    """
    folder = settings().data / "claims" if folder is None else folder
    known = experiments(folder)
    if experiment is None:
        if not known:
            raise UserError(
                f"no claims in {folder}", remedy="give a folder that holds claims as *.yaml"
            )
        return [claim for name in known for claim in read_claims(folder / f"{name}.yaml")]
    if experiment not in known:
        raise UserError(
            f"no claims for experiment {experiment!r} in {folder}",
            remedy=nearest(experiment, tuple(known)) if known else "the folder holds none",
        )
    return read_claims(folder / f"{experiment}.yaml")


def find_claim(claims: list[Claim], name: str) -> Claim:
    """The claim with that identifier.

    Raises:
        UserError: there is none; the remedy names the nearest.
    """
    by_id = {claim.id: claim for claim in claims}
    if name not in by_id:
        raise UserError(f"unknown claim {name!r}", remedy=nearest(name, tuple(by_id)))
    return by_id[name]
